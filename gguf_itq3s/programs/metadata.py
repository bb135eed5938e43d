"""The commands ``gguf-itq3s dump``, ``set-metadata``, ``new-metadata`` and ``hash``.

They are gguf-py's own programs with their own options; installed by themselves they stop at tensor type 510. Importing
this package makes gguf-py know it, so a wrapper has nothing to do but to be the program that is started: nothing is
changed for other users of gguf-py in the same environment.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import gguf

from ..base.errors import UserError, output_error
from ..checkpoint.files import check_output
from ..checkpoint.patches import replaced_in
from .run import as_program

#: Those of gguf-py's programs: ``gguf-dump``, the logger and console name of the module ``gguf.scripts.gguf_dump``.
PROGRAMS: Final = {
    "dump": "metadata and tensors of a GGUF file, also as JSON or Markdown",
    "set-metadata": "change a number in a GGUF file, in place",
    "new-metadata": "copy a GGUF file with other metadata",
    "hash": "hashes of a GGUF file's tensors",
}


def add_parser(subparsers: Any) -> None:
    """Add the subcommands."""
    for name, text in PROGRAMS.items():
        # No prefix: options are the program's, and its --help too.
        parser = subparsers.add_parser(name, help=text, add_help=False, prefix_chars="\0")
        parser.add_argument("arguments", nargs="*")
        parser.set_defaults(run=run, program=name)


def run(args: argparse.Namespace) -> int:
    """Run a program; returns the exit code."""
    program = f"gguf-{args.program}"
    file = next((Path(name) for name in args.arguments if Path(name).is_file()), Path(program))
    what, remedy = "gguf-py could not do it", f"gguf-itq3s {args.program} --help lists the options"
    argv = [f"gguf-itq3s {args.program}", *args.arguments]
    with _whole_files(), as_program(argv, [program], logging.INFO, file, what, remedy):
        try:
            module = importlib.import_module(f"gguf.scripts.{program.replace('-', '_')}")
        except ImportError as error:
            raise UserError(program, f"cannot be started: {error}", "install what is missing with pip") from error
        module.main()
    return 0


@contextmanager
def _whole_files() -> Iterator[None]:
    """Within, a file that a ``GGUFWriter`` writes gets its name when it is whole, and not at all if it fails."""
    own = gguf.GGUFWriter
    partial: list[Path] = []

    class Writer(own):  # type: ignore[misc, valid-type]
        def __init__(self, path: Any, *args: Any, **keywords: Any) -> None:
            self._final = Path(path)
            check_output(self._final, ())
            partial.append(self._final.with_name(f".{self._final.name}.partial"))
            super().__init__(partial[-1], *args, **keywords)

        def close(self) -> None:
            super().close()
            partial[-1].replace(self._final)

    try:
        with replaced_in(gguf, "GGUFWriter", Writer):
            yield
    except OSError as error:
        raise output_error(partial[-1] if partial else Path(error.filename or "output"), error) from error
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
