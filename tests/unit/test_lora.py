"""LoRA adapters to GGUF: upstream's bytes, the gains of folded norms, and what is refused."""

from __future__ import annotations

import functools
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import ALL_LINEAR, change, save_adapter
from gguf_files import arrays, metadata
from gguf_files import tensors as tensors_of
from gguf_itq3s import cli, upstream
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import rescaling
from gguf_itq3s.checkpoint.channels import plan_norms
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.programs.lora import LoraOptions, convert_lora


@pytest.fixture
def adapter(uneven: Callable[[str], Path], tmp_path: Path) -> Path:
    return save_adapter(uneven("llama"), tmp_path / "adapter")


def by_upstream(adapter: Path, base: Path, out: Path, *arguments: str) -> Path:
    """What llama.cpp's own converter writes."""
    script = upstream.fetch_source() / "convert_lora_to_gguf.py"
    command = [sys.executable, script, adapter, "--base", base, "--outfile", out, *arguments]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def folded(uneven: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folded(name)``: a file of the model with folded norms."""

    @functools.cache
    def make(name: str) -> Path:
        out = tmp_path_factory.mktemp("folded") / f"{name}.gguf"
        convert(ConvertOptions.of(uneven(name), out, outtype="f16", fold_norms=True), io.StringIO())
        return out

    return make


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outtype"), [("llama", "f32"), ("gemma", "f16"), ("qwen3", "bf16"), ("mistral", "q8_0")]
)
def test_unfolded_is_what_upstream_writes(
    name: str, outtype: str, uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    base = uneven(name)
    adapter = save_adapter(base, tmp_path / "adapter", rank=32, dtype=torch.bfloat16)
    (adapter / "README.md").write_text("---\nlicense: mit\nbase_model: organisation/model\n---\n")
    expected = by_upstream(adapter, base, tmp_path / "upstream.gguf", "--outtype", outtype)
    done = convert_lora(LoraOptions(adapter, tmp_path / "ours.gguf", base, outtype))
    assert len(done.matrices) == 14 and not done.scaled and rescaling.NORMS_FOLDED not in done.marks
    assert (tmp_path / "ours.gguf").read_bytes() == expected.read_bytes()
    assert entries(tmp_path) == {"adapter", "upstream.gguf", "ours.gguf"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_columns_are_scaled_as_the_conversion_scales_the_matrices(
    name: str, uneven: Callable[[str], Path], folded: Callable[[str], Path], tmp_path: Path
) -> None:
    base = uneven(name)
    adapter = save_adapter(base, tmp_path / "adapter")
    plain, scaled = tmp_path / "plain.gguf", tmp_path / "folded.gguf"
    convert_lora(LoraOptions(adapter, plain, base))
    done = convert_lora(LoraOptions(adapter, scaled, base, model=folded(name)))
    convert(ConvertOptions.of(base, tmp_path / "model.gguf", outtype="f16"))
    weights = arrays(tmp_path / "model.gguf")
    norms = plan_norms(str(metadata(scaled)["general.architecture"]), weights)
    before, after = arrays(plain), arrays(scaled)
    assert (
        list(before) == list(after)
        and len(before) == 28
        and len(done.scaled) == 10
        and rescaling.NORMS_FOLDED in done.marks
    )
    for tensor, value in before.items():
        norm = norms.norm_of(tensor.removesuffix(".lora_a")) if tensor.endswith(".lora_a") else None
        gain = weights[norm] if norm else np.float32(1)
        np.testing.assert_array_equal(after[tensor], value * gain, err_msg=tensor)
    marks = metadata(scaled)
    assert marks.pop(rescaling.NORMS_FOLDED) is True and marks == metadata(plain)


@pytest.mark.slow
def test_experts_are_scaled_in_their_stack(
    uneven: Callable[[str], Path], folded: Callable[[str], Path], tmp_path: Path
) -> None:
    """A router and stacked experts read the same norm; the names are those of checkpoints with one matrix an expert."""
    base = uneven("mixtral")
    gain = torch.from_numpy(convert_f16(base, tmp_path)["blk.1.ffn_norm.weight"])
    folder = save_adapter(base, tmp_path / "adapter", ("gate",))
    tensors = load_file(folder / "adapter_model.safetensors")
    for layer in range(2):
        for expert in range(8):
            for part, shape in (("w1", (512, 256)), ("w2", (256, 512)), ("w3", (512, 256))):
                stem = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
                tensors |= halves(stem, torch.randn(4, shape[1]), torch.randn(shape[0], 4))
    save_file(tensors, folder / "adapter_model.safetensors")
    done = convert_lora(LoraOptions(folder, tmp_path / "out.gguf", base, model=folded("mixtral")))
    assert {name for name in done.scaled if name.startswith("blk.1.")} == {
        "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_inp.weight",
    }  # fmt: skip
    written = arrays(tmp_path / "out.gguf")
    for part, kind, factor in (("w1", "gate", gain), ("w3", "up", gain), ("w2", "down", torch.ones(512))):
        stack = written[f"blk.1.ffn_{kind}_exps.weight.lora_a"]
        stem = "base_model.model.model.layers.1.block_sparse_moe.experts"
        expected = np.stack([tensors[f"{stem}.{expert}.{part}.lora_A.weight"] * factor for expert in range(8)])
        np.testing.assert_array_equal(stack, expected, err_msg=kind)


def convert_f16(base: Path, tmp_path: Path) -> dict[str, np.ndarray]:
    convert(ConvertOptions.of(base, tmp_path / "base-f16.gguf", outtype="f16"))
    return arrays(tmp_path / "base-f16.gguf")


def test_rank_stabilised_alpha(adapter: Path, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """llama.cpp divides by the rank, PEFT by its root."""
    change(adapter, use_rslora=True, lora_alpha=3)
    convert_lora(LoraOptions(adapter, tmp_path / "out.gguf", uneven("llama")))
    assert metadata(tmp_path / "out.gguf")["adapter.lora.alpha"] == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "is DoRA"),
        ({"peft_type": "LOHA"}, "of the kind 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layers are repeated"),
        ({"init_lora_weights": "pissa_niter_16"}, "started from a changed model"),
        ({"alpha_pattern": {"q_proj": 16}}, "alpha_pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"lora_alpha": 0}, "lora_alpha 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"lora_alpha": "8"}, "lora_alpha '8'"),
        ({"lora_alpha": True}, "lora_alpha True"),
        ({"invocation_string": "hello"}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [-1]}, "no tokens"),
        ({"alora_invocation_tokens": list(range(5000))}, "no tokens"),
        ({"alora_invocation_tokens": "ab"}, "no tokens"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(
    fields: dict[str, object], message: str, adapter: Path, uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    change(adapter, **fields)
    with pytest.raises(UserError, match=message) as raised:
        convert_lora(LoraOptions(adapter, tmp_path / "out.gguf", uneven("llama")))
    assert str(raised.value).startswith(str(adapter / "adapter_config.json")) and "\n" not in str(raised.value)
    assert entries(tmp_path) == {"adapter"}


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def halves(name: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


A, B, OTHER = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", "base_model.model.model.layers.0.other"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({B: None}, "has no lora_B"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(256)}, "lora_magnitude_vector: is no matrix of a LoRA"),
        ({A: torch.ones(3, 256)}, "no pair of matrices"), ({A: torch.ones(256)}, "no pair of matrices"),
        ({A: torch.ones(4, 128)}, "has 128 columns, and the model 256"),
        ({A: torch.full((4, 256), torch.nan)}, "lora_A that are NaN or infinite"),
        (halves(OTHER, torch.ones(4, 256), torch.ones(256, 4)), "cannot be converted: Can not map tensor"),
        ({"base_model.model.model.embed_tokens.weight": torch.ones(512, 256)}, "embed_tokens.weight: is no matrix of"),
        (None, "holds no LoRA matrices"),
    ],
)  # fmt: skip
def test_weights_that_are_no_lora_are_refused(
    changes: dict[str, torch.Tensor | None] | None, message: str, adapter: Path, uneven: Callable[[str], Path],
    folded: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    tensors = {} if changes is None else load_file(adapter / "adapter_model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError) as raised:
        convert_lora(LoraOptions(adapter, tmp_path / "out.gguf", uneven("llama"), model=folded("llama")))
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert entries(tmp_path) == {"adapter"}


def test_ranks_that_differ(adapter: Path, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """llama.cpp reads the rank of each matrix; the root of the rank is not one number then."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors |= halves(Q, torch.ones(2, 256), torch.ones(256, 2))
    save_file(tensors, adapter / "adapter_model.safetensors")
    change(adapter, rank_pattern={"q_proj": 2})
    convert_lora(LoraOptions(adapter, tmp_path / "out.gguf", uneven("llama")))
    assert tensors_of(tmp_path / "out.gguf")["blk.0.attn_q.weight.lora_b"].data.shape == (256, 2)
    change(adapter, use_rslora=True)
    with pytest.raises(UserError, match="matrices of several ranks"):
        convert_lora(LoraOptions(adapter, tmp_path / "out2.gguf", uneven("llama")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "adapter_config.json: no such file"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("["), "is not valid JSON"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("[" * 100000), "is not valid JSON"),
        (lambda adapter: (adapter / "adapter_config.json").write_text(" " * (5 << 20)), "has more than 4 MiB"),
        (lambda adapter: (adapter / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "truncated or corrupt"),
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: no such file"),
        (lambda adapter: (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin"), "a pickle"),
        (shutil.rmtree, "is not a folder"),
    ],
)
def test_damaged_folders(
    damage: Callable[[Path], object], message: str, adapter: Path, uneven: Callable[[str], Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    damage(adapter)
    before = entries(tmp_path)
    assert cli.main(["convert-lora", str(adapter), str(tmp_path / "out.gguf"), "--base", str(uneven("llama"))]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
    assert entries(tmp_path) == before


@pytest.mark.slow
def test_no_code_of_adapter_or_model_runs(
    adapter: Path, llama_copy: Path, folded: Callable[[str], Path], tmp_path: Path
) -> None:
    """Neither a class that a config names nor a hub that it names is asked."""
    for folder in (adapter, llama_copy):
        (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((llama_copy / "config.json").read_text())
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}
    config |= {"model_type": "nobodys", "auto_map": names, "_name_or_path": str(adapter)}
    (llama_copy / "config.json").write_text(json.dumps(config))
    change(adapter, auto_map=names, base_model_name_or_path="organisation/nothing")
    for model in (folded("llama"), None):
        out = tmp_path / f"{model is None}.gguf"
        assert len(convert_lora(LoraOptions(adapter, out, llama_copy, model=model)).matrices) == 14
    assert not (tmp_path / "ran").exists()


def test_command(
    adapter: Path, uneven: Callable[[str], Path], folded: Callable[[str], Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "x-{ftype}.gguf"
    arguments = ["convert-lora", str(adapter), str(out), "--base", str(uneven("llama"))]
    arguments += ["--outtype", "f16", "--model", str(folded("llama"))]
    upstream.load_conversion()  # puts folders on the path, once in a process
    before = sys.argv, list(sys.path)
    assert cli.main(arguments) == 0
    assert (sys.argv, sys.path) == before
    assert "x-F16.gguf: 14 matrices, for a model with folded norms, 10 scaled, " in capsys.readouterr().out
    assert cli.main([*arguments[:2], str(tmp_path / "no" / "x.gguf"), *arguments[3:]]) == 1
    assert "no/x.gguf: cannot be written: No such file or directory; create the folder first" in capsys.readouterr().err
    assert cli.main([*arguments[:2], str(adapter / "adapter_model.safetensors"), *arguments[3:]]) == 1
    assert "it is a file of the input" in capsys.readouterr().err
    assert cli.main([*arguments[:4], str(tmp_path), *arguments[5:]]) == 1
    assert "config.json: no such file" in capsys.readouterr().err
    assert len(ALL_LINEAR) == 7 and entries(tmp_path) == {"adapter", "x-F16.gguf"}


# ----------------------------------------------------------------------------------------------- the output matrix


@pytest.mark.parametrize("name", ["gemma", "llama-tied"])
@pytest.mark.parametrize("source", ["checkpoint", "config", "file"])
@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_an_output_matrix_that_is_the_embedding_is_not_adapted(
    module: str, name: str, source: str, uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    """Upstream leaves the matrix out (Gemma), or writes one that llama.cpp does not find in the model; an adapter of
    the embedding stops llama.cpp at an assertion."""
    base, model = uneven(name), None
    adapter = save_adapter(base, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    if module == "lm_head":
        halves = {"A.weight": (4, 256), "B.weight": (512, 4)}
    else:
        halves = {"embedding_A": (4, 512), "embedding_B": (256, 4)}
    tensors |= {f"base_model.model.{module}.lora_{half}": torch.randn(shape) for half, shape in halves.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    if source == "config":
        base = tmp_path / "base"
        base.mkdir()
        shutil.copy(uneven(name) / "config.json", base)
    elif source == "file":
        model = convert(ConvertOptions.of(base, tmp_path / "m.gguf", outtype="f16"), io.StringIO()).path
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: \S+: is of the embedding or the output matrix; "):
        convert_lora(LoraOptions(adapter, tmp_path / "out.gguf", base, model=model))
    assert not list(tmp_path.glob("*out.gguf*"))


def test_matrices_of_other_parts_are_left_out_and_named(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """An adapter of a multimodal model has some on its tower; the text model's are converted."""
    adapter = save_adapter(uneven("llama"), tmp_path / "adapter", ("q_proj",))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for half in ("A", "B"):
        name = f"base_model.model.vision_tower.layers.0.attn.q_proj.lora_{half}.weight"
        tensors[name] = tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight"].clone()
    save_file(tensors, adapter / "adapter_model.safetensors")
    messages = io.StringIO()
    done = convert_lora(LoraOptions(adapter, tmp_path / "out.gguf", uneven("llama")), messages)
    assert done.matrices == ["blk.0.attn_q.weight", "blk.1.attn_q.weight"]
    what = "1 matrices are no part of the text model and are left out: vision_tower.layers.0.attn.q_proj.weight"
    assert messages.getvalue() == f"note: {adapter}: {what}\n"
