"""Files as upstream's converter writes them: the same bytes for its types, its parts and its options."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType
from safetensors.torch import load_file, save_file

import upstream_files
from checkpoints import SIZES, save_model
from damaged import edit_json
from gguf_files import metadata, tensors, types
from gguf_itq3s import upstream
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.cli import convert_main
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

Make = Callable[[str], Path]
FTYPES = {
    "f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0, "auto": LlamaFileType.GUESSED,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("native", [None, False], ids=["default", "numpy"])
@pytest.mark.parametrize("outtype", FTYPES)
@pytest.mark.parametrize("name", ["llama", "mixtral", "uneven"])
def test_bytes_are_upstreams(
    name: str, outtype: str, native: bool | None, checkpoint: Make, uneven: Make, tmp_path: Path
) -> None:
    """Of weights in bfloat16 and in float16."""
    model = uneven("llama") if name == "uneven" else checkpoint(name)
    theirs = upstream_files.write(model, tmp_path / "theirs.gguf", FTYPES[outtype])
    convert(ConvertOptions.of(model, tmp_path / "ours.gguf", outtype=outtype, native=native, threads=2))
    assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()


def test_q8_0_leaves_rows_that_are_no_whole_blocks_in_f16(tokenizer: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "intermediate_size": 304})
    folder = save_model(transformers.LlamaForCausalLM(config).float(), tmp_path / "model", tokenizer)
    theirs = upstream_files.write(folder, tmp_path / "theirs.gguf", FTYPES["q8_0"])
    convert(ConvertOptions.of(folder, tmp_path / "ours.gguf", outtype="q8_0"))
    assert types(theirs)["blk.0.ffn_down.weight"] == Type.F16
    assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("outtype", ["q3_k_m", "iq4_xs", "q4_0"])
def test_mixes_of_llama_quantize_need_the_build(outtype: str, checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf": {outtype.upper()} needs the built library; run make build"):
        convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", outtype=outtype))
    assert not list(tmp_path.iterdir())


def test_auto_takes_the_type_of_the_first_matrix(checkpoint: Make, uneven: Make, tmp_path: Path) -> None:
    for model, kind in ((checkpoint("llama"), "bf16"), (uneven("llama"), "f16")):
        done = convert(ConvertOptions.of(model, tmp_path / "{ftype}.gguf", outtype="auto"))
        assert done.path == tmp_path / f"{kind}.gguf" and done.path.exists()


# ------------------------------------------------------------------------------------------------ parts of a model


def test_vocab_only(checkpoint: Make, llama_copy: Path, tmp_path: Path) -> None:
    theirs = upstream_files.write(checkpoint("llama"), tmp_path / "v.gguf", FTYPES["auto"], vocab_only=True)
    (llama_copy / "model.safetensors").unlink()  # not needed
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="a vocabulary has no tensors"):
        convert(ConvertOptions.of(llama_copy, vocab_only=True, outtype="itq3_s"))
    done = convert(ConvertOptions.of(checkpoint("llama"), folder=tmp_path / "out", vocab_only=True))
    assert done.path.name.endswith("-vocab.gguf")
    assert done.path.read_bytes() == theirs.read_bytes()
    assert convert_main([str(llama_copy), str(tmp_path / "none.gguf"), "--vocab-only"]) == 0
    assert not tensors(tmp_path / "none.gguf")
    ours, whole = metadata(tmp_path / "none.gguf"), metadata(theirs)
    assert ours["tokenizer.ggml.tokens"] == whole["tokenizer.ggml.tokens"] and len(ours) == len(whole)


@pytest.fixture(scope="session")
def multimodal(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """A Gemma 3 with a vision tower."""
    text = {**SIZES, "head_dim": 64, "tie_word_embeddings": True}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 56, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).bfloat16()
    folder = save_model(model, tmp_path_factory.mktemp("gemma") / "Tiny-Gemma", tokenizer)
    weights = load_file(folder / "model.safetensors")  # on the hub, the tower has one more part in its names
    weights = {
        re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", n): t for n, t in weights.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    preprocessor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


@pytest.mark.parametrize("outtype", FTYPES)
def test_projector(outtype: str, multimodal: Path, tmp_path: Path) -> None:
    theirs = upstream_files.write(multimodal, tmp_path / "theirs.gguf", FTYPES[outtype], mmproj=True)
    convert(ConvertOptions.of(multimodal, tmp_path / "ours.gguf", mmproj=True, outtype=outtype))
    assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()
    assert metadata(theirs)["general.architecture"] == "clip" and len(tensors(theirs)) > 20


# ----------------------------------------------------------------------------------------------------- other options


@pytest.mark.parametrize(
    "option,argument",
    [("--no-lazy", "eager"), ("--fuse-qkv", "fuse_qkv")],
)
def test_options_of_upstreams_classes(option: str, argument: str, checkpoint: Make, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {argument: True}
    for name in ("ernie-moe", "qwen2"):
        theirs = upstream_files.write(checkpoint(name), tmp_path / "theirs.gguf", **arguments)
        assert convert_main([str(checkpoint(name)), str(tmp_path / "ours.gguf"), "--outtype", "f16", option]) == 0
        assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()
    if option == "--fuse-qkv":
        assert "blk.0.attn_qkv.weight" in tensors(theirs)


def test_experts_that_an_architecture_cannot_fuse(
    checkpoint: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoint("mixtral")), str(tmp_path / "out.gguf"), "--fuse-gate-up-exps"]
    assert convert_main(words) == 1
    assert capfd.readouterr().err == (
        f"error: {checkpoint('mixtral')}: is llama, which has no tensor for --fuse-gate-up-exps; leave "
        "--fuse-gate-up-exps out\n"
    )


def test_fp8_as_q8(checkpoint: Make, llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = load_file(llama_copy / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.full((2, 2), 0.5)
    save_file(weights, llama_copy / "model.safetensors", metadata={"format": "pt"})
    edit_json(llama_copy / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [256, 256]})
    theirs = upstream_files.write(llama_copy, tmp_path / "theirs.gguf", FTYPES["bf16"], fp8_as_q8=True)
    words = [str(llama_copy), str(tmp_path / "ours.gguf"), "--fp8-as-q8"]
    assert convert_main([*words, "--outtype", "bf16"]) == 0
    assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()
    assert types(theirs)["blk.0.attn_q.weight"] == Type.Q8_0
    assert convert_main(words) == 1
    assert "--fp8-as-q8 has no meaning for itq3_s; " in capfd.readouterr().err


def test_dense_modules_of_sentence_transformers(
    tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Gemma3TextConfig(**{**SIZES, "head_dim": 64, "tie_word_embeddings": True})
    model = save_model(transformers.Gemma3TextModel(config).bfloat16(), tmp_path / "model", tokenizer)
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    for number, shape in ((2, (512, 256)), (3, (256, 512))):
        path = f"{number}_Dense"
        (model / path).mkdir()
        save_file({"linear.weight": torch.randn(shape)}, model / path / "model.safetensors")
        (model / path / "config.json").write_text(json.dumps({"in_features": shape[1], "out_features": shape[0]}))
        modules.append({"type": "sentence_transformers.models.Dense", "path": path})
    (model / "modules.json").write_text(json.dumps(modules))
    theirs = upstream_files.write(model, tmp_path / "theirs.gguf", sentence_transformers_dense_modules=True)
    assert {"dense_2.weight", "dense_3.weight"} <= set(tensors(theirs))
    words = [str(model), str(tmp_path / "ours.gguf"), "--sentence-transformers-dense-modules"]
    assert convert_main([*words, "--outtype", "f16"]) == 0
    assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()
    for bad in ("../outside", 7):
        (model / "modules.json").write_text(json.dumps([{"type": "Dense", "path": bad}]))
        assert convert_main(words) == 1
        assert f"error: {model / 'modules.json'}: names " in capfd.readouterr().err


@pytest.mark.slow
def test_a_draft_for_a_target_model(checkpoint: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """EAGLE-3: the tokenizer and some sizes are the target's."""
    shapes = {
        "fc": (256, 768), "norm": (256,), "lm_head": (128, 256), "midlayer.self_attn.q_proj": (256, 512),
        "midlayer.self_attn.k_proj": (128, 512), "midlayer.self_attn.v_proj": (128, 512),
        "midlayer.self_attn.o_proj": (256, 256), "midlayer.mlp.gate_proj": (512, 256),
        "midlayer.mlp.up_proj": (512, 256), "midlayer.mlp.down_proj": (256, 512), "midlayer.hidden_norm": (256,),
        "midlayer.input_layernorm": (256,), "midlayer.post_attention_layernorm": (256,),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape).half() for name, shape in shapes.items()}
    (draft := tmp_path / "draft").mkdir()
    save_file({**weights, "d2t": torch.arange(128)}, draft / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "draft_vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
    }  # fmt: skip
    (draft / "config.json").write_text(json.dumps(config))
    target = checkpoint("llama")
    theirs = upstream_files.write(draft, tmp_path / "theirs.gguf", target_model_dir=target)
    words = [str(draft), str(tmp_path / "ours.gguf"), "--outtype", "f16"]
    assert convert_main([*words, "--target-model-dir", str(target)]) == 0
    assert (tmp_path / "ours.gguf").read_bytes() == theirs.read_bytes()
    twice = shutil.copytree(target, tmp_path / "twice")
    shutil.copy(target / "model.safetensors", twice / "model-old.safetensors")
    for more, expected in (
        (["--target-model-dir", str(twice)], f"error: {twice}: holds model-old.safetensors beside the model"),
        ([], "requires --target-model-dir"),
        (["--target-model-dir", str(tmp_path / "none")], f"error: {tmp_path / 'none'}: no such folder"),
    ):
        capfd.readouterr()
        assert convert_main([*words, *more]) == 1
        assert expected in capfd.readouterr().err


def test_writer_of_gguf_py_is_left_as_it_was(checkpoint: Make, tmp_path: Path) -> None:
    """The classes' flags are theirs again once a file is read."""
    conversion = upstream.load_conversion()
    with pytest.raises(UserError):
        convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", mtp=True, outtype="f16"))
    assert not conversion.ModelBase.mtp_only and not conversion.ModelBase.no_mtp
    assert gguf.quants.quantize.__module__ == "gguf.quants"
