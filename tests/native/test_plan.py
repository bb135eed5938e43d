"""Memory planning by the converter's own policy, where the file may hold every type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import ARCHITECTURES, SIZES, save_model
from gguf_itq3s.codec import native
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.inspect import plan


def written(model: Path, outtype: str, pure: bool) -> int:
    """Bytes of the tensors that a conversion writes."""
    options = ConvertOptions.of(model, Path("unused.gguf"), outtype=outtype, pure=pure, ternary="off", dry_run=True)
    return sum(row.bytes for row in convert(options).rows)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_plan_is_what_is_written(
    name: str, checkpoint: Callable[[str], Path], library: native.NativeLibrary
) -> None:
    """Grouped-query attention, ternary mixes, experts, odd rows, extra tensors: one policy."""
    types = plan.plan(checkpoint(name), 128, None)["types"]
    for outtype in ("itq3_s", "tq1_0", "tq2_0", "f16"):
        for pure, key in ((False, "bytes"), (True, "pure_bytes")):
            assert types[outtype.upper()][key] == written(checkpoint(name), outtype, pure), (outtype, key)


def test_the_plan_knows_eight_experts_and_seventy_billion(
    tokenizer: Path, tmp_path: Path, library: native.NativeLibrary
) -> None:
    """80 layers with grouped-query attention are a 70B to llama.cpp: attn_v gets Q5_K."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 80, "num_attention_heads": 8, "vocab_size": 64})
    model = transformers.LlamaForCausalLM(config).to(torch.float16)
    folder = save_model(model, tmp_path / "many", tokenizer)
    shapes = plan.read_shapes(folder)
    assert len(shapes) == 80 * 9 + 3
    assert plan.plan(folder, 128, None)["types"]["ITQ3_S"]["bytes"] == written(folder, "itq3_s", False)
