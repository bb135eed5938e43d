"""What a run of a model on a text is asked for: the part of the options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..base.errors import UserError, positive

#: What activations can be kept in, with the bytes of a number and the ending of the files.
DTYPES: Final = {"float32": (4, "f32"), "bfloat16": (2, "bf16")}
FORMS: Final = ("full", "block")
#: Widest input whose full Hessian is collected by default: in a folder of statistics, where each takes disk, and while
#: layers are quantized, where one at a time takes memory (8 GiB of the widest).
FULL_COLUMNS: Final = 8192
FULL_COLUMNS_AT_ONCE: Final = 20480
#: The text that comes with the package; beside it stands where it is from.
BUNDLED: Final = Path(__file__).parent / "text.jsonl.xz"

#: What helps where a model cannot be run here.
BY_IMATRIX: Final = "use an importance matrix of llama-imatrix (--imatrix)"
#: What a text can be, for the help of commands.
TEXTS: Final = (
    "files of text, plain or .xz; .jsonl has in each line a text, or messages for the model's chat template; bundled: "
    "a mix that comes along; TEXT=0.3: three tenths of the tokens, equal parts where nothing is said"
)


@dataclass(frozen=True)
class CalibrationOptions:
    """Which text a model is run on, where, and what is collected; the fields are the options of the commands.

    Attributes:
        model: a local Hugging Face folder with safetensors weights.
        text: files of text, plain or xz; ``.jsonl`` has a text or a conversation in each line.
        tokens: about how many tokens are run.
        context: length of a window; None for :func:`gguf_itq3s.calibrate.text.usual_context`, at most the model's.
        device: torch device.
        trust_remote_code: Python code of the model folder may run.
        hessian: ``full``, ``block``, or None: full up to ``widest`` columns.
        widest: input whose full Hessian is collected where ``hessian`` does not say.
        dtype: what activations are kept in, one of :data:`DTYPES`.
        shares: of the tokens, for each of the files; None, and what is missing: equal parts of what the others leave.

    Raises:
        UserError: a count is not positive: nothing would be run; the shares leave nothing for a file.
    """

    model: Path
    text: Sequence[Path] = (BUNDLED,)
    tokens: int = 262144
    context: int | None = None
    device: str = "cpu"
    batch: int = 8
    trust_remote_code: bool = False
    hessian: str | None = None
    widest: int = FULL_COLUMNS
    dtype: str = "float32"
    shares: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "context", "batch"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(self.model, f"cannot be calibrated with --{name} {value}", "give more than 0")
        for path, part in zip(self.text, self.parts, strict=True):
            if part <= 0:
                what = "the shares of the other texts leave nothing for it"
                raise UserError(path, what, "give them less than 1 in all")

    @property
    def parts(self) -> list[float]:
        """The share of the tokens of each text; they add up to 1."""
        given = [*self.shares, *[None] * (len(self.text) - len(self.shares))]
        known = sum(share for share in given if share is not None)
        if None not in given:
            return [float(share or 0) / known for share in given]
        return [(1 - known) / given.count(None) if share is None else share for share in given]

    def full(self, columns: int) -> bool:
        """Whether the full Hessian of that many columns is collected."""
        return self.hessian == "full" or (self.hessian is None and columns <= self.widest)


def text_of(argument: str) -> tuple[Path, float | None]:
    """A text of a command line, ``FILE``, ``FILE=SHARE`` or ``bundled``, as its path and its share.

    Raises:
        ArgumentTypeError: the share is no number above 0 and up to 1.
    """
    name, _, number = argument.rpartition("=")
    share = None
    if name and not Path(argument).exists():
        try:
            share, argument = float(number), name
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise argparse.ArgumentTypeError(f"{number!r:.40} is no share: give a number up to 1, as in FILE=0.3")
    return BUNDLED if argument == "bundled" and not Path(argument).exists() else Path(argument), share


def add_arguments(parser: argparse._ActionsContainer, widest: int) -> None:
    """The options of a run on a parser or a group of one; ``widest`` as in :class:`CalibrationOptions`."""
    of = CalibrationOptions
    for name, default, what in (("tokens", of.tokens, "tokens to run"), ("batch", of.batch, "windows at a time")):
        parser.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--context", type=positive, metavar="N",
        help="tokens of a window (default: 2048, 512 of few tokens, at most the model's)",
    )  # fmt: skip
    parser.add_argument("--device", default=of.device, help="torch device, such as cuda (default: %(default)s)")
    parser.add_argument(
        "--hessian", choices=FORMS, help=f"form of the sums (default: full up to {widest} columns, else block)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default=of.dtype,
        help="what activations are kept in; bfloat16 halves their files, and where a device is quick at it "
        "the model runs in it (default: %(default)s)",
    )  # fmt: skip
