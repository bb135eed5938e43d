"""gguf-py's programs on files with our type."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import arrays, metadata, types
from gguf_itq3s import ITQ3_S, cli


@pytest.fixture
def model(converted: Callable[..., Path], tmp_path: Path) -> Path:
    out = Path(shutil.copyfile(converted("llama"), tmp_path / "model.gguf"))
    assert sum(kind == ITQ3_S for kind in types(out).values()) == 16
    return out


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    before = sys.argv, list(sys.path), gguf.GGUFWriter
    assert cli.main([str(argument) for argument in arguments]) == code
    assert (sys.argv, sys.path, gguf.GGUFWriter) == before
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.parametrize("in_place", [False, True])
def test_new_metadata_keeps_the_tensors(in_place: bool, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, marks = arrays(model), metadata(model)
    out = model if in_place else model.with_name("new.gguf")
    printed(
        capsys, "new-metadata", "--force", "--general-name", "A name", "--remove-metadata", "itq3s.effort", model, out
    )
    assert types(out) == types(model) and list(arrays(out)) == list(before)
    for name, value in arrays(out).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert marks.pop("itq3s.effort") == "fast"
    assert metadata(out) == {**marks, "general.name": "A name"}
    assert {path.name for path in model.parent.iterdir()} == {model.name, out.name}


def test_new_metadata_leaves_nothing_half_written(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_ti_data_to_file", full)
    said = printed(capsys, "new-metadata", model, model.with_name("new.gguf"), code=1)
    assert "cannot be written: No space left on device; free some space" in said.splitlines()[-1]
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_hash(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = hashlib.sha256()
    lines = printed(capsys, "hash", model).splitlines()
    for name, value in arrays(model).items():
        whole.update(value.tobytes())
        assert f"sha256    {hashlib.sha256(value.tobytes()).hexdigest()}  {model}:{name}" in lines
    assert f"sha256    {whole.hexdigest()}  {model}" in lines


@pytest.mark.parametrize("name", ["dump", "hash", "set-metadata", "new-metadata"])
def test_files_that_are_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    rest = {"set-metadata": ["a", "1"], "new-metadata": [str(tmp_path / "y.gguf")]}.get(name, [])
    last = printed(capsys, name, path, *rest, code=1).splitlines()[-1]
    assert last.startswith(f"error: {path}: gguf-py could not do it: ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.gguf"]
