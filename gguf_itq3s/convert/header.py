"""The head of the output: metadata, tensor infos, and the fingerprint of all that decides the file's content."""

from __future__ import annotations

import hashlib
import json

import gguf

from ..base.journal import key_of, sources
from ..checkpoint.rescaling import NORMS_FOLDED, PLAN_VERSION
from ..checkpoint.source import Checkpoint
from ..codec import native
from ..codec.family import FILE_VERSION, is_trellis
from ..rounding.imatrix import ImportanceMatrix
from . import statistics
from .job import Job
from .options import ConvertOptions
from .types import file_type


def header(job: Job) -> bytes:
    """The head of the file; the writer of the checkpoint gets the metadata.

    Raises:
        UserError: the model's metadata do not fit GGUF's types.
    """
    checkpoint, choices, options = job.checkpoint, job.choices, job.options
    writer = checkpoint.writer
    if not options.plain and not options.request.vocab_only:  # else what upstream wrote stands
        writer.remove_key("general.file_type")
        writer.add_file_type(file_type(checkpoint, choices, options))
    if any(is_trellis(choice.type) for choice in choices):
        writer.add_uint32("itq3s.version", FILE_VERSION)
        writer.add_string("itq3s.codec", options.codec)
        writer.add_string("itq3s.effort", options.effort)
        calibrated = 1.0  # of what is quantized layer by layer, corrected then
        if not options.calibrate:
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
    return job.head()


def set_share(checkpoint: Checkpoint, calibrated: float) -> None:
    """Correct the share of weights that are rounded with statistics, in metadata made before it was known."""
    entries = checkpoint.writer.kv_data[0]
    if "itq3s.calibrated_share" in entries:
        entries["itq3s.calibrated"].value = calibrated > 0
        entries["itq3s.calibrated_share"].value = calibrated


def _add_importance(writer: gguf.GGUFWriter, matrix: ImportanceMatrix, options: ConvertOptions) -> None:
    """What llama-quantize notes of an importance matrix, texts cut as it cuts them."""

    def cut(text: str) -> str:
        return text.encode()[:127].decode(errors="ignore")

    writer.add_string("quantize.imatrix.file", cut(str(options.imatrix)))
    if matrix.datasets:
        writer.add_string("quantize.imatrix.dataset", cut(matrix.datasets[0]))
    writer.add_uint32("quantize.imatrix.entries_count", len(matrix.moments))
    if matrix.chunks > 0:
        writer.add_uint32("quantize.imatrix.chunks_count", matrix.chunks)


def fingerprint(head: bytes, options: ConvertOptions, checkpoint: Checkpoint) -> str:
    """Equal for two runs that would write the same bytes."""
    how = options.deciding()
    how["version"] = sources()
    if (library := native.library_path()) is not None:
        how["library"] = key_of(library.read_bytes())
    how["rescales"] = str(PLAN_VERSION if options.fold_norms or options.equalizes else 0)
    files = [*checkpoint.files]
    if options.request.sentence_transformers_dense_modules:
        files += sorted(options.model.glob("*/model.safetensors"))
    if options.request.target_model_dir:
        files += sorted(options.request.target_model_dir.glob("*.safetensors"))
    how["files"] = str([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    if options.calibration:
        how["calibration"] = (options.calibration / "manifest.json").read_text()
    if options.imatrix:
        how["imatrix"] = hashlib.sha256(options.imatrix.read_bytes()).hexdigest()
    return hashlib.sha256(head + json.dumps(how, sort_keys=True).encode()).hexdigest()
