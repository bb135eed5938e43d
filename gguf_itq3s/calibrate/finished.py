"""Matrices that are encoded: files in a folder of work, where an interrupted run goes on.

Of several processes the first has these files. What each keeps for itself, its activations, is in a folder of its own
below, on its machine: whose share of the windows that is follows from the number of processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import safe_open

from ..base.errors import UserError, output_error
from ..base.journal import Journal, save_arrays
from ..rounding.encode import SquaredError
from .ranks import Ranks, is_own, keep_own, own_folder

#: In the folder of work: output Fisher matrices, and what chose the types, which outlast a change of types.
FISHER, STATISTICS, HELD, SCORES = "fisher", "statistics", "held", "scores.jsonl"
_SHARED: Final = (FISHER, STATISTICS, HELD, SCORES)
#: The activations of the original model and of the quantized one.
STREAMS: Final = ("original", "quantized")


@dataclass
class Finished:
    """Matrices that are encoded.

    Attributes:
        errors: matrix -> squared error and energy of its weights, not of its target.
        files: matrix -> the file that holds it.
        unseen: the experts that no token came to.
        dampings: kind of matrix -> the damping that the last layer took.
        writes: whether this process has the files.
    """

    folder: Path
    journal: Journal
    errors: dict[str, SquaredError] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    dampings: dict[str, float] = field(default_factory=dict)
    layers: int = 0
    writes: bool = True

    @classmethod
    def resume_together(cls, folder: Path, run: str, ranks: Ranks) -> Finished:
        """As :meth:`resume`, on every rank; those that do not write know what is finished."""
        finished = cls.resume(folder, run) if ranks.first else cls(folder, Journal(folder, run), writes=False)
        finished.layers, finished.dampings = ranks.broadcast_object((finished.layers, finished.dampings))
        try:
            keep_own(folder, run, ranks, "streams", STREAMS)
        except OSError as error:
            raise output_error(own_folder(folder, ranks), error) from error
        return finished

    @classmethod
    def resume(cls, folder: Path, run: str) -> Finished:
        """What an earlier run of the same kind has finished; what another has left is thrown away.

        Raises:
            UserError: the folder is something else, or cannot be written.
        """
        finished = cls(folder, Journal(folder / "journal.json", run))
        records = finished.journal.records()
        if records is None:
            finished._begin()
            return finished
        kept = 0
        for line in records:
            path = folder / line["file"]
            if not path.is_file():
                break
            kept += 1
            for entry, (squared, energy) in line["matrices"].items():
                finished.files[entry] = path
                finished.errors[entry] = SquaredError(squared, energy)
            finished.unseen.update(line["unseen"])
            finished.dampings = line["dampings"]
        finished.layers = kept
        try:
            finished.journal.begin(kept)  # also where all are kept: a kill may have torn a line behind them
        except OSError as error:
            raise output_error(folder, error) from error
        return finished

    def add(self, number: int, matrices: Mapping[str, np.ndarray]) -> None:
        """A layer is finished, with the bytes of its matrices; errors, ``unseen`` and ``dampings`` are known."""
        self.layers = number + 1
        if not self.writes:
            return
        path = self.folder / f"layer-{number:04d}.safetensors"
        save_arrays(dict(matrices), path)
        errors = {entry: (self.errors[entry].error, self.errors[entry].energy) for entry in matrices}
        self.journal.note(
            {
                "file": path.name, "matrices": errors, "unseen": sorted(self.unseen & set(matrices)),
                "dampings": self.dampings,
            }
        )  # fmt: skip
        self.files |= dict.fromkeys(matrices, path)

    def matrix(self, entry: str) -> np.ndarray:
        """The bytes of a matrix, uint8."""
        with safe_open(self.files[entry], framework="numpy") as file:
            return np.asarray(file.get_tensor(entry))

    def known(self, name: str) -> bool:
        """Whether a tensor is among them."""
        return name in self.files or f"{name}[0]" in self.files

    def share(self, name: str) -> float:
        """The share of a tensor's matrices that were rounded with statistics: an expert may have seen no token."""
        entries = self._entries(name)
        return sum(entry not in self.unseen for entry in entries) / len(entries) if entries else 0.0

    def pieces(self, name: str) -> Iterator[tuple[np.ndarray, SquaredError]]:
        """The bytes of a tensor, matrix after matrix, with the error of each."""
        for entry in self._entries(name):
            yield self.matrix(entry).reshape(-1), self.errors[entry]

    def _entries(self, name: str) -> list[str]:
        if name in self.files:
            return [name]
        count = 0
        while f"{name}[{count}]" in self.files:
            count += 1
        return [f"{name}[{expert}]" for expert in range(count)]

    def remove(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(self) -> None:
        """Make the folder, or take away what is in it, but for what has a key of its own."""
        known = {*_SHARED, *STREAMS}
        foreign = self.folder.exists() and (
            not self.folder.is_dir()
            or any(path.name not in known and not is_own(path.name) for path in self.folder.iterdir())
        )
        if foreign and not self.journal.present:
            what = "is in the way, and is not what an interrupted conversion has left"
            raise UserError(self.folder, what, "move it away, or choose another name for the output")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                if path.is_dir() and path.name not in _SHARED:
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name not in _SHARED:
                    path.unlink()
            for stream in STREAMS:
                (self.folder / stream).mkdir()
            self.journal.begin()
        except OSError as error:
            raise output_error(self.folder, error) from error
