"""A Llama of 0.6 billion random weights, written as GGUF in any type: what scripts/bench/kernels.py times."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from gguf_itq3s.codec.native import NativeLibrary

N_EMBD = 2048
N_FF = 5632
N_HEAD = 16
N_HEAD_KV = 4
N_LAYER = 12
N_VOCAB = 32000
# Weights that are quantized; tensors repeat them.
POOL = 1 << 20
OUTPUT_TYPE = gguf.GGMLQuantizationType.Q6_K

KV = N_EMBD // N_HEAD * N_HEAD_KV
MATRICES = {
    "attn_q": (N_EMBD, N_EMBD),
    "attn_k": (KV, N_EMBD),
    "attn_v": (KV, N_EMBD),
    "attn_output": (N_EMBD, N_EMBD),
    "ffn_gate": (N_FF, N_EMBD),
    "ffn_up": (N_FF, N_EMBD),
    "ffn_down": (N_EMBD, N_FF),
}
WEIGHTS = N_LAYER * sum(rows * columns for rows, columns in MATRICES.values()) + N_VOCAB * N_EMBD


def quantized_pool(library: NativeLibrary, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The bytes of ``POOL`` Gaussian weights in the type."""
    x = (np.random.default_rng(1).standard_normal(POOL) * 0.02).astype(np.float32)
    if kind == gguf.GGMLQuantizationType.F16:
        return x.astype(np.float16).view(np.uint8)
    return library.quantize_type(x[None], kind).ravel()


def write(path: Path, kind: gguf.GGMLQuantizationType, library: NativeLibrary) -> None:
    """Write the model with its matrices in ``kind``, embedding and output (tied) in Q6_K, norms in F32.

    Half-written files keep the suffix .partial.
    """
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name(f"random llama, {kind.name}")
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("none")

    def add(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType, pool: np.ndarray) -> None:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.resize(pool, (rows, columns // block * size))
        writer.add_tensor(name, data, raw_dtype=kind)

    add("token_embd.weight", N_VOCAB, N_EMBD, OUTPUT_TYPE, quantized_pool(library, OUTPUT_TYPE))
    ones = np.ones(N_EMBD, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    pool = quantized_pool(library, kind)
    for layer in range(N_LAYER):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for name, (rows, columns) in MATRICES.items():
            add(f"blk.{layer}.{name}.weight", rows, columns, kind, pool)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
