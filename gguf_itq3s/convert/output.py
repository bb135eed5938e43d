"""The output: written beside its final name, renamed at the end, and continued after an interruption.

While ``NAME.partial`` grows, ``NAME.partial.journal`` holds a line of JSON for every finished tensor with its CRC-32.
A later run whose header, options and weight files are the same checks the finished tensors and goes on after them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np

from ..base import report
from ..base.errors import UserError, output_error
from ..base.journal import Journal
from ..checkpoint.source import padded

_PARTIAL: Final = ".partial"
_JOURNAL: Final = ".partial.journal"
# Bytes of a file's name, on every file system in use.
_LONGEST: Final = 255


def size_of(head: bytes, sizes: Sequence[int]) -> int:
    """Bytes of a GGUF file with this head and tensors of these sizes."""
    return (padded(len(head)) + sum(map(padded, sizes))) if sizes else len(head)


def check_place(path: Path) -> None:
    """Find an output that cannot be written before the work for it.

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
    """A GGUF file in the making; a context manager.

    Leaving it normally renames what was written. A failed write and ``KeyboardInterrupt`` keep the finished tensors, if
    there are any, for a later run; any other error removes everything that was written.

    Args:
        path: the file's final name.
        head: GGUF header, metadata and tensor infos.
        sizes: bytes of each tensor in the order of the infos.
        fingerprint: of all that decides the content; a partial file with another one is overwritten.

    Raises:
        UserError: the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: Path, head: bytes, sizes: Sequence[int], fingerprint: str) -> None:
        self.path, self._head, self._sizes = path, head, tuple(sizes)
        self._partial = path.with_name(path.name + _PARTIAL)
        self._journal = Journal(path.with_name(path.name + _JOURNAL), fingerprint)
        #: One record for every tensor that is in the file, as passed to :meth:`write`.
        self.records: list[dict[str, Any]] = []
        self._keep = False

    @property
    def size(self) -> int:
        """Size of the complete output in bytes."""
        return size_of(self._head, self._sizes)

    def __enter__(self) -> Output:
        try:
            self._file = self._open()  # and locked, until the end
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
        self.records = self._finished(self._journal.records() or [])
        self._check_space()
        self._journal.begin(len(self.records))
        if not self.records:
            self._file.seek(0)
            self._file.write(self._head.ljust(self._offset(0), b"\0"))
            self._file.flush()
        end = self._offset(len(self.records))
        self._file.truncate(end)
        self._file.seek(end)

    def _offset(self, tensor: int) -> int:
        """Where a tensor starts."""
        return padded(len(self._head)) + sum(map(padded, self._sizes[:tensor])) if self._sizes else len(self._head)

    def write(self, pieces: Iterable[np.ndarray], record: Callable[[], dict[str, Any]]) -> None:
        """Write the next tensor.

        Args:
            pieces: its bytes in order, uint8 arrays.
            record: called once they are written; what it returns is kept in the journal and in :attr:`records`.

        Raises:
            UserError: the file cannot be written; finished tensors are kept.
            RuntimeError: the pieces are not as long as the tensor.
        """
        size = self._sizes[len(self.records)]
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
        kept = f"{len(self.records)} of {len(self._sizes)} tensors are kept, the same command continues after them"
        return UserError(self.path, problem.what, f"{problem.remedy}; {kept}")

    # -------------------------------------------------------------------------------------------------------- the end

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self.path)
                # While the lock is held: behind it, another process may have begun its own.
                self._journal.path.unlink()
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
            done = f"interrupted after {len(self.records)} of {len(self._sizes)} tensors"
            raise KeyboardInterrupt(f"{self.path}: {done}; the same command continues from {self._partial.name}")
        if kind is KeyboardInterrupt:
            raise KeyboardInterrupt(f"{self.path}: interrupted before the first tensor; nothing was kept")

    def _leave(self) -> None:
        """Close everything, and remove it unless it is to be kept."""
        if not self._keep:
            for path in (self._partial, self._journal.path):  # while the lock is held, as above
                with contextlib.suppress(OSError):
                    path.unlink()
        self._close()

    def _close(self) -> None:
        # What cannot be flushed is lost; the journal's checksums find that out.
        with contextlib.suppress(OSError):
            self._file.close()

    # ---------------------------------------------------------------------------------------------------- what is there

    def _open(self) -> IO[bytes]:
        """Open and lock the partial file."""
        while True:
            # Never truncated here: it may be another's.
            handle = os.open(self._partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            file = os.fdopen(handle, "r+b")
            if not self._lock(file):
                file.close()
                raise UserError(self._partial, "another conversion is writing it", "wait for it to end")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(self._partial)):
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
        free = shutil.disk_usage(self.path.parent).free + os.fstat(self._file.fileno()).st_size
        if free < self.size:
            what = f"needs {report.size(self.size)}, {report.size(free)} are free"
            raise UserError(self.path, what, "free some space or choose another folder")

    def _finished(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records of the tensors that an earlier run of the same conversion has written, as far as they are intact."""
        self._file.seek(0)
        if self._file.read(len(self._head)) != self._head:
            return []
        for tensor, (record, size) in enumerate(zip(records, self._sizes, strict=False)):
            self._file.seek(self._offset(tensor))
            if _checksum(self._file, size) != record.get("crc32"):
                return records[:tensor]
        return records


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
