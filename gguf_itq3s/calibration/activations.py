"""The activations between layers, which are files in the folder of a calibration until it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def activation_path(folder: Path, number: int, *, partial: bool = False) -> Path:
    """The file with the inputs of a layer; ``partial`` while it is written."""
    return folder / f"activations-{number:04d}.f32{'.partial' if partial else ''}"


def activations(folder: Path, number: int, shape: tuple[int, ...], mode: Any, *, partial: bool = False) -> np.memmap:
    """The inputs of a layer, float32 (windows, context, hidden), in a file."""
    return np.memmap(activation_path(folder, number, partial=partial), dtype=np.float32, mode=mode, shape=shape)
