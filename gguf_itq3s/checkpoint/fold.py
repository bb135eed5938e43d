"""Norm folding: RMSNorm gains multiplied into the matrices that read the norm, and set to one.

``W (g * n) = (W diag(g)) n``: exact, no data, no change at run time. The rotation of ITQ3_S spreads the rounding error
of a block evenly over its columns, so it wants columns that are read evenly; gains are what makes large language models
read some columns far more than others. QuaRot (arXiv 2404.00456) folds them for the same reason.

Only names that prove who reads a norm are acted on: an architecture known to be laid out so, and in each layer no
tensor that is not known. What is left alone is said. ``output_norm`` is never folded: pooled embeddings are taken
behind it, and would be those of another model; its matrix gets more bits anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf import MODEL_ARCH, get_tensor_name_map

from ..errors import UserError

if TYPE_CHECKING:
    from .reader import SourceTensor

#: Architectures whose layers read ``attn_norm`` in the q, k and v matrices and ``ffn_norm`` in the feed-forward ones,
#: and nowhere else (each checked against its graph in llama.cpp).
ARCHITECTURES: Final = frozenset(
    {
        "llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "granite",
        "granitemoe", "olmoe", "internlm2", "smollm3",
    }
)  # fmt: skip

#: The key of a file, model or adapter, whose norms are folded; the patched llama.cpp compares the two.
NORMS_FOLDED: Final = "itq3s.norms_folded"

#: The quantization method of a model that PyTorch holds packed, and what its ``quantization_config`` says of its norms.
PACKED_METHOD: Final = "itq3_s"
PACKED_FOLDED: Final = "norms_folded"
#: The tag of such a model, which PEFT writes into the model card of an adapter that was trained beside it.
FOLDED_TAG: Final = "itq3_s-norms-folded"

#: Of what is folded, so that no conversion that another version began is continued. The first folded ``output_norm``.
PLAN_VERSION: Final = 2

#: Which matrices of a layer read a norm; :func:`norm_read_by` and :func:`readers_in_checkpoint` answer from it.
READERS: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_norm": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "ffn_norm": (
        "ffn_gate", "ffn_up", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_gate_inp_shexp",
        "ffn_gate_shexp", "ffn_up_shexp",
    ),
}  # fmt: skip

#: Tensors of a layer that read neither norm.
_OTHERS: Final = frozenset(
    {
        "attn_output", "attn_q_norm", "attn_k_norm", "attn_sub_norm", "attn_rot_embd", "attn_post_norm",
        "post_attention_norm", "post_ffw_norm", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "rope_freqs",
        "rope_factors_long", "rope_factors_short",
    }
)  # fmt: skip
# Biases are added after the product, so their matrices can be folded.
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Folding:
    """Which norms are folded.

    Attributes:
        norms: norm -> the matrices that read it, all by GGUF name.
        left_alone: a line for each norm, or all of them, that is not folded.
    """

    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_alone: Sequence[str] = ()

    def norm_of(self, name: str) -> str | None:
        """The folded norm that a matrix reads, or None."""
        return next((norm for norm, readers in self.norms.items() if name in readers), None)

    @property
    def note(self) -> str:
        """What is left alone, a line for each; empty if nothing is."""
        return "\n  ".join(["note: norms that are not folded:", *self.left_alone]) if self.left_alone else ""


def is_folded_packed(config: Mapping[str, object]) -> bool:
    """Whether a ``config.json`` is of a model that PyTorch holds packed and whose norms are folded."""
    packed = config.get("quantization_config")
    return (
        isinstance(packed, Mapping)
        and packed.get("quant_method") == PACKED_METHOD
        and packed.get(PACKED_FOLDED) is True
    )


def norm_read_by(name: str) -> str | None:
    """The norm that a matrix reads by its GGUF name, or None: ``blk.3.attn_q.weight`` -> ``blk.3.attn_norm.weight``."""
    if name == "output.weight":
        return "output_norm.weight"
    layer, _, part = name.removesuffix(".weight").rpartition(".")
    norm = next((norm for norm, readers in READERS.items() if part in readers), None)
    return f"{layer}.{norm}.weight" if layer and norm else None


def readers_in_checkpoint(names: Iterable[str], layers: int) -> dict[str, list[str]]:
    """Norm -> the matrices that read it, by the names of a Hugging Face checkpoint of Llama's architecture.

    Args:
        names: tensors of the checkpoint.
        layers: how many layers it has.
    """
    by_gguf_name = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    here = {gguf_name: name for name in names if (gguf_name := by_gguf_name.get_name(name, try_suffixes=(".weight",)))}
    readers: dict[str, list[str]] = {}
    for gguf_name, name in here.items():
        norm = norm_read_by(gguf_name)
        if norm in here:
            readers.setdefault(here[norm], []).append(name)
    return readers


def plan(arch: str, names: Iterable[str], floats: Callable[[str], bool] = lambda _: True) -> Folding:
    """Which norms of a model can be folded.

    Args:
        arch: ``general.architecture``.
        names: GGUF names of all its tensors.
        floats: whether a tensor comes as floats; a matrix that is quantized already cannot be rescaled.

    Returns:
        The plan.
    """
    if arch not in ARCHITECTURES:
        return Folding({}, [f"norms of the architecture {arch}: not known who reads them"])
    layers: dict[int, dict[str, str]] = {}
    known = set(names)
    for name in known:
        if match := _LAYER.fullmatch(name):
            part = match[2] if match[3] == "weight" else f"{match[2]}.bias"
            layers.setdefault(int(match[1]), {})[part] = name
    norms: dict[str, tuple[str, ...]] = {}
    left_alone = []
    expected = {part for readers in READERS.values() for part in readers} | _OTHERS
    for number, parts in sorted(layers.items()):
        strange = sorted(part for part in parts if part.removesuffix(".bias") not in expected | READERS.keys())
        for norm, candidates in READERS.items():
            if norm not in parts:
                continue
            readers = [parts[part] for part in candidates if part in parts]
            fixed = [reader for reader in readers if not floats(reader)]
            if strange:
                left_alone.append(f"{parts[norm]}: layer {number} has a tensor that is not known, {strange[0]}")
            elif f"{norm}.bias" in parts:
                left_alone.append(f"{parts[norm]}: the norm has a bias")
            elif not readers:
                left_alone.append(f"{parts[norm]}: no matrix reads it")
            elif fixed:
                left_alone.append(f"{parts[norm]}: {fixed[0]} comes quantized")
            else:
                norms[parts[norm]] = tuple(readers)
    return Folding(norms, left_alone)


def plan_tensors(arch: str, tensors: Iterable[SourceTensor], but: Collection[str] = ()) -> Folding:
    """Which norms a conversion folds.

    Args:
        arch: ``general.architecture``.
        tensors: all tensors of the model.
        but: norms that stay, as those that a ternary matrix reads: folded, it would have more than three values.

    Returns:
        The plan.
    """
    stored = {tensor.name: tensor.stored.name for tensor in tensors if tensor.name not in but}
    return plan(arch, stored, lambda name: stored[name] in ("F32", "F16", "BF16"))


def gains(tensors: Iterable[SourceTensor], folder: str) -> Callable[[str], np.ndarray]:
    """The gain of a norm by its GGUF name, float32 (n,); each is read once.

    Args:
        tensors: all tensors of the model.
        folder: of the model, for messages.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    read: dict[str, np.ndarray] = {}

    def gain(norm: str) -> np.ndarray:
        if norm not in read:
            read[norm] = by_name[norm].vector()
            # Once folded, the norm is all ones and the fault would show in the matrices that read it.
            if bad := np.count_nonzero(~np.isfinite(read[norm])):
                what = f"{bad} of its weights {'is' if bad == 1 else 'are'} NaN or infinite"
                raise UserError(folder, what, "repair the checkpoint or download it again", by_name[norm].label)
        return read[norm]

    return gain


def apply(tensors: Sequence[SourceTensor], folding: Folding, folder: str) -> list[SourceTensor]:
    """The tensors of the folded model; weights are still loaded one tensor at a time.

    Args:
        tensors: all tensors of the model.
        folding: from :func:`plan`.
        folder: of the model, for messages.

    Returns:
        The tensors in the same order, with the same names, shapes and types; folded ones load as float32.
    """
    reads = {reader: norm for norm, readers in folding.norms.items() for reader in readers}
    gain = gains(tensors, folder)

    def ones(norm: str) -> Iterator[np.ndarray]:
        yield np.ones_like(gain(norm))

    def scaled(tensor: SourceTensor, norm: str) -> Iterator[np.ndarray]:
        factor = gain(norm)
        if factor.size != tensor.shape[-1]:
            what = f"has {tensor.shape[-1]} columns, but its norm {norm} has {factor.size} gains"
            raise UserError(folder, what, "convert with --no-fold-norms", tensor.label)
        for part in tensor.load():
            weights = np.asarray(part, dtype=np.float32)
            # In place where it is a copy already: a third copy of the largest tensor would not fit.
            yield np.multiply(weights, factor, out=None if np.shares_memory(weights, part) else weights)

    def folded(tensor: SourceTensor) -> SourceTensor:
        if tensor.name in folding.norms:
            return replace(tensor, load=lambda: ones(tensor.name))
        if norm := reads.get(tensor.name):
            return replace(tensor, load=lambda: scaled(tensor, norm))
        return tensor

    return [folded(tensor) for tensor in tensors]
