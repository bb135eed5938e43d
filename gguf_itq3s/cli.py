"""The console commands ``gguf-itq3s`` and ``convert-hf-to-itq3s``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__
from .calibration import collect
from .convert import pipeline
from .errors import report_errors
from .evaluate import command
from .inspect import contents, plan, ternary, verify

#: Modules with a subcommand: each has ``add_parser(subparsers)``, which sets ``run`` to a function of the arguments.
SUBCOMMANDS = (pipeline, collect, contents, verify, command, plan, ternary)


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
    parser = argparse.ArgumentParser(prog="convert-hf-to-itq3s", description=pipeline.DESCRIPTION)
    pipeline.add_arguments(parser)
    return pipeline.run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
