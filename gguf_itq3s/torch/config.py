"""What is asked of the quantization, and what a saved model records of it in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import gguf
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.rescaling import PACKED_METHOD, is_id
from ..codec.blocks import EFFORTS
from ..codec.family import DEFAULT, FAMILY
from ..codec.ternary import TQ1_0, TQ2_0

METHOD: Final = PACKED_METHOD
#: Names of the types that linear layers can have.
QTYPES: Final = {**{row.identifier: row.type for row in FAMILY.values()}, "tq2_0": TQ2_0, "tq1_0": TQ1_0}


@register_quantization_config(METHOD)
class ITQ3SConfig(QuantizationConfigMixin):
    """Options of the quantization, for ``from_pretrained(..., quantization_config=ITQ3SConfig())``.

    Attributes:
        qtype: ``itq3_s``, ``itq2_s`` or ``itq4_s``, in whose place layers that their blocks of 256 do not fit have
            ``itq3_n``, ``itq2_n`` or ``itq4_n``, which can be asked for too; ``tq2_0`` or ``tq1_0`` for models that
            were trained ternary.
        modules_to_not_convert: linear layers and parameters of experts that stay as they are, by name or by a part of
            it between dots, such as ``lm_head``, ``mlp`` or ``layers.0``. None for the output head alone, whatever the
            class calls it. Tied matrices, routers and matrices whose columns are no multiple of 64 (of 256 for the
            ternary types) stay anyway. Once the model is loaded: the names of all that stayed.
        effort: of the trellis encoder, ``fast`` or ``default``.
        ternarize: matrices that are not ternary are made so, with the mean of their absolute values as scale; without
            it they are an error for ``tq2_0`` and ``tq1_0``.
        threads: of the C library, None for one a processor; not saved.
        other_types: of a loaded model, layers and parameters of experts of another type than ``qtype``: type -> names;
            those in blocks of 64 because of their columns need not be among them.
        norms_folded: of a model loaded from a GGUF file, whether its norms are folded.
        rescaling: of a model loaded from a GGUF file that is equalized, the id of that; None for another.
    """

    def __init__(
        self, qtype: str = DEFAULT.identifier, modules_to_not_convert: Sequence[str] | None = None,
        effort: str = "default", ternarize: bool = False, threads: int | None = None,
        other_types: Mapping[str, Sequence[str]] | None = None, norms_folded: bool = False,
        rescaling: str | None = None, **others: Any,
    ) -> None:  # fmt: skip
        """As the attributes; what else a ``config.json`` may hold is passed over.

        Raises:
            ValueError: a value that is none of these, or an option of earlier versions that changed the weights.
        """
        self.quant_method = METHOD
        self.qtype, self.modules_to_not_convert = qtype, modules_to_not_convert
        self.effort, self.ternarize, self.threads = effort, ternarize, threads
        self.other_types = dict(other_types) if isinstance(other_types, Mapping) else other_types
        self.norms_folded, self.rescaling = norms_folded, rescaling
        self.check()
        if others.get("residual") is not None:
            raise ValueError("quantization_config: there is no residual pass any more; take a GGUF file of more bits")
        if others.get("fold_norms") and not norms_folded:
            raise ValueError("quantization_config: fold_norms is convert-hf-to-itq3s --fold-norms, then load_gguf")

    def check(self) -> None:
        """Raise ValueError for a value that cannot be; ``config.json`` may hold any."""

        def require(name: str, value: object, fits: bool, what: str) -> None:
            if not fits:
                raise ValueError(f"quantization_config: {name} {value!r:.60} is not {what}")

        def is_names(value: object) -> bool:
            return isinstance(value, (list, tuple)) and all(isinstance(word, str) and word for word in value)

        kept, others, threads, types = self.modules_to_not_convert, self.other_types, self.threads, tuple(QTYPES)
        require("qtype", self.qtype, self.qtype in types, f"one of {', '.join(types)}")
        require("effort", self.effort, self.effort in EFFORTS, f"one of {', '.join(EFFORTS)}")
        require("modules_to_not_convert", kept, kept is None or is_names(kept), "a list of names")
        for name in ("ternarize", "norms_folded"):
            require(name, value := getattr(self, name), isinstance(value, bool), "true or false")
        require("rescaling", self.rescaling, self.rescaling is None or is_id(self.rescaling), "the id of one")
        require("threads", threads, threads is None or (type(threads) is int and threads > 0), "a positive number")
        require("other_types", others, others is None or isinstance(others, dict), "a dictionary")
        for key, layers in (others or {}).items():
            require("other_types", key, key in types, f"one of {', '.join(types)}")
            require(f"other_types of {key}", layers, is_names(layers), "a list of names")

    def type_of(self, name: str) -> gguf.GGMLQuantizationType:
        """The type that a layer is to have; its columns may ask for shorter blocks."""
        others = (self.other_types or {}).items()
        return QTYPES[next((key for key, layers in others if name in layers), self.qtype)]

    def keeps(self, name: str) -> bool:
        """Whether a layer stays as it is; names are compared as text, whatever a folder's ``config.json`` holds."""
        return any(f".{key}." in f".{name}." for key in self.modules_to_not_convert or ())

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` gets: all but the number of threads, which is the machine's."""
        found = super().to_dict()
        del found["threads"]
        return {key: value for key, value in found.items() if value is not None}
