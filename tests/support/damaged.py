"""Checkpoints with one tensor missing or of another shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

#: Every kind of tensor of a Llama: its name in the checkpoint -> its GGUF name.
KINDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
    "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
    "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
    "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
    "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
    "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
    "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
}


def edit_json(path: Path, **changes: Any) -> None:
    """Other entries of the object in a file, a config for instance."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop(folder: Path, name: str) -> None:
    """Take a tensor out of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def halve(folder: Path, name: str) -> None:
    """Leave a tensor the first half of its rows (or, of a vector, of its values)."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()
    save_file(tensors, folder / "model.safetensors")


def dry_run(folder: Path) -> str:
    """Which check a dry run made of the folder."""
    return convert(ConvertOptions.of(folder, folder / "out.gguf", dry_run=True)).check
