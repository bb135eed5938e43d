"""The activations between layers, which are files in the folder of a calibration until it is done.

In float32 they are mapped as they are. numpy has no bfloat16, so such files are of 16-bit integers, the upper halves of
float32 numbers: what is written is rounded to the nearest, ties to even, and what is read is float32 again.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .options import DTYPES


class Bfloat16Array:
    """Numbers that are kept in bfloat16, as uint16."""

    def __init__(self, halves: np.memmap) -> None:
        self._halves = halves

    @property
    def shape(self) -> tuple[int, ...]:
        return self._halves.shape

    def __getitem__(self, index: Any) -> npt.NDArray[np.float32]:
        """A copy of a part, float32."""
        return widened(self._halves[index])

    def __setitem__(self, index: Any, values: npt.NDArray[np.float32]) -> None:
        """Round float32 values to a part."""
        self._halves[index] = narrowed(values)

    def flush(self) -> None:
        self._halves.flush()


#: What :func:`activations` gives: an array in a file, float32 to whoever reads or writes parts of it.
Activations: TypeAlias = np.memmap | Bfloat16Array
#: The same, or in memory.
Array: TypeAlias = Activations | np.ndarray


def widened(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers whose upper halves are given, of any shape."""
    wide = np.asarray(halves).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def narrowed(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 of any shape, rounded to bfloat16, as the upper halves; NaN stays NaN."""
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def activation_path(folder: Path, number: int, dtype: str = "float32", *, partial: bool = False) -> Path:
    """The file with the inputs of a layer; ``partial`` while it is written."""
    return folder / f"activations-{number:04d}.{DTYPES[dtype][1]}{'.partial' if partial else ''}"


def reserve(path: Path, size: int) -> None:
    """Room on the disk for a file: a hole that it has none for would kill the process (SIGBUS) that writes to it."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)


def activations(
    folder: Path, number: int, shape: tuple[int, ...], mode: Any, dtype: str = "float32", *, partial: bool = False
) -> Activations:
    """The inputs of a layer, (windows, context, hidden), in a file.

    Args:
        dtype: one of :data:`.options.DTYPES`.

    Returns:
        float32 to read and to write: the mapped file, or a :class:`Bfloat16Array`.

    Raises:
        OSError: the file cannot be read, or there is no room for a new one.
    """
    path, size = activation_path(folder, number, dtype, partial=partial), DTYPES[dtype][0]
    if mode == "w+" and hasattr(os, "posix_fallocate"):
        path.write_bytes(b"")
        reserve(path, size * math.prod(shape))
        mode = "r+"
    if dtype == "float32":
        return np.memmap(path, dtype=np.float32, mode=mode, shape=shape)
    return Bfloat16Array(np.memmap(path, dtype=np.uint16, mode=mode, shape=shape))


def complete(array: Activations, folder: Path, number: int, dtype: str) -> None:
    """Give the inputs of a layer, which are written, their name."""
    array.flush()
    activation_path(folder, number, dtype, partial=True).replace(activation_path(folder, number, dtype))
