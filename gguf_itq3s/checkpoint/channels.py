"""Channels of a model: what makes them, what reads them, and which of them can be rescaled.

Three things make channels: the gain of an RMSNorm, for all matrices that read the norm; the rows of v, for the columns
of the attention's output, each for all query heads of a key-value head; the rows of up, for the columns of down, where
the feed-forward network is gated. Between them stands nothing but a linear map, so one may be multiplied by what the
other is divided by (:mod:`gguf_itq3s.checkpoint.rescaling`).

Only what is proved is acted on: an architecture whose channels of that kind were rescaled at random in a model of
random weights, which llama.cpp then predicted the same with (scripts/tables/architectures.py), and in each layer no
tensor that is not known. What is left alone is said. ``output_norm`` is never among them: pooled embeddings are taken
behind it, and would be those of another model; its matrix gets more bits anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, get_tensor_name_map

#: Kinds of channels, by what makes them.
KINDS: Final = ("norms", "values", "products")
#: Architecture -> the kinds of channels that are proved.
PROVED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "afmoe", "chatglm", "cohere2", "cohere2moe", "command-r", "dots1", "ernie4_5", "ernie4_5-moe", "exaone-moe",
            "gemma", "gemma2", "gemma3", "glm4", "glm4moe", "granite", "granitehybrid", "granitemoe", "hunyuan-dense",
            "hunyuan-moe", "hy_v3", "internlm2", "jamba", "laguna", "lfm2", "llama", "mellum", "minimax-m2", "mistral3",
            "olmoe", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "seed_oss",
            "smollm3",
        ),
        KINDS,
    ),
    **dict.fromkeys(("apertus", "arcee", "gpt-oss"), ("norms", "values")),
    **dict.fromkeys(("deepseek2", "deepseek32", "gemma4", "glm-dsa", "lfm2moe"), ("norms", "products")),
    **dict.fromkeys(("exaone4", "falcon-h1", "olmo", "olmo2", "stablelm"), ("values", "products")),
    **dict.fromkeys(("mamba", "mamba2"), ("norms",)),
    **dict.fromkeys(("bloom", "gpt2", "jais2", "nemotron", "phi2", "starcoder", "starcoder2"), ("values",)),
}  # fmt: skip
#: Of these, those with one matrix of gate and up, under the name of up.
_FUSED_UP: Final = frozenset({"phi3", "chatglm", "glm4"})

_MIXERS: Final = (
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_q_a", "attn_kv_a_mqa", "indexer.attn_k",
    "indexer.proj", "ssm_in", "ssm_alpha", "ssm_beta", "ssm_ba", "shortconv.in_proj",
)  # fmt: skip
#: Of these, those that have the rows of v.
VALUES: Final = ("attn_v", "attn_qkv")
_FEED_FORWARD: Final = (
    "ffn_gate", "ffn_up", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_gate_inp_shexp",
    "ffn_gate_shexp", "ffn_up_shexp",
)  # fmt: skip
#: Of these, those that are never rounded: the ways of tokens to experts.
ROUTERS: Final = ("ffn_gate_inp", "ffn_gate_inp_shexp")

#: Tensors of a layer that read none of its norms.
_OTHERS: Final = frozenset(
    {
        "attn_norm", "ffn_norm", "attn_output", "attn_q_norm", "attn_k_norm", "attn_sub_norm", "attn_rot_embd",
        "attn_post_norm", "post_attention_norm", "post_ffw_norm", "ffn_down", "ffn_down_exps", "ffn_down_shexp",
        "rope_freqs", "rope_factors_long", "rope_factors_short", "attn_sinks", "exp_probs_b", "attn_q_a_norm",
        "attn_q_b", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_kv_b", "indexer.attn_q_b", "indexer.k_norm",
        "ssm_conv1d", "ssm_dt", "ssm_norm", "ssm_out", "ssm_x", "ssm_b_norm", "ssm_c_norm", "ssm_dt_norm",
        "shortconv.conv", "shortconv.out_proj", "inp_gate", "proj", "post_norm", "layer_output_scale",
    }
)  # fmt: skip
# Biases are added after the product, so the columns of their matrices can be rescaled.
_LAYER: Final = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")


@dataclass(frozen=True)
class Norms:
    """The norms of a model whose readers are known.

    Attributes:
        readers: norm -> the matrices that read it, all by GGUF name.
        left_alone: a line for each norm, or all of them, whose are not, or cannot be rescaled.
    """

    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_alone: Sequence[str] = ()

    @cached_property
    def _of(self) -> dict[str, str]:
        return {reader: norm for norm, readers in self.readers.items() for reader in readers}

    def norm_of(self, name: str) -> str | None:
        """The norm that a matrix reads, or None."""
        return self._of.get(name)

    @property
    def note(self) -> str:
        """What is left alone, a line for each; empty if nothing is."""
        return "\n  ".join(["note: norms that are not folded:", *self.left_alone]) if self.left_alone else ""


@dataclass(frozen=True)
class Channels:
    """Channels that one tensor makes and matrices read.

    Attributes:
        source: the norm, or the matrix whose rows they are, by GGUF name.
        readers: the matrices whose columns read them.
        count: how many; of each expert's.
        start: the first row of the source that is one: a fused matrix has others before.
        rows: of the source, of one expert.
        head: channels of a head, which are read ``repeats`` times in a row.
        repeats: query heads of a key-value head.
        experts: stacked matrices of the source with channels of their own each; 0 for one set of channels.
        bias: of the source, if it has one.
    """

    source: str
    readers: tuple[str, ...]
    count: int
    start: int
    rows: int
    head: int
    repeats: int = 1
    experts: int = 0
    bias: str | None = None

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        part = self.source.split(".")[-2]
        return "norms" if part.endswith("_norm") else "values" if part in VALUES else "products"

    @property
    def shape(self) -> tuple[int, int]:
        """Of their factors: experts or 1, and how many channels."""
        return max(1, self.experts), self.count

    @property
    def of_column(self) -> npt.NDArray[np.int64]:
        """int64 (count * repeats,): the channel that each column of a reader reads."""
        heads = np.arange(self.count).reshape(-1, 1, self.head)
        return np.broadcast_to(heads, (heads.shape[0], self.repeats, self.head)).reshape(-1)


@dataclass(frozen=True)
class Plan:
    """The channels of a model that can be rescaled.

    Attributes:
        channels: source -> channels.
        left_alone: a line for each source that is not among them, or for all.
    """

    channels: Mapping[str, Channels] = field(default_factory=dict)
    left_alone: Sequence[str] = ()


def readers_in_checkpoint(names: Iterable[str], layers: int) -> dict[str, list[str]]:
    """Norm -> the matrices that read it, by the names of a Hugging Face checkpoint of Llama's architecture."""
    by_gguf_name = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    here = {gguf_name: name for name in names if (gguf_name := by_gguf_name.get_name(name, try_suffixes=(".weight",)))}
    found = dict(plan_norms("llama", here).readers)
    if {"output_norm.weight", "output.weight"} <= here.keys():
        found["output_norm.weight"] = ("output.weight",)
    return {here[norm]: [here[reader] for reader in readers] for norm, readers in found.items()}


def _layers(names: Iterable[str]) -> dict[int, dict[str, str]]:
    """Layer -> part (``attn_q``, ``attn_q.bias``) -> GGUF name."""
    layers: dict[int, dict[str, str]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            part = match[2] if match[3] == "weight" else f"{match[2]}.bias"
            layers.setdefault(int(match[1]), {})[part] = name
    return dict(sorted(layers.items()))


def _strange(parts: Iterable[str]) -> str | None:
    """The first tensor of a layer that is not known; it may read anything."""
    expected = _OTHERS.union(_MIXERS, _FEED_FORWARD)
    return min((part for part in parts if part.removesuffix(".bias") not in expected), default=None)


def _readers(parts: Mapping[str, str]) -> dict[str, list[str]]:
    """The norms of a layer, by their parts, and what reads them."""
    first = second = "attn_norm"
    if "ffn_norm" in parts:
        second = "ffn_norm"
    elif first in parts and "post_attention_norm" in parts:  # some call it by its place
        second = "post_attention_norm"
    found: dict[str, list[str]] = {norm: [] for norm in dict.fromkeys((first, second)) if norm in parts}
    for norm, readers in ((first, _MIXERS), (second, _FEED_FORWARD)):
        found.get(norm, []).extend(parts[part] for part in readers if part in parts)
    return found


def _not_proved(arch: str, kinds: Iterable[str]) -> list[str]:
    """A line where there are any."""
    missing = [kind for kind in kinds if kind not in PROVED.get(arch, ())]
    return [f"{', '.join(missing)} of the architecture {arch}: not proved that they can be rescaled"] * bool(missing)


def plan_norms(arch: str, names: Iterable[str], fixed: Callable[[str], bool] = lambda _: False) -> Norms:
    """Which norms of a model can be rescaled, by the names of its tensors; the rest as of :func:`plan`."""
    if missing := _not_proved(arch, ("norms",)):
        return Norms({}, missing)
    norms: dict[str, tuple[str, ...]] = {}
    left_alone = []
    for number, parts in _layers(names).items():
        strange = _strange(parts)
        for norm, readers in _readers(parts).items():
            stay = [reader for reader in readers if fixed(reader)]
            if strange is not None:
                left_alone.append(f"{parts[norm]}: layer {number} has a tensor that is not known, {strange}")
            elif f"{norm}.bias" in parts:
                left_alone.append(f"{parts[norm]}: the norm has a bias")
            elif not readers:
                left_alone.append(f"{parts[norm]}: no matrix reads it")
            elif stay:
                left_alone.append(f"{parts[norm]}: {stay[0]} is quantized or ternary already")
            else:
                norms[parts[norm]] = tuple(readers)
    return Norms(norms, left_alone)


def plan(
    arch: str,
    shapes: Mapping[str, tuple[int, ...]],
    heads: int,
    *,
    clamped: bool = False,
    fixed: Callable[[str], bool] = lambda _: False,
) -> Plan:
    """Which channels of a model can be rescaled.

    Args:
        arch: ``general.architecture``.
        shapes: of all its tensors, numpy order, by GGUF name.
        heads: query heads of a layer; 0 where that is not known.
        clamped: whether values of v are cut off.
        fixed: whether a matrix cannot be rescaled, as one that is quantized already or ternary.
    """
    norms = plan_norms(arch, shapes, fixed)
    channels = {}
    proved = PROVED.get(arch, ())
    left_alone = [*_not_proved(arch, KINDS), *(norms.left_alone if "norms" in proved else ())]
    for norm, readers in norms.readers.items():
        count = shapes[norm][-1]
        if wrong := [reader for reader in readers if shapes[reader][-1] != count]:
            left_alone.append(f"{norm}: {wrong[0]} has {shapes[wrong[0]][-1]} columns, not {count}")
        else:
            channels[norm] = Channels(norm, readers, count, 0, count, count)
    behind = [*("attn_output",) * ("values" in proved), *(_DOWN if "products" in proved else ())]
    for number, parts in _layers(shapes).items():
        strange = _strange(parts)
        for reader in (reader for reader in behind if reader in parts):
            found: Channels | str
            if strange is not None:
                found = f"layer {number} has a tensor that is not known, {strange}"
            elif reader != "attn_output":
                found = _products(arch, parts, shapes, reader)
            else:
                found = "values of v are clamped" if clamped else _values(parts, shapes, heads)
            if isinstance(found, Channels) and (stay := [n for n in (found.source, *found.readers) if fixed(n)]):
                found = f"{stay[0]} is quantized or ternary already"
            if isinstance(found, str):
                left_alone.append(f"columns of {parts[reader]}: {found}")
            else:
                channels[found.source] = found
    return Plan(channels, left_alone)


#: Matrices behind a gated feed-forward network -> its gate, its up matrix, and one of both.
_DOWN: Final = {
    "ffn_down": ("ffn_gate", "ffn_up", None), "ffn_down_exps": ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"),
    "ffn_down_shexp": ("ffn_gate_shexp", "ffn_up_shexp", None),
}  # fmt: skip


def _values(parts: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], heads: int) -> Channels | str:
    """The rows of v for the columns of the attention's output, or why they cannot be rescaled."""
    if "attn_sub_norm" in parts:
        return "a norm stands between it and v"
    columns = shapes[parts["attn_output"]][-1]
    part = next((part for part in VALUES if part in parts), None)
    if part is None:
        return "there is no v"
    rows = shapes[parts[part]][0]
    # q, k and v one above the other: q has as many rows as the output columns, k as many as v.
    count, odd = (rows, 0) if part == "attn_v" else divmod(rows - columns, 2)
    head = columns // heads if heads > 0 and columns % heads == 0 else 0
    if odd or count <= 0 or not head or count % head or columns % count:
        return f"{columns} columns and {rows} rows of {parts[part]} are not heads of {heads}"
    return Channels(
        parts[part], (parts["attn_output"],), count, rows - count, rows, head, columns // count,
        bias=parts.get(f"{part}.bias"),
    )  # fmt: skip


def _products(
    arch: str, parts: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], reader: str
) -> Channels | str:
    """The rows of up for the columns of down, or why they cannot be rescaled."""
    gate, up, both = _DOWN[reader]
    shape = shapes[parts[reader]]
    count, experts = shape[-1], shape[0] if len(shape) == 3 else 0
    if both in parts:
        source, wanted = both, 2 * count
    elif up in parts and gate in parts:
        source, wanted = up, count
    elif up in parts and arch in _FUSED_UP:
        source, wanted = up, 2 * count
    else:
        return "the feed-forward network is not gated"
    assert source is not None
    found = shapes[parts[source]]
    if found[:-1] != ((experts, wanted) if experts else (wanted,)):
        return f"{parts[source]} has the shape {found}, and not {wanted} rows"
    bias = parts.get(f"{source}.bias")
    if bias is not None and experts:
        return "the experts have biases"
    return Channels(parts[source], (parts[reader],), count, wanted - count, wanted, count, experts=experts, bias=bias)
