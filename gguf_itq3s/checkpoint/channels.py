"""Channels of a model: what makes them, what reads them, and which of them can be rescaled.

Three things make channels: the gain of an RMSNorm, for all matrices that read the norm; the rows of v, for the columns
of the attention's output, each for all query heads of a key-value head; the rows of up, for the columns of down, where
the feed-forward network is gated. Between them stands nothing but a linear map, so one may be multiplied by what the
other is divided by (:mod:`gguf_itq3s.checkpoint.rescaling`).

Only names that prove who reads a channel are acted on: an architecture known to be laid out so, and in each layer no
tensor that is not known. What is left alone is said. ``output_norm`` is never among them: pooled embeddings are taken
behind it, and would be those of another model; its matrix gets more bits anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, get_tensor_name_map

#: Architectures whose layers read ``attn_norm`` in the q, k and v matrices and ``ffn_norm`` in the feed-forward ones,
#: and nowhere else, and whose feed-forward networks are gated (each checked against its graph in llama.cpp).
ARCHITECTURES: Final = frozenset(
    {
        "llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "granite",
        "granitemoe", "olmoe", "internlm2", "smollm3",
    }
)  # fmt: skip
#: Of these, those with one matrix of gate and up, under the name of up.
_FUSED_UP: Final = frozenset({"phi3"})

#: Which matrices of a layer read a norm; :func:`norm_read_by` and :func:`readers_in_checkpoint` answer from it.
READERS: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_norm": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "ffn_norm": (
        "ffn_gate", "ffn_up", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_gate_inp_shexp",
        "ffn_gate_shexp", "ffn_up_shexp",
    ),
}  # fmt: skip
#: Of the readers, those that are never rounded: the ways of tokens to experts.
ROUTERS: Final = ("ffn_gate_inp", "ffn_gate_inp_shexp")

#: Tensors of a layer that read neither norm.
_OTHERS: Final = frozenset(
    {
        "attn_output", "attn_q_norm", "attn_k_norm", "attn_sub_norm", "attn_rot_embd", "attn_post_norm",
        "post_attention_norm", "post_ffw_norm", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "rope_freqs",
        "rope_factors_long", "rope_factors_short",
    }
)  # fmt: skip
# Biases are added after the product, so the columns of their matrices can be rescaled.
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Norms:
    """The norms of a model whose readers are known.

    Attributes:
        readers: norm -> the matrices that read it, all by GGUF name.
        left_alone: a line for each norm, or all of them, whose are not, or cannot be rescaled.
    """

    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_alone: Sequence[str] = ()

    def norm_of(self, name: str) -> str | None:
        """The norm that a matrix reads, or None."""
        norm = norm_read_by(name)
        return norm if norm is not None and name in self.readers.get(norm, ()) else None

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
    def size(self) -> int:
        """How many factors they have in all."""
        return self.count * max(1, self.experts)

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


def norm_read_by(name: str) -> str | None:
    """The norm that a matrix reads by its GGUF name, or None: ``blk.3.attn_q.weight`` -> ``blk.3.attn_norm.weight``."""
    if name == "output.weight":
        return "output_norm.weight"
    layer, _, part = name.removesuffix(".weight").rpartition(".")
    norm = next((norm for norm, readers in READERS.items() if part in readers), None)
    return f"{layer}.{norm}.weight" if layer and norm else None


def readers_in_checkpoint(names: Iterable[str], layers: int) -> dict[str, list[str]]:
    """Norm -> the matrices that read it, by the names of a Hugging Face checkpoint of Llama's architecture."""
    by_gguf_name = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    here = {gguf_name: name for name in names if (gguf_name := by_gguf_name.get_name(name, try_suffixes=(".weight",)))}
    readers: dict[str, list[str]] = {}
    for gguf_name, name in here.items():
        norm = norm_read_by(gguf_name)
        if norm in here:
            readers.setdefault(here[norm], []).append(name)
    return readers


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
    expected = {part for readers in READERS.values() for part in readers} | _OTHERS | READERS.keys()
    return min((part for part in parts if part.removesuffix(".bias") not in expected), default=None)


def plan_norms(arch: str, names: Iterable[str], fixed: Callable[[str], bool] = lambda _: False) -> Norms:
    """Which norms of a model can be rescaled, by the names of its tensors; the rest as of :func:`plan`."""
    if arch not in ARCHITECTURES:
        return Norms({}, [f"norms of the architecture {arch}: not known who reads them"])
    norms: dict[str, tuple[str, ...]] = {}
    left_alone = []
    for number, parts in _layers(names).items():
        strange = _strange(parts)
        for norm, candidates in READERS.items():
            if norm not in parts:
                continue
            readers = [parts[part] for part in candidates if part in parts]
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
    left_alone = list(norms.left_alone)
    for norm, readers in norms.readers.items():
        count = shapes[norm][-1]
        if wrong := [reader for reader in readers if shapes[reader][-1] != count]:
            left_alone.append(f"{norm}: {wrong[0]} has {shapes[wrong[0]][-1]} columns, not {count}")
        else:
            channels[norm] = Channels(norm, readers, count, 0, count, count)
    for number, parts in _layers(shapes).items() if arch in ARCHITECTURES else ():
        strange = _strange(parts)
        for reader in ("attn_output", *_DOWN):
            if reader not in parts:
                continue
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
    part = next((part for part in ("attn_v", "attn_qkv") if part in parts), None)
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
