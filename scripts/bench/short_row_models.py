"""Mixtures of experts whose rows are no multiple of 256, as Hugging Face folders without weights or with random ones.

The names and shapes of the tensors are those of the checkpoints on the hub. Layers, experts and the vocabulary can be
fewer, the lengths of the rows stay.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]

#: Layers of Nemotron 3 Nano 30B-A3B: M Mamba-2, E experts, * attention.
NEMOTRON_PATTERN: Final = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
#: What the matrices of a safetensors file without weights are said to be, two bytes a weight.
_STORED: Final = "BF16"
_SIGMA: Final = 0.02


@dataclass(frozen=True)
class Model:
    """A model that has no weights yet.

    Attributes:
        config: ``config.json``.
        shapes: of the checkpoint's tensors, rows last.
    """

    config: Mapping[str, Any]
    shapes: Shapes

    @property
    def weights(self) -> int:
        """Of all tensors."""
        return sum(map(math.prod, self.shapes.values()))


def nemotron(pattern: str = NEMOTRON_PATTERN, experts: int = 128, vocabulary: int = 131072) -> Model:
    """Nemotron 3 Nano 30B-A3B, or less of it.

    Args:
        pattern: its layers, letters of :data:`NEMOTRON_PATTERN`.
        experts: of a layer.
        vocabulary: tokens.
    """
    hidden, inner, shared = 2688, 1856, 3712
    heads, kv_heads, head = 32, 2, 128
    mamba_heads, mamba_head, groups, state, kernel = 64, 64, 8, 128, 4
    config = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern), "hidden_size": hidden, "vocab_size": vocabulary, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "attention_bias": False,
        "mamba_num_heads": mamba_heads, "mamba_head_dim": mamba_head, "n_groups": groups, "ssm_state_size": state,
        "conv_kernel": kernel, "expand": 2, "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "n_routed_experts": experts, "num_experts_per_tok": min(6, experts),
        "moe_intermediate_size": inner, "moe_shared_expert_intermediate_size": shared, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 262144, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    mamba = mamba_heads * mamba_head
    convolved = mamba + 2 * groups * state
    parts: dict[str, Shapes] = {
        "M": {
            "in_proj.weight": (mamba + convolved + mamba_heads, hidden), "out_proj.weight": (hidden, mamba),
            "conv1d.weight": (convolved, 1, kernel), "conv1d.bias": (convolved,), "norm.weight": (mamba,),
            "A_log": (mamba_heads,), "D": (mamba_heads,), "dt_bias": (mamba_heads,),
        },
        "*": {
            "q_proj.weight": (heads * head, hidden), "k_proj.weight": (kv_heads * head, hidden),
            "v_proj.weight": (kv_heads * head, hidden), "o_proj.weight": (hidden, heads * head),
        },
        "E": {
            "gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,),
            "shared_experts.up_proj.weight": (shared, hidden), "shared_experts.down_proj.weight": (hidden, shared),
            **{f"experts.{i}.up_proj.weight": (inner, hidden) for i in range(experts)},
            **{f"experts.{i}.down_proj.weight": (hidden, inner) for i in range(experts)},
        },
    }  # fmt: skip
    shapes: Shapes = {"backbone.embeddings.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    shapes["backbone.norm_f.weight"] = (hidden,)
    for layer, kind in enumerate(pattern):
        shapes[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
        shapes |= {f"backbone.layers.{layer}.mixer.{name}": shape for name, shape in parts[kind].items()}
    return Model(config, shapes)


def glm(layers: int = 46, experts: int = 128, vocabulary: int = 151552) -> Model:
    """GLM-4.5-Air without its layer for multi-token prediction, or less of it.

    Args:
        layers: of them the first is dense.
        experts: of the other layers.
        vocabulary: tokens.
    """
    hidden, dense, inner = 4096, 10944, 1408
    heads, kv_heads, head = 96, 8, 128
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": layers,
        "hidden_size": hidden, "vocab_size": vocabulary, "intermediate_size": dense, "moe_intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "attention_bias": True,
        "n_routed_experts": experts, "num_experts_per_tok": min(8, experts), "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_qk_norm": False, "num_nextn_predict_layers": 0, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }  # fmt: skip

    def feed_forward(name: str, size: int) -> Shapes:
        ends = {f"{name}.gate_proj.weight": (size, hidden), f"{name}.up_proj.weight": (size, hidden)}
        return {**ends, f"{name}.down_proj.weight": (hidden, size)}

    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(layers):
        place = f"model.layers.{layer}"
        shapes |= {f"{place}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{place}.self_attn.{name}_proj.weight"] = (count * head, hidden)
            shapes[f"{place}.self_attn.{name}_proj.bias"] = (count * head,)
        shapes[f"{place}.self_attn.o_proj.weight"] = (hidden, heads * head)
        if layer == 0:
            shapes |= feed_forward(f"{place}.mlp", dense)
            continue
        shapes[f"{place}.mlp.gate.weight"] = (experts, hidden)
        shapes[f"{place}.mlp.gate.e_score_correction_bias"] = (experts,)
        shapes |= feed_forward(f"{place}.mlp.shared_experts", inner)
        for i in range(experts):
            shapes |= feed_forward(f"{place}.mlp.experts.{i}", inner)
    return Model(config, shapes)


def write_without_weights(folder: Path, model: Model) -> None:
    """A folder whose safetensors file is a header and a hole of the size that the weights would have."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    entries, offset = {}, 0
    for name, shape in model.shapes.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": _STORED, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)


def write_random(folder: Path, model: Model, tokenizer: Path) -> None:
    """A folder with Gaussian weights in bfloat16, gains of one and biases of zero.

    Args:
        folder: where to.
        model: what it is.
        tokenizer: a folder with a SentencePiece tokenizer, which is put beside.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    chance = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in model.shapes.items():
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            tensor.normal_(0, _SIGMA, generator=chance)
        elif "norm" in name or name.endswith(".D"):
            tensor.fill_(1)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def repeat_experts(source: Path, target: Path, times: int) -> None:
    """Write a GGUF file whose mixtures have every expert of another file's several times.

    What quantizes a matrix by itself makes the same bytes of a checkpoint with such experts. The routers are new, so
    that copies are chosen apart.

    Args:
        source: a file with routers in F32.
        target: the other; replaced if it is there.
        times: copies of each expert.
    """
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == f"{arch}.expert_count":
            value *= times
        kind, element = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=element)
    chance = np.random.default_rng(0)
    arrays = []
    for tensor in reader.tensors:
        # the reader's arrays run as numpy's do, experts first
        copies = times if "_exps." in tensor.name or "exp_probs_b" in tensor.name else 1
        data = tensor.data
        if "ffn_gate_inp" in tensor.name:
            rows, columns = data.shape
            data = chance.normal(0, _SIGMA, (rows * times, columns)).astype(np.float32)
        arrays.append((data, copies))
        shape = (data.shape[0] * copies, *data.shape[1:])
        writer.add_tensor_info(tensor.name, shape, data.dtype, data.nbytes * copies, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for data, copies in arrays:
        content = data.tobytes()
        for _ in range(copies):
            file.write(content)
        writer.write_padding(file, data.nbytes * copies)
    writer.close()
