"""A short calibration on the fixed prose, and what a calibration has found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from checkpoints import NOVEL
from gguf_itq3s.calibration.options import CalibrationOptions
from gguf_itq3s.calibration.store import read_manifest


def options(model: Path, **changes: object) -> CalibrationOptions:
    """Ten windows of 64 tokens, and what differs."""
    values: dict[str, object] = {"tokens": 640, "context": 64, "batch": 4, **changes}
    return CalibrationOptions(model, [NOVEL], **values)  # type: ignore[arg-type]


def statistics(folder: Path) -> dict[str, tuple[np.ndarray, int, str | None]]:
    """Matrix -> second moment, tokens, norm."""
    found = {}
    for name, entry in read_manifest(folder).entries.items():
        with safe_open(folder / entry.file, framework="numpy") as file:
            found[name] = file.get_tensor(entry.key), entry.tokens, entry.norm
    return found
