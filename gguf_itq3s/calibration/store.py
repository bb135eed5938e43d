"""A folder of calibration statistics: rotated Hessians of every layer's inputs, and the manifest that says of what.

``manifest.json`` names the model (a hash), the text, the options and, for every matrix, the file and the key of its
statistics; matrices that read the same input share one. Where a norm can be folded (:mod:`gguf_itq3s.fold`), the
statistics are those of the folded model, the normalised input without the gain; an unfolded model's follow from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import UserError

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
# Bytes of a tensor that go into the model's hash, from its beginning and from its end.
_SAMPLE: Final = 4096


@dataclass(frozen=True)
class Entry:
    """Where the statistics of one matrix are.

    Attributes:
        file: safetensors file in the folder.
        key: tensor in it, float32 (n, n) or (n / 256, 256, 256).
        tokens: how many inputs were seen.
        norm: GGUF name of the norm whose gain the statistics leave out, or None.
    """

    file: str
    key: str
    tokens: int
    norm: str | None = None


@dataclass
class Manifest:
    """The contents of ``manifest.json``.

    Attributes:
        model: :func:`model_hash` of the checkpoint.
        arch: ``general.architecture``.
        text: SHA-256 of the tokens that were run.
        tokens: how many.
        options: what the command was given that changes the statistics.
        entries: matrix -> statistics; the matrices of experts are ``name[expert]``.
        complete: whether every layer is there.
    """

    model: str
    arch: str
    text: str
    tokens: int
    options: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    complete: bool = False

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest in one step."""
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")
        partial.replace(folder / MANIFEST)

    def same_run(self, other: Manifest) -> bool:
        """Whether the other manifest is of the same model, text and options."""
        return (self.model, self.arch, self.text, self.tokens, self.options) == (
            other.model, other.arch, other.text, other.tokens, other.options,
        )  # fmt: skip


def entry_name(name: str, expert: int | None = None) -> str:
    """The manifest's name of a matrix, or of one expert of a stack."""
    return name if expert is None else f"{name}[{expert}]"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a calibration folder.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    remedy = "give the folder that gguf-itq3s calibrate wrote"
    if not path.is_file():
        raise UserError(path, "is not there", remedy)
    try:
        values = json.loads(path.read_text())
        version = values.pop("version")
        if version != VERSION:
            raise UserError(path, f"has version {version}, this program reads {VERSION}", "calibrate again")
        entries = {name: Entry(**entry) for name, entry in values.pop("entries").items()}
        return Manifest(**values, entries=entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(path, f"cannot be read: {error}", remedy) from error


def model_hash(files: Sequence[Path]) -> str:
    """A hash of a checkpoint's weights: names, types, shapes, and the first and last bytes of every tensor.

    Args:
        files: its safetensors files.

    Returns:
        Hexadecimal SHA-256.

    Raises:
        UserError: a file is not safetensors.
    """
    tensors: list[tuple[str, str, list[int], bytes]] = []
    for path in files:
        with path.open("rb") as file:
            try:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > os.fstat(file.fileno()).st_size:
                    raise ValueError("the header is longer than the file")
                header = json.loads(file.read(length))
            except (struct.error, ValueError) as error:
                raise UserError(
                    path, f"is not a safetensors file: {error}", "convert the model to safetensors"
                ) from error
            for name, info in header.items():
                if name == "__metadata__":
                    continue
                start, stop = (8 + length + offset for offset in info["data_offsets"])
                file.seek(start)
                sample = file.read(min(_SAMPLE, stop - start))
                file.seek(max(start, stop - _SAMPLE))
                sample += file.read(min(_SAMPLE, stop - start))
                tensors.append((name, info["dtype"], info["shape"], sample))
    digest = hashlib.sha256()
    for name, dtype, shape, sample in sorted(tensors):
        digest.update(json.dumps([name, dtype, shape]).encode())
        digest.update(sample)
    return digest.hexdigest()


@dataclass(frozen=True)
class Calibration:
    """Statistics that are ready for a conversion.

    Attributes:
        folder: where they are.
        manifest: what they are of.
    """

    folder: Path
    manifest: Manifest

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self.manifest.entries

    def hessian(self, name: str, expert: int | None = None) -> npt.NDArray[np.float32] | None:
        """The rotated Hessian of a matrix's inputs, without the gain of :attr:`Entry.norm`.

        Returns:
            float32 (n, n) or (n / 256, 256, 256); None where there is none, or an expert saw no token.

        Raises:
            UserError: a file is missing or damaged.
        """
        from safetensors import SafetensorError, safe_open

        entry = self.entries.get(entry_name(name, expert))
        if entry is None or entry.tokens == 0:
            return None
        path = self.folder / entry.file
        try:
            with safe_open(path, framework="numpy") as file:
                return np.asarray(file.get_tensor(entry.key))
        except (OSError, SafetensorError) as error:
            raise UserError(path, f"cannot be read: {error}", "calibrate again", name) from error


def open_calibration(folder: Path, files: Sequence[Path]) -> Calibration:
    """Open the statistics of a model.

    Args:
        folder: what ``gguf-itq3s calibrate`` wrote.
        files: the checkpoint's weight files.

    Raises:
        UserError: not a calibration folder, not finished, or of another model.
    """
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise UserError(folder / MANIFEST, "is of a calibration that did not finish", "run the same command again")
    if manifest.model != model_hash(files):
        what = "is of another model: its hash and that of the weights differ"
        raise UserError(folder / MANIFEST, what, "calibrate this model")
    return Calibration(folder, manifest)
