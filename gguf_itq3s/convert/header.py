"""The head of the output: metadata, tensor infos, and the fingerprint of all that decides the file's content."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import numpy as np
from gguf import LlamaFileType
from gguf.gguf_writer import WriterState

from .. import __version__
from ..checkpoint.fold import NORMS_FOLDED, PLAN_VERSION, Folding
from ..checkpoint.policy import Choice
from ..checkpoint.reader import Checkpoint
from ..codec.types import ITQ3_S
from ..errors import UserError
from .options import NEUTRAL, TERNARY_TYPES, ConvertOptions
from .ternary import Ternaries

FORMAT_VERSION: Final = 1


def header(
    checkpoint: Checkpoint,
    choices: Sequence[Choice],
    options: ConvertOptions,
    folding: Folding,
    ternaries: Ternaries,
    calibrated: float = 0.0,
) -> bytes:
    """GGUF header, metadata and tensor infos as bytes; ``calibrated``: the share of weights rounded with statistics.

    Raises:
        UserError: the model's metadata do not fit GGUF's types.
    """
    writer = checkpoint.writer
    if options.outtype != "f16":  # what upstream wrote for an F16 file stands
        writer.remove_key("general.file_type")
        writer.add_file_type(_file_type(checkpoint, choices, options))
    if any(choice.type == ITQ3_S for choice in choices):
        writer.add_uint32("itq3s.version", FORMAT_VERSION)
        writer.add_string("itq3s.codec", options.codec)
        writer.add_string("itq3s.effort", options.effort)
        writer.add_bool("itq3s.calibrated", calibrated > 0)
        writer.add_float32("itq3s.calibrated_share", calibrated)
    if folding.norms or any(choice.type == ITQ3_S for choice in choices):
        writer.add_bool(NORMS_FOLDED, bool(folding.norms))
    if ternaries.mode:
        writer.add_string("itq3s.ternary", ternaries.mode)
    writer.tensors = [{}]
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        size = tensor.bytes_in(choice.type)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=choice.type)
    buffer = io.BytesIO()
    writer.fout, writer.state = [buffer], WriterState.EMPTY
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        what = f"gives metadata that no GGUF file can hold: {error}"
        raise UserError(checkpoint.folder / "config.json", what, "take the config.json of the model") from error
    return buffer.getvalue()


def _file_type(checkpoint: Checkpoint, choices: Sequence[Choice], options: ConvertOptions) -> int:
    """``general.file_type``: of the output type, or of the ternary type that most matrices were found to be."""
    weights: Counter[str] = Counter()
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        weights[choice.type.name.lower()] += tensor.size
    ternary = max(TERNARY_TYPES, key=lambda name: weights[name])
    name = ternary if weights[ternary] > weights[options.outtype] else options.outtype
    return LlamaFileType[f"MOSTLY_{name.upper()}"]


def fingerprint(head: bytes, options: ConvertOptions, checkpoint: Checkpoint) -> str:
    """Equal for two runs that would write the same bytes."""
    how = {name: str(value) for name, value in asdict(options).items() if name not in NEUTRAL}
    how["version"] = __version__
    how["folds"] = str(PLAN_VERSION if options.folds else 0)
    how["files"] = str([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files])
    if options.calibration:
        how["calibration"] = (options.calibration / "manifest.json").read_text()
    if options.imatrix:
        how["imatrix"] = hashlib.sha256(options.imatrix.read_bytes()).hexdigest()
    return hashlib.sha256(head + json.dumps(how, sort_keys=True).encode()).hexdigest()
