"""The console commands ``gguf-itq3s`` and ``convert-hf-to-itq3s``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__, upstream
from .base.errors import report_errors
from .calibrate import command as calibrate
from .convert import command as convert
from .evaluate import command as evaluate
from .inspect import contents, find_ternary, plan, verify
from .programs import lora, metadata
from .publish import command as publish
from .upstream import build

#: Modules with a subcommand: each has ``add_parser(subparsers)``, which sets ``run`` to a function of the arguments and
#: ``needs_source`` if that reads checkpoints through llama.cpp's conversion package.
SUBCOMMANDS = (convert, calibrate, contents, verify, evaluate, plan, find_ternary, lora, metadata, build, publish)


@report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """``gguf-itq3s SUBCOMMAND ...``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gguf-itq3s", description="GGUF quantization in trellis-coded and ternary types."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for module in SUBCOMMANDS:
        module.add_parser(subparsers)
    return _run(parser, argv)


@report_errors
def convert_main(argv: Sequence[str] | None = None) -> int:
    """``convert-hf-to-itq3s model_dir out.gguf ...``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="convert-hf-to-itq3s", description=convert.DESCRIPTION)
    convert.add_arguments(parser)
    return _run(parser, argv)


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    args = parser.parse_args(argv)
    if getattr(args, "needs_source", False) and argv is None and not upstream.gguf_is_vendored():
        # gguf was imported from elsewhere because the source was not there: have it, then start again with its own.
        upstream.fetch_source()
        if upstream.RESTARTED not in os.environ:
            os.environ[upstream.RESTARTED] = "1"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return int(args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
