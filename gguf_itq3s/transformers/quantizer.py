"""What Transformers calls while it loads a model: linear layers become packed ones, tensor by tensor.

``from_pretrained`` builds the model without weights, lets :class:`ITQ3SQuantizer` put packed layers in place of linear
ones, then reads one tensor after the other; those of packed layers go through :class:`Pack` on their way, so that there
is never more than one matrix in floats beside the model. A saved model is read as it is, once its tensors are known to
be what its config says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert

from ..checkpoint.fold import FOLDED_TAG
from ..codec import ternary
from ..codec.transform import BLOCK
from ..codec.types import ITQ3_S
from ..torch import PackedLinear, quantize
from . import folding
from .config import METHOD, ITQ3SConfig
from .folding import Folding

#: Weights that are scaled and coded at a time.
_PIECE: Final = 1 << 22
#: What is said of a checkpoint that holds no weights to look at.
_UNREAD: Final = "norms are folded as a model is read from safetensors files: save it so, or give fold_norms=False"


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint.

    Attributes:
        file: where it is.
        key: its name there.
        dtype: as safetensors calls it.
        shape: its shape.
        whole: whether it becomes one parameter as it is, neither split nor merged.
    """

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    whole: bool

    def read(self) -> torch.Tensor:
        """The tensor."""
        with safe_open(self.file, framework="pt") as source:
            return source.get_tensor(self.key)


class Pack(ConversionOps):
    """The operation that Transformers applies to a tensor for which :meth:`ITQ3SQuantizer.param_needs_quantization`."""

    def __init__(self, quantizer: ITQ3SQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *_: Any, full_layer_name: str, **__: Any) -> dict[str, torch.Tensor]:
        """What becomes of a parameter: itself and, with a residual pass, its residual, by name."""
        (tensor,) = input_dict.values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        if self.quantizer.refused is None:
            try:
                return self.quantizer.actions[full_layer_name](tensor)
            except ValueError as error:
                # Transformers would hide it in a table of its log; it is raised once the tensors are through.
                self.quantizer.refused = error
        return {full_layer_name: tensor}


@register_quantizer(METHOD)
class ITQ3SQuantizer(HfQuantizer):
    """See :class:`gguf_itq3s.transformers.ITQ3SConfig`."""

    quantization_config: ITQ3SConfig
    requires_calibration = False

    def __init__(self, quantization_config: ITQ3SConfig, **kwargs: Any) -> None:
        # A copy: what is found out about this model is written into it.
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        self.quantization_config.check()
        #: Parameter -> what is made of its tensor; of a saved model empty.
        self.actions: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {}
        #: Why a tensor cannot be packed; nothing is packed after it.
        self.refused: ValueError | None = None
        self._packed: dict[str, PackedLinear] = {}
        self._folding = Folding()
        #: Matrices that stay floats, read in float32 all the same.
        self._unrounded: set[str] = set()
        self._kept: Any = None
        self._files: Sequence[str] = ()
        self._dtype = torch.get_default_dtype()

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse what would read packed weights from the disk while the model runs."""
        if "disk" in {str(place) for place in (device_map.values() if isinstance(device_map, dict) else [device_map])}:
            raise ValueError("packed layers cannot be offloaded to the disk; give a device_map without it")

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """``save_pretrained`` writes the packed bytes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters beside the packed layers can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """torch.compile takes the layers."""
        return True

    # ------------------------------------------------------------------------------------------- before the weights

    def _process_model_before_weight_loading(
        self, model: Any, dtype: torch.dtype | None = None, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> Any:
        config = self.quantization_config
        self._dtype, self._files = dtype or self._dtype, checkpoint_files or ()
        if config.modules_to_not_convert is None:
            config.modules_to_not_convert = get_keys_to_not_convert(model)
        tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
        linear = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
        chosen = {name: layer for name, layer in linear.items() if name not in tied and not config.keeps(name)}
        narrow = [name for name, layer in chosen.items() if layer.in_features % BLOCK]
        if narrow and self.pre_quantized:
            raise ValueError(
                f"{narrow[0]}: {chosen[narrow[0]].in_features} columns cannot be packed; the config is wrong"
            )
        if narrow:
            named = ", ".join(narrow[:4]) + (f" and {len(narrow) - 4} more" if len(narrow) > 4 else "")
            warnings.warn(
                f"{len(narrow)} linear layers stay as they are, because their columns are no multiple of {BLOCK}: "
                f"{named}", stacklevel=2,
            )  # fmt: skip
        for name, layer in chosen.items():
            if name in narrow:
                continue
            qtype, residual = config.types_of(name)
            packed = PackedLinear(
                layer.in_features, layer.out_features, layer.bias is not None, qtype=qtype, residual_type=residual,
                device="meta", dtype=self._dtype,
            )  # fmt: skip
            packed.train(layer.training)
            model.set_submodule(name, packed)
            self._packed[name] = packed
        if not self._packed:
            warnings.warn("no linear layer can be packed: the model stays as it is", stacklevel=2)
        config.modules_to_not_convert = sorted(name for name in linear if name not in self._packed)
        if not self.pre_quantized:
            self._keep_unrounded(model)
        return model

    def _keep_unrounded(self, model: Any) -> None:
        """Let weights be read in float32, not rounded to the model's dtype before gains and codes are made of them."""
        config = self.quantization_config
        tied = model.all_tied_weights_keys  # not tied yet, and none of a matrix's own
        parameters = [
            name for name, _ in model.named_parameters() if name not in tied and not name.endswith(".residual")
        ]
        if config.fold_norms and config.qtype == "itq3_s":
            self._folding = folding.plan(model.config, parameters)
            if self._folding.note:
                warnings.warn(self._folding.note, stacklevel=2)
        packed = {f"{name}.weight" for name in self._packed}
        readers = {name for readers in self._folding.norms.values() for name in readers}
        self._unrounded = readers - packed
        self._kept = model._keep_in_fp32_modules_strict
        model._keep_in_fp32_modules_strict = {*(self._kept or ()), *packed, *readers}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """The last call before tensors are read: the names are known now, so the plan is made here."""
        stored = self._stored(model, weight_conversions)
        if self._files:
            self._check(stored)
        if not self.pre_quantized:
            self._plan(stored)
        return list(super().update_weight_conversions(weight_conversions, model))

    def _stored(self, model: Any, conversions: Sequence[Any]) -> dict[str, Stored]:
        """The tensors of the checkpoint by parameter; empty where it is none of safetensors files."""
        # A copy: to ask a renaming for a name marks it as used, which decides what a saved model is called.
        mapping = copy.deepcopy(list(conversions))
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state = model.state_dict()
        found: dict[str, Stored] = {}
        for file in self._files:
            if not str(file).endswith(".safetensors"):
                continue
            with safe_open(file, framework="pt") as source:
                for key in source.keys():  # noqa: SIM118  (not a dictionary)
                    name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
                    piece = source.get_slice(key)
                    found[name] = Stored(file, key, piece.get_dtype(), tuple(piece.get_shape()), converter is None)
        return found

    def _check(self, stored: Mapping[str, Stored]) -> None:
        """Compare the tensors of packed layers with their shapes before one of them is read.

        Raises:
            ValueError: one is missing or of another shape or type.
        """
        if not stored:  # no safetensors: Transformers' own checks are left
            return
        for name, layer in self._packed.items():
            expected: dict[str, tuple[int, ...]] = {"weight": (layer.out_features, layer.in_features)}
            if self.pre_quantized:
                expected = {
                    part: tuple(blocks.shape)
                    for part in ("weight", "residual")
                    if (blocks := getattr(layer, part)) is not None
                }
            for part, shape in expected.items():
                there = stored.get(f"{name}.{part}")
                if there is None:
                    folder = Path(self._files[0]).parent
                    raise ValueError(f"{folder}: has no {name}.{part}; download the model again")
                if not there.whole and not self.pre_quantized:
                    continue
                packed = there.dtype == "U8"
                if there.shape != shape or packed != self.pre_quantized:
                    wanted = f"{layer.qtype.name} blocks, U8" if self.pre_quantized else "floats"
                    raise ValueError(
                        f"{there.file}: {there.key}: is {there.dtype} of shape {list(there.shape)} where {wanted} of "
                        f"shape {list(shape)} are expected; download the model again"
                    )

    def _plan(self, stored: Mapping[str, Stored]) -> None:
        """Decide what becomes of each parameter.

        Raises:
            ValueError: norms are to be folded and cannot be read.
        """
        norms = self._folding.norms
        if norms and not stored:
            raise ValueError(_UNREAD)
        if merged := [name for name in norms if name not in stored or not stored[name].whole]:
            warnings.warn(f"norms are not folded: the checkpoint does not hold {merged[0]} as it is", stacklevel=2)
            norms = {}
        self.quantization_config.norms_folded = bool(norms)
        gains = {norm: self._gain(stored[norm]) for norm in norms}
        reads = {reader: gains[norm] for norm, readers in norms.items() for reader in readers}
        self.actions |= {norm: partial(self._neutral, norm) for norm in norms}
        self.actions |= {name: partial(self._float, name, reads.get(name)) for name in self._unrounded}
        for module in self._packed:
            self.actions[f"{module}.weight"] = partial(self._pack, module, reads.get(f"{module}.weight"))

    def _gain(self, norm: Stored) -> torch.Tensor:
        gain = self._folding.gain(norm.read())
        if not torch.isfinite(gain).all():
            raise ValueError(f"{norm.file}: {norm.key}: has NaN or infinite weights; repair the checkpoint")
        return gain

    # ----------------------------------------------------------------------------------------------- with a weight

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a tensor goes through :class:`Pack`."""
        return param_name in self.actions

    def get_quantize_ops(self) -> Pack:
        """The operation for such a tensor."""
        return Pack(self)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Of a saved model: packed bytes stay bytes, and only floats become floats.

        Raises:
            ValueError: a tensor is one where the model has the other.
        """
        kind = param.get_dtype() if hasattr(param, "get_dtype") else "F" if param.is_floating_point() else "U8"
        floats = kind.startswith(("F", "BF"))
        if dtype is not None and floats != dtype.is_floating_point:
            raise ValueError(f"a tensor of {kind} cannot be a parameter of {dtype}; download the model again")
        return super().get_new_dtype(converter, param, dtype)

    def _neutral(self, norm: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {norm: self._folding.neutral(weight)}

    def _float(self, name: str, gain: torch.Tensor | None, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """A matrix that reads a folded norm and is not packed."""
        scaled = weight if gain is None else weight.float() * gain.to(weight.device)
        return {name: scaled.to(self._dtype)}

    def _pack(self, module: str, gain: torch.Tensor | None, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        config, layer = self.quantization_config, self._packed[module]
        expected = (layer.out_features, layer.in_features)
        if tuple(weight.shape) != expected:
            raise ValueError(f"{module}.weight: has the shape {tuple(weight.shape)}, not {expected}")
        if layer.qtype != ITQ3_S:
            weight = self._ternary(module, weight.float())
        # In pieces, so that there is no second copy of the matrix in floats.
        packed = [
            quantize(piece, layer.qtype, layer.residual_type, effort=config.effort, threads=config.threads)
            for piece in self._scaled(module, weight, gain)
        ]
        found = {f"{module}.weight": torch.cat([part.weight for part in packed])}
        if layer.residual_type is not None:
            found[f"{module}.residual"] = torch.cat([part.residual for part in packed if part.residual is not None])
        return found

    def _scaled(self, module: str, weight: torch.Tensor, gain: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Some rows of a matrix after the other, float32, times the gains of the norm that it reads."""
        for rows in weight.split(max(1, _PIECE // weight.shape[1])):
            piece = rows.float()
            if gain is not None:
                piece = piece * gain.to(piece.device)
            if not torch.isfinite(piece).all():
                raise ValueError(f"{module}.weight: has NaN or infinite weights; repair the checkpoint")
            yield piece

    def _ternary(self, module: str, matrix: torch.Tensor) -> torch.Tensor:
        values = matrix.cpu().numpy()
        if not np.isfinite(values).all():
            raise ValueError(f"{module}.weight: has NaN or infinite weights; repair the checkpoint")
        if ternary.recognise(values) is not None:
            return matrix
        if not self.quantization_config.ternarize:
            raise ValueError(
                f"{module}.weight: is not ternary; use qtype itq3_s, modules_to_not_convert, or ternarize=True"
            )
        return torch.from_numpy(ternary.ternarize(values, "absmean").weights()).to(matrix.device)

    # ------------------------------------------------------------------------------------------- after the weights

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.refused is not None:
            raise self.refused
        if not self.pre_quantized:
            model._keep_in_fp32_modules_strict = self._kept
        self.actions.clear()
        if self.quantization_config.norms_folded:
            model.add_model_tags(FOLDED_TAG)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Ordinary linear layers with the decoded matrices, in place of the packed ones."""
        for name, layer in list(model.named_modules()):
            if isinstance(layer, PackedLinear):
                device = layer.weight.device
                dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
                dense.weight = nn.Parameter(layer.dequantize(dtype or self._dtype).to(device), requires_grad=False)
                dense.bias = layer.bias
                model.set_submodule(name, dense)
        return model
