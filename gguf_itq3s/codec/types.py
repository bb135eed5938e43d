"""The names of the trellis types in gguf-py, and which types gguf-py quantizes.

:mod:`gguf_itq3s.codec.registry` adds the codec classes.
"""

from __future__ import annotations

from typing import Final

from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as Type

from .family import FAMILY

ITQ3_S: Final = Type["ITQ3_S"]
ITQ2_S: Final = Type["ITQ2_S"]
ITQ4_S: Final = Type["ITQ4_S"]
ITQ3_N: Final = Type["ITQ3_N"]
ITQ2_N: Final = Type["ITQ2_N"]
ITQ4_N: Final = Type["ITQ4_N"]
#: ``general.file_type`` of a file whose matrices are mostly in the type.
MOSTLY_ITQ3_S: Final = LlamaFileType["MOSTLY_ITQ3_S"]
MOSTLY_ITQ2_S: Final = LlamaFileType["MOSTLY_ITQ2_S"]
MOSTLY_ITQ4_S: Final = LlamaFileType["MOSTLY_ITQ4_S"]
MOSTLY_ITQ3_N: Final = LlamaFileType["MOSTLY_ITQ3_N"]
MOSTLY_ITQ2_N: Final = LlamaFileType["MOSTLY_ITQ2_N"]
MOSTLY_ITQ4_N: Final = LlamaFileType["MOSTLY_ITQ4_N"]

#: Types that need no built library: gguf-py quantizes them in numpy, or this package does.
NUMPY_TYPES: Final = frozenset(
    {
        Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.TQ1_0, Type.TQ2_0,
        *FAMILY,
    }
)  # fmt: skip


def bits_per_weight(qtype: Type) -> float:
    """Bits of a block of any type, for each of its weights."""
    weights, size = GGML_QUANT_SIZES[qtype]
    return 8 * size / weights
