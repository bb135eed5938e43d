"""The console commands ``gguf-itq3s`` and ``convert-hf-to-itq3s``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__, calibrate, convert, evaluate, inspect_gguf, plan, ternary_report, verify
from .errors import report_errors

#: Modules with a subcommand: each has ``add_parser(subparsers)``, which sets ``run`` to a function of the arguments.
SUBCOMMANDS = (convert, calibrate, inspect_gguf, verify, evaluate, plan, ternary_report)


@report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """``gguf-itq3s SUBCOMMAND ...``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gguf-itq3s", description="GGUF quantization in ITQ3_S and ternary types.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for module in SUBCOMMANDS:
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    return int(args.run(args))


@report_errors
def convert_main(argv: Sequence[str] | None = None) -> int:
    """``convert-hf-to-itq3s model_dir out.gguf ...``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="convert-hf-to-itq3s", description=convert.DESCRIPTION)
    convert.add_arguments(parser)
    return convert.run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
