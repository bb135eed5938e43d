"""The head of the output: metadata, tensor infos, and the fingerprint of all that decides the file's content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import gguf
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from .. import __version__
from ..checkpoint.policy import Choice
from ..checkpoint.reading import Checkpoint
from ..checkpoint.rescaling import NORMS_FOLDED, PLAN_VERSION, Rescaling
from ..codec.types import ITQ3_S
from ..rounding.imatrix import ImportanceMatrix
from . import statistics
from .options import TERNARY_TYPES, ConvertOptions, Destination
from .output import padded

if TYPE_CHECKING:
    from .job import Job

FORMAT_VERSION: Final = 1
# Types that only a mix is named after.
_MIXES: Final = {"q4_k": "Q4_K_M", "q5_k": "Q5_K_M", "q3_k": "Q3_K_M"}


@dataclass(frozen=True)
class Head:
    """The heads of the output.

    Attributes:
        whole: GGUF header, metadata and tensor infos of the file that is not split.
        parts: the same of each part, that alone where it is not split.
        counts: how many tensors each part has.
    """

    whole: bytes
    parts: tuple[bytes, ...]
    counts: tuple[int, ...]


def header(job: Job) -> Head:
    """The heads of the files; the writer of the checkpoint gets the metadata.

    Raises:
        UserError: the model's metadata do not fit GGUF's types, or there would be too many parts.
    """
    checkpoint, choices, options = job.checkpoint, job.choices, job.options
    writer = checkpoint.writer
    if not options.plain and not options.request.vocab_only:  # else what upstream wrote stands
        writer.remove_key("general.file_type")
        writer.add_file_type(file_type(checkpoint, choices, options))
    if any(choice.type == ITQ3_S for choice in choices):
        writer.add_uint32("itq3s.version", FORMAT_VERSION)
        writer.add_string("itq3s.codec", options.encoder.codec)
        writer.add_string("itq3s.effort", options.encoder.effort)
        calibrated = 1.0  # of what is quantized layer by layer, corrected then
        if not options.layerwise.calibrate:
            known = job.statistics.share if job.statistics is not None else lambda _: 0.0
            calibrated = statistics.share(checkpoint, choices, known)
        writer.add_bool("itq3s.calibrated", calibrated > 0)
        writer.add_float32("itq3s.calibrated_share", calibrated)
        if NORMS_FOLDED not in job.rescaling.metadata():
            writer.add_bool(NORMS_FOLDED, False)
    if job.ternaries.mode:
        writer.add_string("itq3s.ternary", job.ternaries.mode)
    if isinstance(job.statistics, ImportanceMatrix):
        _add_importance(writer, job.statistics, options)
    return render(job)


def describe(checkpoint: Checkpoint, rescaling: Rescaling) -> None:
    """Give the writer of a checkpoint what the file says of its rescaling."""
    for key, value in rescaling.metadata().items():
        if isinstance(value, bool):
            checkpoint.writer.add_bool(key, value)
        elif isinstance(value, str):
            checkpoint.writer.add_string(key, value)
        else:
            checkpoint.writer.add_array(key, value)


def set_share(checkpoint: Checkpoint, calibrated: float) -> None:
    """Correct the share of weights that are rounded with statistics, in metadata made before it was known."""
    entries = checkpoint.writer.kv_data[0]
    if "itq3s.calibrated_share" in entries:
        entries["itq3s.calibrated"].value = calibrated > 0
        entries["itq3s.calibrated_share"].value = calibrated


def render(job: Job) -> Head:
    """The heads of the files, of the metadata that the checkpoint's writer has.

    Raises:
        UserError: as :func:`header`.
    """
    types = [choice.type for choice in job.choices]
    whole, _ = _render(job.checkpoint, types, Destination())
    if not job.options.to.splits:
        return Head(whole[0], (whole[0],), (len(types),))
    parts, counts = _render(job.checkpoint, types, job.options.to)
    if len(parts) > 1:  # upstream fills up the head of a part without tensors
        parts = [part.ljust(padded(len(part)), b"\0") if not n else part for part, n in zip(parts, counts, strict=True)]
    return Head(whole[0], tuple(parts), tuple(counts))


def _add_importance(writer: gguf.GGUFWriter, matrix: ImportanceMatrix, options: ConvertOptions) -> None:
    """What llama-quantize notes of an importance matrix, texts cut as it cuts them."""

    def cut(text: str) -> str:
        return text.encode()[:127].decode(errors="ignore")

    writer.add_string("quantize.imatrix.file", cut(str(options.statistics.imatrix)))
    if matrix.datasets:
        writer.add_string("quantize.imatrix.dataset", cut(matrix.datasets[0]))
    writer.add_uint32("quantize.imatrix.entries_count", len(matrix.moments))
    if matrix.chunks > 0:
        writer.add_uint32("quantize.imatrix.chunks_count", matrix.chunks)


def _render(checkpoint: Checkpoint, types: Sequence[Type], to: Destination) -> tuple[list[bytes], list[int]]:
    """Heads by upstream's writer, split as it splits, and the number of tensors in each."""
    writer = checkpoint.writer
    writer.split_max_tensors, writer.split_max_size = to.split_max_tensors, to.split_max_size
    writer.tensors = [{}, {}] if to.no_tensor_first_split else [{}]
    heads = checkpoint.heads(types)
    return heads, [len(part) for part in writer.tensors]


def file_type(checkpoint: Checkpoint, choices: Sequence[Choice], options: ConvertOptions) -> LlamaFileType:
    """``general.file_type``: of the output type, or of the ternary type that most matrices were found to be.

    Where types are chosen for a size, it is that of the type of most weights.
    """
    if options.plain or options.request.vocab_only:
        return checkpoint.ftype
    weights: Counter[str] = Counter()
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        weights[choice.type.name.lower()] += tensor.size
    if options.types.budgeted:
        name = max((name for name in weights if name != "f32"), key=weights.__getitem__)
        return LlamaFileType[f"MOSTLY_{_MIXES.get(name, name.upper())}"]
    ternary = max(TERNARY_TYPES, key=lambda name: weights[name])
    if weights[ternary] > weights[options.target.name.lower()]:
        return LlamaFileType[f"MOSTLY_{ternary.upper()}"]
    return options.stock or LlamaFileType[f"MOSTLY_{options.types.outtype.upper()}"]


def fingerprint(head: Head, options: ConvertOptions, checkpoint: Checkpoint) -> str:
    """Equal for two runs that would write the same bytes."""
    how = options.deciding()
    how["version"] = __version__
    how["rescales"] = str(PLAN_VERSION if options.statistics.fold_norms or options.equalizes else 0)
    files = [*checkpoint.files]
    if options.request.sentence_transformers_dense_modules:
        files += sorted(options.model.glob("*/model.safetensors"))
    if options.request.target_model_dir:
        files += sorted(options.request.target_model_dir.glob("*.safetensors"))
    how["files"] = str([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    given = options.statistics
    if given.calibration:
        how["calibration"] = (given.calibration / "manifest.json").read_text()
    if given.imatrix:
        how["imatrix"] = hashlib.sha256(given.imatrix.read_bytes()).hexdigest()
    return hashlib.sha256(b"".join(head.parts) + json.dumps(how, sort_keys=True).encode()).hexdigest()
