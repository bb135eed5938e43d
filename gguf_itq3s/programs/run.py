"""Running a Python program of llama.cpp's inside this process: its arguments, its loggers, its way to end."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..base.errors import UserError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def as_program(
    argv: Sequence[str], loggers: Sequence[str], shown: int, file: Path, what: str, remedy: str
) -> Iterator[None]:
    """Within, the process looks like the program of ``argv``, and its errors are a user's.

    What its loggers say goes to stderr, from the level ``shown`` on. An error is of ``file``; its reason follows
    ``what``.

    Raises:
        UserError: the program gave up, or failed in any way; the last error that it logged says why.
        OSError: the disk is full.
    """
    said: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            said.append(record.getMessage())
        elif record.levelno >= shown:
            print(record.getMessage(), file=sys.stderr)

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.basicConfig(format="%(message)s")  # before the program's own, which would show what any library says
    own = [logging.getLogger(name) for name in loggers]
    before = sys.argv, list(sys.path), [(logger.level, logger.propagate) for logger in own]
    for logger in own:
        logger.setLevel(min(shown, logging.ERROR))
        logger.propagate = False
        logger.addHandler(handler)
    sys.argv = list(argv)
    try:
        yield
    except SystemExit as end:
        if end.code:
            reason = said[-1].lstrip("! ") if said else f"it ended with code {end.code}"
            raise UserError(file, f"{what}: {reason}", remedy) from end
    except (UserError, KeyboardInterrupt, MemoryError, BrokenPipeError):
        raise
    except EOFError as error:
        raise UserError(file, "has to be confirmed, and nobody can be asked", "give --force") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise UserError(file, f"{what}: {reason}", remedy) from error
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        for logger, (level, propagate) in zip(own, before[2], strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
