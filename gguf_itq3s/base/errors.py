"""Errors that a user can act on, and how a command reports them: one line, exit code 1."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from ..upstream import FetchError

#: In the environment, asks for the traceback of an error.
TRACEBACK: Final = "GGUF_ITQ3S_TRACEBACK"


class UserError(Exception):
    """Something outside the program is wrong; the message names the file, the tensor and the remedy.

    Attributes:
        file: the file or folder at fault.
        what: what is wrong with it.
        remedy: what to do.
        tensor: the tensor at fault, if it is one.
    """

    def __init__(self, file: str | os.PathLike[str], what: str, remedy: str, tensor: str | None = None) -> None:
        self.file, self.what, self.remedy, self.tensor = Path(file), what, remedy, tensor
        place = f"{self.file}: {tensor}" if tensor else f"{self.file}"
        super().__init__(f"{place}: {_one_line(what)}; {remedy}")


def _one_line(text: str) -> str:
    """The text up to its first line break, without a closing full stop."""
    lines = text.strip().splitlines()
    return lines[0].rstrip(" .:") if lines else "unknown error"


def failed_line(error: BaseException) -> str:
    """The line of code that an error comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


@contextmanager
def errors_of_weights(checkpoint: Path, tensor: str) -> Iterator[None]:
    """Within, a ValueError is of the weights of a tensor, and becomes an error of their checkpoint."""
    try:
        yield
    except ValueError as error:
        raise UserError(checkpoint, str(error), "repair the checkpoint or download it again", tensor) from error


def output_error(path: Path, error: OSError) -> UserError:
    """The error for a file that cannot be written."""
    remedies = {
        errno.ENOSPC: "free some space or choose another folder",
        errno.EDQUOT: "free some space or choose another folder",
        errno.EFBIG: "raise the file size limit or choose another folder",
        errno.ENOENT: "create the folder first",
    }
    what = f"cannot be written: {error.strerror or error}"
    return UserError(path, what, remedies.get(error.errno or 0, "choose a place that can be written"))


def positive(argument: str) -> int:
    """The type of an option that counts something, for argparse."""
    try:
        value = int(argument)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{argument!r} is not a whole number") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not more than 0")
    return value


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def report_errors(command: Callable[..., int]) -> Callable[..., int]:
    """Decorate the ``main`` of a command: user errors and Ctrl-C become one line on stderr and exit code 1.

    So does any other exception, which is an error of the program. ``GGUF_ITQ3S_TRACEBACK=1`` prints the traceback as
    well.
    """

    @functools.wraps(command)
    def main(*args: object, **kwargs: object) -> int:
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            return command(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            problem: BaseException = error
        finally:
            signal.signal(signal.SIGTERM, before)
        if os.environ.get(TRACEBACK):
            traceback.print_exception(problem)
        if isinstance(problem, BrokenPipeError):
            # The reader of our output is gone (a closed pager); Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            print(f"error: {_message(problem)}", file=sys.stderr)
        return 1

    return main


def _message(problem: BaseException) -> str:
    if isinstance(problem, MemoryError):
        return "out of memory; close other programs or use a machine with more"
    if isinstance(problem, (UserError, FetchError, KeyboardInterrupt)):
        return str(problem) or "interrupted"
    what = f"internal error: {type(problem).__name__}: {_one_line(str(problem) or 'no message')}"
    return f"{what}; run with {TRACEBACK}=1 to see where"
