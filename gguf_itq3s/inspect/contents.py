"""``gguf-itq3s inspect``: a GGUF file tensor by tensor: type, shape, bits, range of scales, share of each level."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ..base import report
from ..base.errors import UserError
from ..checkpoint.gguf_file import open_gguf
from ..codec import ternary
from ..codec.blocks import unpack
from ..codec.family import FAMILY
from ..codec.formats import Format

# Where the float16 scale of a block is, in bytes; types not listed have another kind of scale.
_SCALE_OFFSETS: Final = {
    Type.Q4_0: 0, Type.Q4_1: 0, Type.Q5_0: 0, Type.Q5_1: 0, Type.Q8_0: 0, Type.Q2_K: 80, Type.Q3_K: 108, Type.Q4_K: 0,
    Type.Q5_K: 0, Type.Q6_K: 208, Type.IQ4_NL: 0, Type.IQ4_XS: 0, Type.IQ3_S: 0, Type.IQ3_XXS: 0, Type.IQ2_XXS: 0,
    Type.IQ2_XS: 0, Type.IQ2_S: 0, Type.IQ1_S: 0, Type.TQ1_0: 52, Type.TQ2_0: 64,
    **{qtype: row.format.scale_offset for qtype, row in FAMILY.items()},
}  # fmt: skip
# Where the other float16 of a block are: a minimum, an offset, a zero-point.
_MORE_FLOATS: Final = {
    Type.Q4_1: 2, Type.Q5_1: 2, Type.Q2_K: 82, Type.Q4_K: 2, Type.Q5_K: 2,
    **{qtype: row.format.scale_offset + 2 for qtype, row in FAMILY.items() if row.format.zero_point},
}  # fmt: skip
_CHUNK: Final = 4096
_SHOWN: Final = 100  # characters of a value of metadata in the tables; JSON has all
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_TRITS: Final = (-1, 0, 1)

Blocks = np.ndarray


def _level_counts(fmt: Format) -> Callable[[Blocks], np.ndarray]:
    return lambda blocks: np.bincount(unpack(blocks, fmt)[0].indices.ravel(), minlength=fmt.levels.size)


def _trit_counts(qtype: Type) -> Callable[[Blocks], np.ndarray]:
    return lambda blocks: np.bincount(ternary.trits_of(blocks, qtype).ravel() + 1, minlength=3)


#: Types whose weights are a scale times one of a few levels: the levels, and a count of each over blocks.
_LEVELS: Final[dict[Type, tuple[tuple[int, ...], Callable[[Blocks], np.ndarray]]]] = {
    **{qtype: (tuple(row.format.levels.tolist()), _level_counts(row.format)) for qtype, row in FAMILY.items()},
    **{qtype: (_TRITS, _trit_counts(qtype)) for qtype in ternary.TERNARY_TYPES},
}


def inspect_tensor(tensor: gguf.ReaderTensor) -> dict[str, Any]:
    """Facts about one tensor.

    Returns:
        ``name``, ``type``, ``shape`` (ggml order, row length first), ``bits_per_weight``, ``scales`` (least and largest
        magnitude of the finite block scales that are not zero, or None), ``zero_blocks``, ``not_finite`` (how many
        blocks, or values of a type without blocks, are NaN or infinite; None for a type gguf-py cannot decode), and
        for trellis types, TQ1_0 and TQ2_0 ``levels`` (level -> share of the weights), else None.
    """
    qtype = tensor.tensor_type
    facts: dict[str, Any] = {
        "name": tensor.name, "type": qtype.name, "shape": [int(n) for n in tensor.shape],
        "bits_per_weight": 8 * int(tensor.n_bytes) / max(1, int(tensor.n_elements)),
        "scales": None, "zero_blocks": None, "not_finite": None, "levels": None,
    }  # fmt: skip
    if not tensor.n_elements:
        return facts
    if qtype not in _SCALE_OFFSETS:
        facts["not_finite"] = _not_finite(tensor)
        return facts
    blocks = tensor.data.view(np.uint8).reshape(-1, gguf.GGML_QUANT_SIZES[qtype][1])
    offset = _SCALE_OFFSETS[qtype]
    scales = np.abs(_float16_at(blocks, offset))
    finite = np.isfinite(scales)
    used = scales[finite & (scales > 0)]
    facts["scales"] = [float(used.min()), float(used.max())] if used.size else [0.0, 0.0]
    facts["zero_blocks"] = int((scales == 0).sum())
    if (more := _MORE_FLOATS.get(qtype)) is not None:
        finite &= np.isfinite(_float16_at(blocks, more))
    facts["not_finite"] = int((~finite).sum())
    if qtype in _LEVELS:
        levels, count = _LEVELS[qtype]
        total = np.zeros(len(levels), dtype=np.int64)
        try:
            for start in range(0, blocks.shape[0], _CHUNK):
                total += count(np.ascontiguousarray(blocks[start : start + _CHUNK]))
        except ValueError:  # a damaged TQ2_0 block has the fourth code, which is no trit
            return facts
        facts["levels"] = {
            str(level): float(n) / int(tensor.n_elements) for level, n in zip(levels, total, strict=True)
        }
    return facts


def _float16_at(blocks: Blocks, offset: int) -> np.ndarray:
    """The float16 at a place of every block, as float32 (m,)."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2")[:, 0].astype(np.float32)


def _not_finite(tensor: gguf.ReaderTensor) -> int | None:
    """How many blocks, or values, decode to NaN or infinity; None where gguf-py cannot tell."""
    qtype = tensor.tensor_type
    if tensor.data.dtype.kind in "iu" and qtype.name in ("I8", "I16", "I32", "I64"):
        return 0
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    size, _ = gguf.GGML_QUANT_SIZES[qtype]
    step, bad = max(1, (_CHUNK << 8) // max(1, rows.shape[-1])), 0
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                values = part if part.dtype.kind == "f" else gguf.quants.dequantize(part, qtype)
        except NotImplementedError:
            return None
        bad += int((~np.isfinite(values).reshape(-1, size)).any(axis=1).sum())
    return bad


def inspect_file(path: Path) -> dict[str, Any]:
    """Facts about a file: ``file``, ``bytes``, ``metadata`` (``itq3s.*``, architecture and file type), ``tensors``.

    Of a split file, any part stands for the whole.

    Raises:
        UserError: as :func:`gguf_itq3s.checkpoint.gguf_file.open_gguf`.
    """
    reader = open_gguf(path)
    general = ("general.architecture", "general.file_type", "general.name")
    try:
        metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name.startswith("itq3s.") or name in general
        }
    except (ValueError, IndexError, TypeError) as error:
        raise UserError(path, f"has metadata that cannot be read ({error})", "write or download it again") from error
    return {
        "file": str(path), "parts": [part.name for part in reader.paths], "bytes": reader.size, "metadata": metadata,
        "tensors": [inspect_tensor(tensor) for tensor in reader.tensors],
    }  # fmt: skip


def text(facts: dict[str, Any]) -> str:
    """The facts as tables; shares of levels in percent, from the lowest level up."""
    parts = facts["parts"]
    split = f" in {len(parts)} files, {parts[0]} the first" if len(parts) > 1 else ""
    lines = [f"{facts['file']}: {report.size(facts['bytes'])}{split}"]
    for key, value in facts["metadata"].items():  # the exponents of a rescaling are a letter a channel
        whole = str(value)
        lines.append(f"{key} = {whole[:_SHOWN]}" + f"... ({len(whole)} characters)" * (len(whole) > _SHOWN))
    for t in facts["tensors"]:
        if t["not_finite"]:
            units = "values" if t["type"] in _FLOATS else "blocks"
            lines.append(f"NOT FINITE: {t['name']}: {t['not_finite']} {units} NaN or infinite")
    lines.append("")
    rows = [
        [t["name"], t["type"], "x".join(map(str, t["shape"])), f"{t['bits_per_weight']:.4g}",
         f"{t['scales'][0]:.3g} .. {t['scales'][1]:.3g}" if t["scales"] else "-",
         " ".join(f"{100 * share:.0f}" for share in t["levels"].values()) if t["levels"] else "-"]
        for t in facts["tensors"]
    ]  # fmt: skip
    lines.append(report.table(["tensor", "type", "shape", "bits/w", "scales", "share of each level, %"], rows))
    for name in dict.fromkeys(t["type"] for t in facts["tensors"] if t["levels"]):
        levels = next(t["levels"] for t in facts["tensors"] if t["type"] == name)
        lines.append(f"levels of {name}: {' '.join(levels)}")
    sizes = []
    for t in facts["tensors"]:
        weights = int(np.prod(t["shape"], dtype=np.int64))
        sizes.append(report.TensorRow(t["name"], t["type"], weights, round(t["bits_per_weight"] * weights / 8)))
    return "\n".join([*lines, "", report.by_type(sizes)])


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``inspect``."""
    parser = subparsers.add_parser("inspect", help="types, bits, scales and levels of a GGUF file", description=__doc__)
    parser.add_argument("file", type=Path, help="GGUF file, or any part of a split one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if a value is not finite."""
    facts = inspect_file(args.file)
    print(json.dumps(facts, indent=1, default=str) if args.json else text(facts))
    return int(any(tensor["not_finite"] for tensor in facts["tensors"]))
