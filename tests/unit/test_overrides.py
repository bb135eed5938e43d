"""llama-quantize's options on the command line: what they mean, and one line for what they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from gguf_files import metadata, types
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import policy
from gguf_itq3s.checkpoint.policy import Overrides, choose
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec.types import ITQ3_S
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

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
        (None, "No such file"), (b"attn_q", "'attn_q' is not PATTERN=TYPE"), (b"\xff\xfe", "codec"),
        (b"a=q8_0 " * (1 << 22), "has more than 16777216 bytes"),
    ):  # fmt: skip
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(SystemExit) as done:
            convert_main(words)
        line = capfd.readouterr().err.splitlines()[-1]
        assert done.value.code == 2 and f"argument --tensor-type-file: {file}: " in line and expected in line


def test_options_of_other_commands_name_them(capfd: pytest.CaptureFixture[str]) -> None:
    for option, expected in (
        ("--split-max-size", "llama-gguf-split --split --split-max-size ... FILE.gguf NAME"),
        ("--prune-layers", "llama-quantize --prune-layers ... F16.gguf OUT.gguf TYPE"),
        ("--override-kv", "llama-quantize --override-kv ... FILE.gguf OUT.gguf COPY"),
    ):
        assert convert_main(["model", option, "2G"]) == 1
        line = capfd.readouterr().err
        assert line.startswith(f"error: {option}: ") and expected in line and line.count("\n") == 1


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "auto"])
def test_plain_files_have_no_patterns(outtype: str, checkpoint: Make, tmp_path: Path) -> None:
    for changes in ({"tensor_types": (("attn_q", "q8_0"),)}, {"leave_output_tensor": True}):
        with pytest.raises(UserError, match="is for quantized files, and"):
            convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", outtype=outtype, **changes))  # type: ignore[arg-type]


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
