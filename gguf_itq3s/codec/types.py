"""The names and numbers of ITQ3_S in gguf-py: enum members and the size of a block.

Importing this module makes ``GGUFWriter`` and ``GGUFReader`` know the type; :mod:`gguf_itq3s.codec.registry` adds the
codec class.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, TypeVar

import gguf
from gguf import GGMLQuantizationType as Type

from .formats import ITQ3_S_FORMAT
from .transform import BLOCK

Member = TypeVar("Member", bound=IntEnum)


def _add_member(enum: type[Member], name: str, value: int) -> Member:
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


#: Tensor type 500; upstream's numbers are far below, so a later upstream type cannot collide.
ITQ3_S: Final = _add_member(gguf.GGMLQuantizationType, "ITQ3_S", 500)
#: ``general.file_type`` of a file whose matrices are mostly ITQ3_S.
MOSTLY_ITQ3_S: Final = _add_member(gguf.LlamaFileType, "MOSTLY_ITQ3_S", 500)

gguf.GGML_QUANT_SIZES[ITQ3_S] = (BLOCK, ITQ3_S_FORMAT.block_bytes)

#: Types gguf-py quantizes in numpy, so they need no built library.
NUMPY_TYPES: Final = frozenset(
    {
        Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.TQ1_0, Type.TQ2_0,
        ITQ3_S,
    }
)  # fmt: skip
