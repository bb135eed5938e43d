"""What a calibration is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import UserError, positive

FORMS: Final = ("full", "block")
#: Widest input whose full Hessian is collected by default: in a folder of statistics, where each takes disk, and while
#: layers are quantized, where one at a time takes memory (8 GiB of the widest).
FULL_COLUMNS: Final = 8192
FULL_COLUMNS_AT_ONCE: Final = 20480
#: The text that comes with the package; beside it stands where it is from.
BUNDLED: Final = Path(__file__).parent / "text.txt.xz"


@dataclass(frozen=True)
class CalibrationOptions:
    """A model and a text that it runs on; the fields are options of commands (:func:`add_arguments`).

    Attributes:
        model: a local Hugging Face folder with safetensors weights.
        text: files of text, plain or xz; windows are taken from all of them alike.
        tokens: about how many tokens are run.
        context: length of a window; None for :func:`gguf_itq3s.calibration.text.usual_context`, at most the model's.
        hessian: ``full``, ``block``, or None: full up to ``widest`` columns.
        device: torch device.
        batch: windows at a time.
        trust_remote_code: Python code of the model folder may run.
        widest: input whose full Hessian is collected where ``hessian`` does not say.

    Raises:
        UserError: a count is not positive: nothing would be collected.
    """

    model: Path
    text: Sequence[Path] = (BUNDLED,)
    tokens: int = 262144
    context: int | None = None
    hessian: str | None = None
    device: str = "cpu"
    batch: int = 8
    trust_remote_code: bool = False
    widest: int = FULL_COLUMNS

    def __post_init__(self) -> None:
        for name in ("tokens", "context", "batch"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(self.model, f"cannot be calibrated with --{name} {value}", "give more than 0")

    def full(self, columns: int) -> bool:
        """Whether the full Hessian of that many columns is collected."""
        return self.hessian == "full" or (self.hessian is None and columns <= self.widest)


def add_arguments(parser: argparse._ActionsContainer, widest: int) -> None:
    """The options that say how a model is run, on any parser; ``widest`` as in :class:`CalibrationOptions`."""
    parser.add_argument(
        "--tokens", type=positive, default=CalibrationOptions.tokens, help="tokens to run (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=positive, help="tokens of a window (default: 2048, 512 of few tokens, at most the model's)"
    )
    parser.add_argument(
        "--hessian", choices=FORMS, help=f"form of the sums (default: full up to {widest} columns, else block)"
    )
    parser.add_argument(
        "--device", default=CalibrationOptions.device, help="torch device, such as cuda (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive, default=CalibrationOptions.batch, metavar="N",
        help="windows at a time (default: %(default)s)",
    )  # fmt: skip
