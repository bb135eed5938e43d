"""The shapes that the Triton kernels are tried on."""

from __future__ import annotations

from typing import NamedTuple

import gguf
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.codec.family import is_trellis
from packed import TYPES


class Case(NamedTuple):
    qtype: Type
    rows: int
    columns: int
    outputs: int


def name(case: Case) -> str:
    return f"{case.qtype.name}-{case.rows}x{case.columns}"


#: Columns and outputs, by whether the columns are a multiple of 256. Odd numbers of outputs.
SHAPES = {True: ((256, 33), (768, 7), (4096, 5)), False: ((64, 33), (576, 7))}
#: The ternary types, which share all but the decoder, with fewer rows.
FORWARD = [
    Case(qtype, rows, columns, outputs)
    for qtype in TYPES
    for long, shapes in SHAPES.items()
    for columns, outputs in shapes
    for rows in (1, 3, 16, 17, 128)
    if (is_trellis(qtype) or rows in (1, 17)) and long == (gguf.GGML_QUANT_SIZES[qtype][0] == 256)
]
