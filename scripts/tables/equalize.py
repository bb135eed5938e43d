#!/usr/bin/env python3
"""What rescaled channels leave of the error of rounding, on sampled layers of a model.

    scripts/tables/equalize.py MODEL --text calibration.txt --layers 2,13,24
    ... --update docs/calibration.md    # and the section of the page

Channels are multiplied by t = w^p a^-q, with w the mean square of a column over its readers and a that of its input
(`gguf_itq3s.rounding.equalize`; by theory p = q = 1/4 is best for rounding to the nearest codeword). Statistics, and
the Hessians of LDLQ, are of every other window of the text; the error |E x|^2 / |W x|^2 is measured on the others. Of
every matrix the same rows are rounded each time. Each figure is the geometric mean over the layers and the matrices of
a kind, over that with the channels as they are. With --sizes, statistics of fewer tokens are tried too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, positive, report_errors  # noqa: E402
from gguf_itq3s.calibrate.inputs import Seen, Watch  # noqa: E402
from gguf_itq3s.calibrate.layers import LayeredModel  # noqa: E402
from gguf_itq3s.calibrate.options import FULL_COLUMNS, CalibrationOptions  # noqa: E402
from gguf_itq3s.calibrate.text import windows  # noqa: E402
from gguf_itq3s.checkpoint import rescaling  # noqa: E402
from gguf_itq3s.checkpoint.channels import Channels  # noqa: E402
from gguf_itq3s.checkpoint.reading import open_checkpoint  # noqa: E402
from gguf_itq3s.checkpoint.source import SourceTensor  # noqa: E402
from gguf_itq3s.codec import blocks, native  # noqa: E402
from gguf_itq3s.codec.transform import BLOCK  # noqa: E402
from gguf_itq3s.convert.equalize import mean_squares  # noqa: E402
from gguf_itq3s.rounding import equalize, hessian, ldlq  # noqa: E402

#: p and q, in eighths; the first are the channels as they are.
POWERS: Final = ((0, 0), (2, 2), (4, 0), (2, 0), (3, 1))
#: Source of the channels -> what the kind is called.
KINDS: Final = {"attn_norm": "q, k, v", "attn_v": "o", "ffn_norm": "gate, up", "ffn_up": "down"}
WAYS: Final = ("nearest", "diagonal", "LDLQ")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """A layer's inputs, by matrix: float32 (tokens, n), and which tokens are of the statistics."""

    inputs: Mapping[str, Floats]
    seen: npt.NDArray[np.bool_]


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--layers", required=True, help="numbers of the layers, such as 2,13,24")
    parser.add_argument("--tokens", type=positive, default=8192, help="of both halves (default: %(default)s)")
    parser.add_argument("--context", type=positive, default=512, help="default: %(default)s")
    parser.add_argument("--rows", type=positive, default=192, help="of each matrix (default: %(default)s)")
    parser.add_argument("--sizes", help="tokens of smaller statistics, such as 256,1024")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="page with the section to replace")
    args = parser.parse_args()
    library = native.load()
    if library is None:
        raise UserError(native.library_name(), "is not built", "run make build")
    layers = sorted(int(number) for number in args.layers.split(","))
    sizes = [int(size) for size in args.sizes.split(",")] if args.sizes else []
    checkpoint = open_checkpoint(args.model)
    options = CalibrationOptions(args.model, args.text, tokens=args.tokens, context=args.context)
    model = LayeredModel(options, checkpoint)
    plan = rescaling.plan_tensors(checkpoint)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    found: dict[tuple[str, str, tuple[int, int]], list[float]] = defaultdict(list)
    theory: dict[tuple[str, int], list[float]] = defaultdict(list)
    text, done = "", []
    for number, sample in run(model, options, layers, args.context):
        for source, channels in plan.channels.items():
            part = source.split(".")[-2]
            if not source.startswith(f"blk.{number}.") or part not in KINDS:
                continue
            for key, error in errors(channels, tensors, sample, args.rows, library).items():
                found[(KINDS[part], *key)].append(error)
            for size in (*sizes, int(sample.seen.sum())):
                theory[KINDS[part], size].append(predicted(channels, tensors, sample, size))
        done.append(number)
        text = table(found, theory, done, args.tokens)
        print(text, flush=True)
    if args.update:
        report.replace_section(args.update, "equalize", f"\n{text}\n")
    return 0


def run(model: LayeredModel, options: CalibrationOptions, layers: list[int], context: int):  # type: ignore[no-untyped-def]
    """The inputs of some layers, one after the other, as the model runs."""
    inputs = windows(options, model.context)
    batches = [slice(i, i + options.batch) for i in range(0, len(inputs), options.batch)]
    seen = np.repeat(np.arange(len(inputs)) % 2 == 0, context)
    with tempfile.TemporaryDirectory() as folder:
        keywords = model.start(Path(folder), inputs, batches, 0)
        file = next(Path(folder).iterdir())
        hidden = np.array(np.memmap(file, np.float32, "r", shape=(*inputs.shape, model.hidden)))
        for number in tqdm(range(max(layers) + 1), unit=" layers"):
            layer = model.load(number)
            groups = model.layout.groups(number, layer) if number in layers else []
            kept: dict[str, list[Floats]] = defaultdict(list)

            def keep(call: Seen, kept: dict[str, list[Floats]] = kept) -> None:
                for group in call.groups:
                    rows = call.rows(group).float().cpu().numpy().copy()
                    gain = 1 if group.norm is None else model.gain(group.norm)
                    for reader in group.readers:
                        kept[reader.name].append(rows * gain)

            with Watch(model, number, layer, groups, keep):
                for batch in batches:
                    hidden[batch] = model.step(layer, hidden[batch], keywords[number][len(hidden[batch])])
            model.unload(number)
            if number in layers:
                yield number, Sample({name: np.concatenate(parts) for name, parts in kept.items()}, seen)


def statistics(channels: Channels, tensors: Mapping[str, SourceTensor], x: Floats):  # type: ignore[no-untyped-def]
    """Mean squares of the columns, over all readers, and of their inputs: float64 (n,) each."""
    w = np.mean([mean_squares(tensors[reader])[0] for reader in channels.readers], axis=0)
    return w, np.square(x).mean(axis=0, dtype=np.float64)


def factors(channels: Channels, w, a, powers: tuple[int, int]):  # type: ignore[no-untyped-def]
    """t of every column, float64 (n,); powers in eighths."""
    tied = None if channels.repeats == 1 else channels.of_column
    return np.exp(equalize.logarithms(w, a, tied, (powers[0] / 2, powers[1] / 2)))[channels.of_column]


def predicted(channels: Channels, tensors: Mapping[str, SourceTensor], sample: Sample, tokens: int) -> float:
    """The cost by theory on the other half, over that of the channels as they are, with statistics of some tokens."""
    x = sample.inputs[channels.readers[0]]
    first, second = x[sample.seen], x[~sample.seen]
    # From places spread evenly over it, in pieces of 64 tokens.
    pieces = max(1, tokens // 64)
    starts = np.linspace(0, max(0, len(first) - 64), pieces).astype(int)
    some = first if tokens >= len(first) else np.concatenate([first[start : start + 64] for start in starts])
    w, a = statistics(channels, tensors, some)
    square = factors(channels, w, a, (2, 2)) ** 2
    there = np.square(second).mean(axis=0, dtype=np.float64)
    return equalize.cost(w / square, there * square) / equalize.cost(w, there)


def errors(
    channels: Channels, tensors: Mapping[str, SourceTensor], sample: Sample, count: int, library: native.NativeLibrary
) -> dict[tuple[str, tuple[int, int]], float]:
    """The error on the other half, over that of the channels as they are: way, powers -> geometric mean of matrices."""
    x = sample.inputs[channels.readers[0]]
    first, second = x[sample.seen], x[~sample.seen]
    w, a = statistics(channels, tensors, first)
    full = len(w) <= FULL_COLUMNS
    some = {}
    for reader in channels.readers:
        weights = tensors[reader].whole()
        some[reader] = weights[np.linspace(0, len(weights) - 1, min(count, len(weights))).astype(int)]
    result: dict[tuple[str, tuple[int, int]], float] = {}
    for powers in POWERS:
        t = factors(channels, w, a, powers)
        turned = hessian.rotate_rows(first * t)
        if full:
            h = turned.T @ turned / len(turned)
        else:
            parts = turned.reshape(len(turned), -1, BLOCK).transpose(1, 0, 2)
            h = parts.transpose(0, 2, 1) @ parts / len(turned)
        ways = {"nearest": None, "LDLQ": hessian.factorize(h), "diagonal": hessian.factorize(
            hessian.from_diagonal(a * t * t))}  # fmt: skip
        for way, factor in ways.items():
            total = []
            for rows in some.values():
                scaled = (rows / t).astype(np.float32)
                coded = library.quantize(scaled) if factor is None else ldlq.quantize(scaled, factor, library=library)
                error = (blocks.dequantize(coded) - scaled) * t
                total.append(np.log(np.square(second @ error.T).sum() / np.square(second @ rows.T).sum()))
            result[way, powers] = float(np.exp(np.mean(total)))
    return result


def table(
    found: Mapping[tuple[str, str, tuple[int, int]], list[float]], theory: Mapping[tuple[str, int], list[float]],
    layers: list[int], tokens: int,
) -> str:  # fmt: skip
    def fraction(eighths: int) -> str:
        return str(Fraction(eighths, 8))

    kinds = [kind for kind in KINDS.values() if any(key[0] == kind for key in found)]
    rows = []
    for way in WAYS:
        for powers in POWERS:
            cells = [found[kind, way, powers] for kind in kinds]
            first = [found[kind, way, POWERS[0]] for kind in kinds]
            ratios = [np.exp(np.mean(np.log(a) - np.log(b))) for a, b in zip(cells, first, strict=True)]
            shown = [f"{np.exp(np.mean(np.log(c))):.4f}" for c in first] if powers == POWERS[0] else [
                f"{ratio:.3f}" for ratio in ratios]  # fmt: skip
            rows.append([way, *(fraction(power) for power in powers), *shown])
    parts = [report.markdown(["rounding", "p", "q", *kinds], rows, left=1)]
    held = tokens // 2
    parts.append(
        f"Layers {', '.join(map(str, layers))}, {held} tokens of statistics, as many others for the error. The rows "
        "of p = q = 0 are the errors, the others are over them.\n"
    )
    counts = sorted({size for _, size in theory})
    rows = [[str(size), *(f"{np.mean(theory[kind, size]):.3f}" for kind in kinds)] for size in counts]
    parts.append(report.markdown(["tokens of statistics", *kinds], rows, left=1))
    parts.append("Cost by theory on the other half, over that of the channels as they are.")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
