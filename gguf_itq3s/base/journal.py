"""Long work that can be interrupted: journals of what is finished, and files that are whole or not there.

A run is known by a key, a hash of all that decides its result. What another run has left is never gone on with.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .errors import UserError

if TYPE_CHECKING:
    import numpy as np

_RUN: Final = "run"
_REMEDY: Final = "repair the disk or its permissions, or move the file away to begin anew"


def key_of(*parts: object) -> str:
    """Hexadecimal SHA-256 of what decides a result: bytes as they are, anything else as its ``repr``."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@lru_cache
def sources(*without: str) -> str:
    """A hash of the package's own files, but for some files and rooms, by their paths in it: what one state has begun
    another may end differently."""
    root = Path(__file__).parents[1]
    files = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    kept = [(name, path) for name, path in files.items() if not any(name.is_relative_to(other) for other in without)]
    return key_of(*(part for name, path in kept for part in (name.as_posix(), path.read_bytes())))


class Journal:
    """A file with a line of JSON for the run, given by its key, and one for everything that it has finished."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self._run = path, run

    def records(self) -> list[dict[str, Any]] | None:
        """What this run has noted before, up to a line that a kill has torn; None where nothing is of this run.

        Raises:
            UserError: the file is there and cannot be read.
        """
        lines = self._lines()
        return [record for record, _ in lines[1:]] if lines and lines[0][0] == {_RUN: self._run} else None

    @property
    def present(self) -> bool:
        """Whether the file is a journal, of whatever run; raises UserError as :meth:`records`."""
        return any(_RUN in record for record, _ in self._lines()[:1])

    def begin(self, kept: int = 0) -> None:
        """Go on behind the first ``kept`` records, or begin anew where there are none to keep.

        Raises:
            OSError: the file cannot be written.
        """
        # Cut, not written anew: there may be no room for it.
        size = self._lines()[kept][1] if kept else 0
        with self._open() as file:
            file.truncate(size)
        if not kept:
            self.note({_RUN: self._run})

    def note(self, record: Mapping[str, Any]) -> None:
        """Add a line, whole or with an error.

        Raises:
            OSError: the file cannot be written.
        """
        data = json.dumps(record).encode() + b"\n"
        with self._open() as file:
            file.seek(0, os.SEEK_END)
            while data:  # unbuffered: what could not be written must not be tried again at the closing
                written = file.write(data)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                data = data[written:]

    def _open(self) -> Any:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        return os.fdopen(handle, "r+b", buffering=0)

    def _lines(self) -> list[tuple[dict[str, Any], int]]:
        """The lines, each with the place behind it, up to the first that is not a whole record."""
        lines: list[tuple[dict[str, Any], int]] = []
        end = 0
        try:
            data = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return lines
        except OSError as error:  # another run's, for all that is known
            raise UserError(self.path, f"cannot be read ({error.strerror or error})", _REMEDY) from error
        with contextlib.suppress(ValueError, RecursionError):
            for text in data.splitlines(keepends=True):
                line = json.loads(text)
                if not isinstance(line, dict) or not text.endswith(b"\n"):
                    break
                end += len(text)
                lines.append((line, end))
        return lines


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def save_arrays(
    arrays: dict[str, np.ndarray], path: Path, folder: Path | None = None, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all, and to the disk: a journal may name it afterwards.

    It is written in ``folder``, on the same disk and by default its own, before it gets its name.

    Raises:
        OSError: it cannot be written; also where the disk is full, as from any other writer.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    partial = (folder or path.parent) / f"{path.name}.partial"
    try:
        # Of a view, safetensors would write what lies in memory.
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial, metadata)
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)
