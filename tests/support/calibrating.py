"""A short calibration on the fixed prose."""

from __future__ import annotations

from pathlib import Path

from checkpoints import NOVEL
from gguf_itq3s.calibration.options import CalibrationOptions


def options(model: Path, **changes: object) -> CalibrationOptions:
    """Ten windows of 64 tokens, and what differs."""
    values: dict[str, object] = {"tokens": 640, "context": 64, "batch": 4, **changes}
    return CalibrationOptions(model, [NOVEL], **values)  # type: ignore[arg-type]
