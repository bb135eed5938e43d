"""gguf-itq3s publish: the card, and an upload to a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from fake_hub import TOKEN, FakeHub, fake_hub
from gguf_itq3s.cli import main
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.evaluate.engine import describe
from gguf_itq3s.publish import card as published


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture(scope="module")
def file(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("file") / "m-ITQ3_S.gguf"
    convert(ConvertOptions.of(checkpoint("llama"), out, effort="fast", fold_norms=True))
    return out


@pytest.fixture
def folder(file: Path, tmp_path: Path) -> Path:
    """A folder with a model, what was measured of it, and a file that is nobody's business."""
    place = tmp_path / "out"
    place.mkdir()
    shutil.copy(file, place)
    facts = describe(place / "m-ITQ3_S.gguf")
    figures = dict.fromkeys(
        ("perplexity", "perplexity_error", "mean_kld", "mean_kld_error", "kld_99", "kld_99_error", "same_top",
         "same_top_error"), 0.125,
    )  # fmt: skip
    row = {"key": "convert", "type": "ITQ3_S", "how": "mix, folded", **facts, **figures}
    (place / published.RESULTS).write_text(json.dumps({"context": 512, "tables": {"weights": [row]}}))
    (place / published.PICTURE).write_bytes(b"\x89PNG")
    (place / "token.txt").write_text("secret")
    return place


def publish(hub: FakeHub, *arguments: str | Path, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """The command with that hub: its address is read when huggingface_hub is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "gguf_itq3s.cli", "publish", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def front_matter(card: str) -> dict[str, object]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(folder), "--base-model", "someone/model"]) == 0
    card = (folder / "README.md").read_text()
    head = front_matter(card)
    assert head["base_model"] == "someone/model"
    assert head["base_model_relation"] == "quantized"
    assert head["library_name"] == "gguf"
    assert "itq3_s" in head["tags"]  # type: ignore[operator]
    row = next(line for line in card.splitlines() if line.startswith("| m-ITQ3_S.gguf"))
    size = (folder / "m-ITQ3_S.gguf").stat().st_size
    assert f"{size / 1024:.2f} KiB" in row and "0.12500" in row
    assert "llama-cli -m m-ITQ3_S.gguf" in card and published.PICTURE in card and "gguf-itq3s build" in card
    assert "convert-lora" in card
    # There is no licence in the random model, and nothing is made up.
    assert "license" not in head
    assert "licence is not known" in capsys.readouterr().err


@pytest.mark.slow
def test_figures_are_those_of_the_very_tensors(folder: Path, checkpoint: Callable[[str], Path]) -> None:
    convert(ConvertOptions.of(checkpoint("llama"), folder / "other.gguf", pure=True, effort="fast", fold_norms=True))
    assert main(["publish", str(folder)]) == 0
    rows = [line for line in (folder / "README.md").read_text().splitlines() if ".gguf " in line and "|" in line]
    measured = {row.split("|")[1].strip(): "0.12500" in row for row in rows}
    assert measured == {"m-ITQ3_S.gguf": True, "other.gguf": False}


def test_a_type_of_llama_cpps_needs_no_patch(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "m.gguf", outtype="f16"))
    assert main(["publish", str(tmp_path)]) == 0
    card = (tmp_path / "README.md").read_text()
    assert "gguf-itq3s build" not in card and "Any llama.cpp" in card and "by `gguf-itq3s eval`" not in card


@pytest.mark.slow
def test_a_card_of_somebodys_own_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text("mine")
    assert main(["publish", str(folder)]) == 1
    assert (folder / "README.md").read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["publish", str(folder), "--force"]) == 0
    assert main(["publish", str(folder)]) == 0  # its own is replaced


@pytest.mark.slow
def test_nothing_is_uploaded_unasked(hub: FakeHub, folder: Path) -> None:
    done = publish(hub, folder, "--repo", "me/model")
    assert done.returncode == 0, done.stderr
    assert not hub.repositories
    assert "m-ITQ3_S.gguf" in done.stdout and "nothing was uploaded" in done.stdout and "token.txt" not in done.stdout


@pytest.mark.slow
def test_an_upload(hub: FakeHub, folder: Path) -> None:
    done = publish(hub, folder, "--repo", "me/model", "--upload", "--private")
    assert done.returncode == 0, done.stderr
    private, files = hub.repositories["me/model"]
    assert private
    assert set(files) == {"README.md", "m-ITQ3_S.gguf", published.PICTURE}
    assert all(files[name] == (folder / name).read_bytes() for name in files)
    assert f"{hub.url}/me/model/commit/" in done.stdout
    again = publish(hub, folder, "--repo", "me/model", "--upload")
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line(hub: FakeHub, folder: Path) -> None:
    done = publish(hub, folder, "--repo", "me/model", "--upload", token="hf_wrong")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: hf:me/model: ")
    assert "Traceback" not in done.stderr
    assert not hub.repositories
    hub.full = True
    done = publish(hub, folder, "--repo", "me/model", "--upload")
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    assert hub.repositories["me/model"][1] == {}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--upload"], ["--repo", "nobody"], ["--repo", "a/../b"]])
def test_wrong_arguments(folder: Path, arguments: list[str]) -> None:
    with fake_hub() as hub:
        assert publish(hub, folder, *arguments).returncode in (1, 2)
        assert not hub.repositories


def test_an_empty_folder_and_damaged_results(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / published.RESULTS).write_text('{"context": 512, "tables": {"weights": [{}]}}')
    assert main(["publish", str(folder)]) == 1
    assert "is not the result of an evaluation" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["publish", str(empty)]) == 1
    assert not list(empty.iterdir())
