"""What of a checkpoint is wanted, in the words of upstream's converter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, LlamaFileType

from ..base.errors import UserError
from .files import listed_file
from .patches import replaced_in

#: Fields that upstream's classes take as arguments of the same name.
_PASSED_ON: Final = (
    "fuse_gate_up_exps", "fp8_as_q8", "fuse_qkv", "sentence_transformers_dense_modules", "target_model_dir",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is to be read; the fields are options of ``convert_hf_to_gguf.py``.

    Attributes:
        ftype: the file that upstream would write; it decides the type that each tensor is stored in.
        mmproj: the projector of a multimodal model, not its text model.
        mtp: the layers that predict several tokens, alone.
        no_nextn: everything but these.
        vocab_only: metadata and tokenizer, no tensors.
        metadata: a JSON file whose entries replace the model card's.
        quantized_by: ``general.quantized_by``, before that of ``metadata``.
        repository: the model's name on the hub, which is its ``general.name`` then.
        no_lazy: compute every tensor at once.
        fuse_gate_up_exps: one matrix of ``ffn_gate_exps`` and ``ffn_up_exps``.
        fp8_as_q8: tensors that come in 8-bit floats are stored in Q8_0.
        fuse_qkv: one matrix of ``attn_q``, ``attn_k`` and ``attn_v``.
        sentence_transformers_dense_modules: the dense layers behind an embedding model.
        target_model_dir: the model that a draft model is for.
    """

    ftype: LlamaFileType = LlamaFileType.MOSTLY_F16
    mmproj: bool = False
    mtp: bool = False
    no_nextn: bool = False
    vocab_only: bool = False
    metadata: Path | None = None
    quantized_by: str | None = None
    repository: str | None = None
    no_lazy: bool = False
    fuse_gate_up_exps: bool = False
    fp8_as_q8: bool = False
    fuse_qkv: bool = False
    sentence_transformers_dense_modules: bool = False
    target_model_dir: Path | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor of a ``conversion`` class."""
        passed = {name: getattr(self, name) for name in _PASSED_ON}
        return {**passed, "eager": self.no_lazy, "metadata_override": self.metadata}

    def check(self, folder: Path) -> None:
        """Refuse a model whose list of modules leads out of its folder, where upstream would follow it.

        Raises:
            UserError: it does, or the list cannot be read.
        """
        path = folder / "modules.json"
        if not self.sentence_transformers_dense_modules or not path.is_file():
            return
        remedy = "take the file of the model"
        try:
            modules = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(path, f"is not valid JSON: {error}", remedy) from error
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise UserError(path, "is no list of modules", remedy)
        for module in modules:
            if module.get("path") != "":  # the model itself
                listed_file(folder, module.get("path"), path)

    @contextmanager
    def set_on(self, model_class: Any, folder: Path) -> Iterator[None]:
        """Within, a ``conversion`` class takes, or leaves out, the layers that predict several tokens.

        Raises:
            UserError: it cannot part them from the others.
        """
        with ExitStack() as stack:
            if self.fuse_gate_up_exps and MODEL_TENSOR.FFN_GATE_UP_EXP not in MODEL_TENSORS[model_class.model_arch]:
                what = f"is {MODEL_ARCH_NAMES[model_class.model_arch]}, which has no tensor for --fuse-gate-up-exps"
                raise UserError(folder, what, "leave --fuse-gate-up-exps out")
            if self.mtp and self.no_nextn:
                raise UserError(folder, "is asked for with --mtp and --no-nextn", "give one of them for each file")
            if self.mtp or self.no_nextn:
                option, flag = ("--mtp", "mtp_only") if self.mtp else ("--no-nextn", "no_mtp")
                if not getattr(model_class, "supports_mtp_export", False):
                    raise UserError(folder, f"is of an architecture that {option} is not for", f"leave {option} out")
                stack.enter_context(replaced_in(model_class, flag, True))
            for name in ("module_paths", "dense_features_dims"):  # a class gathers these over all its objects
                if (gathered := getattr(model_class, name, None)) is not None:
                    stack.enter_context(replaced_in(model_class, name, type(gathered)()))
            yield
