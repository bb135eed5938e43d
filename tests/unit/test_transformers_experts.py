"""Mixtures of experts in Transformers with packed experts: bytes, folding, saving, GGUF files, classes not known."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from checkpoints import MIXTURES
from gguf_files import rewritten
from gguf_itq3s import upstream
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.torch import PackedExperts, PackedLinear, quantizer, stacked
from gguf_itq3s.transformers import ITQ3SConfig, load_gguf
from loading import FAST, TOKENS, changed, load, logits


@pytest.fixture(scope="module", autouse=True)
def any_tokenizer() -> Iterator[None]:
    """The small tokenizer is none of those that upstream knows by their hash."""
    conversion = upstream.load_conversion()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion.base.TextModel, "get_vocab_base_pre", lambda *_: "default")
        yield


def packed(model: nn.Module) -> dict[str, PackedExperts]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedExperts)}


@pytest.fixture(scope="module")
def quantized(uneven: Callable[[str], Path]) -> Callable[[str], Any]:
    """``quantized(name)``: a packed model, in float32; not to be changed."""
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            made[name] = load(uneven(name), ITQ3SConfig(**FAST), dtype=torch.float32)
        return made[name]

    return make


@pytest.fixture(scope="module")
def saved(quantized: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A packed Qwen 3 with experts, and the folder it was saved to; not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = copy.deepcopy(quantized("qwen3-moe"))
    model.save_pretrained(folder)
    return model, folder


# ------------------------------------------------------------------------------------------------ quantized on load


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_the_bytes_are_those_of_the_converter(
    name: str, quantized: Callable[[str], Any], converted: Callable[..., Path]
) -> None:
    """Of experts as they are, of all other matrices but for the order of rows."""
    model = quantized(name)
    file = gguf.GGUFReader(converted(name))
    tensors = {tensor.name: tensor.data for tensor in file.tensors}
    layers = packed(model)
    assert len(layers) == (1 if name == "ernie-moe" else 2)
    for path, layer in layers.items():
        block = f"blk.{path.split('.')[2]}"
        both = np.concatenate([tensors[f"{block}.ffn_{part}_exps.weight"] for part in ("gate", "up")], axis=1)
        assert np.array_equal(layer.gate_up_proj.numpy(), both)
        assert np.array_equal(layer.down_proj.numpy(), tensors[f"{block}.ffn_down_exps.weight"])
    arch = str(file.fields["general.architecture"].contents())
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, 2)
    linear = {path: layer for path, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    for path, layer in linear.items():
        rows = [
            np.sort(blocks.view(f"V{blocks.shape[1]}").ravel()).tobytes()
            for blocks in (tensors[f"{names.get_name(path)}.weight"], layer.weight.numpy())
        ]
        assert rows[0] == rows[1], path
    assert len(linear) == {"qwen2-moe": 14, "ernie-moe": 14}.get(name, 8)


@pytest.mark.slow
def test_one_expert_at_a_time(
    uneven: Callable[[str], Path], quantized: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are stored one by one are read so: when one is coded, those before it are gone."""
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    largest: list[int] = []
    own = quantizer.ITQ3SQuantizer._blocks

    def watched(self: Any, matrix: Any, weight: torch.Tensor) -> Any:
        alive.append(sum(ref() is not None for ref in seen))
        largest.append(weight.untyped_storage().nbytes())
        seen.append(weakref.ref(weight))
        return own(self, matrix, weight)

    quantized("qwen3-moe")
    monkeypatch.setattr(quantizer.ITQ3SQuantizer, "_blocks", watched)
    half = load(uneven("qwen3-moe"), ITQ3SConfig(**FAST), dtype=torch.bfloat16)
    ours, theirs = (next(iter(packed(model).values())).gate_up_proj for model in (half, quantized("qwen3-moe")))
    assert torch.equal(ours, theirs)  # the dtype is not that of the weights that are coded
    assert len(seen) == 2 * (4 + 2 * 4) and alive == [0] * len(seen)
    assert max(largest) == 512 * 256 * 4  # gate and up of one expert


@pytest.mark.slow
def test_what_stays(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts by name, one of their two matrices by name, and the gate of shared experts."""
    config = ITQ3SConfig(modules_to_not_convert=["layers.0.mlp.experts", "layers.1.mlp.experts.down_proj"], **FAST)
    model = load(uneven("qwen2-moe"), config, dtype=torch.float32)
    (path,) = packed(model)
    assert path == "model.layers.1.mlp.experts"
    layer = packed(model)[path]
    assert layer.gate_up_proj.dtype == torch.uint8 and layer.down_proj.dtype == torch.float32
    assert type(model.model.layers[0].mlp.shared_expert_gate) is nn.Linear
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    unread = load_file(uneven("qwen2-moe") / "model.safetensors")["model.layers.1.mlp.experts.2.down_proj.weight"]
    assert torch.equal(layer.down_proj[2], unread.float())


# ---------------------------------------------------------------------------------------------- classes of experts


def module(name: str, **changes: Any) -> nn.Module:
    """The experts of an architecture, small."""
    library = getattr(transformers.models, name)
    modeling = getattr(library, f"modeling_{name}")
    kinds = [
        kind for key, kind in vars(modeling).items() if key.endswith("Experts") and kind.__module__ == modeling.__name__
    ]
    config = SimpleNamespace(
        num_local_experts=4, num_experts=4, hidden_size=256, intermediate_size=512, moe_intermediate_size=512,
        n_routed_experts=4, moe_num_experts=4, hidden_act="silu", mlp_hidden_act="relu2", moe_latent_size=None,
        swiglu_alpha=1.7, swiglu_limit=7.0, _experts_implementation="eager", expert_ffn_hidden_size=512,
        zero_expert_num=2, **changes,
    )  # fmt: skip
    with torch.device("meta"):
        return kinds[0](config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "bias", "transposed"),
    [("mixtral", False, False), ("deepseek_v3", False, False), ("gpt_oss", True, True), ("minimax_m3_vl", False, False),
     ("nemotron_h", False, False), ("aria", False, True)],
)  # fmt: skip
def test_layouts_that_are_known(name: str, bias: bool, transposed: bool) -> None:
    """Orientations, biases, gates that are interleaved or clamped, and none at all."""
    found = stacked.find(module(name))
    assert isinstance(found, stacked.Experts)
    assert found.bias == bias and {stack.transposed for stack in found.stacks.values()} == {transposed}
    assert [(stack.rows, stack.columns) for stack in found.stacks.values()] == [
        (512 if name == "nemotron_h" else 1024, 256), (256, 512)
    ]  # fmt: skip


def test_layouts_that_are_not() -> None:
    """Other signatures, more parameters, and a class that computes something else."""
    assert "in a way that is not known" in str(stacked.find(module("llama4")))
    assert "different numbers of experts" in str(stacked.find(module("longcat_flash")))
    built = module("mixtral")
    built.post_norm = nn.RMSNorm(256)
    assert "other parameters than are known (post_norm.weight)" in str(stacked.find(built))
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Clamped(MixtralExperts):  # type: ignore[misc]
        """Differs where numbers are large."""

        def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            own = MixtralExperts.forward.__wrapped__
            return own(self, x, index, weights).clamp(-50, 50)

    odd = module("mixtral")
    odd.__class__ = Clamped
    assert "in a way that is not known" in str(stacked.find(odd))
    assert not stacked.is_stacked(nn.Linear(4, 4))


# --------------------------------------------------------------------------------------------------- saved and loaded


def test_saved_and_loaded_again(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    again = load(folder)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 512, 100)
    assert torch.equal(logits(again), logits(model))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(again.generate(TOKENS[:1], **options), model.generate(TOKENS[:1], **options))


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 256, 101, dtype=torch.uint8), r"\[4, 256, 101\] where ITQ3_S blocks.*\[4, 256, 100\]"),
        (torch.zeros(3, 256, 100, dtype=torch.uint8), r"is U8 of shape \[3, 256, 100\]"),
        (torch.zeros(4, 256, 100), r"is F32 of shape \[4, 256, 100\] where ITQ3_S blocks, U8"),
        (None, f"has no {NAME}; download the model again"),
    ],
)
def test_tensors_that_do_not_fit(
    tensor: torch.Tensor | None, message: str, saved: tuple[Any, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load(changed(saved[1], tmp_path / "model", **{NAME: tensor}))


@pytest.mark.parametrize("change", ["shape", "missing", "bytes"])
def test_experts_of_a_checkpoint_that_do_not_fit(change: str, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = {"missing": None, "shape": torch.zeros(255, 256), "bytes": torch.zeros(256, 256, dtype=torch.uint8)}
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    folder = changed(uneven("qwen3-moe"), tmp_path / "model", None, **{name: tensors[change]})
    with pytest.raises(
        ValueError, match=r"is not one of 4 experts' 256 x 256 floats of model.layers.1.mlp.experts.down"
    ):
        load(folder, ITQ3SConfig(**FAST))


# ---------------------------------------------------------------------------------------------------------- GGUF files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-few", "qwen2-moe"])
def test_a_file_keeps_its_experts_packed(
    name: str, quantized: Callable[[str], Any], converted: Callable[..., Path], tmp_path: Path
) -> None:
    model = quantized(name)
    file = load_gguf(converted(name), dtype=torch.float32)
    ours, theirs = model.state_dict(), file.state_dict()
    assert ours.keys() == theirs.keys()
    differing = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert differing == ["model.embed_tokens.weight", "lm_head.weight"]  # coded in the file
    file.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), logits(file))
    assert file.generate(TOKENS[:1], max_new_tokens=4, do_sample=False).shape == (1, 24)


@pytest.mark.slow
def test_a_file_with_gate_and_up_in_one(converted: Callable[..., Path], tmp_path: Path) -> None:
    def fuse(_: Any, tensors: dict[str, Any]) -> None:
        for block in ("blk.0", "blk.1"):
            (gate, qtype), (up, _) = (tensors.pop(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up"))
            tensors[f"{block}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1), qtype

    fused = load_gguf(rewritten(converted("qwen3-moe"), tmp_path / "fused.gguf", fuse))
    apart = load_gguf(converted("qwen3-moe"))
    assert len(packed(apart)) == 2
    for path, layer in packed(apart).items():
        assert torch.equal(packed(fused)[path].gate_up_proj, layer.gate_up_proj)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 3, r"has the shape \[4, "), ("expert_used_count", 9, "sends a token to 9 of 4 experts"),
        ("expert_feed_forward_length", 1 << 30, "moe_intermediate_size 1073741824, which is no count"),
        ("blk.1.ffn_up_exps.weight", 0, "has no two tensors, of gate and up, for model.layers.1.mlp.experts.gate_up"),
    ],
)  # fmt: skip
def test_files_that_are_not_what_they_say(
    key: str, value: int, message: str, converted: Callable[..., Path], tmp_path: Path
) -> None:
    def change(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        if key in tensors:
            del tensors[key]
        else:
            fields[f"qwen3moe.{key}"] = (value, fields[f"qwen3moe.{key}"][1])

    rewritten(converted("qwen3-moe"), tmp_path / "model.gguf", change)
    with pytest.raises(UserError, match=message):
        load_gguf(tmp_path / "model.gguf")
