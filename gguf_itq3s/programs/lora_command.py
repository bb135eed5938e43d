"""The command ``gguf-itq3s convert-lora``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from ..base import report
from ..checkpoint import trust
from ..checkpoint.hub import download
from ..convert.options import TERNARY_MODES
from .lora import OUTTYPES, LoraOptions, convert_lora

DESCRIPTION: Final = (
    "Convert a LoRA adapter of PEFT to GGUF, as llama.cpp's own converter writes it, or with --model for a file whose "
    "channels are rescaled (converted with statistics, --equalize or --fold-norms)."
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``convert-lora``."""
    parser = subparsers.add_parser("convert-lora", help="LoRA adapter to GGUF", description=DESCRIPTION)
    defaults = LoraOptions(Path(), Path(), Path())
    parser.add_argument("adapter", type=Path, help="folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("out", metavar="out.gguf", type=Path, help="file to write; {ftype} becomes the output type")
    parser.add_argument(
        "--base", required=True, metavar="model_dir",
        help="the model that the adapter was trained on: a Hugging Face folder, or hf:organisation/name to download; "
        "for a file that is not rescaled, config.json is enough",
    )  # fmt: skip
    parser.add_argument(
        "--outtype", choices=OUTTYPES, default=defaults.outtype, help="type of the matrices (default: %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="FILE.gguf",
        help="the converted model, which says how it is rescaled; llama.cpp refuses an adapter that does not fit",
    )  # fmt: skip
    parser.add_argument(
        "--fold-norms", action=argparse.BooleanOptionalAction, default=defaults.fold_norms,
        help="without --model: the model was converted with --fold-norms",
    )  # fmt: skip
    parser.add_argument(
        "--ternary", choices=TERNARY_MODES, default=defaults.ternary,
        help="as the model was converted: norms that ternary matrices read are not folded (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--trained-folded", action=argparse.BooleanOptionalAction, default=defaults.trained_folded,
        help="it was trained beside a model whose norms are folded, as gguf_itq3s.transformers can load it (default: "
        "as the adapter's model card and the config.json of --base say)",
    )  # fmt: skip
    trust.add_argument(parser)
    parser.add_argument("--verbose", action="store_true", help="show what llama.cpp's converter logs")
    parser.set_defaults(run=run, needs_source=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    values = {key: value for key, value in vars(args).items() if key in LoraOptions.__dataclass_fields__}
    values["base"] = Path(args.base)
    if args.base.startswith("hf:"):
        values["base"] = download(args.base.removeprefix("hf:"), trust_remote_code=args.trust_remote_code)
    values["out"] = args.out.with_name(args.out.name.replace("{ftype}", args.outtype.upper()))
    done = convert_lora(LoraOptions(**values))
    scaled = f"{len(done.scaled)} scaled" if done.scaled else "trained beside one"
    kind = "with folded norms" if done.folded else "that is rescaled"
    how = f"for a model {kind}, {scaled}" if done.marks else "for a model as it was"
    print(f"wrote {values['out']}: {len(done.matrices)} matrices, {how}, {report.size(values['out'].stat().st_size)}")
    return 0
