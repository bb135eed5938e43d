"""The family of trellis-coded types: one table, which every other module asks in place of naming a type.

Importing this module makes ``GGUFWriter`` and ``GGUFReader`` of gguf-py know the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar

import gguf
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from .formats import (
    ITQ2_N_FORMAT,
    ITQ2_S_FORMAT,
    ITQ3_N_FORMAT,
    ITQ3_S_FORMAT,
    ITQ4_N_FORMAT,
    ITQ4_S_FORMAT,
    Format,
)

Member = TypeVar("Member", bound=IntEnum)


def add_member(enum: type[Member], name: str, value: int) -> Member:
    """Add a member to an existing IntEnum, or return the one that is there.

    gguf-py names tensor types through enums that cannot be subclassed once they have members, and looks types up by
    value in readers and writers, so a type it does not know has to become a member.

    Raises:
        RuntimeError: the number already stands for something else.
    """
    members: dict[Any, Any] = enum._value2member_map_
    if value in members:
        if members[value].name != name:
            raise RuntimeError(f"gguf {enum.__name__} {value} is {members[value].name}, not {name}; update gguf-itq3s")
        return enum(value)
    member = int.__new__(enum, value)
    member._name_, member._value_ = name, value
    # Enum classes refuse plain attribute assignment of new names only through their metaclass.
    type.__setattr__(enum, name, member)
    enum._member_names_.append(name)  # type: ignore[attr-defined]
    enum._member_map_[name] = member  # type: ignore[attr-defined]
    members[value] = member
    return member


@dataclass(frozen=True, eq=False)
class TrellisType:
    """A row of the table.

    Attributes:
        format: what its blocks are made of.
        type: in gguf-py; upstream's numbers are far below, so a later upstream type cannot collide.
        file_type: ``general.file_type`` of a file whose matrices are mostly of this type; the same number.
        fallback: the type in its place where a row is not whole blocks.
        follows: the file type whose mix llama-quantize makes.
        in_mix: types of that mix, and what takes their place.
        values: type of the values' matrix where query heads share its heads: it costs most for a weight.
    """

    format: Format
    type: Type
    file_type: LlamaFileType
    fallback: Type
    follows: LlamaFileType
    in_mix: Mapping[Type, Type]
    values: Type

    @property
    def name(self) -> str:
        """As in messages and files."""
        return self.format.name

    @property
    def identifier(self) -> str:
        """As in the names of C functions and of output types."""
        return self.name.lower()

    @property
    def file_type_name(self) -> str:
        """What llama.cpp calls the file type."""
        return f"{self.name} - {self.format.bits_per_weight:g} bpw"


def _row(
    fmt: Format, number: int, follows: LlamaFileType, in_mix: Mapping[Type, Type], values: Type, fallback: Type =
    Type.IQ4_NL,
) -> TrellisType:  # fmt: skip
    """A row, with its members in the enums of gguf-py."""
    qtype = add_member(gguf.GGMLQuantizationType, fmt.name, number)
    file_type = add_member(gguf.LlamaFileType, f"MOSTLY_{fmt.name}", number)
    gguf.GGML_QUANT_SIZES[qtype] = (fmt.block, fmt.block_bytes)
    return TrellisType(fmt, qtype, file_type, fallback, follows, in_mix, values)


# Rows that are no multiple of 256 are in blocks of 64 where these divide them, by the mix of the longer type. What a
# mix has in Q4_K is in four bits of ours, of less error in 4.06 bits than in 4.5, and one size up where those are the
# rule.
_IQ2_XXS, _IQ3_S = LlamaFileType.MOSTLY_IQ2_XXS, LlamaFileType.MOSTLY_IQ3_S
_ITQ4_N: Final = _row(ITQ4_N_FORMAT, 517, _IQ3_S, {Type.Q4_K: Type.Q5_K}, Type.Q6_K)
_ITQ4_S: Final = _row(ITQ4_S_FORMAT, 516, _IQ3_S, {Type.Q4_K: Type.Q5_K}, Type.Q6_K, _ITQ4_N.type)
_ITQ3_N: Final = _row(ITQ3_N_FORMAT, 513, _IQ3_S, {Type.Q4_K: _ITQ4_N.type}, Type.Q6_K)
_ITQ3_S: Final = _row(ITQ3_S_FORMAT, 510, _IQ3_S, {Type.Q4_K: _ITQ4_S.type}, Type.Q6_K, _ITQ3_N.type)
_IN_2_BITS: Final = {Type.Q2_K: _ITQ3_N.type, Type.Q4_K: _ITQ4_N.type}
_ITQ2_N: Final = _row(ITQ2_N_FORMAT, 514, _IQ2_XXS, _IN_2_BITS, _ITQ4_N.type)
_IN_2_BITS_256: Final = {Type.Q2_K: _ITQ3_S.type, Type.Q4_K: _ITQ4_S.type}
_ITQ2_S: Final = _row(ITQ2_S_FORMAT, 512, _IQ2_XXS, _IN_2_BITS_256, _ITQ4_S.type, _ITQ2_N.type)

#: The types, the first the one that is taken where none is named.
FAMILY: Final[Mapping[Type, TrellisType]] = {
    row.type: row for row in (_ITQ3_S, _ITQ2_S, _ITQ4_S, _ITQ3_N, _ITQ2_N, _ITQ4_N)
}
DEFAULT: Final = next(iter(FAMILY.values()))


#: ``itq3s.version`` of files that hold tensors of these types.
FILE_VERSION: Final = 3
#: The same types in the code of versions 1 and 2, of four subsets, which nothing reads any more.
FORMER: Final[Mapping[int, str]] = {500: "ITQ3_S", 502: "ITQ2_S", 503: "ITQ3_N", 504: "ITQ2_N"}


def is_trellis(qtype: Type) -> bool:
    """Whether a type is one of the family."""
    return qtype in FAMILY


def trellis_type(qtype: Type) -> TrellisType:
    """The entry of a type.

    Raises:
        ValueError: it is none of the family.
    """
    if qtype not in FAMILY:
        names = ", ".join(row.name for row in FAMILY.values())
        raise ValueError(f"{qtype.name} is not trellis-coded; use one of {names}")
    return FAMILY[qtype]


def rotation(qtype: Type) -> int:
    """How many weights of a row are rotated together in a type; 1 where none are."""
    return FAMILY[qtype].format.block if qtype in FAMILY else 1
