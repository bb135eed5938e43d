"""Transformers' loading with packed layers: bytes, folding, saving, GGUF files, folders that are not what they say."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import dynamic_module_utils, modeling_gguf_pytorch_utils

from gguf_files import rewritten
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.codec import ternary
from gguf_itq3s.codec.family import FAMILY, TrellisType, is_trellis
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.torch import PackedLinear
from gguf_itq3s.torch.config import QTYPES
from gguf_itq3s.transformers import ITQ3SConfig, load_gguf
from loading import FAST, TOKENS, changed, difference, load, logits
from quantized import quantized


def packed(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


@pytest.fixture(scope="module")
def saved(uneven: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A packed model, and the folder it was saved to; not to be changed."""
    model = load(uneven("llama"), ITQ3SConfig(**FAST))
    folder = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(folder)
    return model, folder


# ------------------------------------------------------------------------------------------------ quantized on load


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("llama-tied", "auto"), ("qwen3", "auto")],
)
def test_the_bytes_are_those_of_the_converter(
    name: str, dtype: Any, uneven: Callable[[str], Path], converted: Callable[..., Path]
) -> None:
    """Whatever the model's dtype: rounding to it comes after the code."""
    model = load(uneven(name), ITQ3SConfig(**FAST), dtype=dtype)
    file = load_gguf(converted(name), dtype=model.dtype)
    ours, theirs = model.state_dict(), file.state_dict()
    layers = packed(model)
    assert len(layers) == 14
    for key in (f"{layer}.weight" for layer in layers):
        assert ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]), key


def test_what_stays(uneven: Callable[[str], Path]) -> None:
    """The output head and what is named, by whole parts of its name; a loaded model knows them all."""

    def names(*kept: str) -> set[str]:
        model = load(uneven("llama"), ITQ3SConfig(modules_to_not_convert=kept, **FAST))
        left = model.config.quantization_config.modules_to_not_convert
        assert len(left) + len(packed(model)) == 15 and not set(left) & set(packed(model))
        return set(packed(model))

    assert names("lm_head", "layers.1", "model.layers.0.mlp") == {
        f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"
    }
    assert len(names("q_proj", "layer", "proj", "model.layers.0.ml")) == 13


@pytest.mark.parametrize("row", [row for row in FAMILY.values() if is_trellis(row.fallback)], ids=lambda row: row.name)
def test_columns_that_are_no_multiple_of_256_are_in_blocks_of_64(
    row: TrellisType, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """By the config and out of the converter's file; saved, they are what they were."""
    folder, out, qtype = checkpoint("llama-odd"), tmp_path / "model.gguf", row.identifier
    convert(ConvertOptions.of(folder, out, outtype=qtype, pure=True, effort="fast"), io.StringIO())
    models = [load(folder, ITQ3SConfig(qtype, **FAST), dtype=torch.float32), load_gguf(out, dtype=torch.float32)]
    for number, model in enumerate(models):
        layers = packed(model)
        assert layers.keys() - {"lm_head"} == packed(models[0]).keys()
        for name, layer in layers.items():
            assert name == "lm_head" or torch.equal(layer.weight, packed(models[0])[name].weight)
            if name.endswith("down_proj"):
                assert layer.in_features == 320 and layer.qtype == row.fallback
            else:
                assert layer.in_features == 256 and layer.qtype == row.type
        model.save_pretrained(tmp_path / str(number))
        again = load(tmp_path / str(number))
        assert {name: repr(layer) for name, layer in packed(again).items()} == {
            name: repr(layer) for name, layer in layers.items()
        }
        assert torch.equal(logits(again), logits(model))


@pytest.fixture(scope="module")
def trits(uneven: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers' matrices are ternary."""
    folder = tmp_path_factory.mktemp("ternary") / "model"
    shutil.copytree(uneven("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if "proj" in name:
            weights = ternary.ternarize(weight.float().numpy(), "absmean").weights()
            tensors[name] = torch.from_numpy(weights).half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("qtype", ["tq2_0", "tq1_0"])
def test_ternary_models_lose_nothing(qtype: str, trits: Path, tmp_path: Path) -> None:
    model = load(trits, ITQ3SConfig(qtype), dtype=torch.float32)
    assert {layer.qtype.name.lower() for layer in packed(model).values()} == {qtype}
    assert not model.config.quantization_config.norms_folded  # folded, a matrix would have more values than three
    assert difference(logits(model), logits(load(trits, dtype=torch.float32))) < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_what_is_not_ternary(uneven: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"weight: is not ternary; use qtype itq3_s, .* or ternarize=True"):
        load(uneven("llama"), ITQ3SConfig("tq2_0"))
    model = load(uneven("llama"), ITQ3SConfig("tq2_0", ternarize=True), dtype=torch.float32)
    weight = load_file(uneven("llama") / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float().numpy()
    expected = ternary.ternarize(weight, "absmean").weights()
    assert np.allclose(model.model.layers[0].mlp.up_proj.dequantize().numpy(), expected, rtol=1e-3)


def test_weights_that_are_no_numbers(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(uneven("llama") / "model.safetensors")[name]
    weight.view(-1)[3] = float("nan")
    folder = changed(uneven("llama"), tmp_path / "model", None, **{name: weight})
    with pytest.raises(ValueError, match=f"{name}: has NaN or infinite weights; repair the checkpoint"):
        load(folder, ITQ3SConfig(**FAST))


# --------------------------------------------------------------------------------------------------- saved and loaded


def test_saved_and_loaded_again(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "itq3_s" and "threads" not in config
    again = load(folder)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    matrices = sum(layer.in_features * layer.out_features for layer in packed(again).values())
    bytes_there = sum(layer.weight.numel() for layer in packed(again).values())
    assert bytes_there * 8 / matrices == 3.125
    stored = {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}
    assert stored["model.layers.0.mlp.up_proj.weight"] == torch.uint8
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(again.generate(TOKENS[:1], **options), model.generate(TOKENS[:1], **options))


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(512, 101, dtype=torch.uint8), r"is U8 of shape \[512, 101\] where ITQ3_S blocks.*\[512, 100\]"),
        (torch.zeros(511, 100, dtype=torch.uint8), r"is U8 of shape \[511, 100\]"),
        (torch.zeros(51200, dtype=torch.uint8), r"is U8 of shape \[51200\]"),
        (torch.zeros(512, 100), r"is F32 of shape \[512, 100\] where ITQ3_S blocks, U8"),
        (torch.zeros(512, 256), r"is F32 of shape \[512, 256\]"),
        (None, "has no model.layers.1.mlp.up_proj.weight; download the model again"),
    ],
)
def test_tensors_that_do_not_fit(
    tensor: torch.Tensor | None, message: str, saved: tuple[Any, Path], tmp_path: Path
) -> None:
    folder = changed(saved[1], tmp_path / "model", **{UP: tensor})
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_bytes_where_floats_belong(saved: tuple[Any, Path], tmp_path: Path) -> None:
    name = "model.layers.0.input_layernorm.weight"
    folder = changed(saved[1], tmp_path / "model", **{name: torch.ones(256, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="a tensor of U8 cannot be a parameter of"):
        load(folder)


@pytest.mark.parametrize(
    ("packing", "changes", "message"),
    [
        ("fp8-blocks", {}, "weight_scale_inv: is a scale of codes"),
        ("compressed-int", {}, "weight_scale: is a scale of codes"),
        ("gptq", {}, "(scales|qzeros|g_idx): is a scale of codes"),
        ("plain", {UP: torch.zeros(512, 256, dtype=torch.int8)}, f"{UP}: is I8 of shape .* where floats"),
    ],
)
def test_codes_are_no_weights(
    packing: str, changes: dict[str, torch.Tensor], message: str, uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    """Transformers does not know of them but by ``quantization_config``, and older files call it another name."""
    folder, _ = quantized(uneven("llama"), tmp_path, packing)
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(changed(folder, tmp_path / "model", None, **changes), ITQ3SConfig(**FAST))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qtype": "q4_k"}, f"qtype 'q4_k' is not one of {', '.join(QTYPES)}"),
        ({"qtype": ["itq3_s"]}, "qtype"), ({"qtype": None}, "qtype"), ({"residual": "tq1_0"}, "no residual pass"),
        ({"effort": "much"}, "effort 'much' is not one of"), ({"fold_norms": True}, "fold_norms is convert-hf"),
        ({"norms_folded": 1}, "norms_folded 1 is not true"), ({"threads": 0}, "threads 0 is not a positive"),
        ({"threads": True}, "threads"), ({"modules_to_not_convert": "lm_head"}, "is not a list of names"),
        ({"modules_to_not_convert": [""]}, "is not a list of names"),
        ({"modules_to_not_convert": {"a": 1}}, "is not a list of names"),
        ({"other_types": ["tq2_0"]}, "is not a dictionary"), ({"other_types": {"f16": ["a"]}}, "other_types 'f16'"),
        ({"other_types": {"tq2_0": "a"}}, "is not a list of names"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    fields: dict[str, Any], message: str, saved: tuple[Any, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ITQ3SConfig(**fields)
    with pytest.raises(ValueError, match=message):
        load(changed(saved[1], tmp_path / "model", fields))


def test_names_are_no_patterns(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """A name that would take for ever as a regular expression is a name that no layer has."""
    folder = changed(saved[1], tmp_path / "model", {"modules_to_not_convert": ["lm_head", "(.*.*)*(.*.*)*$x"]})
    assert len(packed(load(folder))) == 14
    # Of another set of layers than the tensors are for.
    folder = changed(saved[1], tmp_path / "other", {"modules_to_not_convert": []})
    with pytest.raises(ValueError, match="is F16 of shape"):
        load(folder)


# ---------------------------------------------------------------------------------------------------------- GGUF files


@pytest.mark.parametrize("name", ["llama"])
def test_a_file_computes_what_its_decoded_form_computes(name: str, converted: Callable[..., Path]) -> None:
    """Plain from_pretrained decodes every tensor; the packed layers give the same to rounding."""
    path = converted(name)
    model = load_gguf(path)
    assert len(packed(model)) >= 14
    decoded = load(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert not packed(decoded)
    assert difference(logits(model), logits(decoded)) < 1e-4
    assert model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False).shape == (1, 24)


@pytest.mark.slow
def test_a_file_of_several_types(trits: Path, tmp_path: Path) -> None:
    """ITQ3_S and TQ2_0 beside Q6_K; saved, every layer keeps its type."""
    out = tmp_path / "mixed.gguf"
    options = ConvertOptions.of(
        trits, out, outtype="tq2_0", effort="fast", tensor_types=(("ffn_down", "itq3_s"), ("attn_output", "q8_0"))
    )
    convert(options, io.StringIO())
    model = load_gguf(out, dtype=torch.float16)
    kinds = {name.rpartition(".")[2]: layer.qtype.name for name, layer in packed(model).items()}
    assert kinds == {
        "q_proj": "TQ2_0", "k_proj": "TQ2_0", "v_proj": "TQ2_0", "gate_proj": "TQ2_0", "up_proj": "TQ2_0",
        "down_proj": "ITQ3_S",
    }  # fmt: skip
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert {name: layer.qtype for name, layer in packed(again).items()} == {
        name: layer.qtype for name, layer in packed(model).items()
    }
    assert torch.equal(logits(again), logits(model))


def drop(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.pop(name)


def cut(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        data, qtype = tensors[name]
        tensors[name] = (data[:-8], qtype)

    return change


def say(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(fields: dict[str, Any], _: dict[str, Any]) -> None:
        fields[key] = (value, fields[key][1])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("blk.1.ffn_up.weight"), "has no tensor for model.layers.1.mlp.up_proj.weight; write or download it"),
        (cut("blk.1.ffn_up.weight"), r"ffn_up.weight: has the shape \[504, 256\], and the model's is \[512, 256\]"),
        (say("llama.block_count", 3), "has no tensor for model.layers.2"),
        (say("llama.block_count", 1 << 30), "has num_hidden_layers 1073741824, more than"),
        (say("llama.block_count", 3000), "has num_hidden_layers 3000, but no weight is of more than 2"),
        (say("llama.embedding_length", 0), "cannot be read by Transformers|has the shape"),
        (say("llama.attention.head_count", 0), "cannot be read by Transformers"),
        (say("general.architecture", "nonsense"), "whose settings or tensors are not known here"),
        (say("general.architecture", "gpt2"), "whose settings or tensors are not known here"),
    ],
)
def test_files_that_are_refused(
    change: Callable[[dict[str, Any], dict[str, Any]], None], message: str, converted: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    with pytest.raises(UserError, match=message):
        load_gguf(rewritten(converted("llama"), tmp_path / "damaged.gguf", change))


def test_a_file_is_read_behind_the_gate(converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Transformers finds beside a GGUF file or in it, it runs none of it."""
    own, refused = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map, []

    def names(*args: Any, **kwargs: Any) -> Any:
        with pytest.raises(UserError, match="Python code"):
            dynamic_module_utils.get_class_in_module("Model", "modeling.py")
        refused.append(True)
        return own(*args, **kwargs)

    monkeypatch.setattr(modeling_gguf_pytorch_utils, "get_gguf_hf_weights_map", names)
    load_gguf(converted("llama"))
    assert refused
