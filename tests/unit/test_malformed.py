"""Malformed input of any kind: one line, exit code 1, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import NOVEL
from damaged import edit_json
from gguf_files import LLAMA, write_gguf
from gguf_itq3s.base.errors import TRACEBACK, UserError, report_errors
from gguf_itq3s.calibrate.store import read_manifest
from gguf_itq3s.cli import main

Damage = Callable[[Path], object]
DEEP = "[" * 100_000 + "]" * 100_000


def config(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", **changes)


def tensor(name: str, value: torch.Tensor) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights[name] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def index(content: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    return damage


COUNTS: tuple[Any, ...] = ("many", "256", [], {}, ["a"], -1, 1.5, True, 10**9)
DAMAGES: dict[str, Damage] = {
    **{
        f"{key} {value!r}": config(**{key: value})
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
        for value in COUNTS
    },
    "a negative context": config(max_position_embeddings=-5),
    "a context in words": config(max_position_embeddings="long"),
    "a number beyond 64 bits": config(max_position_embeddings=2**70),
    "an epsilon in words": config(rms_norm_eps="small"),
    **{f"an epsilon of {value}": config(rms_norm_eps=value) for value in (-1e-6, 1.5, float("nan"), float("inf"))},
    "text_config": config(text_config={"num_hidden_layers": "two"}),
    "deep config": lambda f: (f / "config.json").write_text('{"a": ' + DEEP + "}"),
    "a list for a config": lambda f: (f / "config.json").write_text("[1, 2]"),
    "architectures of numbers": config(architectures=[7]),
    "architectures of lists": config(architectures=[["LlamaForCausalLM"]]),
    "no architectures": config(architectures=[]),
    "architectures in words": config(architectures={"a": 1}),
    "bytes that are no text": lambda f: (f / "config.json").write_bytes(b"\xff\xfe\xff"),
    "weight_map of numbers": index('{"weight_map": {"model.norm.weight": 7}}'),
    "weight_map of lists": index('{"weight_map": {"model.norm.weight": ["model-00001-of-00001.safetensors"]}}'),
    "weight_map null": index('{"weight_map": {"model.norm.weight": null}}'),
    "weight_map a list": index('{"weight_map": ["model-00001-of-00001.safetensors"]}'),
    "weight_map in words": index('{"weight_map": "model-00001-of-00001.safetensors"}'),
    "deep index": index('{"weight_map": ' + DEEP + "}"),
    "index a list": index("[]"),
    "0-d norm": tensor("model.norm.weight", torch.tensor(1.0)),
    "0-d matrix": tensor("model.layers.0.mlp.down_proj.weight", torch.tensor(1.0)),
    "empty norm": tensor("model.norm.weight", torch.zeros(0)),
    "empty matrix": tensor("model.layers.0.mlp.down_proj.weight", torch.zeros(256, 0)),
    "matrix without rows": tensor("model.layers.0.mlp.down_proj.weight", torch.zeros(0, 512)),
}
#: What a plan of sizes does not look at.
NOT_PLANNED = {"a negative context", "a context in words", "a number beyond 64 bits", "an epsilon in words"}


def one_line(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert main(arguments) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    assert "internal error" not in lines[0], lines[0]
    return lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_malformed_checkpoint(name: str, llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    DAMAGES[name](llama_copy)
    one_line(["convert", str(llama_copy), str(tmp_path / "out.gguf"), "--dry-run"], capfd)
    if name not in NOT_PLANNED:
        one_line(["plan", str(llama_copy)], capfd)
    out = str(tmp_path / "out")
    if name != "a number beyond 64 bits":  # no more than 2048 of them are used
        one_line(["calibrate", str(llama_copy), "--text", str(NOVEL), "-o", out, "--tokens", "64"], capfd)


@pytest.mark.parametrize(
    "key,value,there", [("num_hidden_layers", 4096, 2), ("vocab_size", 8388608, 512), ("vocab_size", 300_000, 512)]
)
@pytest.mark.parametrize("section", [False, True])
def test_counts_beyond_the_weights(
    section: bool, key: str, value: int, there: int, llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Upstream would make lists of so many first: 15 seconds and 200 MB, four minutes and 900 MB."""
    config(**({"text_config": {key: value}} if section else {key: value}))(llama_copy)
    for command in (["convert", str(llama_copy), str(tmp_path / "out.gguf"), "--dry-run"], ["plan", str(llama_copy)]):
        assert f"config.json: has {key} {value}, but no weight is of more than {there}; " in one_line(command, capfd)


@pytest.mark.parametrize("device", ["frobnicator", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there(
    device: str, checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", str(checkpoint("llama")), "--text", str(NOVEL), "-o", str(tmp_path / "out")]
    assert f"cannot be calibrated on --device {device}: " in one_line([*arguments, "--device", device], capfd)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_with_a_dimension_of_0_or_a_string_that_is_no_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, shape: tuple[int, ...], name: str) -> None:
        fields = {**LLAMA, "general.name": (name, [gguf.GGUFValueType.STRING])}
        write_gguf(path, fields, {"output_norm.weight": (np.zeros(shape, dtype=np.float32), None)})

    empty, words = tmp_path / "empty.gguf", tmp_path / "words.gguf"
    write(empty, (0, 256), "x")
    assert main(["inspect", str(empty)]) in (0, 1) and "Traceback" not in capfd.readouterr().err
    write(words, (256,), "MARK")
    words.write_bytes(words.read_bytes().replace(b"MARK", b"\xff\xfe\xff\xfe"))
    one_line(["inspect", str(words)], capfd)


# ------------------------------------------------------------------------------------------------------ the last resort


@pytest.mark.parametrize("error", [RuntimeError("what\nwas not foreseen"), RecursionError(), KeyError("x"), OSError(5)])
def test_an_error_that_nobody_foresaw_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @report_errors
    def command() -> int:
        raise error

    monkeypatch.delenv(TRACEBACK, raising=False)
    assert command() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: internal error: {type(error).__name__}: ")
    assert line.endswith("; run with GGUF_ITQ3S_TRACEBACK=1 to see where")
    monkeypatch.setenv(TRACEBACK, "1")
    assert command() == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == line


def test_a_deep_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"version": ' + DEEP + "}")
    with pytest.raises(UserError, match=r"manifest\.json: cannot be read: "):
        read_manifest(tmp_path)
