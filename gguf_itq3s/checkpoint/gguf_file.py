"""A GGUF file read whole, also where it is split: the parts are found by the name of any of them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
from gguf import Keys

from ..base.errors import UserError
from ..codec.family import FILE_VERSION, FORMER

_REMEDY: Final = "write or download it again"
_CONVERT_AGAIN: Final = "make it anew: convert the checkpoint with this program"
_VERSION: Final = "itq3s.version"
# What gguf-py says of a type that it does not know.
_UNKNOWN_TYPE: Final = re.compile(r"([0-9]+)\)? is not a valid GGMLQuantizationType")
_PART: Final = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file.

    Attributes:
        paths: its parts in order, one unless it is split.
        fields: metadata by key; of a split file, those of the first part.
        tensors: of all parts, in order.
    """

    paths: tuple[Path, ...]
    fields: dict[str, gguf.ReaderField]
    tensors: list[gguf.ReaderTensor]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def content(self) -> str:
        """Hash of names, types and bytes of the tensors, whatever their order."""
        digest = hashlib.sha256()
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.name):
            digest.update(f"{tensor.name} {tensor.tensor_type}".encode())
            digest.update(tensor.data.tobytes())
        return digest.hexdigest()


def open_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file; any part of a split one stands for the whole.

    Raises:
        UserError: there is no such file, it is not a complete GGUF file, a part is missing or of another file, or it is
            of a version that is not known.
    """
    if not path.is_file():
        raise UserError(path, "no such file", "give a GGUF file")
    file = _open(path)
    _check_version(file)
    return file


def _open(path: Path) -> GGUFFile:
    reader = _read(path)
    count = _number(reader, Keys.Split.LLM_KV_SPLIT_COUNT, path)
    if count is None or count < 2:
        return GGUFFile((path,), reader.fields, reader.tensors)
    number = _number(reader, Keys.Split.LLM_KV_SPLIT_NO, path)
    name = _PART.fullmatch(path.name)
    if name is None or number is None or (int(name[2]), int(name[3])) != (number + 1, count):
        what = f"is part {'?' if number is None else number + 1} of {count}, and its name does not say so"
        raise UserError(path, what, f"give it the name that it was written with, NAME-00001-of-{count:05d}.gguf")
    paths = tuple(path.with_name(f"{name[1]}-{part + 1:05d}-of-{count:05d}.gguf") for part in range(count))
    if missing := [part for part in paths if not part.is_file()]:
        more = f" ({len(missing)} of {count} parts are missing)" if len(missing) > 1 else ""
        raise UserError(missing[0], f"this part is not there{more}", "copy or download it beside the others")
    readers = [reader if part == path else _read(part) for part in paths]
    tensors = [tensor for part in readers for tensor in part.tensors]
    for place, (part, other) in enumerate(zip(paths, readers, strict=True)):
        found = [_number(other, key, part) for key in (Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT)]
        if found != [place, count]:
            what = f"is not part {place + 1} of {count}, as its name says"
            raise UserError(part, what, "take the parts of one file")
        if _number(other, Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, part) != len(tensors):
            what = f"is of a file with another number of tensors than the {len(tensors)} in the {count} parts"
            raise UserError(part, what, "take the parts of one file")
    seen: set[str] = set()
    for part, other in zip(paths, readers, strict=True):
        for tensor in other.tensors:
            if tensor.name in seen:
                raise UserError(part, "is in another part too", "take the parts of one file", tensor.name)
            seen.add(tensor.name)
    return GGUFFile(paths, readers[0].fields, tensors)


def _check_version(file: GGUFFile) -> None:
    """Refuse a file whose ``itq3s.version`` is another; one without may be."""
    path = file.paths[0]
    if _VERSION not in file.fields:
        return
    version = contents_of(file, _VERSION)
    if version in (1, 2):
        raise UserError(path, f"has {_VERSION} {version}, whose code is no longer read", _CONVERT_AGAIN)
    if type(version) is not int or version != FILE_VERSION:
        what = f"has {_VERSION} {version!r:.40}, this program reads {FILE_VERSION}"
        raise UserError(path, what, "take a newer one")


def contents_of(file: GGUFFile, key: str) -> object:
    """A value of the metadata; None where there is none that can be read."""
    try:
        field = file.fields.get(key)
        return None if field is None else field.contents()
    except (ValueError, IndexError, TypeError):
        return None


def shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """The shape of a tensor as numpy and PyTorch have it, the longest steps first."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _read(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # gguf-py checks little of what it reads
        unknown = _UNKNOWN_TYPE.search(str(error))
        if unknown and int(unknown[1]) in FORMER:
            what = f"is in the former code of {FORMER[int(unknown[1])]} ({_VERSION} 1 or 2), which is no longer read"
            raise UserError(path, what, _CONVERT_AGAIN) from error
        raise UserError(path, f"is not a complete GGUF file ({error})", _REMEDY) from error


def _number(reader: gguf.GGUFReader, key: str, path: Path) -> int | None:
    """A whole number of the metadata, None where there is none."""
    field = reader.fields.get(key)
    try:
        value: Any = None if field is None else field.contents()
    except (ValueError, IndexError, TypeError) as error:
        raise UserError(path, f"has metadata that cannot be read ({error})", _REMEDY) from error
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UserError(path, f"has {key} {value!r:.40}", _REMEDY)
    return value
