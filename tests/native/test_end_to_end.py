"""The whole way: a Hugging Face folder, an ITQ3_S file, and the built llama.cpp that loads and runs it."""

from __future__ import annotations

import re
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import llama
import llama_server
from checkpoints import NOVEL
from divergence import log_probabilities, mean_kld
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec.types import ITQ3_S

PROMPT = "The old house stood at the end of the lane, and"


def convert(model: Path, out: Path, *options: str) -> Path:
    assert convert_main([str(model), str(out), *options]) == 0
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    made = {
        kind: convert(llama.MODEL, folder / f"{kind}.gguf", "--outtype", kind) for kind in ("itq3_s", "f16", "tq2_0")
    }
    made["pure"] = convert(llama.MODEL, folder / "pure.gguf", "--pure")
    return made


def dequantized(source: Path, target: Path) -> Path:
    """An F16 file that holds the weights of ``source``."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_llama_quantize_writes_the_same_blocks(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "quantized.gguf"
    llama.run("llama-quantize", "--pure", files["f16"], out, "ITQ3_S", "2")
    reader = gguf.GGUFReader(out)
    assert reader.fields["general.file_type"].contents() == 510
    assert reader.fields["itq3s.version"].contents() == 3
    assert reader.fields["itq3s.codec"].contents() == "trellis"
    theirs = {t.name: t for t in reader.tensors}
    compared = 0
    for tensor in gguf.GGUFReader(convert(llama.MODEL, tmp_path / "plain.gguf", "--pure", "--no-fold-norms")).tensors:
        assert theirs[tensor.name].tensor_type == tensor.tensor_type, tensor.name
        if tensor.tensor_type == ITQ3_S:
            np.testing.assert_array_equal(theirs[tensor.name].data, tensor.data, err_msg=tensor.name)
            compared += 1
    assert compared >= 7 * 4


@pytest.mark.parametrize("kind", ["itq3_s", "pure"])
def test_perplexity_is_that_of_the_dequantized_weights(files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    text = llama.evaluation_text()
    expected = llama.perplexity(dequantized(files[kind], tmp_path / "f16.gguf"), text)
    assert llama.perplexity(files[kind], text) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("kind", ["pure", "tq2_0"])
def test_the_buffer_of_panels_holds_the_matrices(files: dict[str, Path], kind: str) -> None:
    """Not the look-up of embeddings, and nothing with --no-repack; the text is the same."""
    tensors = gguf.GGUFReader(files[kind]).tensors
    ours = (ITQ3_S, gguf.GGMLQuantizationType.TQ1_0, gguf.GGMLQuantizationType.TQ2_0)
    sizes = []
    for tensor in tensors:
        if tensor.tensor_type in ours:  # the embedding too, which is the output
            panels = int(tensor.shape[1]) // 16
            sizes.append(panels * -(-(int(tensor.n_bytes) // panels) // 64) * 64)
    assert len(sizes) in (42, 43)
    options: list[str | Path] = [
        "-m", files[kind], "-p", PROMPT, "-n", "32", "--temp", "0", "-no-cnv", "--no-warmup", "-t", "2", "-v"
    ]  # fmt: skip
    texts = []
    for more, held in (([], sum(sizes)), (["-lm", "none"], sum(sizes)), (["-nr"], 0)):
        done = llama.run("llama-completion", *options, *more)
        buffers = re.findall(r"(\S+) model buffer size = +([0-9.]+) MiB", done.stderr)
        assert buffers, done.stderr[-2000:]
        assert sum(float(size) for name, size in buffers if name == "CPU_ITQ3S") == pytest.approx(
            held / 2**20, abs=0.02
        )
        texts.append(done.stdout)
    assert len(texts[0].partition(PROMPT)[2]) > 60 and len(set(texts)) == 1


@pytest.mark.parametrize("kind", ["itq3_s", "tq2_0"])
def test_a_text_does_not_depend_on_those_beside_it(
    files: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, alone and among eight, without what is upstream's and adds in another order for more tokens: flash
    attention for 64, tiles of Q6_K, on a processor with AVX2 alone, for eight."""
    monkeypatch.setenv("GGML_CPU_TILED_MM", "0")
    words = NOVEL.read_text().split()
    prompts = [" ".join(words[97 * i : 97 * i + 3 + 5 * (i % 9)]) for i in range(24)]
    with llama_server.running("-m", files[kind], "-np", "8", "-c", "4096", "-fa", "off") as server:

        def text(prompt: str) -> str:
            body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
            return str(server.post("/completion", body)["content"])

        alone = [text(prompt) for prompt in prompts]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(text, prompts))
    assert all(len(answer) > 20 for answer in alone)
    assert together == alone


def test_mixture_of_experts_runs(tmp_path: Path) -> None:
    """mul_mat_id: a Mixtral of random weights, beside the F16 file of the same dequantized weights."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path / "mixtral"
    MixtralForCausalLM(config).half().save_pretrained(folder)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(llama.MODEL / name, folder / name)
    made = convert(folder, tmp_path / "moe.gguf", "--pure")
    experts = [t for t in gguf.GGUFReader(made).tensors if "_exps" in t.name]
    assert len(experts) == 6 and all(t.tensor_type == ITQ3_S for t in experts)
    base = log_probabilities(dequantized(made, tmp_path / "moe-f16.gguf"), tmp_path / "base")
    # 0.014 by rounded activations; 1.1 with the experts of one matrix in another order
    assert mean_kld(made, base) < 0.1


def patched(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = source.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    target.write_bytes(data.replace(old, new))
    return target


def tensor_info(name: str, shape: tuple[int, int], kind: int) -> bytes:
    """The bytes of a GGUF tensor info up to its offset."""
    encoded = name.encode()
    return struct.pack("<Q", len(encoded)) + encoded + struct.pack("<IQQI", 2, *shape, kind)


@pytest.mark.parametrize(
    "shape,kind,message",
    [
        ((255, 256), 510, "not a multiple of block size"),
        ((128, 512), 510, "not a multiple of block size"),
        ((256, 512), 510, "offset"),
        ((512, 128), 510, None),  # a whole file, of another model
        ((256, 256), 500, "invalid ggml type 500"),
        ((256, 256), 511, "never in a file"),
    ],
    ids=["row length", "row of 128", "more rows", "longer rows", "the former code", "activation type"],
)
def test_the_loader_refuses_a_broken_file(
    files: dict[str, Path], tmp_path: Path, shape: tuple[int, int], kind: int, message: str | None
) -> None:
    name = "blk.0.attn_q.weight"
    assert {t.name: t.shape.tolist() for t in gguf.GGUFReader(files["pure"]).tensors}[name] == [256, 256]
    broken = patched(
        files["pure"], tmp_path / "broken.gguf", tensor_info(name, (256, 256), 510), tensor_info(name, shape, kind)
    )
    done = llama.run("llama-completion", "-m", broken, "-p", "x", "-n", "1", "-no-cnv", check=False)
    assert done.returncode == 1
    if message is None:
        return
    assert message in done.stdout + done.stderr
    done = llama.run("llama-quantize", "--allow-requantize", broken, tmp_path / "out.gguf", "Q8_0", check=False)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr


def test_a_truncated_file_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(files["pure"].read_bytes()[:-5000])
    done = llama.run("llama-completion", "-m", short, "-p", "x", "-n", "1", "-no-cnv", check=False)
    assert done.returncode == 1
    assert "corrupted or incomplete" in done.stdout + done.stderr
    done = llama.run("llama-quantize", "--allow-requantize", short, tmp_path / "out.gguf", "Q8_0", check=False)
    assert done.returncode == 1
    assert "corrupted or incomplete" in done.stdout + done.stderr


def test_invalid_scales_are_found(files: dict[str, Path], tmp_path: Path) -> None:
    """ggml_validate_row_data covers the type: a NaN scale stops --check-tensors."""
    tensor = next(t for t in gguf.GGUFReader(files["pure"]).tensors if t.tensor_type == ITQ3_S)
    data = bytearray(files["pure"].read_bytes())
    data[tensor.data_offset + 96 : tensor.data_offset + 98] = b"\x00\x7e"
    broken = tmp_path / "nan.gguf"
    broken.write_bytes(data)
    options = ["-p", "x", "-n", "1", "-no-cnv", "--check-tensors"]
    assert llama.run("llama-completion", "-m", broken, *options, check=False).returncode == 1
    assert llama.run("llama-completion", "-m", files["pure"], *options, check=False).returncode == 0
