"""scripts/bench/short_rows.py: the models, what their files take, copies of experts, and the table of the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from gguf_itq3s.checkpoint.policy import Choice
from gguf_itq3s.checkpoint.shards import stored_tensors
from gguf_itq3s.codec.types import ITQ3_N
from scripts.bench import short_row_models, short_rows

ROOT = Path(__file__).resolve().parents[2]


def test_nemotron_is_the_model_of_its_name() -> None:
    pattern = short_row_models.NEMOTRON_PATTERN
    assert {kind: pattern.count(kind) for kind in "ME*"} == {"M": 23, "E": 23, "*": 6}
    hidden = 2688
    experts = 128 * 2 * 1856 * hidden + 2 * 3712 * hidden + 128 * hidden + 128
    mamba = (2 * 4096 + 2 * 8 * 128 + 64) * hidden + hidden * 4096 + 6144 * 5 + 4096 + 3 * 64
    attention = 2 * 4096 * hidden + 2 * 256 * hidden
    whole = 23 * experts + 23 * mamba + 6 * attention + 53 * hidden + 2 * 131072 * hidden
    assert short_row_models.nemotron().weights == whole


def test_glm_is_the_model_of_its_name() -> None:
    hidden = 4096
    attention = 2 * 96 * 128 * hidden + 2 * 1024 * hidden + 96 * 128 + 2 * 1024 + 2 * hidden
    experts = 129 * 3 * 1408 * hidden + 128 * hidden + 128
    whole = 46 * attention + 3 * 10944 * hidden + 45 * experts + 2 * 151552 * hidden + hidden
    assert short_row_models.glm().weights == whole


def test_the_timed_part_has_the_proportions_of_the_whole() -> None:
    part = short_rows.timed_model(128)
    share = short_rows.TIMED_LAYERS / len(short_row_models.NEMOTRON_PATTERN)
    for kind in "ME*":
        count = part.config["hybrid_override_pattern"].count(kind)
        assert abs(count - share * short_row_models.NEMOTRON_PATTERN.count(kind)) < 0.1
    assert abs(part.config["vocab_size"] - share * 131072) < 32
    assert short_row_models.nemotron().config["n_routed_experts"] == short_rows.DIFFERENT * short_rows.COPIES


@pytest.mark.parametrize("model", [short_row_models.nemotron("M*", 4, 64), short_row_models.glm(2, 4, 64)])
def test_a_folder_without_weights_has_their_headers_and_sizes(model: short_row_models.Model, tmp_path: Path) -> None:
    short_row_models.write_without_weights(tmp_path / "model", model)
    file = tmp_path / "model" / "model.safetensors"
    found = stored_tensors([file])
    assert {name: shape for name, (_, shape) in found.items()} == model.shapes
    assert 2 * model.weights < file.stat().st_size < 2 * model.weights + (1 << 20)
    assert file.stat().st_blocks * 512 < 1 << 20


class Dry:
    """An F16 file whose matrices become Q3_K, and Q4_0 where the rows are short."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def choices(self, file_type: LlamaFileType, *, statistics: bool) -> dict[str, Choice]:
        assert statistics == (file_type == LlamaFileType.MOSTLY_IQ2_XXS)
        wanted = {name: Type.Q3_K if self.is_matrix(name) else Type.F32 for name in self.shapes}
        return {name: Choice(Type.Q4_0 if self.is_short(name) else qtype, qtype) for name, qtype in wanted.items()}

    def is_matrix(self, name: str) -> bool:
        return len(self.shapes[name]) > 1 and "ffn_gate_inp" not in name

    def is_short(self, name: str) -> bool:
        return self.is_matrix(name) and self.shapes[name][-1] % 256 != 0


def test_sizes_are_those_of_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = short_row_models.nemotron("E*", 4, 64)
    short_row_models.write_without_weights(tmp_path / "model", model)
    checkpoint = short_rows.opened(tmp_path / "model")
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    dry = Dry(shapes)
    monkeypatch.setattr(short_rows, "f16_file", lambda _: dry)
    found = short_rows.sizes_of(checkpoint)
    assert sum(map(math.prod, shapes.values())) == model.weights
    vectors, hidden = 3 * 2688 + 4 + 4 * 2688, 2688  # three norms, the bias and the matrix of the router
    long = hidden * 4096  # attn_output alone has rows that 256 divides
    output = 64 * hidden  # Q6_K in the mix, Q8_0 in such rows
    others = model.weights - vectors - long - output
    expected = 4 * vectors + long // 256 * 100 + others // 64 * 26 + output // 32 * 34
    assert found["itq3_s"]["bytes"] == expected
    expected = 4 * vectors + long // 256 * 100 + others // 32 * 18 + output // 32 * 34
    assert found["itq3_s --fallback iq4_nl"]["bytes"] == expected
    assert found["itq3_s"]["bits"] == 8 * found["itq3_s"]["bytes"] / model.weights
    short = sum(math.prod(shape) for name, shape in shapes.items() if dry.is_short(name))
    matrices = sum(math.prod(shape) for name, shape in shapes.items() if dry.is_matrix(name))
    stock = found["Q3_K_S"]
    assert stock["bytes"] == short // 32 * 18 + (matrices - short) // 256 * 110 + 4 * (model.weights - matrices)
    assert stock["short"] == short / model.weights
    assert next(iter(stock["types"])) == "Q4_0"


def test_experts_are_copied_and_routers_are_not(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[ITQ3_N]
    experts = chance.integers(0, 256, (2, 3, 2 * size), dtype=np.uint8)
    router = chance.standard_normal((2, 128), dtype=np.float32)
    bias, norm = np.array([1, 2], np.float32), np.ones(128, np.float32)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "nemotron_h_moe")
    writer.add_expert_count(2)
    writer.add_token_list([b"a", b"b"])
    writer.add_head_count_kv([0, 2])
    writer.add_tensor("blk.0.ffn_up_exps.weight", experts, raw_dtype=ITQ3_N)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", router)
    writer.add_tensor("blk.0.exp_probs_b.bias", bias)
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    short_row_models.repeat_experts(tmp_path / "one.gguf", tmp_path / "many.gguf", 3)
    reader = gguf.GGUFReader(tmp_path / "many.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    many = tensors["blk.0.ffn_up_exps.weight"]
    assert many.tensor_type == ITQ3_N and list(many.shape) == [2 * block, 3, 6]
    assert np.array_equal(many.data, np.concatenate([experts] * 3))
    routers = tensors["blk.0.ffn_gate_inp.weight"].data
    assert routers.shape == (6, 128) and len(np.unique(routers[:, 0])) == 6
    assert np.array_equal(tensors["blk.0.exp_probs_b.bias"].data, [1, 2, 1, 2, 1, 2])
    assert np.array_equal(tensors["output_norm.weight"].data, norm)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["nemotron_h_moe.expert_count"] == 6
    assert fields["tokenizer.ggml.tokens"] == ["a", "b"]
    assert fields["nemotron_h_moe.attention.head_count_kv"] == [0, 2]


def test_speeds_are_compared_in_the_same_round() -> None:
    samples = {"generation, 1": {"itq3_s": [20.0, 9.0, 15.0], "Q3_K_S": [10.0, 6.0, 12.0]}}
    found = {
        "samples": samples, "medians": {"generation, 1": {"itq3_s": 15.0, "Q3_K_S": 10.0}}, "weights": 10**9,
        "rounds": 3, "cores": 2, "load": 0.5, "processor": "zen", "bytes": {"itq3_s": 2**20, "Q3_K_S": 2**21},
    }  # fmt: skip
    lines = [line.split("|")[1:-1] for line in short_rows.speed_table(found).splitlines() if line.startswith("| gen")]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["generation, 1 thread", "`itq3_s`", "15.00", "1.50", "1.67"],
        ["generation, 1 thread", "Q3_K_S", "10.00", "1.00", "1.00"],
    ]


def test_the_page_shows_the_recorded_measurement() -> None:
    section = (ROOT / "docs" / short_rows.PAGE).read_text().split("<!-- begin short rows -->")[1]
    recorded = json.loads((ROOT / "docs" / short_rows.RESULTS).read_text())
    assert section.split("<!-- end short rows -->")[0].strip() == short_rows.table(recorded).strip()
    assert set(recorded) == set(short_rows.PARTS)
    for entry in recorded["files"].values():
        assert all(sizes["planned"] == sizes["file"] for sizes in entry["files"].values())
