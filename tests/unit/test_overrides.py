"""llama-quantize's options on the command line: what they mean, and one line for what they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from checkpoints import SIZES, save_model
from gguf_files import metadata, tensors, types
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import policy
from gguf_itq3s.checkpoint.policy import Overrides, choose
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.checkpoint.source import Checkpoint, SourceTensor
from gguf_itq3s.checkpoint.weights import Weights
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec.types import ITQ3_S
from gguf_itq3s.convert import overrides as kv
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.convert.prune import prune

Make = Callable[[str], Path]
SMALL = policy.Model("llama", layers=32, heads=32, kv_heads=32, experts=0, tied=False)


def test_patterns_are_searched_in_order() -> None:
    overrides = Overrides(patterns=((r"blk\.0\.", Type.Q8_0), ("attn_q", Type.Q6_K)))

    def chosen(name: str, pure: bool = False) -> Type:
        return choose(name, (256, 512), Type.F16, ITQ3_S, SMALL, overrides=overrides, pure=pure).type

    assert chosen("blk.0.attn_q.weight") == chosen("blk.0.attn_q.weight", pure=True) == Type.Q8_0
    assert chosen("blk.1.attn_q.weight") == Type.Q6_K
    assert chosen("blk.1.attn_k.weight") == ITQ3_S
    # Not what may not be quantized, nor rows that are not whole blocks.
    assert choose("blk.0.attn_norm.weight", (256,), Type.F32, ITQ3_S, SMALL, overrides=overrides).type == Type.F32
    assert choose("blk.1.attn_q.weight", (4, 320), Type.F16, ITQ3_S, SMALL, overrides=overrides).type == Type.Q8_0
    # A file that is not quantized has no patterns, as in llama-quantize.
    assert choose("blk.0.attn_q.weight", (4, 256), Type.F16, Type.F16, SMALL, overrides=overrides).type == Type.F16


def test_types_by_name(checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "types.txt").write_text("ffn_up=BF16\n ffn_gate=q5_0")
    words = ["--tensor-type", "ATTN_K=Q8_0", "--tensor-type-file", str(tmp_path / "types.txt"), "--leave-output-tensor"]
    assert convert_main([str(checkpoint("llama")), str(tmp_path / "x.gguf"), "--effort", "fast", *words]) == 0
    made = types(tmp_path / "x.gguf")
    assert made["blk.1.attn_k.weight"] == Type.Q8_0 and made["blk.0.ffn_up.weight"] == Type.BF16
    assert made["blk.0.ffn_gate.weight"] == Type.Q5_0 and made["output.weight"] == Type.F16
    assert made["blk.0.attn_q.weight"] == ITQ3_S


@pytest.mark.parametrize(
    "words,expected",
    [
        (["--tensor-type", "attn_q"], "'attn_q' is not PATTERN=TYPE"),
        (["--tensor-type", "=q8_0"], "is not PATTERN=TYPE"),
        (["--tensor-type", "attn_q="], "is not PATTERN=TYPE"),
        (["--tensor-type", "attn_q=q9"], "'q9' is not one of the types bf16, "),
        (["--tensor-type", "attn_q=iq2_xxs"], "'iq2_xxs' is not one of the types"),
        (["--tensor-type", "attn_(q=q8_0"], "is not a regular expression: missing )"),
        (["--tensor-type", "[[:digit:]]=q8_0"], "write a class such as [[:digit:]] as [0-9]"),
        (["--prune-layers", "1,x"], "is no list of layers"), (["--prune-layers", "-1"], "-1 is no layer"),
        (["--override-kv", "a"], "is not KEY=TYPE:VALUE"), (["--override-kv", "a=int"], "is not KEY=TYPE:VALUE"),
        (["--override-kv", "a=int:1.5"], "is not a whole number"), (["--override-kv", "a=int:-1"], "whole number of 0"),
        (["--override-kv", "a=int:4294967296"], "whole number of 0 to 4294967295"),
        (["--override-kv", "a=float:x"], "is not a number"), (["--override-kv", "a=bool:1"], "neither true nor false"),
        (["--override-kv", f"a=str:{'x' * 128}"], "longer than 127 bytes"),
        (["--override-kv", "a=u8:1"], "one of int, float, bool and str"),
        (["--override-kv", "general.alignment=int:1"], "says how the file is made"),
        (["--override-kv", "itq3s.version=int:2"], "says how the file is made"),
    ],
)  # fmt: skip
def test_words_that_are_none(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        convert_main(["model", *words])
    assert done.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: argument {words[0]}: " in said and expected in said


def test_a_file_of_patterns_is_checked(checkpoint: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "types.txt"
    words = [str(checkpoint("llama")), "--dry-run", "--tensor-type-file", str(file)]
    for content, expected in (
        (None, "cannot be read: No such file"), (b"attn_q", "'attn_q' is not PATTERN=TYPE"), (b"\xff\xfe", "codec"),
        (b"a=q8_0 " * (1 << 22), "has more than 16777216 bytes"),
    ):  # fmt: skip
        if content is not None:
            file.write_bytes(content)
        assert convert_main(words) == 1
        line = capfd.readouterr().err
        assert line.startswith(f"error: {file}: ") and expected in line and line.count("\n") == 1


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "auto"])
def test_plain_files_have_no_patterns(outtype: str, checkpoint: Make, tmp_path: Path) -> None:
    for changes in ({"tensor_types": (("attn_q", "q8_0"),)}, {"leave_output_tensor": True}):
        with pytest.raises(UserError, match="is for quantized files, and"):
            convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", outtype=outtype, **changes))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- metadata, layers


def test_overridden_metadata(checkpoint: Make, tmp_path: Path) -> None:
    texts = ["llama.context_length=int:99", "general.name=str:Other", "a.b=float:0.5", "a.c=bool:true"]
    words = [word for text in texts for word in ("--override-kv", text)]
    out = tmp_path / "x.gguf"
    assert convert_main([str(checkpoint("llama")), str(out), "--outtype", "f16", *words]) == 0
    facts = metadata(out)
    assert (facts["llama.context_length"], facts["general.name"], facts["a.b"], facts["a.c"]) == (
        99,
        "Other",
        0.5,
        True,
    )
    with pytest.raises(UserError, match="correct --override-kv"):
        convert(ConvertOptions.of(checkpoint("llama"), out, override_kv=("x",)))


def test_the_policy_follows_overridden_metadata(checkpoint: Make) -> None:
    """As llama-quantize's, which reads the metadata with what is laid over them."""
    before = open_checkpoint(checkpoint("llama"))
    after = kv.apply(before, ("llama.expert_count=int:8", "llama.block_count=int:80", "llama.block_count=int:70"))
    assert (before.model.experts, after.model.experts, after.model.layers) == (0, 8, 70)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """A Llama of four layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 4})
    return save_model(transformers.LlamaForCausalLM(config).half(), tmp_path_factory.mktemp("deep") / "deep", tokenizer)


def test_pruned_layers(deep: Path, tmp_path: Path) -> None:
    convert(ConvertOptions.of(deep, tmp_path / "whole.gguf", outtype="f16"))
    convert(ConvertOptions.of(deep, tmp_path / "pruned.gguf", outtype="f16", prune_layers=(0, 2)))
    whole, pruned = tensors(tmp_path / "whole.gguf"), tensors(tmp_path / "pruned.gguf")
    assert metadata(tmp_path / "pruned.gguf")["llama.block_count"] == 2
    assert len(pruned) == len(whole) - 18
    for now, then in ((0, 1), (1, 3)):
        for name in [name for name in pruned if name.startswith(f"blk.{now}.")]:
            np.testing.assert_array_equal(pruned[name].data, whole[name.replace(f"blk.{now}.", f"blk.{then}.")].data)


def test_lists_of_a_value_for_each_layer_are_pruned() -> None:
    writer = gguf.GGUFWriter(None, "gemma3")
    writer.add_block_count(4)
    writer.add_array("gemma3.attention.head_count_kv", [1, 2, 3, 4])
    writer.add_array("gemma3.rope.dimension_sections", [5, 6, 7, 8])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c", "d"])
    writer.add_uint32("gemma3.nextn_predict_layers", 1)
    each = [SourceTensor(f"blk.{n}.attn_q.weight", (2, 2), Type.F16, (), lambda: iter(())) for n in range(4)]
    folder, ftype = Path("m"), gguf.LlamaFileType.MOSTLY_F16
    checkpoint = Checkpoint(folder, each, SMALL, writer, [], ftype, gguf.Metadata(), Weights(folder))
    pruned, names = prune(checkpoint, (1, 3))
    assert names == {"blk.0.attn_q.weight": "blk.0.attn_q.weight", "blk.1.attn_q.weight": "blk.2.attn_q.weight"}
    values = {key: entry.value for key, entry in pruned.writer.kv_data[0].items()}
    assert values["gemma3.attention.head_count_kv"] == [1, 3] and values["gemma3.block_count"] == 2
    assert values["gemma3.rope.dimension_sections"] == [5, 6, 7, 8] and values["gemma3.nextn_predict_layers"] == 0
    assert values["tokenizer.ggml.tokens"] == ["a", "b", "c", "d"]


def test_layers_that_are_not_there(checkpoint: Make, tmp_path: Path) -> None:
    for layers, expected in (((2,), "has no layer 2 to prune; give layers of 0 to 1"), ((0, 1), "no layer left")):
        with pytest.raises(UserError, match=expected):
            convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", prune_layers=layers))


@pytest.mark.slow
def test_statistics_follow_their_layers(calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """A pruned, folded and calibrated file has the blocks of the layer that is left."""
    model, statistics = calibrated("llama")
    options = {"calibration": statistics, "effort": "fast", "pure": True, "fold_norms": True}
    convert(ConvertOptions.of(model, tmp_path / "whole.gguf", **options))  # type: ignore[arg-type]
    convert(ConvertOptions.of(model, tmp_path / "pruned.gguf", prune_layers=(0,), **options))  # type: ignore[arg-type]
    whole, pruned = tensors(tmp_path / "whole.gguf"), tensors(tmp_path / "pruned.gguf")
    left = [name for name in pruned if name.startswith("blk.0.")]
    assert len(left) == 9
    for name in left:
        np.testing.assert_array_equal(pruned[name].data, whole[name.replace("blk.0.", "blk.1.")].data, err_msg=name)
    facts = metadata(tmp_path / "pruned.gguf")
    assert facts["itq3s.calibrated"] is True and facts["itq3s.norms_folded"] is True


# ------------------------------------------------------------------------------------------------ where it came from


@pytest.mark.slow
def test_origin_is_carried(llama_copy: Path, tmp_path: Path) -> None:
    """Base model, licence and the like of the model card; --metadata goes before it, and --quantized-by before that."""
    card = """---
license: apache-2.0
license_name: Own
base_model: someone/Base-Model-1B
tags: [one, two]
language: [en]
---
Text
"""
    (llama_copy / "README.md").write_text(card)
    for outtype in ("itq3_s", "f16"):
        words = [str(llama_copy), str(tmp_path / "x.gguf"), "--outtype", outtype, "--effort", "fast"]
        assert convert_main(words) == 0
        facts = metadata(tmp_path / "x.gguf")
        assert (facts["general.license"], facts["general.license.name"]) == ("apache-2.0", "Own")
        assert facts["general.base_model.0.name"] == "Base Model 1B"
        assert facts["general.base_model.0.repo_url"] == "https://huggingface.co/someone/Base-Model-1B"
        assert (facts["general.tags"], facts["general.languages"]) == (["one", "two"], ["en"])
        assert "general.quantized_by" not in facts
        assert facts["general.quantization_version"] == gguf.GGML_QUANT_VERSION
        own = {"general.author": "Somebody", "general.quantized_by": "File", "general.tags": ["three"]}
        (tmp_path / "own.json").write_text(json.dumps(own))
        words += ["--metadata", str(tmp_path / "own.json")]
        assert convert_main(words) == 0
        facts = metadata(tmp_path / "x.gguf")
        assert [facts[key] for key in own] == list(own.values()) and facts["general.license"] == "apache-2.0"
        assert convert_main([*words, "--quantized-by", "Option", "--model-name", "Name"]) == 0
        facts = metadata(tmp_path / "x.gguf")
        assert (facts["general.quantized_by"], facts["general.name"]) == ("Option", "Name")


@pytest.mark.parametrize(
    "content,expected",
    [
        ("[]", "holds no JSON object"), ("{", "is not valid JSON"),
        ('{"general.autor": "x"}', "has the key 'general.autor', which is not read; take it out, or correct it"),
        ('{"general.author": 1}', "has general.author 1, which is not a text"),
        ('{"general.tags": "x"}', "which is not a list of texts"),
        ('{"general.sampling.temp": "x"}', "which is not a number"),
        ('{"general.base_models": [{"name": 7}]}', "which is not a list of objects with texts"),
        (None, "no such file"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_read(content: str | None, expected: str, checkpoint: Make, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as caught:
        convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", metadata=file))
    assert str(caught.value).startswith(f"{file}: ") and expected in str(caught.value)
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.slow
def test_a_model_card_that_gguf_cannot_hold(llama_copy: Path, tmp_path: Path) -> None:
    (llama_copy / "README.md").write_text("---\nlicense: {a: 1}\n---\n")
    with pytest.raises(UserError, match="gives metadata that no GGUF file can hold"):
        convert(ConvertOptions.of(llama_copy, tmp_path / "x.gguf"))
    assert not list(tmp_path.glob("x.gguf*"))
