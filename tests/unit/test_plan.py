"""Memory planning from config and index alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from gguf_itq3s.base import report
from gguf_itq3s.checkpoint import reading
from gguf_itq3s.cli import main
from gguf_itq3s.inspect import plan

Q = gguf.GGMLQuantizationType
GIB = 1 << 30

LLAMA_3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and index of a 70B model; there are no weights."""
    folder = tmp_path_factory.mktemp("llama-70b")
    (folder / "config.json").write_text(json.dumps(LLAMA_3_70B))
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"model.layers.{i}.{part}.weight" for i in range(80) for part in LAYER]
    weight_map = dict.fromkeys(names, "model-00001-of-00030.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_the_70b_case_of_the_paper(llama_70b: Path) -> None:
    """70B at 3.125 bits with 16K tokens in 32 GiB: it fits, by what the paper calls 27.3 GiB (it is 27.3 GB)."""
    result = plan.plan(llama_70b, 16384, report.parse_size("32GiB"))
    assert result["weights"] == 70_553_706_496
    pure = result["types"]["ITQ3_S"]["pure_bytes"]
    assert pure == pytest.approx(70.55e9 * 3.125 / 8, rel=1e-3)
    assert 25.6 < pure / GIB < 25.8
    assert result["types"]["ITQ2_S"]["pure_bytes"] == pytest.approx(pure * 2.0625 / 3.125, rel=1e-3)
    # 80 layers of 8 heads of 128, K and V, two bytes each.
    assert result["cache"]["F16"] == 80 * 8 * 128 * 2 * 2 * 16384 == 5 * GIB
    assert result["cache"]["Q4_0"] == 5 * GIB * 4.5 / 16
    assert result["fits"]["ITQ3_S"] == {"F16": True, "Q8_0": True, "Q4_0": True}
    assert not any(result["fits"]["Q4_K"].values())
    assert result["fits"]["IQ3_S"] == {"F16": False, "Q8_0": True, "Q4_0": True}


def test_shapes_from_the_config_equal_the_headers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = checkpoint("llama-tied")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    assert reading.read_shapes(tmp_path)[0] == reading.read_shapes(source)[0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 8, "hidden_size": 512}, 2 * 512),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}, 2 * 128),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}, 2 * 256),
        ({"num_attention_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 576),
    ],
)
def test_cache_row(config: dict[str, Any], expected: int) -> None:
    layers = plan.layers_of({"num_hidden_layers": 3, **config})
    assert plan.cache_bytes(layers, 1000, Q.F16) == 3 * 1000 * expected * 2


def test_sliding_window_layers_keep_their_window() -> None:
    config = {
        "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    token = 4 * 64 * 2 * 2
    assert plan.cache_bytes(plan.layers_of(config), 8192, Q.F16) == token * (8192 + 1024)


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 1
    assert "config.json: no such file; give the folder of a Hugging Face checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), "--vram", "much"])
    assert "is no size" in capsys.readouterr().err


def test_mixes_of_llama_quantize_need_the_build(llama_70b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(llama_70b), "--outtype", "q8_0", "--outtype", "itq3_s"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "/" not in line and "GiB" in line]
    assert rows[-2:] == ["Q8_0", "ITQ3_S"]
    assert main(["plan", str(llama_70b), "--outtype", "q3_k_m"]) == 1
    assert f"{llama_70b}: Q3_K_M needs the built library; run make build" in capsys.readouterr().err
