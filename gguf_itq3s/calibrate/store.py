"""A folder of calibration statistics: rotated Hessians of every layer's inputs, and the manifest that says of what.

``manifest.json`` names the model (a hash), the text, the options and, for every matrix, the file and the key of its
statistics; matrices that read the same input share one. Where all readers of a norm are known
(:mod:`gguf_itq3s.checkpoint.channels`), the statistics are of the normalised input without the gain; what a model's
matrices read, as it is or rescaled, follows from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from ..base.journal import key_of, write_text
from ..checkpoint.files import listed_file
from ..codec.native import processors
from ..rounding import hessian
from ..rounding.factors import tensor_entry

MANIFEST: Final = "manifest.json"
VERSION: Final = 2


@dataclass(frozen=True)
class Entry:
    """Where the statistics of one matrix are.

    Attributes:
        key: tensor in it, float32 (n, n) or (n / b, b, b) as in :mod:`gguf_itq3s.rounding.hessian`.
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
        text: SHA-256 of the tokens that were run.
        options: what the command was given that changes the statistics.
        entries: matrix -> statistics; the matrices of experts are ``name[expert]``.
        complete: whether every layer is there.
        code: :func:`gguf_itq3s.base.journal.sources` of what began it.
    """

    model: str
    arch: str
    text: str
    tokens: int
    options: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    complete: bool = False
    code: str = ""

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest in one step."""
        write_text(folder / MANIFEST, json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    def same_run(self, other: Manifest) -> bool:
        """Whether the other manifest is of the same model, text and options."""
        return (self.model, self.arch, self.text, self.tokens, self.options) == (
            other.model, other.arch, other.text, other.tokens, other.options,
        )  # fmt: skip


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a calibration folder.

    Raises:
        UserError: there is none, it cannot be read, or it names a file outside of the folder.
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
        for name, entry in entries.items():
            listed_file(folder, entry.file, path)
            if not isinstance(entry.norm, (str, type(None))):
                raise UserError(path, f"leaves out the norm {entry.norm!r:.80}", remedy, name)
            if not isinstance(entry.tokens, int) or entry.tokens < 0 or not isinstance(entry.key, str):
                raise UserError(path, f"has {entry.tokens!r:.40} tokens of {entry.key!r:.80}", remedy, name)
        return Manifest(**values, entries=entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(path, f"cannot be read: {error}", remedy) from error


def model_hash(files: Sequence[Path]) -> str:
    """A hash of a checkpoint's weights: names, types, shapes and every byte, however they are dealt out over files.

    It is made once for files that do not change while the process runs, on all processors: 1.3 GB/s each.

    Raises:
        UserError: a file is not safetensors.
    """
    return _model_hash(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@lru_cache(maxsize=4)
def _model_hash(files: tuple[tuple[Path, int, int], ...]) -> str:
    return key_of(*sorted(found for path, _, _ in files for found in _hashes(path)))


def _hashes(path: Path) -> list[tuple[str, str, list[int], str]]:
    """Name, type, shape and hash of every tensor of a safetensors file."""
    import torch

    def hashed(name: str) -> tuple[str, str, list[int], str]:
        view, raw = file.get_slice(name), file.get_tensor(name).flatten().view(torch.uint8)  # mapped
        return name, view.get_dtype(), list(view.get_shape()), hashlib.sha256(raw.numpy().data).hexdigest()

    try:
        with safe_open(path, framework="pt") as file, ThreadPoolExecutor(processors()) as pool:
            return list(pool.map(hashed, file.keys()))
    except (SafetensorError, OSError) as error:
        raise UserError(path, f"is not a safetensors file: {error}", "convert the model to safetensors") from error


@dataclass(frozen=True)
class Calibration:
    """Statistics that are ready for a conversion, as :class:`gguf_itq3s.rounding.factors.Statistics`."""

    folder: Path
    manifest: Manifest

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self.manifest.entries

    @property
    def path(self) -> Path:
        return self.folder

    def known(self, name: str) -> bool:
        return name in self.entries or tensor_entry(name, 0) in self.entries

    def share(self, name: str) -> float:
        seen, count = self._seen.get(name, (0, 1))
        return seen / count

    @cached_property
    def _seen(self) -> dict[str, tuple[int, int]]:
        """Tensor -> how many of its matrices saw a token, and how many there are."""
        seen: dict[str, tuple[int, int]] = {}
        for name, entry in self.entries.items():
            tensor = name.partition("[")[0]
            before, count = seen.get(tensor, (0, 0))
            seen[tensor] = before + bool(entry.tokens), count + 1
        return seen

    def _entry(self, name: str, expert: int | None) -> Entry | None:
        """That of a matrix; the heads of a product are one matrix of a model, whose statistics all have."""
        return self.entries.get(tensor_entry(name, expert)) or self.entries.get(name)

    def key(self, name: str, expert: int | None) -> str:
        entry = self._entry(name, expert)
        return f"{entry.file}:{entry.key}" if entry else tensor_entry(name, expert)

    def tokens(self, name: str, expert: int | None) -> int | None:
        entry = self._entry(name, expert)
        return entry.tokens if entry else None

    def left_out(self, name: str, expert: int | None) -> str | None:
        entry = self._entry(name, expert)
        return entry.norm if entry else None

    def rotated(
        self, name: str, columns: int, expert: int | None, factor: npt.NDArray[np.floating] | None
    ) -> npt.NDArray[np.floating] | None:
        found = self._of_columns(name, columns, expert)
        return found if found is None or factor is None else hessian.scale_columns(found, factor)

    def diagonal(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.float64] | None:
        found = self._of_columns(name, columns, expert)
        return None if found is None else np.maximum(hessian.diagonal(found), 0)  # of float32 sums

    def _of_columns(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.float32] | None:
        found = self.hessian(name, expert)
        if found is not None and hessian.columns_of(found) != columns:
            raise ValueError(f"the statistics have {hessian.columns_of(found)} columns, the matrix {columns}")
        return found

    def hessian(self, name: str, expert: int | None = None) -> npt.NDArray[np.float32] | None:
        """The rotated Hessian of a matrix's inputs, without the gain of :attr:`Entry.norm`.

        Returns:
            float32 (n, n) or (n / b, b, b); None where there is none, or an expert saw no token.

        Raises:
            UserError: a file is missing or damaged.
        """
        entry = self._entry(name, expert)
        if entry is None or entry.tokens == 0:
            return None
        path = self.folder / entry.file
        try:
            with safe_open(path, framework="numpy") as file:
                found = np.asarray(file.get_tensor(entry.key))
            hessian.check_form(found)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise UserError(path, f"cannot be read: {error}", "calibrate again", name) from error
        if not np.isfinite(found).all() or (np.diagonal(found, axis1=-2, axis2=-1) < 0).any():
            raise UserError(path, "has statistics that are not finite, or squares below 0", "calibrate again", name)
        if hessian.is_flat(found):
            raise UserError(path, "has statistics that tell no column from another", "calibrate again", name)
        return found


def open_calibration(folder: Path, files: Sequence[Path]) -> Calibration:
    """Open the statistics of a model.

    Args:
        folder: what ``gguf-itq3s calibrate`` wrote.
        files: the checkpoint's weight files.

    Raises:
        UserError: not a calibration folder, not finished, empty, or of another model.
    """
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise UserError(folder / MANIFEST, "is of a calibration that did not finish", "run the same command again")
    # An expert may have seen no token; a matrix that all tokens pass cannot.
    blind = [name for name, entry in manifest.entries.items() if not entry.tokens and not name.endswith("]")]
    if not any(entry.tokens for entry in manifest.entries.values()) or blind:
        what = "has statistics that saw no token" if manifest.entries else "has no statistics"
        raise UserError(folder / MANIFEST, what, "calibrate again", blind[0] if blind else None)
    if manifest.model != model_hash(files):
        what = "is of another model: its hash and that of the weights differ"
        raise UserError(folder / MANIFEST, what, "calibrate this model")
    return Calibration(folder, manifest)
