"""Outlier twins are the same function with other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from gguf_itq3s.base.errors import UserError
from scripts.train import twins


def predictions(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.arange(3, 131)[None]).logits, dim=-1)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("twin", twins.TWINS)
def test_the_function_is_the_same(name: str, twin: str, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    model = uneven(name)
    tensors, tied = twins.read_model(model)
    changed = twins.make_twin(tensors, twin, 6, 0, tied)
    twins.write_model(changed, model, tmp_path / twin)
    before, after = predictions(model), predictions(tmp_path / twin)
    assert float((before.exp() * (before - after)).sum(-1).mean()) < 1e-6
    gain, weight = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight"
    ratio = (changed[gain].float() / tensors[gain].float()).abs()
    assert int((ratio != 1).sum()) == 6
    assert set(ratio[ratio != 1].log2().round(decimals=3).abs().tolist()) <= {2.0, 3.0, 4.0, 5.0}
    assert bool((ratio.max() > 1) == (twin == "activation-twin"))
    assert bool((ratio.min() < 1) == (twin == "weight-twin"))
    largest, before_largest = (float(t[weight].abs().max()) for t in (changed, tensors))
    assert largest > 3 * before_largest if twin == "weight-twin" else largest <= before_largest
    # Powers of two: what the gain takes, the columns give, to the last bit of what float16 holds.
    torch.testing.assert_close(changed[weight].float() * ratio, tensors[weight].float(), rtol=1e-3, atol=2e-6)
    columns = (changed[weight] != tensors[weight]).any(dim=0)
    assert torch.equal(columns, ratio != 1)


def test_other_models_are_refused(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not one of"):
        twins.read_model(uneven("gemma"))
    with pytest.raises(UserError, match="is not there"):
        twins.read_model(tmp_path)
    with pytest.raises(UserError, match="Llama's names"):
        twins.norm_readers({"x": torch.zeros(1)}, False)
