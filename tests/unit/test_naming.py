"""Names of outputs: templates and the GGUF naming convention as upstream, and places that cannot be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf import LlamaFileType

import upstream_files
from gguf_files import metadata
from gguf_itq3s.checkpoint import reading
from gguf_itq3s.cli import convert_main
from gguf_itq3s.convert import command
from gguf_itq3s.convert.naming import output_path
from gguf_itq3s.convert.options import ConvertOptions

Make = Callable[[str], Path]
CARD = "---\nbase_model: someone/Fine-Base-7B\nname: Fine Model\n---\n"


@pytest.mark.slow
@pytest.mark.parametrize("outtype", ["f16", "q8_0", "auto"])
@pytest.mark.parametrize("folder", ["llama", "Fine-Model-7B-Instruct-v1.2"])
@pytest.mark.parametrize("card", [None, CARD])
def test_the_default_name_is_upstreams(
    card: str | None, folder: str, outtype: str, checkpoint: Make, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(checkpoint("llama"), tmp_path / folder))
    if card:
        (model / "README.md").write_text(card)
    (tmp_path / "theirs").mkdir()
    ftypes = {"f16": LlamaFileType.MOSTLY_F16, "q8_0": LlamaFileType.MOSTLY_Q8_0, "auto": LlamaFileType.GUESSED}
    theirs = upstream_files.write(model, tmp_path / "theirs", ftypes[outtype])
    assert convert_main([str(model), "--outtype", outtype]) == 0
    assert [path.name for path in model.glob("*.gguf")] == [theirs.name]
    assert (model / theirs.name).read_bytes() == theirs.read_bytes()
    # A folder given as upstream's --outfile gets the same file; the name ends in the type.
    (tmp_path / "ours").mkdir()
    assert convert_main([str(model), "--outtype", outtype, "--outfile", str(tmp_path / "ours")]) == 0
    assert [path.name for path in (tmp_path / "ours").iterdir()] == [theirs.name]
    assert convert_main([str(model), "--effort", "fast"]) == 0
    kind = {"f16": "F16", "q8_0": "Q8_0", "auto": "BF16"}[outtype]
    assert (model / theirs.name.replace(f"-{kind}.gguf", "-ITQ3_S.gguf")).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,expected",
    [
        ("a-{ftype}.gguf", "a-bf16.gguf"), ("a-{FTYPE}.gguf", "a-BF16.gguf"), ("{outtype}{OUTTYPE}", "bf16BF16"),
        ("{}.gguf", "bf16.gguf"), ("plain.gguf", "plain.gguf"), ("{{x}}.gguf", "{x}.gguf"),
    ],
)  # fmt: skip
def test_templates_are_upstreams(name: str, expected: str, checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    theirs = upstream_files.write(checkpoint("llama"), tmp_path / "theirs" / name, LlamaFileType.GUESSED)
    for words in ([str(tmp_path / name)], ["--outfile", str(tmp_path / name)]):
        assert convert_main([str(checkpoint("llama")), *words, "--outtype", "auto"]) == 0
        (made,) = (path for path in tmp_path.iterdir() if path.is_file())
        assert made.name == expected == theirs.name
        made.unlink()


@pytest.mark.parametrize("name", ["{name}.gguf", "{0}{1}.gguf", "{.gguf", "{ftype.x}.gguf", "{ftype!z}.gguf"])
def test_fields_that_are_not_known(
    name: str, checkpoint: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert convert_main([str(checkpoint("llama")), str(tmp_path / name), "--outtype", "f16"]) == 1
    line = capfd.readouterr().err
    assert f"error: {tmp_path / name}: has a field in its name that is not known " in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


HOSTILE = ["../../etc/x", "/abs/olute", "a\\b", "..", ".hidden", "{ftype}{0.__class__}", "x" * 5000, "a\nb\0c", "c:d"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_model_cards_words_stay_in_the_folder(text: str, tmp_path: Path) -> None:
    options = ConvertOptions.of(tmp_path)
    for key in ("name", "basename", "finetune", "version", "size_label"):
        described = gguf.Metadata(**{"name": "model", key: text})
        for changed in (
            options,
            ConvertOptions.of(tmp_path, vocab_only=True),
            ConvertOptions.of(tmp_path, mmproj=True),
        ):
            path = output_path(changed, described, LlamaFileType.MOSTLY_Q8_0)
            assert path.parent == tmp_path and path.suffix == ".gguf" and len(path.name) < 230
            assert path.name == path.name.strip("./\\") and path.name.isprintable()
    path = output_path(ConvertOptions.of(tmp_path, repository=f"{text}/x"), gguf.Metadata(), LlamaFileType.MOSTLY_Q8_0)
    assert path.parent == Path() and path.name.endswith("-q8_0.gguf")


def test_a_hostile_card_in_a_conversion(llama_copy: Path) -> None:
    (llama_copy / "README.md").write_text("---\nfinetune: ../../../out\nversion: [1, 2]\n---\n")
    assert convert_main([str(llama_copy), "--outtype", "f16"]) in (0, 1)
    assert all(path.parent == llama_copy for path in llama_copy.parent.rglob("*.gguf"))


def test_a_model_of_the_hub_is_written_here(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by upstream's --remote: the name is the repository's, and no file goes into the hub's cache."""
    asked = []

    def download(repository: str, *, trust_remote_code: bool) -> Path:
        asked.append(repository)
        return checkpoint("llama")

    monkeypatch.setattr(command, "download", download)
    monkeypatch.chdir(tmp_path)
    before = list(checkpoint("llama").iterdir())
    assert convert_main(["someone/small", "--remote", "--outtype", "f16"]) == 0
    assert convert_main(["hf:someone/small@main", "--outtype", "q8_0"]) == 0
    assert asked == ["someone/small", "someone/small@main"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["someone-small-f16.gguf", "someone-small-q8_0.gguf"]
    assert metadata(tmp_path / "someone-small-f16.gguf")["general.name"] == "someone/small"
    assert list(checkpoint("llama").iterdir()) == before


# ------------------------------------------------------------------------------------- places that cannot be written


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a model is read."""
    monkeypatch.setattr(reading, "check_folder", lambda folder: pytest.fail(f"{folder} was opened"))


@pytest.mark.parametrize("place", ["missing/x.gguf", "file/x.gguf", "folder", "n" * 245 + ".gguf", "missing/{ftype}"])
@pytest.mark.parametrize("option", ["out", "outfile"])
def test_a_place_that_cannot_be_written_is_found_before_the_work(
    option: str, place: str, checkpoint: Make, tmp_path: Path, no_work: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    if option == "outfile" and place == "folder":
        pytest.skip("takes a file of the default name")
    words = [str(tmp_path / place)] if option == "out" else ["--outfile", str(tmp_path / place)]
    assert convert_main([str(checkpoint("llama")), *words]) == 1
    line = capfd.readouterr().err
    assert line.startswith("error: ") and "cannot be written: " in line and line.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; tests/faults mounts a read-only place")
def test_a_read_only_folder(checkpoint: Make, tmp_path: Path, no_work: None, capfd: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o555)
    assert convert_main([str(checkpoint("llama")), str(tmp_path / "x.gguf")]) == 1
    assert "cannot be written: Permission denied" in capfd.readouterr().err
