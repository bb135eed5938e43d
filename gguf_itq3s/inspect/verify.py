"""``gguf-itq3s verify``: the relative error of every tensor of a GGUF file against its checkpoint, worst first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from ..base import report
from ..base.errors import UserError
from ..checkpoint import loadable, trust
from ..checkpoint.gguf_file import GGUFFile, open_gguf, shape_of
from ..checkpoint.reading import open_checkpoint
from ..checkpoint.rescaling import Rescaling, rescaling_of

#: Weights compared at a time.
_PART: Final = 1 << 22
#: A tensor of the reference: GGUF name -> its shape (numpy order) and a function that yields its parts.
Reference = dict[str, tuple[tuple[int, ...], Callable[[], Iterator[np.ndarray]]]]


def reference_of(source: Path, *, trust_remote_code: bool = False) -> Reference:
    """The tensors to compare with, of a Hugging Face folder (through llama.cpp's conversion) or of a GGUF file.

    Raises:
        UserError: it cannot be read.
    """
    if source.is_file():
        reader = open_gguf(source)
        return {t.name: (shape_of(t), partial(_whole, t)) for t in reader.tensors}
    return {t.name: (t.shape, t.load) for t in open_checkpoint(source, trust_remote_code=trust_remote_code).tensors}


def _whole(tensor: gguf.ReaderTensor) -> Iterator[np.ndarray]:
    yield _values(tensor, slice(None)).reshape(shape_of(tensor))


def _values(tensor: gguf.ReaderTensor, rows: slice) -> np.ndarray:
    """Rows of a tensor as float32 (rows, n)."""
    data = tensor.data.reshape(-1, tensor.data.shape[-1])[rows]
    if tensor.tensor_type in (Type.F32, Type.F16, Type.F64):
        return data.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is counted
        return gguf.quants.dequantize(data, tensor.tensor_type)


def _rescaling(file: GGUFFile, source: Path, reference: Reference) -> Rescaling:
    """What the reference has to be multiplied by to be what the file rounds.

    Raises:
        UserError: the two are rescaled, each in its own way.
    """

    def gain(norm: str) -> np.ndarray:
        if norm not in reference:
            return np.ones(0, dtype=np.float32)
        return np.concatenate([np.asarray(part, dtype=np.float32).ravel() for part in reference[norm][1]()])

    found = rescaling_of(file, gain)
    if source.is_file() and (theirs := rescaling_of(open_gguf(source), gain)):
        if theirs.key != found.key:
            what = f"is rescaled otherwise than {file.paths[0].name}"
            raise UserError(source, what, "compare with the checkpoint, or with a file as it was")
        return Rescaling()
    return found


def compare(path: Path, source: Path, *, trust_remote_code: bool = False) -> list[dict[str, Any]]:
    """Relative squared error of every tensor of a file: first those with NaN or infinite values, then the worst.

    A file whose channels are rescaled, norms folded or not, is compared with the checkpoint rescaled alike.

    Args:
        path: GGUF file, or any part of a split one.
        source: Hugging Face folder or GGUF file.
        trust_remote_code: Python code of the folder may run.

    Returns:
        For every tensor ``name``, ``type``, ``error`` (``|W - W'|^2 / |W|^2``; None for a tensor that one side lacks or
        whose values are not finite), ``max_error`` (largest difference over the RMS of the tensor), ``not_finite`` (how
        many values of the two are NaN or infinite) and ``note``.

    Raises:
        UserError: a file cannot be read, or a tensor has another shape.
    """
    opened = open_gguf(path)
    file = {t.name: t for t in opened.tensors}
    reference = reference_of(source, trust_remote_code=trust_remote_code)
    rescaling = _rescaling(opened, source, reference)
    results = []
    for name, tensor in tqdm(file.items(), desc="verify", unit="tensor", disable=not sys.stderr.isatty()):
        if name not in reference:
            results.append(_alone(name, tensor.tensor_type.name, "not in the checkpoint"))
            continue
        shape, load = reference[name]
        if shape != shape_of(tensor):
            raise UserError(
                path, f"has shape {shape_of(tensor)}, the checkpoint {shape}", "compare with its own checkpoint", name
            )
        if name in rescaling.neutral:
            results.append({**_alone(name, tensor.tensor_type.name, "folded"), "error": 0.0, "max_error": 0.0})
            continue
        try:
            result = _compare_tensor(tensor, load(), rescaling)
        except NotImplementedError:
            result = {"note": "gguf-py cannot decode this type"}
        results.append({**_alone(name, tensor.tensor_type.name, ""), **result})
    results += [_alone(name, "-", "not in the file") for name in reference if name not in file]
    return sorted(results, key=lambda r: (-r["not_finite"], -(np.inf if r["error"] is None else r["error"])))


def check_loadable(path: Path) -> str:
    """Whether llama.cpp can load a file; returns which check was made, a sentence.

    Raises:
        UserError: it cannot be read, or a tensor is missing or has another shape than the metadata say.
    """
    reader = open_gguf(path)
    field = reader.fields.get("general.architecture")
    arch = field.contents() if field is not None else None
    metadata = {name: field.contents() for name, field in reader.fields.items() if name.startswith(f"{arch}.")}
    metadata["general.architecture"] = arch
    if (tokens := reader.fields.get("tokenizer.ggml.tokens")) is not None:
        metadata["tokenizer.ggml.tokens"] = list(tokens.data)  # where they are: only their number is asked
    try:
        return loadable.check_file(reader.paths[0], {t.name: shape_of(t) for t in reader.tensors}, metadata)
    except loadable.NotLoadableError as problem:
        raise UserError(path, str(problem), "convert the checkpoint again", problem.tensor) from problem


def _alone(name: str, qtype: str, note: str) -> dict[str, Any]:
    return {"name": name, "type": qtype, "error": None, "max_error": None, "not_finite": 0, "note": note}


def _compare_tensor(tensor: gguf.ReaderTensor, parts: Iterator[np.ndarray], rescaling: Rescaling) -> dict[str, Any]:
    error = energy = largest = 0.0
    row = count = bad = missed = 0
    rescaled = rescaling.touches(tensor.name)
    rows_of_one = shape_of(tensor)[-2] if len(shape_of(tensor)) > 1 else 1
    for part in parts:
        matrix = np.asarray(part).reshape(-1, part.shape[-1]) if part.ndim > 1 else np.asarray(part).reshape(1, -1)
        if rescaled:
            start = row // rows_of_one if part.ndim == 3 else row
            matrix = rescaling.scale(tensor.name, part, start if part.ndim > 1 else 0).reshape(matrix.shape)
        step = max(1, _PART // max(1, matrix.shape[1]))
        for start in range(0, matrix.shape[0], step):
            expected = matrix[start : start + step].astype(np.float32)
            found = _values(tensor, slice(row, row + expected.shape[0])).reshape(expected.shape)
            bad += expected.size - int(np.isfinite(found).sum())
            missed += expected.size - int(np.isfinite(expected).sum())
            row += expected.shape[0]
            count += expected.size
            if bad or missed:  # there is no error any more, only the count of such values
                continue
            difference = found.astype(np.float64) - expected
            error += float(np.square(difference).sum())
            energy += float(np.square(expected, dtype=np.float64).sum())
            largest = max(largest, float(np.abs(difference).max(initial=0)))
    if bad or missed:
        where = "" if bad else " in the checkpoint"
        note = f"{bad or missed} of {count} values are NaN or infinite{where}"
        return {"not_finite": bad + missed, "note": note}
    rms = np.sqrt(energy / max(count, 1))
    relative = error / energy if energy else (0.0 if error == 0 else float("inf"))
    note = "rescaled" if rescaled else ""
    return {"error": relative, "max_error": largest / rms if rms else largest, "note": note}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``verify``."""
    parser = subparsers.add_parser("verify", help="error of a GGUF file against its checkpoint", description=__doc__)
    parser.add_argument("file", type=Path, help="GGUF file, or any part of a split one")
    parser.add_argument(
        "--against", type=Path, required=True, metavar="MODEL", help="Hugging Face folder, or F16 GGUF file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    trust.add_argument(parser)
    parser.set_defaults(run=run, needs_source=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if a tensor is missing on one side, or a value is not finite.

    Raises:
        UserError: as :func:`check_loadable` and :func:`compare`.
    """
    check = check_loadable(args.file)
    results = compare(args.file, args.against, trust_remote_code=args.trust_remote_code)
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        rows = [
            [r["name"], r["type"], "-" if r["error"] is None else f"{r['error']:.4g}",
             "-" if r["max_error"] is None else f"{r['max_error']:.3g}", r["note"]]
            for r in results
        ]  # fmt: skip
        print(report.table(["tensor", "type", "rel. sq. error", "max error / RMS", "note"], rows))
        print(f"checked: {check}")
    return int(any(r["not_finite"] or r["note"].startswith("not in") for r in results))
