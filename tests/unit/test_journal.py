"""Journals of long work: what counts after an interruption."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.base.journal import Journal, save_arrays, write_text
from gguf_itq3s.calibrate.finished import Finished


def test_a_run_goes_on_behind_its_own_records_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path, "a")
    assert first.records() is None and not first.present
    first.begin()
    assert first.records() == [] and first.present
    for number in range(3):
        first.note({"number": number})
    assert Journal(path, "a").records() == [{"number": 0}, {"number": 1}, {"number": 2}]
    other = Journal(path, "b")
    assert other.records() is None and other.present
    other.begin()
    assert other.records() == [] and first.records() is None


@pytest.mark.parametrize("torn", [b'{"number": 3}', b'{"num', b"[1]\n", b"\xff\n", b"[" * 10**5])
def test_a_torn_line_counts_for_nothing_and_is_cut(tmp_path: Path, torn: bytes) -> None:
    journal = Journal(tmp_path / "journal", "a")
    journal.begin()
    journal.note({"number": 0})
    journal.note({"number": 1})
    with journal.path.open("ab") as file:
        file.write(torn)
    records = journal.records()
    assert records == [{"number": 0}, {"number": 1}]
    journal.begin(len(records))
    journal.note({"number": 2})
    assert journal.records() == [*records, {"number": 2}]
    journal.begin(1)
    assert journal.records() == records[:1]


def test_a_journal_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside it is another run's, for all that is known."""
    folder = tmp_path / "x.calibrating"
    first = Finished.resume(folder, "a")
    first.add(0, {})
    files = sorted(path.name for path in folder.iterdir())

    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"journal.json: cannot be read \(Input/output"):
        patch.setattr(Path, "read_bytes", broken)
        Finished.resume(folder, "a")
    assert sorted(path.name for path in folder.iterdir()) == files
    assert Finished.resume(folder, "a").layers == 1


def test_files_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def noted(number: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{number}"), (tmp_path / "x").exists()))
        sync(number)

    monkeypatch.setattr(os, "fsync", noted)
    save_arrays({"x": np.zeros(3)}, tmp_path / "x")
    assert synced == [(str(tmp_path / "x.partial"), False)] and (tmp_path / "x").exists()


def test_a_view_is_written_as_it_reads(tmp_path: Path) -> None:
    """Rows that something was cut from are apart in memory."""
    cut = np.arange(24).reshape(4, 6)[:, :4]
    save_arrays({"x": cut}, tmp_path / "x")
    np.testing.assert_array_equal(load_file(tmp_path / "x")["x"], cut)


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\udcff")
    assert path.read_text() == "old"
    with pytest.raises(OSError):
        save_arrays({"x": np.zeros(3)}, tmp_path / "no folder" / "x")
    assert not (tmp_path / "no folder").exists()
