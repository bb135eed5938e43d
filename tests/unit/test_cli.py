"""The command line: bad input gives one line, exit code 1, and no file."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from damaged import edit_json
from gguf_itq3s import upstream
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec import native

ROOT = Path(__file__).resolve().parents[2]
Damage = Callable[[Path], object]


def edit_tensor(folder: Path, name: str, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[7] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> list[Path]:
    """Split the checkpoint into three shards with an index."""
    weights = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    paths, weight_map = [], {}
    for number in range(3):
        paths.append(folder / f"model-{number + 1:05d}-of-00003.safetensors")
        part = dict(weights[number::3])
        save_file(part, paths[-1], metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, paths[-1].name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return paths


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def remove_first_from_index(folder: Path) -> None:
    paths = shard(folder)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if v != paths[0].name}}))


def remove_last_shard_and_index(folder: Path) -> None:
    shard(folder)[2].unlink()
    (folder / "model.safetensors.index.json").unlink()


def forget_a_tensor(folder: Path) -> None:
    path = shard(folder)[1]
    weights = load_file(path)
    weights.pop(sorted(weights)[0])
    save_file(weights, path)


def rename_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mystery.weight"] = weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, folder / "model.safetensors")


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not a checkpoint")


#: what is done to a good checkpoint, and what the line says: file, tensor, fault.
FAULTS: dict[str, tuple[Damage, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"llama/config\.json: no such file; "),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), r"llama/config\.json: is not valid JSON.*; "),
    "unsupported architecture": (
        lambda f: edit_json(f / "config.json", architectures=["FrobnicatorForCausalLM"]),
        r"llama/config\.json: architecture FrobnicatorForCausalLM is not supported; ",
    ),
    "no architecture": (
        lambda f: edit_json(f / "config.json", architectures=None), r"llama/config\.json: names no architecture; ",
    ),
    "no tokenizer": (remove_tokenizer, r"llama: has no tokenizer; "),
    "damaged tokenizer": (lambda f: truncate(f / "tokenizer.model", 100), r"llama: the tokenizer cannot be read.*; "),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"llama: holds no model\*\.safetensors.*; "),
    "truncated": (
        lambda f: truncate(f / "model.safetensors", (f / "model.safetensors").stat().st_size // 2),
        r"model\.safetensors: is truncated or corrupt .*; download it again",
    ),
    "empty": (lambda f: truncate(f / "model.safetensors", 0), r"model\.safetensors: is truncated or corrupt .*; "),
    "corrupt header": (
        lambda f: overwrite(f / "model.safetensors", 8, b"\xff" * 32), r"model\.safetensors: is truncated or corrupt",
    ),
    "absurd header length": (
        lambda f: overwrite(f / "model.safetensors", 0, b"\xff" * 8), r"model\.safetensors: is truncated or corrupt",
    ),
    "truncated shard": (
        lambda f: truncate(shard(f)[1], 100_000), r"model-00002-of-00003\.safetensors: is truncated or corrupt .*; ",
    ),
    "missing shard": (
        lambda f: shard(f)[1].unlink(),
        r"model-00002-of-00003\.safetensors: is named in model\.safetensors\.index\.json but not there; ",
    ),
    "missing shard, no index": (
        remove_last_shard_and_index,
        r"model-00003-of-00003\.safetensors: this shard is not there; ",
    ),
    "shard missing from the index": (
        remove_first_from_index,
        r"model-00001-of-00003\.safetensors: is not listed in model\.safetensors\.index\.json; ",
    ),
    "tensor missing from its shard": (
        forget_a_tensor, r"model-00002-of-00003\.safetensors: \S+: is listed in the index but not in this shard; ",
    ),
    "damaged index": (
        lambda f: (shard(f), (f / "model.safetensors.index.json").write_text("{}")),
        r"model\.safetensors\.index\.json: has no weight_map; ",
    ),
    "damaged pickle": (pickle_only, r"pytorch_model\.bin: is truncated or corrupt .*; "),
    "unknown tensor": (rename_tensor, r"llama: cannot be read: .*model\.layers\.0\.mystery\.weight.*; "),
    "NaN": (
        lambda f: edit_tensor(f, "model.layers.1.mlp.down_proj.weight", float("nan")),
        r"llama: blk\.1\.ffn_down\.weight \(model\.layers\.1\.mlp\.down_proj\.weight\): 1 of its weights is NaN; ",
    ),
    "infinity": (
        lambda f: edit_tensor(f, "model.layers.0.self_attn.q_proj.weight", float("-inf")),
        r"llama: blk\.0\.attn_q\.weight \(model\.layers\.0\.self_attn\.q_proj\.weight\): 1 of its .* infinite; ",
    ),
    "NaN in a norm": (
        lambda f: edit_tensor(f, "model.layers.0.input_layernorm.weight", float("nan")),
        r"llama: blk\.0\.attn_norm\.weight \(model\..*layernorm\.weight\): 1 of its weights is NaN; ",
    ),
    "NaN in the last norm": (
        lambda f: edit_tensor(f, "model.norm.weight", float("nan")),
        r"llama: output_norm\.weight \(model\.norm\.weight\): 1 of its weights is NaN; ",
    ),
}  # fmt: skip


NOTE = "note: without the built library: Q6_K -> Q8_0; make build adds it"


def one_error(message: str) -> str:
    """The error line; the note on types and the progress bar may stand before it, nothing else."""
    lines = [line for line in re.split(r"[\r\n]+", message) if line not in ("", NOTE) and "weights/s" not in line]
    assert len(lines) == 1, message
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("name", FAULTS)
def test_bad_checkpoint(name: str, llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, expected = FAULTS[name]
    damage(llama_copy)
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    capfd.readouterr()
    assert convert_main([str(llama_copy), str(out), "--effort", "fast"]) == 1
    captured = capfd.readouterr()
    line = one_error(captured.err)
    assert re.search(expected, line), line
    assert line.removeprefix("error: ").startswith(str(tmp_path))
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    "model,expected",
    [
        ("nothing", r"nothing: no such folder; "),
        ("file", r"file: is a file, not a folder; "),
        ("model.gguf", r"model\.gguf: is a file, not a folder; .*llama-quantize"),
    ],
)
def test_not_a_folder(model: str, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("file", "model.gguf"):
        (tmp_path / name).touch()
    assert convert_main([str(tmp_path / model), str(tmp_path / "out.gguf")]) == 1
    assert re.search(expected, one_error(capfd.readouterr().err))
    assert not (tmp_path / "out.gguf").exists()


def test_f16_overflow_is_named(llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_tensor(llama_copy, "lm_head.weight", 1e6)
    assert convert_main([str(llama_copy), str(tmp_path / "out.gguf"), "--outtype", "f16"]) == 1
    line = one_error(capfd.readouterr().err)
    assert "output.weight (lm_head.weight): a weight is larger than F16 can hold; " in line


# ----------------------------------------------------------------------------------------------------- output


def test_full_disk_is_found_before_the_work(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert convert_main([str(checkpoint("llama")), str(tmp_path / "out.gguf")]) == 1
    line = one_error(capfd.readouterr().err)
    assert re.search(r"out\.gguf: needs [0-9.]+ KiB, 1000 B are free; free some space", line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_output_that_cannot_grow(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The real write fails half-way: a file size limit stands for the full disk."""
    limit = 200_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    script = ROOT / "scripts" / "convert_hf_to_itq3s.py"
    command: list[str | Path] = [sys.executable, script, checkpoint("llama"), tmp_path / "out.gguf"]
    done = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True)
    assert done.returncode == 1
    line = one_error(done.stderr)
    assert line.startswith(f"error: {tmp_path / 'out.gguf'}: cannot be written: ")
    kept = re.search(r"; (\d+) of 21 tensors are kept, the same command continues after them$", line)
    assert kept and sorted(path.suffix for path in tmp_path.iterdir()) == [".journal", ".partial"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"continuing after {kept[1]} of 21 tensors" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_a_file_that_is_there_survives_a_failed_conversion(llama_copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")
    edit_tensor(llama_copy, "model.norm.weight", float("nan"))
    assert convert_main([str(llama_copy), str(out), "--effort", "fast"]) == 1
    assert out.read_bytes() == b"before"


def test_two_conversions_to_one_file(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out.gguf.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert convert_main([str(checkpoint("llama")), str(tmp_path / "out.gguf")]) == 1
        assert "out.gguf.partial: another conversion is writing it; " in one_error(capfd.readouterr().err)
    assert (tmp_path / "out.gguf.partial").exists()


# ---------------------------------------------------------------------------------------------------- commands


def test_native_without_a_build_says_how_to_build(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(native, "load", lambda: None)
    assert convert_main([str(checkpoint("llama")), str(tmp_path / "out.gguf"), "--native"]) == 1
    assert "is not built; run make build" in one_error(capfd.readouterr().err)


# ------------------------------------------------------------------------------------------- the pinned source


@pytest.mark.slow
def test_unreachable_source_is_one_line(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """With an empty cache and no package index, pip's failure becomes one line."""
    environment = {
        **os.environ, "GGUF_ITQ3S_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "",
    }  # fmt: skip
    environment.pop("LLAMA_CPP_DIR", None)
    commands: list[list[str | Path]] = [
        [sys.executable, "-m", "gguf_itq3s.cli", "convert", checkpoint("llama"), tmp_path / "out.gguf"],
        [sys.executable, ROOT / "scripts" / "fetch_llama_cpp.py"],
    ]
    for command in commands:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert lines[0].startswith("fetching llama-cpp-python ") and len(lines) == 2
        assert lines[1].startswith("error: pip download llama-cpp-python==") and lines[1].endswith("set LLAMA_CPP_DIR")
    assert not (tmp_path / "out.gguf").exists()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


#: What the planted archive has below vendor/llama.cpp.
PLANTED = {
    "README.md": "planted\n", "conversion/base.py": "planted = 1\n", "convert_lora_to_gguf.py": "planted = 2\n",
}  # fmt: skip


def planted_archive(folder: Path, ran: Path) -> str:
    """An archive by the pinned name in ``folder``, whose build code writes the file ``ran``; returns its SHA-256."""
    backend = f"""
import pathlib
pathlib.Path({str(ran)!r}).touch()
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    made = pathlib.Path(folder) / "llama_cpp_python-{upstream.VERSION}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: {upstream.VERSION}\\n")
    return made.name
"""
    files = {
        "backend.py": backend,
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "PKG-INFO": f"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: {upstream.VERSION}\n",
        **{f"vendor/llama.cpp/{name}": text for name, text in PLANTED.items()},
    }
    folder.mkdir()
    archive = folder / f"{upstream.SOURCE}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{upstream.SOURCE}/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(archive.read_bytes()).hexdigest()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """An empty cache and, as the only index, a folder with a planted archive: its SHA-256, what its code writes."""
    ran = tmp_path / "ran"
    digest = planted_archive(tmp_path / "index", ran)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("GGUF_ITQ3S_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    return digest, ran


@pytest.mark.slow
def test_nothing_of_an_archive_with_another_hash_runs(planted: tuple[str, Path]) -> None:
    digest, ran = planted
    with pytest.raises(upstream.FetchError) as refused:
        upstream.fetch_source()
    assert str(refused.value) == (
        f"{upstream.SOURCE}.tar.gz: sha256 is {digest}, expected {upstream.SHA256}; check the package index in use"
    )
    assert not ran.exists(), "code of the archive has run"
    assert upstream.find_source() is None
    assert [path.suffix for path in upstream.cache_dir().iterdir()] == [".lock"]


@pytest.mark.slow
def test_only_the_content_of_the_archive_counts(
    planted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest, _ = planted
    for name, text in PLANTED.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    monkeypatch.setattr(upstream, "SHA256", digest)
    monkeypatch.setattr(upstream, "TREE_SHA256", upstream.tree_hash(tmp_path / "tree"))
    monkeypatch.setattr(upstream, "PYTHON_SHA256", upstream.tree_hash(tmp_path / "tree", upstream._PYTHON))
    monkeypatch.setattr(upstream, "_checked", set())
    folder = upstream.cache_dir() / upstream.SOURCE
    source = folder / "vendor" / "llama.cpp"
    source.mkdir(parents=True)
    assert upstream.find_source() is None  # empty
    assert upstream.fetch_source() == source and upstream.find_source() == source
    assert f"{folder} is damaged or of another version and is replaced" in capsys.readouterr().err
    assert {name: (source / name).read_text() for name in PLANTED} == PLANTED
    assert sorted(path.name for path in upstream.cache_dir().iterdir()) == [upstream.SOURCE, f"{upstream.SOURCE}.lock"]
    # nothing outside the vendored source is unpacked, and the index is not asked again
    assert [path.name for path in folder.iterdir()] == ["vendor"]
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", "")
        assert upstream.fetch_source(whole=True) == source
    damages: dict[str, Callable[[], object]] = {
        "changed": lambda: (source / "conversion" / "base.py").write_text("planted = 2\n"),
        "added": lambda: (source / "conversion" / "more.py").write_text(""),
        "gone": lambda: (source / "conversion" / "base.py").unlink(),
        "a script": lambda: (source / "convert_lora_to_gguf.py").write_text("planted = 3\n"),
        "emptied": lambda: shutil.rmtree(source / "conversion"),
    }
    for name, damage in damages.items():
        damage()
        upstream._checked.clear()
        assert upstream.find_source() is None, name
        assert upstream.fetch_source() == source
        assert not (source / "conversion" / "more.py").exists(), name
    # What Python compiles there is no change; what only a build reads is found by the build.
    (source / "conversion" / "__pycache__").mkdir()
    (source / "conversion" / "__pycache__" / "base.pyc").touch()
    (source / "README.md").write_text("other\n")
    upstream._checked.clear()
    assert upstream.find_source() == source and (source / "README.md").read_text() == "other\n"
    assert upstream.fetch_source(whole=True) == source and (source / "README.md").read_text() == "planted\n"


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python's tarfile has no filters")
def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(f"{upstream.SOURCE}/vendor/llama.cpp/../../../../outside"))
    with pytest.raises(upstream.FetchError, match=r"archive\.tar\.gz: .*outside the destination; set LLAMA_CPP_DIR"):
        upstream._unpack(archive, tmp_path / "unpacked")
    assert not (tmp_path / "outside").exists()


def test_own_checkout_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = upstream.fetch_source()
    monkeypatch.setenv("LLAMA_CPP_DIR", str(source))
    assert upstream.fetch_source() == source
    monkeypatch.setenv("LLAMA_CPP_DIR", str(tmp_path))
    with pytest.raises(upstream.FetchError, match=r"not a llama\.cpp checkout; correct or unset LLAMA_CPP_DIR"):
        upstream.fetch_source()


@pytest.mark.slow
def test_a_program_with_another_gguf_is_told_to_start_again(tmp_path: Path) -> None:
    """gguf from elsewhere is in use already: the conversion package would not work with it."""
    shutil.copytree(upstream.fetch_source() / "gguf-py" / "gguf", tmp_path / "gguf")
    program = "import gguf; from gguf_itq3s import upstream; upstream.load_conversion()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "StaleGgufError: gguf was imported before the llama.cpp source was there" in done.stderr
