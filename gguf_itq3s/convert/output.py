"""The output, one file or the parts of a split one: written beside its final names, renamed at the end, and continued
after an interruption.

While ``NAME.partial`` grows, ``NAME.partial.journal`` holds a line of JSON for every finished tensor with its CRC-32.
A later run whose header, options and weight files are the same checks the finished tensors and goes on after them. Of a
split file the journal stands beside the first part; the parts get their names together, the first one last, so that a
set that has its first part is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np

from ..base import report
from ..base.errors import UserError, output_error
from ..base.journal import Journal
from ..checkpoint.source import padded
from .header import Head
from .naming import part_paths

_PARTIAL: Final = ".partial"
_JOURNAL: Final = ".partial.journal"
# Bytes of a file's name, on every file system in use.
_LONGEST: Final = 255


@dataclass(frozen=True)
class Part:
    """One file of the output.

    Attributes:
        path: its final name.
        head: GGUF header, metadata and tensor infos.
        sizes: bytes of each tensor in the order of the infos.
    """

    path: Path
    head: bytes
    sizes: tuple[int, ...]

    @property
    def partial(self) -> Path:
        """Its name while it is written."""
        return self.path.with_name(self.path.name + _PARTIAL)

    def offset(self, tensor: int) -> int:
        """Where a tensor starts; for one past the last, the size of the file."""
        # Upstream pads the head of what has no tensors in the first part of a split file, and of no other.
        start = padded(len(self.head)) if self.sizes else len(self.head)
        return start + sum(padded(size) for size in self.sizes[:tensor])

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.offset(len(self.sizes))


def parts_of(path: Path, head: Head, sizes: Sequence[int]) -> list[Part]:
    """The files of an output.

    Args:
        path: of the file that is not split.
        head: the heads.
        sizes: bytes of every tensor.
    """
    left = iter(sizes)
    paths = part_paths(path, len(head.parts))
    return [
        Part(own, part, tuple(islice(left, count)))
        for own, part, count in zip(paths, head.parts, head.counts, strict=True)
    ]


def check_place(path: Path) -> None:
    """Find an output that cannot be written before the work for it.

    Args:
        path: the file.

    Raises:
        UserError: it is a folder, its folder is not there or cannot be written, or its name is too long.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if len(os.fsencode(path.name + _JOURNAL)) > _LONGEST:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise output_error(path, error) from error


class Output:
    """A GGUF file, or the parts of one, in the making; a context manager.

    Leaving it normally renames what was written. A failed write and ``KeyboardInterrupt`` keep the finished tensors, if
    there are any, for a later run; any other error removes everything that was written.

    Args:
        parts: the files, in order.
        fingerprint: of all that decides the content; a partial file with another one is overwritten.

    Raises:
        UserError: a file cannot be written, or another process is writing it.
    """

    def __init__(self, parts: Sequence[Part], fingerprint: str) -> None:
        self.parts = tuple(parts)
        #: The name that messages have.
        self.path = self.parts[0].path
        self._journal = Journal(self.path.with_name(self.path.name + _JOURNAL), fingerprint)
        #: One record for every tensor that is in the files, as passed to :meth:`write`.
        self.records: list[dict[str, Any]] = []
        self._number = 0  # of the part that is being written
        self._keep = False

    @property
    def size(self) -> int:
        """Size of the complete output in bytes."""
        return sum(part.size for part in self.parts)

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return sum(len(part.sizes) for part in self.parts)

    def __enter__(self) -> Output:
        try:
            # It is open, and locked, until the end.
            self._first = self._file = self._open()
        except OSError as error:
            raise output_error(self.path, error) from error
        try:
            self._begin()
        except OSError as error:
            problem = self._failed(error)
            self._leave()
            raise problem from error
        except UserError:
            self._keep = bool(self.records)
            self._leave()
            raise
        return self

    # ------------------------------------------------------------------------------------------------------- writing

    def _begin(self) -> None:
        """Go on after the tensors that an earlier run has written, if any."""
        noted = self._journal.records() or []
        if noted and len(noted) >= self.tensors:
            self._take_back()
        self.records = self._finished(noted)
        self._check_space()
        self._journal.begin(len(self.records))
        left = len(self.records)
        while left >= len(self.parts[self._number].sizes) and self._number + 1 < len(self.parts):
            left -= len(self.parts[self._number].sizes)
            if not self.parts[self._number].sizes:
                self._start_part()  # the first one
            self._number += 1
        self._file = self._open_part(self._number)
        if left:
            self._seek(left)
        else:
            self._start_part()

    def _open_part(self, number: int) -> IO[bytes]:
        if number == 0:
            return self._first
        handle = os.open(self.parts[number].partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        return os.fdopen(handle, "r+b")

    def _start_part(self) -> None:
        """Write the head of the part, and nothing behind it."""
        part = self.parts[self._number]
        self._file.seek(0)
        self._file.write(part.head.ljust(part.offset(0), b"\0"))
        self._file.flush()
        self._seek(0)

    def _seek(self, tensor: int) -> None:
        end = self.parts[self._number].offset(tensor)
        self._file.truncate(end)
        self._file.seek(end)

    def _next_part(self) -> None:
        self._end_part()
        self._number += 1
        self._file = self._open_part(self._number)
        self._start_part()

    def _end_part(self) -> None:
        """Bring the part to the disk; the first one stays open, for its lock."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._file is not self._first:
            self._file.close()

    def write(self, pieces: Iterable[np.ndarray], record: Callable[[], dict[str, Any]]) -> None:
        """Write the next tensor.

        Args:
            pieces: its bytes in order, uint8 arrays.
            record: called once they are written; what it returns is kept in the journal and in :attr:`records`.

        Raises:
            UserError: a file cannot be written; finished tensors are kept.
            RuntimeError: the pieces are not as long as the tensor.
        """
        with self._writing():
            while self._left_in_part() == 0:
                self._next_part()
        part = self.parts[self._number]
        size = part.sizes[-self._left_in_part()]
        written = checksum = 0
        for piece in pieces:
            with self._writing():
                self._file.write(piece.data)
            checksum = zlib.crc32(piece.data, checksum)
            written += piece.size
        if written != size:
            raise RuntimeError(f"tensor {len(self.records)}: wrote {written} bytes of {size}")
        with self._writing():
            self._file.write(bytes(padded(size) - size))
            self._file.flush()
            noted = {**record(), "crc32": checksum}
            self._journal.note(noted)
        self.records.append(noted)

    def _left_in_part(self) -> int:
        """How many tensors the part is still to get."""
        return sum(len(part.sizes) for part in self.parts[: self._number + 1]) - len(self.records)

    @contextlib.contextmanager
    def _writing(self) -> Any:
        try:
            yield
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> UserError:
        """The error for a write that failed; what is finished is kept."""
        problem = output_error(self.path, error)
        self._keep = bool(self.records)
        if not self._keep:
            return problem
        kept = f"{len(self.records)} of {self.tensors} tensors are kept, the same command continues after them"
        return UserError(self.path, problem.what, f"{problem.remedy}; {kept}")

    # -------------------------------------------------------------------------------------------------------- the end

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                while self._number + 1 < len(self.parts):
                    self._next_part()
                self._end_part()
                self._rename()
            except OSError as error:
                problem = self._failed(error)
                self._leave()
                raise problem from error
            self._close()
            return
        if kind is KeyboardInterrupt:
            self._keep = bool(self.records)
        self._leave()
        if kind is KeyboardInterrupt and self._keep:
            done = f"interrupted after {len(self.records)} of {self.tensors} tensors"
            name = self.parts[0].partial.name
            raise KeyboardInterrupt(f"{self.path}: {done}; the same command continues from {name}")
        if kind is KeyboardInterrupt:
            raise KeyboardInterrupt(f"{self.path}: interrupted before the first tensor; nothing was kept")

    def _rename(self) -> None:
        """Give the parts their names, the first one last."""
        if len(self.parts) > 1:
            self.path.unlink(missing_ok=True)  # of an earlier set, which is about to lose its other parts
        for part in (*self.parts[1:], self.parts[0]):
            part.partial.replace(part.path)
        # While the lock is held: behind it, another process may have begun its own.
        self._journal.path.unlink()

    def _take_back(self) -> None:
        """Undo the renaming of parts that was interrupted before the first one got its name."""
        if os.fstat(self._first.fileno()).st_size:
            for part in self.parts[1:]:
                if part.path.exists() and not part.partial.exists():
                    part.path.replace(part.partial)

    def _leave(self) -> None:
        """Close everything, and remove it unless it is to be kept."""
        if not self._keep:
            # While the lock is held, as above.
            for path in (*(part.partial for part in self.parts), self._journal.path):
                with contextlib.suppress(OSError):
                    path.unlink()
        self._close()

    def _close(self) -> None:
        for file in (self._file, self._first):
            # What cannot be flushed is lost; the journal's checksums find that out.
            with contextlib.suppress(OSError):
                file.close()

    # ---------------------------------------------------------------------------------------------------- what is there

    def _open(self) -> IO[bytes]:
        """Open and lock the first partial file."""
        partial = self.parts[0].partial
        while True:
            # Never truncated here: it may be another's.
            handle = os.open(partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            file = os.fdopen(handle, "r+b")
            if not self._lock(file):
                file.close()
                raise UserError(partial, "another conversion is writing it", "wait for it to end")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(partial)):
                    return file
            # It got its final name between the opening and the lock: writing would destroy a finished file.
            file.close()

    @staticmethod
    def _lock(file: IO[bytes]) -> bool:
        try:
            import fcntl
        except ImportError:  # not POSIX
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _check_space(self) -> None:
        """Find a disk that is too small before the work, not after it."""
        there = sum(part.partial.stat().st_size for part in self.parts if part.partial.exists())
        free = shutil.disk_usage(self.path.parent).free + there
        if free < self.size:
            what = f"needs {report.size(self.size)}, {report.size(free)} are free"
            raise UserError(self.path, what, "free some space or choose another folder")

    def _finished(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records of the tensors that an earlier run of the same conversion has written, as far as they are intact."""
        done = 0
        for number, part in enumerate(self.parts):
            if done >= len(records):
                break
            with contextlib.ExitStack() as stack:
                if number == 0:
                    file = self._first
                elif part.partial.exists():
                    file = stack.enter_context(part.partial.open("rb"))
                else:
                    break
                file.seek(0)
                if part.sizes and file.read(len(part.head)) != part.head:
                    break
                for tensor, (record, size) in enumerate(zip(records[done:], part.sizes, strict=False)):
                    file.seek(part.offset(tensor))
                    if _checksum(file, size) != record.get("crc32"):
                        return records[: done + tensor]
                done += len(part.sizes)
        return records[:done]


def _checksum(file: IO[bytes], size: int) -> int | None:
    """CRC-32 of the next ``size`` bytes, None if there are fewer."""
    checksum = 0
    while size:
        block = file.read(min(size, 1 << 24))
        if not block:
            return None
        checksum = zlib.crc32(block, checksum)
        size -= len(block)
    return checksum
