"""What quantizing layer by layer takes of memory and disk, said and looked for before the work."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from gguf import GGMLQuantizationType as Type

from ..base import report
from ..base.errors import UserError
from ..checkpoint.source import SourceTensor
from ..codec.transform import rotation_block
from ..rounding.target import WIDE
from .backward import CHUNK
from .experts import BOUND
from .layers import LayeredModel
from .matrices import EMBEDDING, Source
from .options import DTYPES, CalibrationOptions
from .ranks import ALONE, Ranks, own_batch, processes_here
from .result import MEASURED
from .shares import Batches

#: Memory of Python and its libraries, torch and transformers among them, in bytes.
_LIBRARIES: Final = 600 << 20


@dataclass(frozen=True)
class FisherBlocks:
    """The form of output Fisher matrices: most rows of one that is kept whole, and of the blocks of a larger one."""

    full: int = 8192
    block: int = 1024


def _sizes(
    tensor: SourceTensor, calibration: CalibrationOptions, fisher: FisherBlocks, qtype: Type, hidden: int
) -> Counter[str]:
    """What a matrix of a layer, or its experts' in one group after the other, takes: numbers of weights and gradients,
    bytes while it is rounded and of what it is encoded in."""
    rows, columns = tensor.shape[-2:]
    n = columns if calibration.full(columns) else rotation_block(columns)
    # Sums in float64, two decompositions with a copy each, a factor; of narrow ones all in float64.
    square = (8 + 6 * 4 if n > WIDE else 2 * 8 + 6 * 8) * n * columns
    gradients = tensor.size // columns * (rows if rows <= fisher.full else fisher.block)
    inside = len(tensor.shape) > 2
    return Counter(
        solving=square + 8 * 7 * rows * columns, columns=columns, kept=columns if rows == hidden else 0,
        weights=0 if inside else tensor.size, gradients=0 if inside else gradients,
        experts=tensor.size if inside else 0, of_experts=gradients if inside else 0,
        encoded=tensor.bytes_in(qtype) if inside else 0,
    )  # fmt: skip


def check(
    folder: Path, calibration: CalibrationOptions, source: Source, model: LayeredModel, inputs: np.ndarray,
    batches: Batches, fisher: FisherBlocks | None, messages: TextIO, ranks: Ranks = ALONE,
) -> None:  # fmt: skip
    """Say what memory and disk a run takes, and find a disk that is too small before the work.

    Args:
        inputs: tokens of this rank, int64 (windows, context).

    Raises:
        UserError: the disk is too small.
    """
    layers: dict[str, Counter[str]] = {}
    for name, tensor in source.tensors.items():
        if len(tensor.shape) >= 2 and name.startswith("blk."):
            size = layers.setdefault(name.split(".")[1], Counter())
            layer = _sizes(tensor, calibration, fisher or FisherBlocks(), source.types[name], model.hidden)
            one = {key: max(size[key], layer[key]) for key in ("solving", "columns")}
            size.update(layer)
            size.update({key: value - size[key] for key, value in one.items()})
    largest: Counter[str] = Counter()
    for size in layers.values():
        largest |= size
    vocabulary, hidden = source.tensors[EMBEDDING].shape[-2:]
    batch = min(own_batch(calibration.batch, calibration.device), len(inputs)) * inputs.shape[1]
    kept = batches.kept(inputs.shape[1])
    held = len(range(kept.start, kept.stop, kept.step))
    weight, number = 2 if model.in_bfloat16 else 4, DTYPES[model.dtype][0]
    # Of experts a group, and what all of them are encoded in.
    group = min(BOUND, 8 * largest["experts"] + 8 * largest["of_experts"])
    rounding = 2 * weight * largest["weights"] + group + largest["encoded"] + largest["solving"]
    rounding += 4 * (8 * batch + 3 * held) * largest["columns"]
    # The output matrix and a copy of it, logits of the original and, of some tokens, of both.
    ends = 8 * vocabulary * hidden + 4 * 2 * MEASURED * vocabulary
    stream = number * inputs.size * hidden
    disk = 4 * stream + 2 * number * inputs.size * largest["kept"]
    if group:  # what comes into the experts of both models and what they put out
        disk += 4 * stream
    shared = 0  # keys and values that later layers read, float32, of a kind of layer
    if readers := int(getattr(model.config, "num_kv_shared_layers", 0)):
        kinds = len(set(getattr(model.config, "layer_types", ())))
        shared = 4 * inputs.size * 2 * max(t.shape[-2] for n, t in source.tensors.items() if ".attn_k." in n)
        disk += 2 * kinds * shared
    if ranks.first:
        disk += sum(tensor.bytes_in(source.types[name]) for name, tensor in source.tensors.items())
    backward = 0
    if fisher is not None:
        disk += (model.layers + 3) * stream + readers * shared
        if ranks.first:
            disk += 4 * sum(size["gradients"] + size["of_experts"] for size in layers.values())
        # A layer, sums in float64 and what is written of them; before that the logits of a few tokens.
        rest = weight * largest["weights"] + 12 * largest["gradients"]
        backward = rest + 2 * group + 16 * batch * largest["columns"]
        ends = max(ends, 6 * vocabulary * hidden + 32 * CHUNK * vocabulary)
    memory = _LIBRARIES + max(rounding, ends, backward)
    tokens, whole = (int(total) for total in ranks.sums(inputs.size, disk))
    text = f"{tokens} tokens through {model.layers} layers"
    if ranks.alone:
        needs = f"about {report.size(memory)} of memory, {report.size(disk)} of disk"
    else:
        text += f" in {ranks.size} processes"
        needs = f"about {report.size(memory)} of memory each, {report.size(whole)} of disk together"
    print(f"calibrating on {text}: {needs}", file=messages)
    # The processes of a machine share its disk.
    here = disk if ranks.alone else min(whole, disk * processes_here())
    work = folder if ranks.alone else folder.parent
    present = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    if (free := shutil.disk_usage(folder).free + present) < here:
        what = f"needs {report.size(here)} while it calibrates, {report.size(free)} are free"
        raise UserError(folder, what, "free some space, give less --tokens, or choose another folder")
