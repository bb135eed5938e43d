"""Weights as a model of Transformers has them: those of the file, whatever the checkpoint holds them in."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrating import options, statistics
from checkpoints import NOVEL
from damaged import edit_json
from gguf_itq3s import upstream
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import energies
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.checkpoint import patches
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.checkpoint.weights import Parameters
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from quantized import PACKINGS, quantized
from selection import some

Make = Callable[[str], Path]
#: A packing of each kind of code, and the others.
_SHORT = ("fp8-blocks", "gptq")


def parameters(folder: Path) -> Parameters:
    """The weights of a folder by the names of its model."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    return Parameters(open_checkpoint(folder).weights, model)


@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_are_what_the_codes_mean(packing: str, uneven: Make, tmp_path: Path) -> None:
    """Every matrix, and what is stored beside them as it is."""
    folder, meant = quantized(uneven("llama"), tmp_path, packing)
    weights = parameters(folder)
    tensors = load_file(meant / "model.safetensors")
    assert len(tensors) == 21
    for name, tensor in tensors.items():
        torch.testing.assert_close(weights.get(name, tensor.shape).float(), tensor.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("packing", some(PACKINGS, lambda name: name in _SHORT, pytest.mark.slow))
def test_statistics_of_codes_are_those_of_what_they_mean(packing: str, uneven: Make, tmp_path: Path) -> None:
    """Second moments of a calibration, and the mean squares that equalization asks for."""
    found, wanted = (collected(folder, tmp_path) for folder in quantized(uneven("llama"), tmp_path, packing))
    assert found.keys() == wanted.keys() and len(wanted) == 2 * 14
    for name, moment in wanted.items():
        np.testing.assert_allclose(found[name], moment, rtol=0, atol=1e-3 * np.abs(moment).max(), err_msg=name)


def collected(folder: Path, scratch: Path) -> dict[str, np.ndarray]:
    """What a calibration and a short run find of every matrix."""
    place = scratch / f"{folder.name}-statistics"
    calibrate(options(folder), place, io.StringIO())
    means = energies.measure(options(folder), open_checkpoint(folder), io.StringIO()).means
    return {name: moment for name, (moment, *_) in statistics(place).items()} | {
        f"mean square of {name}": mean for name, mean in means.items()
    }


def test_one_expert_of_stacked_codes_is_read_alone(
    uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of FP8 in blocks with all experts in one tensor, as Transformers 5 has them: no other expert's bytes."""
    folder = Path(shutil.copytree(uneven("qwen3-moe"), tmp_path / "stacked"))
    tensors = load_file(folder / "model.safetensors")
    place = "model.layers.0.mlp.experts"
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        codes = torch.stack([torch.cat([tensors.pop(f"{place}.{n}.{p}.weight") for p in parts]) for n in range(4)])
        tensors[f"{place}.{name}"] = codes.to(torch.float8_e4m3fn)
        tensors[f"{place}.{name}_scale_inv"] = torch.rand(4, codes.shape[1] // 128, codes.shape[2] // 128)
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=PACKINGS["fp8-blocks"][0])
    monkeypatch.setattr(upstream.load_conversion().base.TextModel, "get_vocab_base_pre", lambda *_: "default")
    weights = parameters(folder)
    read: list[int] = []
    own = patches._read_bytes

    def counted(tensor: Any) -> np.ndarray:
        read.append(tensor.data_range.size)
        return own(tensor)

    for name, shape in (("gate_up_proj", (512, 256)), ("down_proj", (256, 256))):
        whole = weights.get(f"{place}.{name}", torch.Size((4, *shape)))
        with monkeypatch.context() as patch:
            patch.setattr(patches, "_read_bytes", counted)
            for number in range(4):
                read.clear()
                assert torch.equal(weights.get(f"{place}.{name}", torch.Size(shape), number), whole[number])
                assert sum(read) == shape[0] * shape[1] * (1 + 4 / 128**2)


def changed(source: Path, folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a model with one tensor changed, in float32."""
    copy = Path(shutil.copytree(source, folder))
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = change(tensors[name].float()).contiguous()
    save_file(tensors, copy / "model.safetensors")
    return copy


def with_a(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One weight of a matrix is another one."""

    def change(weights: torch.Tensor) -> torch.Tensor:
        weights[0, 0] = value
        return weights

    return change


@pytest.mark.parametrize("value", [3e38, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_weights_that_cannot_be_are_named(name: str, value: float, uneven: Make, tmp_path: Path) -> None:
    """Also where no statistic would tell: behind the last layer, and in a row of a token that the text has not."""
    folder = changed(uneven("llama"), tmp_path / "model", name, with_a(value))
    with pytest.raises(UserError, match=f"{name}: a weight is NaN, infinite or too large"):
        calibrate(options(folder, tokens=64), tmp_path / "statistics", io.StringIO())


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("rows", [-64, 64])
def test_rows_that_the_config_does_not_say_are_named(name: str, rows: int, uneven: Make, tmp_path: Path) -> None:
    """More or fewer than ``vocab_size``, or ``intermediate_size``."""
    cut = (lambda w: w[:rows]) if rows < 0 else (lambda w: torch.cat([w, w[:rows]]))
    folder = changed(uneven("llama"), tmp_path / "model", name, cut)
    with pytest.raises(UserError, match=rf"{name}: is \({512 + rows}, 256\), and \(512, 256\) in the model"):
        calibrate(options(folder, tokens=64), tmp_path / "statistics", io.StringIO())


def test_a_token_without_a_row_is_named(uneven: Make, tmp_path: Path) -> None:
    """A tokenizer has one more than the embedding: the file does without, and a text with it cannot be run."""
    folder = Path(shutil.copytree(uneven("llama"), tmp_path / "model"))
    token = {"content": "<extra>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder={"512": {**token, "special": False}})
    messages = io.StringIO()
    convert(ConvertOptions.of(folder, dry_run=True), messages)
    note = "its tokenizer has tokens that the model has no row for, which are left out: '<extra>' (512)"
    assert f"note: {folder}: {note}" in messages.getvalue().splitlines()
    (tmp_path / "text.txt").write_text("<extra> " + NOVEL.read_text())
    calibrate(options(folder, tokens=64), tmp_path / "statistics", io.StringIO())
    with pytest.raises(UserError, match=r"has 512 rows of its embedding, and the text the token '<extra>' \(512\)"):
        calibrate(replace(options(folder), text=[tmp_path / "text.txt"]), tmp_path / "more", io.StringIO())


def test_a_tokenizer_of_words_with_more_tokens_than_rows_is_refused(
    uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream asserts that there are none, without a word."""
    monkeypatch.setattr(upstream.load_conversion().base.TextModel, "get_vocab_base_pre", lambda *_: "default")
    folder = Path(shutil.copytree(uneven("llama"), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")))
    words = tokenizers.Tokenizer(tokenizers.models.BPE({letter: place for place, letter in enumerate("abcd")}, []))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.add_tokens([f"<{number}>" for number in range(4, 514)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"that the model has no row for: '<512>' \(512\) and 1 more; take the token"):
        open_checkpoint(folder)
