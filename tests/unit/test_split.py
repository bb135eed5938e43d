"""Split files: upstream's bytes, and an output of several files that is whole or can be continued."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

import upstream_files
from gguf_files import metadata, tensors
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.base.journal import Journal
from gguf_itq3s.checkpoint import patches, source
from gguf_itq3s.cli import convert_main
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.rounding.encode import Encoder
from selection import some

Make = Callable[[str], Path]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "split,count",
    [
        ({"split_max_tensors": 4}, 6), ({"split_max_size": 400_000}, 10), ({"split_max_size": 1}, 21),
        ({"split_max_tensors": 9, "split_max_size": 700_000}, 5), ({"split_max_size": 10**9}, 1),
        ({"no_tensor_first_split": True}, 2), ({"split_max_tensors": 9, "no_tensor_first_split": True}, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_parts_are_upstreams(outtype: str, split: dict[str, Any], count: int, checkpoint: Make, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ftype = gguf.LlamaFileType[f"MOSTLY_{outtype.upper()}"]
    renamed = {"small_first_shard" if k == "no_tensor_first_split" else k: v for k, v in split.items()}
    upstream_files.write(checkpoint("llama"), tmp_path / "theirs" / "x.gguf", ftype, **renamed)
    done = convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "ours" / "x.gguf", outtype=outtype, **split))
    ours, theirs = content(tmp_path / "ours"), content(tmp_path / "theirs")
    assert list(ours) == list(theirs) and ours == theirs
    assert len(done.parts) == count or (outtype == "q8_0" and "split_max_size" in split)
    assert [part.path.name for part in done.parts] == list(ours)
    assert done.size == sum(map(len, ours.values()))


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_the_parts_hold_the_whole_file(first: bool, checkpoint: Make, tmp_path: Path) -> None:
    options: dict[str, Any] = {"effort": "fast", "split_max_tensors": 5, "no_tensor_first_split": first}
    convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "whole.gguf", effort="fast"))
    done = convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x-{ftype}.gguf", **options))
    assert [part.path.name for part in done.parts] == [
        f"x-itq3_s-{number + 1:05d}-of-{5 + first:05d}.gguf" for number in range(5 + first)
    ]
    whole = tensors(tmp_path / "whole.gguf")
    found: dict[str, gguf.ReaderTensor] = {}
    for number, part in enumerate(done.parts):
        facts = metadata(part.path)
        assert (facts["split.no"], facts["split.count"]) == (number, len(done.parts))
        assert facts["split.tensors.count"] == len(whole)
        assert ("general.architecture" in facts) == (number == 0)
        found |= tensors(part.path)
    assert list(found) == list(whole)
    assert all((found[n].data == whole[n].data).all() and found[n].tensor_type == whole[n].tensor_type for n in whole)
    first_facts = {k: v for k, v in metadata(done.parts[0].path).items() if not k.startswith("split.")}
    assert first_facts == metadata(tmp_path / "whole.gguf")


@pytest.mark.slow
def test_a_dry_run_says_the_plan(checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(checkpoint("llama")), str(tmp_path / "x.gguf"), "--split-max-size", "300K", "--effort", "fast"]
    assert convert_main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert convert_main(words) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 2
    assert [line.split()[0] for line in said.splitlines() if line.startswith("x-0")] == names
    assert f"would write {tmp_path / names[0]} and {len(names) - 1} more: " in said


def test_zero_is_no_split(checkpoint: Make, tmp_path: Path) -> None:
    words = ["--split-max-size", "0", "--split-max-tensors", "0", "--outtype", "f16"]
    assert convert_main([str(checkpoint("llama")), str(tmp_path / "x.gguf"), *words]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize(
    "words", [["--split-max-size", "2X"], ["--split-max-size", "-1"], ["--split-max-tensors", "x"]]
)
def test_bad_sizes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert_main(["model", *words])
    assert f"argument {words[0]}: " in capsys.readouterr().err


def test_more_parts_than_can_be_numbered(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_MOST_PARTS", 20)
    with pytest.raises(UserError, match="would be written in 21 parts, more than 20; raise --split-max-size"):
        convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", split_max_tensors=1))


# ---------------------------------------------------------------------------------------------------- interruptions


def stop_before(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error come, once, in place of that tensor."""
    encode, count = Encoder.encode, iter(range(10**6))

    def counted(self: Encoder, *args: Any) -> Any:
        if next(count) == number:
            raise error
        return encode(self, *args)

    monkeypatch.setattr(Encoder, "encode", counted)


@pytest.fixture(scope="module")
def whole(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The seven parts of a file, the first without tensors."""
    out = tmp_path_factory.mktemp("whole")
    convert(asked(checkpoint("llama"), out))
    return content(out)


def asked(model: Path, folder: Path) -> ConvertOptions:
    return ConvertOptions.of(model, folder / "x.gguf", outtype="f16", split_max_tensors=4, no_tensor_first_split=True)


@pytest.mark.parametrize("number", some([1, 3, 4, 5, 8, 20], lambda number: number in (4, 20), pytest.mark.slow))
def test_an_interruption_and_the_same_call_continue(
    number: int, checkpoint: Make, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_before(number, KeyboardInterrupt(), patch)
        with pytest.raises(KeyboardInterrupt, match=f"interrupted after {number} of 21 tensors; the same command "):
            convert(asked(checkpoint("llama"), tmp_path))
    assert not [name for name in content(tmp_path) if name.endswith(".gguf")]
    said = io.StringIO()
    convert(asked(checkpoint("llama"), tmp_path), said)
    assert f"continuing after {number} of 21 tensors" in said.getvalue()
    assert content(tmp_path) == whole


@pytest.mark.slow
def test_an_error_cleans_up(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, error in ((0, KeyboardInterrupt()), (9, ValueError("no")), (9, MemoryError())):
        with monkeypatch.context() as patch:
            stop_before(number, error, patch)
            with pytest.raises(BaseException):  # noqa: B017
                convert(asked(checkpoint("llama"), tmp_path))
        assert content(tmp_path) == {}


class Killed(BaseException):
    """What nothing tidies up after."""


@pytest.mark.parametrize("number", some(range(7), lambda number: number in (0, 6), pytest.mark.slow))
def test_a_kill_during_the_renaming(
    number: int, checkpoint: Make, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No first part stands before all the others do, not even one of an earlier set."""
    for name in whole:
        (tmp_path / name).write_bytes(b"old")
    replace, count = Path.replace, iter(range(10**6))

    def replaced(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial") and next(count) == number:
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replaced)
        with pytest.raises(Killed):
            convert(asked(checkpoint("llama"), tmp_path))
    assert not (tmp_path / min(whole)).exists()
    said = io.StringIO()
    convert(asked(checkpoint("llama"), tmp_path), said)
    assert "continuing after 21 of 21 tensors" in said.getvalue()
    assert content(tmp_path) == whole


def test_a_leftover_journal_does_not_undo_a_finished_set(
    checkpoint: Make, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill came between the last renaming and the removal of the journal."""
    unlink = Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(".journal"):
            raise Killed
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            convert(asked(checkpoint("llama"), tmp_path))
        assert set(content(tmp_path)) == {*whole, f"{min(whole)}.partial.journal"}
        patch.undo()
        stop_before(2, KeyboardInterrupt(), patch)
        with pytest.raises(KeyboardInterrupt):
            convert(asked(checkpoint("llama"), tmp_path))
        assert {name: data for name, data in content(tmp_path).items() if name in whole} == whole
    convert(asked(checkpoint("llama"), tmp_path))
    assert content(tmp_path) == whole


def test_damaged_parts_are_written_again(
    checkpoint: Make, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_before(11, KeyboardInterrupt(), patch)
        with pytest.raises(KeyboardInterrupt):
            convert(asked(checkpoint("llama"), tmp_path))
    third = sorted(tmp_path.glob("*.partial"))[2]
    data = bytearray(third.read_bytes())
    data[-40] ^= 1  # in the last tensor of the part
    third.write_bytes(data)
    said = io.StringIO()
    convert(asked(checkpoint("llama"), tmp_path), said)
    assert "continuing after 7 of 21 tensors" in said.getvalue()
    assert content(tmp_path) == whole


# ------------------------------------------------------------------------------------------------- writes that fail


@pytest.mark.parametrize("split", [0, 4])
@pytest.mark.parametrize("code", some([errno.ENOSPC, errno.EIO], lambda code: code == errno.ENOSPC, pytest.mark.slow))
def test_a_failed_write_keeps_what_is_finished(
    code: int, split: int, checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", outtype="f16", split_max_tensors=split)
    note, count = Journal.note, iter(range(10**6))

    def failing(self: Journal, record: Mapping[str, Any]) -> None:
        if next(count) == 6:
            with self.path.open("ab") as file:
                file.write(b'{"name": "tor')  # half a line still fitted
            raise OSError(code, os.strerror(code))
        note(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", failing)
        with pytest.raises(UserError) as caught:
            convert(options)
    said = str(caught.value)
    assert f"cannot be written: {os.strerror(code)}; " in said
    assert "5 of 21 tensors are kept, the same command continues after them" in said
    assert content(tmp_path) and not [name for name in content(tmp_path) if name.endswith(".gguf")]
    log = io.StringIO()
    done = convert(options, log)
    assert "continuing after 5 of 21 tensors" in log.getvalue()
    (tmp_path / "again").mkdir()
    convert(
        ConvertOptions.of(checkpoint("llama"), tmp_path / "again" / "x.gguf", outtype="f16", split_max_tensors=split)
    )
    again = content(tmp_path / "again")
    assert {part.path.name: part.path.read_bytes() for part in done.parts} == again
    assert len(list(tmp_path.iterdir())) == len(again) + 1


def test_a_failed_read_is_no_failed_write(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(tensor: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(patches, "_read_bytes", failing)
    with pytest.raises(
        UserError, match=r"output\.weight \(lm_head\.weight\): cannot be read: Input/output error; check"
    ):
        convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", outtype="f16"))
    assert not list(tmp_path.iterdir())


def test_a_failed_flush_keeps_what_is_finished(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", outtype="f16")

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(UserError, match="21 of 21 tensors are kept"):
            convert(options)
    said = io.StringIO()
    convert(options, said)
    assert "continuing after 21 of 21 tensors" in said.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.slow
def test_a_disk_that_got_too_small_meanwhile_keeps_what_is_finished(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_before(5, KeyboardInterrupt(), patch)
        with pytest.raises(KeyboardInterrupt):
            convert(asked(checkpoint("llama"), tmp_path))
    kept = content(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(UserError, match="are free; free some space"):
            convert(asked(checkpoint("llama"), tmp_path))
    assert content(tmp_path) == kept
