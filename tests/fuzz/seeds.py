#!/usr/bin/env python3
"""Write the headers that fuzzing starts from, into tests/fuzz/corpus/header: small models with tensors of our types."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gguf_itq3s  # noqa: E402, F401  (before anything imports gguf)

# isort: split
import gguf  # noqa: E402

from gguf_itq3s.codec.family import FAMILY, FILE_VERSION  # noqa: E402
from gguf_itq3s.codec.types import ITQ3_N, ITQ3_S  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "corpus" / "header"
F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
TQ1_0, TQ2_0 = gguf.GGMLQuantizationType.TQ1_0, gguf.GGMLQuantizationType.TQ2_0
LOW, EXPERTS = 32, 2
#: Of a row: whole blocks of 256, and of 64 alone.
WIDTH, SHORT = 256, 192


def tensor(writer: gguf.GGUFWriter, name: str, kind: gguf.GGMLQuantizationType, *shape: int) -> None:
    """Announce a tensor; shape as numpy has it, the row last. Its bytes are not written."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    elements = 1
    for count in shape:
        elements *= count
    shape = (*shape[:-1], shape[-1] // block * size)
    dtype = {F32: "float32", F16: "float16"}.get(kind, "uint8")
    if kind in (F32, F16):
        shape = (*shape[:-1], shape[-1] // size)
    import numpy as np

    writer.add_tensor_info(name, shape, np.dtype(dtype), elements // block * size, raw_dtype=kind)


def model(
    name: str, architecture: str, kind: gguf.GGMLQuantizationType, vocabulary: str, experts: int = 0, width: int = WIDTH
) -> bytes:
    """The header of a model of one layer with rows of ``width`` weights."""
    path = FOLDER / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("seed")
    trellis = FAMILY.get(kind)
    writer.add_file_type(trellis.file_type if trellis else 36)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(LOW)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(LOW)
    writer.add_value_length(LOW)
    writer.add_rope_dimension_count(LOW)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if trellis:
        writer.add_uint32("itq3s.version", FILE_VERSION)
        writer.add_string("itq3s.codec", "trellis")
        writer.add_string("itq3s.effort", "default")
        writer.add_bool("itq3s.calibrated", False)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(1)
    if vocabulary == "spm":
        tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "b", "\u2581a", "ab"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([2, 3, 3, 6, 1, 1, 1, 1, 1])
    else:
        tokens = ["a", "b", "\u0120", "ab", "\u0120a", "<|end|>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([1, 1, 1, 1, 1, 3])
        writer.add_token_merges(["a b", "\u0120 a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    tensor(writer, "token_embd.weight", kind, len(tokens), width)
    tensor(writer, "output_norm.weight", F32, width)
    tensor(writer, "blk.0.attn_norm.weight", F32, width)
    tensor(writer, "blk.0.ffn_norm.weight", F32, width)
    for part in "qkv":
        tensor(writer, f"blk.0.attn_{part}.weight", kind, LOW, width)
        if architecture == "qwen2":
            tensor(writer, f"blk.0.attn_{part}.bias", F32, LOW)
    tensor(writer, "blk.0.attn_output.weight", F16, width, LOW)
    if experts:
        tensor(writer, "blk.0.ffn_gate_inp.weight", F32, experts, width)
    middle, each = ("_exps", (experts,)) if experts else ("", ())
    for part in ("gate", "up"):
        tensor(writer, f"blk.0.ffn_{part}{middle}.weight", kind, *each, LOW, width)
    tensor(writer, f"blk.0.ffn_down{middle}.weight", F16, *each, width, LOW)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = path.read_bytes()
    path.write_bytes(header + bytes(-len(header) % 32))
    return header


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    model("llama-itq3_s", "llama", ITQ3_S, "spm")
    model("llama-tq1_0", "llama", TQ1_0, "bpe")
    model("qwen2-tq2_0", "qwen2", TQ2_0, "bpe")
    model("llama-experts", "llama", ITQ3_S, "bpe", EXPERTS)
    model("llama-itq3_n", "llama", ITQ3_N, "spm", width=SHORT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
