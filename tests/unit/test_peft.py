"""LoRA adapters of stock PEFT beside packed layers: training, saving, and what convert-lora makes of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gguf_files import arrays, metadata
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import rescaling
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.programs.lora import LoraOptions, convert_lora
from gguf_itq3s.transformers import ITQ3SConfig, load_gguf
from training import train, windows, with_adapter


@pytest.fixture(scope="module")
def folded(converted: Callable[..., Path]) -> Path:
    """A file with folded norms."""
    return converted("llama", fold_norms=True)


@pytest.fixture(scope="module")
def trained(
    folded: Path, uneven: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, list[float]]:
    """A packed model with an adapter trained for 5 steps, where that is saved, the packed model, and the losses."""
    folder = tmp_path_factory.mktemp("peft")
    model = load_gguf(folded, dtype=torch.float32)
    model.save_pretrained(folder / "packed")
    model = with_adapter(model)
    losses = train(model, windows(uneven("llama"), 4, 64), 5)
    model.save_pretrained(folder / "adapter")
    return model, folder, losses


def test_training_changes_the_adapters_alone(trained: tuple[Any, Path, list[float]]) -> None:
    model, folder, losses = trained
    assert all(np.isfinite(losses)) and len(set(losses)) == len(losses)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(names) == 28 and all(".lora_" in name for name in names)
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == names
    before = load_file(folder / "packed" / "model.safetensors")
    after = {name.replace(".base_layer", ""): tensor for name, tensor in model.get_base_model().state_dict().items()}
    assert len(before) == 21 and sum(tensor.dtype == torch.uint8 for tensor in before.values()) == 15
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("base", ["original", "packed"])
def test_converted_as_it_is(base: str, trained: tuple[Any, Path, list[float]], uneven: Any, tmp_path: Path) -> None:
    """Trained beside folded matrices it fits them: nothing is scaled, and it is marked. The card tells."""
    _, folder, _ = trained
    model_dir = uneven("llama") if base == "original" else folder / "packed"
    done = convert_lora(LoraOptions(folder / "adapter", tmp_path / "out.gguf", model_dir))
    assert rescaling.NORMS_FOLDED in done.marks and not done.scaled and len(done.matrices) == 14
    assert metadata(tmp_path / "out.gguf")[rescaling.NORMS_FOLDED] is True
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    a = weights["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"].numpy()
    np.testing.assert_array_equal(arrays(tmp_path / "out.gguf")["blk.1.ffn_up.weight.lora_a"], a)


@pytest.mark.slow
def test_what_was_trained_on(trained: tuple[Any, Path, list[float]], folded: Path, uneven: Any, tmp_path: Path) -> None:
    """Without the card it has to be said, or the base has to say it; what is said comes first."""
    _, folder, _ = trained
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes((folder / "adapter" / name).read_bytes())

    def scaled(base: Path, **options: Any) -> int:
        asked = LoraOptions(adapter, tmp_path / "out.gguf", base, **{"model": folded, **options})
        return len(convert_lora(asked).scaled)

    assert scaled(uneven("llama")) == 10  # taken for one of the checkpoint
    assert scaled(uneven("llama"), trained_folded=True) == 0
    assert scaled(folder / "packed") == 0
    (adapter / "README.md").write_bytes((folder / "adapter" / "README.md").read_bytes())
    assert scaled(uneven("llama")) == 0
    assert scaled(uneven("llama"), trained_folded=False) == 10
    plain = tmp_path / "plain.gguf"
    convert(ConvertOptions.of(uneven("llama"), plain, outtype="f16"), io.StringIO())
    with pytest.raises(
        UserError, match=r"was trained beside a model that is not plain\.gguf; give the file that it was as --model"
    ):
        scaled(uneven("llama"), model=plain)


@pytest.mark.slow
def test_an_adapter_of_an_unfolded_packed_model(folded: Path, uneven: Any, tmp_path: Path) -> None:
    """It was trained where the checkpoint's own gains are, so it is scaled like any other."""
    config = ITQ3SConfig(effort="fast", threads=1)
    model = AutoModelForCausalLM.from_pretrained(uneven("llama"), quantization_config=config, dtype=torch.float32)
    model = with_adapter(model)
    train(model, windows(uneven("llama"), 1, 16), 1)
    model.save_pretrained(tmp_path / "adapter")
    assert rescaling.FOLDED_TAG not in (tmp_path / "adapter" / "README.md").read_text()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(uneven("llama"))
    done = convert_lora(LoraOptions(tmp_path / "adapter", tmp_path / "out.gguf", uneven("llama"), model=folded))
    assert rescaling.NORMS_FOLDED in done.marks and len(done.scaled) == 10


def test_packed_matrices_are_not_merged_into(trained: tuple[Any, Path, list[float]]) -> None:
    """Blocks cannot take the update: an error, and the blocks stay."""
    model, folder, _ = trained
    again = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "packed", dtype=torch.float32), folder / "adapter"
    )
    with pytest.raises(RuntimeError):
        again.merge_and_unload()
    name = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
    assert torch.equal(again.state_dict()[name], model.state_dict()[name])
