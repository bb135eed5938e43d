"""``gguf-itq3s plan``: sizes of a model in every type and of its KV cache, and what fits, without reading weights.

Shapes come from the headers of the safetensors files if those are there, else from building the model of
``config.json`` on torch's meta device, with the tensors that the index names. llama.cpp's conversion makes GGUF tensors
of them as it would of the weights, and the converter's type policy says what each becomes. The mixes of llama.cpp's own
types (``--outtype q3_k_m``) need the built library.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as Type

from ..base import report
from ..base.errors import UserError, positive
from ..checkpoint import policy, trust
from ..checkpoint.reading import open_without_weights
from ..checkpoint.source import Checkpoint
from ..checkpoint.stock import STOCK_TYPES, F16File, f16_file
from ..checkpoint.validation import check_folder
from ..codec.family import FAMILY
from ..codec.types import bits_per_weight

#: Types of the table, by descending size.
WEIGHT_TYPES: Final = tuple(
    sorted(
        (Type.F16, Type.Q8_0, Type.Q6_K, Type.Q4_K, Type.IQ4_XS, Type.Q3_K, Type.IQ3_S, *FAMILY, Type.IQ3_XXS,
         Type.TQ2_0, Type.TQ1_0), key=bits_per_weight, reverse=True,
    )
)  # fmt: skip
#: Rows that can be asked for by the name of a converter's output type: the type of most matrices, and the file's where
#: llama-quantize mixes others with it.
OUTTYPES: Final[Mapping[str, tuple[Type, LlamaFileType | None]]] = {
    **{qtype.name.lower(): (qtype, None) for qtype in (*FAMILY, Type.TQ1_0, Type.TQ2_0, Type.F16, Type.Q8_0)},
    **{name: types for name, types in STOCK_TYPES.items() if name != "q8_0"},
}
CACHE_TYPES: Final = (Type.F16, Type.Q8_0, Type.Q4_0)

#: llama.cpp's defaults: tokens of a physical batch, and padding of a sliding-window cache.
_MICRO_BATCH: Final = 512
_CACHE_PADDING: Final = 256


@dataclass(frozen=True)
class Layer:
    """What a layer keeps for a token of context.

    Attributes:
        k: values of the K cache.
        v: values of the V cache.
        window: tokens it looks back, None for all.
    """

    k: int
    v: int
    window: int | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``; of a model with several parts, the text model's section with the rest behind it.

    Raises:
        UserError: as :func:`gguf_itq3s.checkpoint.validation.check_folder`.
    """
    config = check_folder(folder)
    return {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config


def weight_bytes(
    checkpoint: Checkpoint, qtype: Type, *, pure: bool, mixed: Mapping[str, Type] | None = None,
    fallback: str = policy.FALLBACK_KINDS[0],
) -> int:  # fmt: skip
    """Bytes of all tensors with the matrices in a type; as :func:`gguf_itq3s.checkpoint.policy.choose` takes them."""
    total = 0
    for tensor in checkpoint.tensors:
        choice = policy.choose(
            tensor.name, tensor.shape, tensor.stored, qtype, checkpoint.model, pure=pure, mixed=mixed,
            fallback=fallback,
        )  # fmt: skip
        total += tensor.bytes_in(choice.type)
    return total


def layers_of(config: Mapping[str, Any]) -> list[Layer]:
    """What each layer caches, from the config: grouped heads, sliding windows, multi-head latent attention.

    Raises:
        KeyError: the config does not say.
    """
    count = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    if not count:
        raise KeyError("num_hidden_layers")
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 0)
    if config.get("kv_lora_rank"):
        # llama.cpp caches the compressed row once, as K; V is a view of it.
        return [Layer(int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]), 0)] * count
    size = int(config.get("hidden_size") or config.get("n_embd") or 0)
    head = int(config.get("head_dim") or size // heads)
    values = int(config.get("num_key_value_heads") or heads) * head
    full, window = Layer(values, values), config.get("sliding_window")
    kinds = config.get("layer_types")
    if not kinds:
        use_window = config.get("use_sliding_window", config.get("model_type") == "mistral")
        return [Layer(values, values, int(window)) if window and use_window else full] * count
    by_kind = {
        "full_attention": full,
        "sliding_attention": Layer(values, values, int(window) if window else None),
        "linear_attention": Layer(0, 0),
    }
    return [by_kind.get(kind, full) for kind in kinds]


def cache_bytes(layers: Sequence[Layer], context: int, qtype: Type) -> int:
    """Bytes of the KV cache of one sequence in llama.cpp: a windowed layer keeps the window and a micro-batch."""
    block, size = GGML_QUANT_SIZES[qtype]
    total = 0
    for layer in layers:
        tokens = context
        if layer.window is not None:
            padded = -(-(layer.window + _MICRO_BATCH) // _CACHE_PADDING) * _CACHE_PADDING
            tokens = min(context, padded)
        for row in (layer.k, layer.v):
            total += tokens * (-(-row // block) * size)
    return total


def compute_bytes(config: Mapping[str, Any]) -> int:
    """An estimate of llama.cpp's compute buffer: logits and the widest activations of a micro-batch in F32."""
    widest = max(int(config.get(key) or 0) for key in ("hidden_size", "intermediate_size", "n_embd", "n_inner"))
    return 4 * _MICRO_BATCH * (int(config.get("vocab_size") or 0) + 3 * widest)


def plan(
    folder: Path, context: int, memory: int | None, *, outtypes: Sequence[str] = (),
    fallback: str = policy.FALLBACK_KINDS[0], trust_remote_code: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Sizes of everything.

    Args:
        folder: Hugging Face folder; ``config.json`` and an index are enough.
        context: tokens of context.
        memory: bytes there are, or None.
        outtypes: the rows, of :data:`OUTTYPES`; empty for :data:`WEIGHT_TYPES`.
        fallback: of trellis types, one of :data:`gguf_itq3s.checkpoint.policy.FALLBACK_KINDS`.
        trust_remote_code: Python code of the folder may run.

    Returns:
        ``weights`` (count), ``types`` (name -> ``bytes``, ``pure_bytes``, ``bits``), ``cache`` (name -> bytes),
        ``compute`` (bytes), ``memory``, ``context``, and ``fits`` (type -> cache type -> bool) if memory is given.

    Raises:
        UserError: as :func:`read_config` and :func:`read_shapes`, the config does not describe the cache, or there is
            no library for the mixes.
    """
    config = read_config(folder)
    checkpoint = open_without_weights(folder, trust_remote_code=trust_remote_code)
    try:
        layers = layers_of(config)
        compute = compute_bytes(config)
    except (KeyError, ZeroDivisionError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            folder / "config.json", f"does not describe the KV cache ({error})", "give a decoder model"
        ) from error
    weights = sum(tensor.size for tensor in checkpoint.tensors)
    rows = {name.upper(): OUTTYPES[name] for name in outtypes} or {qtype.name: (qtype, None) for qtype in WEIGHT_TYPES}
    file: F16File | None = None
    types = {}
    for name, (qtype, file_type) in rows.items():
        mixed = None
        if file_type is not None:
            file = file or f16_file(checkpoint)
            mixed = file.mixed_types(file_type)
        used = weight_bytes(checkpoint, qtype, pure=False, mixed=mixed, fallback=fallback)
        pure = weight_bytes(checkpoint, qtype, pure=True, fallback=fallback)
        types[name] = {"bytes": used, "pure_bytes": pure, "bits": 8 * used / weights}
    cache = {qtype.name: cache_bytes(layers, context, qtype) for qtype in CACHE_TYPES}
    result: dict[str, Any] = {
        "weights": weights, "context": context, "memory": memory, "types": types, "cache": cache,
        "compute": compute,
    }  # fmt: skip
    if memory is not None:
        result["fits"] = {
            name: {kind: entry["bytes"] + used + result["compute"] <= memory for kind, used in cache.items()}
            for name, entry in types.items()
        }
    return result


def text(result: Mapping[str, Any]) -> str:
    """The plan as tables."""
    cache = result["cache"]
    lines = [
        f"{report.count(result['weights'])} weights, {result['context']} tokens of context",
        "KV cache: " + ", ".join(f"{name} {report.size(used)}" for name, used in cache.items())
        + f"; compute buffer about {report.size(result['compute'])}",
        "",
    ]  # fmt: skip
    header = ["type", "bits/w", "pure", "mix", *(f"+ KV {name}" for name in cache)]
    rows = []
    for name, entry in result["types"].items():
        row = [name, f"{entry['bits']:.3f}", report.size(entry["pure_bytes"]), report.size(entry["bytes"])]
        for kind, used in cache.items():
            total = report.size(entry["bytes"] + used + result["compute"])
            row.append(f"{total} {'fits' if result['fits'][name][kind] else 'no'}" if result["memory"] else total)
        rows.append(row)
    lines.append(report.table(header, rows))
    if result["memory"]:
        lines.append(f"\nfits: mix, KV cache and compute buffer within {report.size(result['memory'])}")
    return "\n".join(lines)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``plan``."""
    parser = subparsers.add_parser("plan", help="sizes by type, KV cache, and what fits", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder; config.json and the index are enough")
    parser.add_argument("--ctx", type=positive, default=4096, help="tokens of context (default: %(default)s)")
    parser.add_argument("--vram", type=report.parse_size, metavar="SIZE", help="memory there is, such as 32GiB or 24GB")
    parser.add_argument(
        "--outtype", choices=OUTTYPES, action="append", default=[], dest="outtypes", metavar="TYPE",
        help=f"a row of the table instead of the usual ones, repeatable: {', '.join(OUTTYPES)}; the types of llama.cpp "
        "as llama-quantize mixes them, which needs the build",
    )  # fmt: skip
    parser.add_argument(
        "--fallback", choices=policy.FALLBACK_KINDS, default=policy.FALLBACK_KINDS[0],
        help="of rows that are no multiple of 256, as convert takes it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    trust.add_argument(parser)
    parser.set_defaults(run=run, needs_source=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    result = plan(
        args.model, args.ctx, args.vram, outtypes=args.outtypes, fallback=args.fallback,
        trust_remote_code=args.trust_remote_code,
    )  # fmt: skip
    print(json.dumps(result, indent=1) if args.json else text(result))
    return 0
