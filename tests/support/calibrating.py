"""A short calibration on the fixed prose, and what a calibration has found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from checkpoints import NOVEL
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.store import read_manifest


def options(model: Path, **changes: object) -> CalibrationOptions:
    """Ten windows of 64 tokens, and what differs."""
    values: dict[str, object] = {"tokens": 640, "context": 64, "batch": 4, **changes}
    return CalibrationOptions(model, [NOVEL], **values)  # type: ignore[arg-type]


#: Matrix -> second moment, tokens, norm.
Statistics = dict[str, tuple[np.ndarray, int, str | None]]


def statistics(folder: Path) -> Statistics:
    """What a calibration of a folder has found."""
    found = {}
    for name, entry in read_manifest(folder).entries.items():
        with safe_open(folder / entry.file, framework="numpy") as file:
            found[name] = file.get_tensor(entry.key), entry.tokens, entry.norm
    return found


def same_statistics(found: Statistics, wanted: Statistics) -> None:
    """Those of two layers whose experts' outputs were added up in another order are alike."""
    for key, (moment, tokens, norm) in wanted.items():
        assert found[key][2] == norm
        # In layer 1 a token may lie between two experts.
        assert found[key][1] == tokens or (key.startswith("blk.1.") and abs(found[key][1] - tokens) <= 2)
        bound = 1e-6 if key.startswith("blk.0.") else 1e-3
        np.testing.assert_allclose(found[key][0], moment, atol=bound * np.abs(moment).max())
