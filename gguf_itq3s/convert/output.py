"""The output file: written beside its final name, renamed at the end, and continued after an interruption.

While ``NAME.partial`` grows, ``NAME.partial.journal`` holds a line of JSON for every finished tensor with its CRC-32.
A later run whose header, options and weight files are the same checks the finished tensors and goes on after them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np

from .. import report
from ..errors import UserError, output_error

_ALIGNMENT: Final = 32  # GGUF's default


class OutputFile:
    """A GGUF file in the making; a context manager.

    Leaving it normally renames the file. An error removes everything that was written. ``KeyboardInterrupt`` keeps
    the finished tensors, if there are any, for a later run.

    Args:
        path: the final name.
        header: GGUF header, metadata and tensor infos.
        sizes: bytes of each tensor in the order of the infos.
        fingerprint: of all that decides the content; a partial file with another one is overwritten.

    Raises:
        UserError: the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: Path, header: bytes, sizes: list[int], fingerprint: str) -> None:
        self.path, self.header, self.sizes, self.fingerprint = path, header, sizes, fingerprint
        self.partial = path.with_name(path.name + ".partial")
        self.journal = path.with_name(path.name + ".partial.journal")
        self._data_start = _padded(len(header))
        #: One record for every tensor that is in the file, as passed to :meth:`write`.
        self.records: list[dict[str, Any]] = []

    @property
    def size(self) -> int:
        """Size of the complete file in bytes."""
        return self._data_start + sum(_padded(size) for size in self.sizes)

    def __enter__(self) -> OutputFile:
        try:
            self._file = self._open()
        except OSError as error:
            raise output_error(self.path, error) from error
        try:
            self._begin()
        except OSError as error:
            self._discard()
            raise output_error(self.path, error) from error
        return self

    def _begin(self) -> None:
        """Position the file after the tensors that an earlier run has written, if any."""
        self.records = self._finished()
        done = self._data_start + sum(_padded(size) for size in self.sizes[: len(self.records)])
        self._check_space()
        if not self.records:
            self._file.seek(0)
            self._file.write(self.header.ljust(self._data_start, b"\0"))
        self._file.truncate(done)
        self._file.seek(done)
        self._lines = self.journal.open("w", encoding="utf-8")
        for line in ({"fingerprint": self.fingerprint}, *self.records):
            self._append(line)

    def write(self, pieces: Iterable[np.ndarray], record: Callable[[], dict[str, Any]]) -> None:
        """Write the next tensor.

        Args:
            pieces: its bytes in order, uint8 arrays.
            record: called once they are written; what it returns is kept in the journal and in :attr:`records`.

        Raises:
            UserError: the file cannot be written.
            RuntimeError: the pieces are not as long as the tensor.
        """
        size = self.sizes[len(self.records)]
        written = checksum = 0
        try:
            for piece in pieces:
                self._file.write(piece.data)
                checksum = zlib.crc32(piece.data, checksum)
                written += piece.size
            if written != size:
                raise RuntimeError(f"tensor {len(self.records)}: wrote {written} bytes of {size}")
            self._file.write(bytes(_padded(size) - size))
            self._file.flush()
            self.records.append({**record(), "crc32": checksum})
            self._append(self.records[-1])
        except OSError as error:
            raise output_error(self.path, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._lines.close()
        if kind is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.partial.replace(self.path)
                # While the lock is held: behind it, another process may have begun its own.
                self.journal.unlink()
                self._file.close()
            except OSError as error:
                self._discard()
                raise output_error(self.path, error) from error
        elif kind is KeyboardInterrupt and self.records:
            self._close()
            done = f"interrupted after {len(self.records)} of {len(self.sizes)} tensors"
            raise KeyboardInterrupt(f"{self.path}: {done}; the same command continues from {self.partial.name}")
        else:
            self._discard()
            if kind is KeyboardInterrupt:
                raise KeyboardInterrupt(f"{self.path}: interrupted before the first tensor; nothing was kept")

    def _close(self) -> None:
        # What cannot be flushed is lost; the journal's checksums find that out.
        with contextlib.suppress(OSError):
            self._file.close()

    def _discard(self) -> None:
        # While the lock is held, as above.
        self.partial.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        self._close()

    def _append(self, record: dict[str, Any]) -> None:
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()

    def _open(self) -> IO[bytes]:
        """Open and lock the partial file."""
        while True:
            # Never truncated here: it may be another's.
            handle = os.open(self.partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            file = os.fdopen(handle, "r+b")
            if not self._lock(file):
                file.close()
                raise UserError(self.partial, "another conversion is writing it", "wait for it to end")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(self.partial)):
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
            self._discard()
            what = f"needs {report.size(self.size)}, {report.size(free)} are free"
            raise UserError(self.path, what, "free some space or choose another folder")

    def _finished(self) -> list[dict[str, Any]]:
        """Records of the tensors that an earlier run of the same conversion has written, as far as they are intact."""
        first, *records = self._journal_lines() or [{}]
        if first != {"fingerprint": self.fingerprint} or self._file.read(len(self.header)) != self.header:
            return []
        offset = self._data_start
        for count, (record, size) in enumerate(zip(records, self.sizes, strict=False)):
            self._file.seek(offset)
            if self._checksum(size) != record.get("crc32"):
                return records[:count]
            offset += _padded(size)
        return records

    def _journal_lines(self) -> list[dict[str, Any]]:
        """The lines up to the first that is not a whole record: a kill may tear the last one."""
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError, RecursionError):
            for text in self.journal.read_bytes().splitlines():
                line = json.loads(text)
                if not isinstance(line, dict):
                    break
                lines.append(line)
        return lines

    def _checksum(self, size: int) -> int | None:
        """CRC-32 of the next ``size`` bytes, None if there are fewer."""
        checksum = 0
        while size:
            block = self._file.read(min(size, 1 << 24))
            if not block:
                return None
            checksum = zlib.crc32(block, checksum)
            size -= len(block)
        return checksum


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
