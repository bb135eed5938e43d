"""Which tensor gets which type: the rules of ``llama-quantize`` for the types that need no build.

The rules stand in ``src/llama-quant.cpp`` of llama.cpp (``tensor_allows_quantization``, ``llama_tensor_get_type_impl``,
``tensor_type_fallback``); a trellis type follows the type there that its entry of
:data:`gguf_itq3s.codec.family.FAMILY` names. The test suite compares the choices with those of the built
``llama-quantize``; the mixes of llama.cpp's own types are asked of it (:mod:`.stock`). One rule differs: a ternary
tensor whose rows are not whole blocks becomes Q8_0, not Q4_0, which cannot hold {-a, 0, a}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as Type

from ..codec.family import FAMILY
from ..codec.types import NUMPY_TYPES

#: What takes the place of a type where a row is not whole blocks of it; that may have one in its place again.
FALLBACKS: Final[Mapping[Type, Type]] = {
    **{qtype: row.fallback for qtype, row in FAMILY.items()},
    Type.TQ1_0: Type.Q8_0,
    Type.TQ2_0: Type.Q8_0,
    Type.IQ3_XXS: Type.IQ4_NL,
    Type.IQ3_S: Type.IQ4_NL,
    Type.IQ4_XS: Type.IQ4_NL,
    Type.Q2_K: Type.Q4_0,
    Type.Q3_K: Type.Q4_0,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}

#: What takes the place of a trellis type: one in shorter blocks where they divide the row, or IQ4_NL at once.
FALLBACK_KINDS: Final = ("trellis", "iq4_nl")

#: Types that a tensor may be given by name: all that are written without an importance matrix.
GIVEN_TYPES: Final = tuple(
    sorted(
        NUMPY_TYPES | {Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS, Type.IQ3_S},
        key=lambda qtype: qtype.name,
    )
)
_FLOATS: Final = (Type.F32, Type.F16, Type.BF16, Type.Q8_0)

#: Parts of names that are never quantized (small, or read in full precision).
_KEPT: Final = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight",
    "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight",
    "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight",
    "time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight", "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "sam.pos_embd",
    "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
_KEPT_GLM5_NEXT: Final = (
    "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate", "indexer_compressor_ape",
    "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight", "ssm_beta.weight",
    "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight",
)  # fmt: skip
#: Heads of classifiers and rerankers: a few scores, and nothing behind them makes up for an error.
_HEADS: Final = "cls."
#: Gates of linear attention: a few rows that decide what of a state is kept.
_GATES: Final = (
    "ssm_alpha.weight", "ssm_beta.weight", "ssm_ba.weight", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight",
    "ssm_g_b.weight",
)  # fmt: skip
#: Steps and projections of a state space, in a few hundred rows.
_STEPS: Final = "ssm_x.weight"
#: Rows that cost nothing in F16.
_FEW_ROWS: Final = 64
_VALUES: Final = "attn_v.weight"
_ATTN_V: Final = ("attn_qkv.weight", "attn_kv_b.weight", _VALUES)
_ATTN_K: Final = "attn_k.weight"
_POSITION_AND_TOKEN_TYPE: Final = ("position_embd.weight", "token_types.weight")
TOKEN_EMBEDDINGS: Final = ("token_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True)
class Model:
    """What the rules ask about a model.

    Attributes:
        arch: ``general.architecture``.
        layers: number of layers.
        heads: attention heads of the first layer.
        kv_heads: key/value heads of the first layer.
        experts: experts of a layer, 0 for a dense model.
        tied: whether the token embedding is the output matrix too (no ``output.weight``).
        first_downs: the matrices that :func:`first_downs` finds.
    """

    arch: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    tied: bool
    first_downs: frozenset[str] = frozenset()

    @property
    def gqa(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """The models that llama.cpp calls 70B; their attn_v is small and gets more bits."""
        if self.arch == "llama":
            return self.layers == 80 and self.experts != 8 and self.heads != self.kv_heads
        return self.layers == {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}.get(self.arch)


@dataclass(frozen=True)
class Choice:
    """The type of one tensor.

    Attributes:
        type: the type it is written in.
        wanted: the type it would have if every row were whole blocks and every quantizer at hand.
    """

    type: Type
    wanted: Type


@dataclass(frozen=True)
class Overrides:
    """Types that are asked for by name, as llama-quantize takes them.

    Attributes:
        token_embedding: ``--token-embedding-type``.
        output: ``--output-tensor-type``.
        patterns: ``--tensor-type``: regular expressions, searched in the name; the first that is found counts.
        leave_output: ``--leave-output-tensor``: the output matrix stays as it is stored.
    """

    token_embedding: Type | None = None
    output: Type | None = None
    patterns: Sequence[tuple[str, Type]] = ()
    leave_output: bool = False

    def pattern(self, name: str) -> Type | None:
        """The type of the first pattern that is found in a name."""
        return next((qtype for pattern, qtype in self.patterns if re.search(pattern, name)), None)

    def given(self, name: str, *, tied: bool, quantized: bool, pure: bool) -> Type | None:
        """The type that a tensor is given, None where the rules decide; the order is llama-quantize's.

        Args:
            name: GGUF name.
            tied: whether the token embedding is the output matrix too.
            quantized: whether the file's type is a quantized one; only then patterns count.
            pure: whether the mix is left out, which knows of tied matrices.
        """
        found = self.pattern(name) if quantized else None
        is_embedding = name in TOKEN_EMBEDDINGS
        if self.token_embedding and is_embedding and not (found and name != TOKEN_EMBEDDINGS[0]):
            return self.token_embedding
        if self.output and name == "output.weight":
            return self.output
        if found is None and self.output and is_embedding and tied and quantized and not pure:
            return self.output
        return found

    def touches(self, name: str, *, tied: bool, quantized: bool, pure: bool) -> bool:
        """Whether they say anything of a tensor."""
        return (self.leave_output and name == "output.weight") or (
            self.given(name, tied=tied, quantized=quantized, pure=pure) is not None
        )


def may_quantize(name: str, shape: Sequence[int], arch: str) -> bool:
    """Whether a tensor is one that llama-quantize quantizes: a matrix, or experts, called ``*weight``."""
    dims = len(shape)
    while dims > 1 and shape[len(shape) - dims] == 1:
        dims -= 1
    if dims < 2 or not name.endswith("weight") or name in _POSITION_AND_TOKEN_TYPE:
        return False
    kept = (*_KEPT, *_KEPT_GLM5_NEXT) if arch == "glm5-next" else _KEPT
    return not any(part in name for part in kept)


def stays(name: str, shape: Sequence[int]) -> bool:
    """Whether a matrix that may be quantized stays in F16: a head, a gate, a few rows (docs/converting.md)."""
    return name.startswith(_HEADS) or name.endswith(_GATES) or shape[-2] < _FEW_ROWS


def first_downs(shapes: Mapping[str, Sequence[int]], arch: str, layers: int) -> frozenset[str]:
    """The first matrices out of the feed-forward networks, an eighth as many as there are layers.

    llama-quantize counts tensors, not layers: a layer with experts may have several.
    """

    def place(name: str) -> tuple[int, str]:
        layer = re.match(r"blk\.(\d+)\.", name)
        return int(layer[1]) if layer else -1, name

    downs = [name for name, shape in shapes.items() if "ffn_down" in name and may_quantize(name, shape, arch)]
    return frozenset(sorted(downs, key=place)[: layers // 8])


def mix(name: str, columns: int, target: Type, model: Model) -> Type:
    """The type llama-quantize mixes in for a tensor it may quantize, before any fallback for the row length.

    Args:
        name: GGUF name.
        columns: row length.
        target: the type of the file. Of types that are neither of the trellis family nor TQ1_0, TQ2_0 or Q8_0 only the
            output's rule is known.
        model: facts about the model.
    """
    is_embedding = name in TOKEN_EMBEDDINGS
    row = FAMILY.get(target)
    follows = None if row is None else row.follows
    if model.arch == "glm5-next" and any(part in name for part in ("attn_q_a", "attn_q_b", "nextn.eh_proj")):
        return Type.Q8_0
    if name == "output.weight" or (model.tied and is_embedding):
        whole = columns % GGML_QUANT_SIZES[target][0] == 0
        most = Type.Q5_K if follows == LlamaFileType.MOSTLY_IQ2_XXS else Type.Q6_K
        return most if whole and model.arch != "falcon" and target != Type.Q8_0 else Type.Q8_0
    if target in (Type.TQ1_0, Type.TQ2_0):
        if is_embedding:
            return Type.Q4_K
        return Type.Q8_0 if model.experts == 8 and any(part in name for part in (*_ATTN_V, _ATTN_K)) else target
    if row is None:
        return target
    if name.endswith(_STEPS):
        return Type.Q8_0
    found = _mix_2_bits(name, model) if follows == LlamaFileType.MOSTLY_IQ2_XXS else _mix_3_bits(name, model)
    if _VALUES in name and model.gqa > 1 and found != Type.Q8_0:
        return row.values
    return target if found is None else row.in_mix.get(found, found)


def _mix_3_bits(name: str, model: Model) -> Type | None:
    """What is at more bits in a mix of IQ3_S; None for the other tensors."""
    if any(part in name for part in _ATTN_V):
        if model.experts == 8:
            return Type.Q8_0
        if model.gqa >= 4:
            return Type.Q5_K if model.is_70b else Type.Q4_K
    elif _ATTN_K in name:
        if model.experts == 8:
            return Type.Q8_0
    elif "attn_output.weight" in name and model.experts == 8 and model.arch != "falcon":
        return Type.Q5_K
    return None


def _mix_2_bits(name: str, model: Model) -> Type | None:
    """What is at more bits in a mix of IQ2_XXS; None for the other tensors."""
    if name in TOKEN_EMBEDDINGS:
        return Type.Q2_K
    if any(part in name for part in _ATTN_V):
        return Type.Q4_K if model.gqa >= 4 or model.experts >= 4 else Type.Q2_K
    if _ATTN_K in name:
        return Type.Q4_K if model.experts == 8 else None
    if "ffn_down" in name:
        return Type.Q2_K if name in model.first_downs else None
    return Type.Q5_K if "attn_output.weight" in name and model.experts == 8 else None


def fit(wanted: Type, columns: int, fallback: str = FALLBACK_KINDS[0]) -> Type:
    """``wanted``, or the first type of its chain of :data:`FALLBACKS` that a row is whole blocks of; in the end F16.

    Args:
        wanted: the type.
        columns: row length.
        fallback: one of :data:`FALLBACK_KINDS`; with the second, no trellis type takes the place of another.
    """
    found, passed_over = wanted, FAMILY if fallback != FALLBACK_KINDS[0] else ()
    while columns % GGML_QUANT_SIZES[found][0] or (found != wanted and found in passed_over):
        found = FALLBACKS.get(found, Type.F16)
    return found


def choose(
    name: str,
    shape: Sequence[int],
    stored: Type,
    target: Type,
    model: Model,
    *,
    pure: bool = False,
    writable: frozenset[Type] | None = None,
    overrides: Overrides = Overrides(),
    mixed: Mapping[str, Type] | None = None,
    fallback: str = FALLBACK_KINDS[0],
) -> Choice:
    """The type of one tensor.

    Args:
        name: GGUF name.
        shape: shape in numpy order, rows last.
        stored: the type that upstream's file has it in: F16 (of an F16 file), or another where its converter insists
            on it.
        target: the type of the file; F16 leaves every tensor as it is stored, whatever that is.
        model: facts about the model.
        pure: every matrix to ``target``, embeddings and output included.
        writable: the types that can be written, None for all; others become Q8_0, but for those that are given.
        overrides: types that are given by name. As in llama-quantize they count for what may be quantized.
        mixed: the types of a mix by name (:func:`.stock.mixed_types`), None for that of :func:`mix`.
        fallback: as :func:`fit` takes it.
    """
    if not may_quantize(name, shape, model.arch) or (overrides.leave_output and name == "output.weight"):
        return Choice(stored, stored)
    columns = shape[-1]
    given = overrides.given(name, tied=model.tied, quantized=target != Type.F16, pure=pure)
    if given is not None and stored in _FLOATS:
        return Choice(fit(given, columns, fallback), given)
    if target == Type.F16 or stored != Type.F16:
        return Choice(stored, stored)
    if not pure and stays(name, shape) and (name.startswith(_HEADS) or (mixed is None and target != Type.Q8_0)):
        return Choice(stored, stored)
    wanted = target if pure else mix(name, columns, target, model) if mixed is None else mixed[name]
    chosen = fit(wanted, columns, fallback)
    if writable is not None and chosen not in writable:
        chosen = fit(Type.Q8_0, columns)
    return Choice(chosen, wanted)
