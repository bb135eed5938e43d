"""The activations between layers, which are files in the folder of a calibration until it is done."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np


def activation_path(folder: Path, number: int, *, partial: bool = False) -> Path:
    """The file with the inputs of a layer; ``partial`` while it is written."""
    return folder / f"activations-{number:04d}.f32{'.partial' if partial else ''}"


def activations(folder: Path, number: int, shape: tuple[int, ...], mode: Any, *, partial: bool = False) -> np.memmap:
    """The inputs of a layer, float32 (windows, context, hidden), in a file.

    Raises:
        OSError: the file cannot be read, or there is no room for a new one.
    """
    if mode == "w+" and hasattr(os, "posix_fallocate"):
        # A hole that the disk has no room for would kill the process (SIGBUS) when it is written to.
        with activation_path(folder, number, partial=partial).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
        mode = "r+"
    return np.memmap(activation_path(folder, number, partial=partial), dtype=np.float32, mode=mode, shape=shape)
