"""Names in lists of files lead to the list's own folder, and an output is none of the inputs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint.files import check_output, listed_file
from gguf_itq3s.cli import convert_main, main

OUTSIDE = ["../model.safetensors", "/etc/passwd", "..", ".", "", "sub/model.safetensors", "..\\model.safetensors",
           "model\0.safetensors", 7, None, ["model.safetensors"], {"a": 1}]  # fmt: skip
Calibrated = Callable[[str], tuple[Path, Path]]


def error_of(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that fails."""
    capfd.readouterr()
    assert main(arguments) == 1
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_out_of_the_folder(name: object, tmp_path: Path) -> None:
    place = tmp_path / "index.json"
    with pytest.raises(UserError, match=r"index\.json: names .*; take the list") as caught:
        listed_file(tmp_path, name, place)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../model.safetensors", "absolute", 7])
def test_an_index_names_files_of_its_folder(
    name: object, llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file is there and whole, and is not read nevertheless."""
    outside = shutil.move(llama_copy / "model.safetensors", tmp_path / "model.safetensors")
    index = llama_copy / "model.safetensors.index.json"
    name = str(outside) if name == "absolute" else name
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    for command in (["convert", str(llama_copy), str(tmp_path / "out.gguf"), "--dry-run"], ["plan", str(llama_copy)]):
        assert error_of(command, capfd).startswith(f"error: {index}: names ")
    index.rename(llama_copy / "pytorch_model.bin.index.json")
    line = error_of(["convert", str(llama_copy), str(tmp_path / "out.gguf"), "--dry-run"], capfd)
    assert "pytorch_model.bin.index.json: names " in line


def test_links_from_a_cache_work(llama_copy: Path, tmp_path: Path) -> None:
    """The hub's cache: a snapshot's files are links to blobs beside it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(llama_copy.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / str(number))
    assert main(["convert", str(snapshot), str(tmp_path / "out.gguf"), "--dry-run"]) == 0


@pytest.mark.parametrize("name", ["../layer-0000.safetensors", "absolute"])
def test_a_manifest_names_files_of_its_folder(
    name: str, calibrated: Calibrated, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, out = calibrated("llama")
    folder = tmp_path / "calibration"
    shutil.copytree(out, folder)
    (folder / "layer-0000.safetensors").rename(tmp_path / "layer-0000.safetensors")
    name = str(tmp_path / "layer-0000.safetensors") if name == "absolute" else name
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["entries"]["blk.0.attn_q.weight"]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    line = error_of(["convert", str(model), str(tmp_path / "x.gguf"), "--calibration", str(folder)], capfd)
    assert line.startswith(f"error: {folder / 'manifest.json'}: names a file outside of its folder")


# ------------------------------------------------------------------------------------------------------------ outputs


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.model"])
@pytest.mark.parametrize("way", ["itself", "link", "hard link", "folder through a link", "blob"])
def test_the_model_is_not_written_over(
    name: str, way: str, llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, model = llama_copy / name, llama_copy
    if way == "link":
        (out := tmp_path / "out.gguf").symlink_to(llama_copy / name)
    elif way == "hard link":
        os.link(llama_copy / name, out := tmp_path / "out.gguf")
    elif way == "folder through a link":
        (model := tmp_path / "other").symlink_to(llama_copy)
    elif way == "blob":
        (llama_copy / name).rename(out := tmp_path / "blob")
        (llama_copy / name).symlink_to(out)
    before = contents(llama_copy)
    line = error_of(["convert", str(model), str(out), "--outtype", "f16"], capfd)
    assert line.startswith(f"error: {out}: cannot be written: it is a file of the input {model}; "), line
    assert contents(llama_copy) == before and out.exists()


def test_no_work_is_done_for_an_output_that_is_an_input(
    llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model is not even opened: what is wrong with it is not said."""
    (llama_copy / "tokenizer.model").write_text("damaged")
    line = error_of(["convert", str(llama_copy), str(llama_copy / "model.safetensors"), "--dry-run"], capfd)
    assert "it is a file of the input" in line
    assert "it is a folder" in error_of(["convert", str(llama_copy), str(tmp_path), "--dry-run"], capfd)


def test_statistics_are_not_written_over(
    calibrated: Calibrated, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, statistics = calibrated("llama")
    folder = Path(shutil.copytree(statistics, tmp_path / "calibration"))
    before = contents(folder)
    for name in before:
        arguments = ["convert", str(model), str(folder / name), "--calibration", str(folder)]
        assert f"it is a file of the input {folder}; " in error_of(arguments, capfd)
    assert contents(folder) == before
    matrix = tmp_path / "imatrix.gguf"
    matrix.write_bytes(b"GGUF and so on")
    assert "it is the input itself" in error_of(["convert", str(model), str(matrix), "--imatrix", str(matrix)], capfd)
    assert matrix.read_bytes() == b"GGUF and so on"


def test_a_gguf_file_beside_the_weights_may_be_written(llama_copy: Path) -> None:
    out = llama_copy / "model.gguf"
    for _ in range(2):  # new, and over the one before
        assert convert_main([str(llama_copy), str(out), "--outtype", "f16"]) == 0
    assert out.read_bytes()[:4] == b"GGUF"
    check_output(llama_copy / "calibration", [llama_copy], folder=True)
    (llama_copy / "calibration").mkdir()
    check_output(llama_copy / "calibration", [llama_copy], folder=True)
