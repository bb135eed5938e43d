"""Names in lists of files lead to the list's own folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_itq3s.checkpoint.files import listed_file
from gguf_itq3s.cli import main
from gguf_itq3s.errors import UserError

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


def test_a_name_in_the_folder(tmp_path: Path) -> None:
    assert listed_file(tmp_path, "model..x.safetensors", tmp_path) == tmp_path / "model..x.safetensors"


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
