"""What Transformers calls while it loads a model: linear layers and experts become packed ones, tensor by tensor.

``from_pretrained`` builds the model without weights, lets :class:`ITQ3SQuantizer` put packed layers in place of linear
ones and of stacked experts, then reads one tensor after the other; those of packed layers go through :class:`Pack` on
their way, so that there is never more than one matrix in floats beside the model; experts that the checkpoint holds one
by one are read so (:mod:`.stacking`). A saved model is read as it is, once its tensors are known to be what its config
says.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert

from ..checkpoint.quantization import REMEDY, is_scale
from ..checkpoint.rescaling import EQUALIZED_TAG, FOLDED_TAG
from ..codec import ternary
from ..codec.family import DEFAULT, is_trellis
from . import decode, stacked
from .config import METHOD, ITQ3SConfig
from .decode import QType
from .experts import PackedExperts
from .linear import PackedLinear
from .packing import quantize
from .stacked import Experts
from .stacking import Pieces, Stacked, read

#: Weights that are coded at a time.
_PIECE: Final = 1 << 22
#: Last parts of the names of routers, which stay floats as in a GGUF file.
_ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint, ``dtype`` as safetensors calls it; ``whole`` ones are neither split nor merged."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    whole: bool


class Pack(ConversionOps):
    """The operation that Transformers applies to a tensor for which :meth:`ITQ3SQuantizer.param_needs_quantization`."""

    def __init__(self, quantizer: ITQ3SQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *_: Any, full_layer_name: str, **__: Any) -> dict[str, torch.Tensor]:
        """What becomes of a parameter, by name."""
        (tensor,) = input_dict.values()
        tensor = tensor[0] if isinstance(tensor, list) and not isinstance(tensor, Pieces) else tensor
        if self.quantizer.refused is None:
            try:
                return self.quantizer.actions[full_layer_name](tensor)
            except ValueError as error:
                # Transformers would hide it in a table of its log; it is raised once the tensors are through.
                self.quantizer.refused = error
        return {full_layer_name: read(tensor[0][0]) if isinstance(tensor, Pieces) else tensor}


@dataclass(frozen=True)
class Matrix:
    """What is packed: the matrix of a linear layer, or the ``count`` matrices of experts that one parameter holds.

    ``transposed`` floats of experts have their rows last.
    """

    parameter: str
    qtype: QType
    rows: int
    columns: int
    count: int | None = None
    transposed: bool = False

    @property
    def floats(self) -> tuple[int, ...]:
        """The shape that a checkpoint has it in."""
        shape = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        return shape if self.count is None else (self.count, *shape)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The shape of its blocks."""
        shape = (self.rows, decode.layout(self.qtype).row_bytes(self.columns))
        return shape if self.count is None else (self.count, *shape)


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
        #: By name: that of a linear layer, or of a parameter of experts.
        self._packed: dict[str, Matrix] = {}
        #: Experts that have packed matrices, by name of their module.
        self._experts: dict[str, Experts] = {}
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
        chosen = {
            name: layer
            for name, layer in linear.items()
            if name not in tied and not config.keeps(name) and name.rpartition(".")[2] not in _ROUTERS
        }
        every = {f"{name}.{part}": module for name, module in model.named_modules() for part in stacked.stacks(module)}
        stacks = self._find_experts(every)
        widths = {name: layer.in_features for name, layer in chosen.items()}
        widths |= {name: found.stacks[name.rpartition(".")[2]].columns for name, found in stacks.items()}
        narrow = {
            name: columns
            for name, columns in widths.items()
            if not decode.layout_for(config.type_of(name), columns).fits(columns)
        }
        if narrow and self.pre_quantized:
            name = next(iter(narrow))
            raise ValueError(f"{name}: {narrow[name]} columns cannot be packed; the config is wrong")
        if narrow:
            warnings.warn(
                f"{len(narrow)} linear layers stay as they are, because their columns are not whole blocks: "
                f"{_listed(narrow)}", stacklevel=2,
            )  # fmt: skip
        for name, layer in chosen.items():
            if name not in narrow:
                self._pack_linear(model, name, layer)
        self._pack_experts(model, {name: found for name, found in stacks.items() if name not in narrow})
        if not self._packed:
            warnings.warn("no linear layer can be packed: the model stays as it is", stacklevel=2)
        config.modules_to_not_convert = sorted(name for name in (*linear, *every) if name not in self._packed)
        if not self.pre_quantized:
            # Read in float32, not rounded to the model's dtype before codes are made of them.
            self._kept = model._keep_in_fp32_modules_strict
            packed = {matrix.parameter for matrix in self._packed.values()}
            model._keep_in_fp32_modules_strict = {*(self._kept or ()), *packed}
        return model

    def _find_experts(self, stacks: Mapping[str, nn.Module]) -> dict[str, Experts]:
        """Of parameters that are stacks, and their modules: those that can be packed and are not to stay."""
        found: dict[str, Experts] = {}
        left: dict[str, str] = {}
        known: dict[nn.Module, Experts | str] = {}  # a module has two stacks
        for name, module in stacks.items():
            if self.quantization_config.keeps(name):
                continue
            if module not in known:
                known[module] = stacked.find(module)
            experts = known[module]
            if isinstance(experts, str):
                left[name.rpartition(".")[0]] = experts
            else:
                found[name] = experts
        if left and not self.pre_quantized:
            reasons = "; ".join(sorted(set(left.values())))
            warnings.warn(f"{len(left)} modules of experts stay floats, {_listed(left)}: {reasons}", stacklevel=2)
        return found

    def _pack_linear(self, model: Any, name: str, layer: nn.Linear) -> None:
        packed = PackedLinear(
            layer.in_features, layer.out_features, layer.bias is not None,
            qtype=self.quantization_config.type_of(name), device="meta", dtype=self._dtype,
        )  # fmt: skip
        packed.train(layer.training)
        model.set_submodule(name, packed)
        self._packed[name] = Matrix(f"{name}.weight", packed.qtype, layer.out_features, layer.in_features)

    def _pack_experts(self, model: Any, stacks: Mapping[str, Experts]) -> None:
        config = self.quantization_config
        for path, found in {name.rpartition(".")[0]: found for name, found in stacks.items()}.items():
            kinds = {
                part: replace(stack, qtype=config.type_of(name)) if (name := f"{path}.{part}") in stacks else stack
                for part, stack in found.stacks.items()
            }
            layer = PackedExperts(found.count, kinds, found.gate, bias=found.bias, device="meta", dtype=self._dtype)
            layer.train(found.module.training)
            model.set_submodule(path, layer)
            self._experts[path] = found
            for part, stack in kinds.items():
                if stack.qtype is not None:
                    name = f"{path}.{part}"
                    sizes = (stack.rows, stack.columns, found.count)
                    self._packed[name] = Matrix(name, stack.qtype, *sizes, stack.transposed)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """The last call before tensors are read: the names are known now."""
        stored = self._stored(model, weight_conversions)
        if any(stored.values()):
            self._check(stored, model.state_dict().keys())
        if not self.pre_quantized:
            self.actions |= {matrix.parameter: partial(self._pack, matrix) for matrix in self._packed.values()}
        conversions = list(super().update_weight_conversions(weight_conversions, model))
        names = {matrix.parameter for matrix in self._packed.values() if matrix.count is not None}
        if self.pre_quantized or not names:
            return conversions
        return [
            Stacked.of(entry, names) or entry if isinstance(entry, WeightConverter) else entry for entry in conversions
        ]

    def _stored(self, model: Any, conversions: Sequence[Any]) -> dict[str, list[Stored]]:
        """The tensors of the checkpoint by the parameter they become, or a part of; empty without safetensors files."""
        # A copy: to ask a renaming for a name marks it as used, which decides what a saved model is called.
        mapping = copy.deepcopy(list(conversions))
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state = model.state_dict()
        found: dict[str, list[Stored]] = {}
        for file in self._files:
            if not str(file).endswith(".safetensors"):
                continue
            with safe_open(file, framework="pt") as source:
                for key in source.keys():  # noqa: SIM118  (not a dictionary)
                    name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
                    piece = source.get_slice(key)
                    here = Stored(file, key, piece.get_dtype(), tuple(piece.get_shape()), converter is None)
                    found.setdefault(name, []).append(here)
        return found

    def _check(self, stored: Mapping[str, list[Stored]], parameters: Iterable[str]) -> None:
        """Compare the tensors of packed layers with their shapes before one of them is read.

        Raises:
            ValueError: one is missing or of another shape or type, or there are scales, of which Transformers knows
                only by a ``quantization_config``.
        """
        scale = next((there[0] for name, there in stored.items() if is_scale(name) and name not in parameters), None)
        if scale is not None and not self.pre_quantized:
            raise ValueError(f"{scale.file}: {scale.key}: is a scale of codes that would be read as weights; {REMEDY}")
        for matrix in self._packed.values():
            there = stored.get(matrix.parameter)
            if not there:
                folder = Path(self._files[0]).parent
                raise ValueError(f"{folder}: has no {matrix.parameter}; download the model again")
            if not there[0].whole and not self.pre_quantized:
                if matrix.count is not None:
                    self._check_pieces(matrix, there)
                continue
            kind, shape = there[0].dtype, matrix.blocks if self.pre_quantized else matrix.floats
            fits = kind == "U8" if self.pre_quantized else "F" in kind  # F32, BF16, F8_E4M3
            if there[0].shape != shape or not fits:
                wanted = f"{matrix.qtype.name} blocks, U8" if self.pre_quantized else "floats"
                raise ValueError(
                    f"{there[0].file}: {there[0].key}: is {kind} of shape {list(there[0].shape)} where "
                    f"{wanted} of shape {list(shape)} are expected; download the model again"
                )

    @staticmethod
    def _check_pieces(matrix: Matrix, pieces: Sequence[Stored]) -> None:
        """The same for experts that are stored one by one."""
        numbers = sum(math.prod(piece.shape) for piece in pieces)
        wrong = next((piece for piece in pieces if "F" not in piece.dtype), None)
        if wrong is not None or numbers != math.prod(matrix.floats):
            at = wrong or pieces[0]
            raise ValueError(
                f"{at.file}: {at.key}: is not one of {matrix.count} experts' {matrix.rows} x {matrix.columns} floats "
                f"of {matrix.parameter}; download the model again"
            )

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

    def _pack(self, matrix: Matrix, weight: torch.Tensor | Pieces) -> dict[str, torch.Tensor]:
        found = torch.empty(matrix.blocks, dtype=torch.uint8)
        device = torch.device("cpu")
        for number, rows in enumerate(self._matrices(matrix, weight)):
            device = rows.device
            (found if matrix.count is None else found[number]).copy_(self._blocks(matrix, rows))
            del rows
        return {matrix.parameter: found.to(device)}

    @staticmethod
    def _matrices(matrix: Matrix, weight: torch.Tensor | Pieces) -> Iterator[torch.Tensor]:
        """One matrix after the other, (rows, columns).

        Raises:
            ValueError: there are more, fewer or others than the model has.
        """
        shape = (matrix.rows, matrix.columns)
        if isinstance(weight, Pieces):
            if len(weight) != matrix.count:
                raise ValueError(f"{matrix.parameter}: has {len(weight)} experts, not {matrix.count}")
            for pieces in weight:
                rows = torch.cat([read(piece) for piece in pieces])
                if tuple(rows.shape) != shape:
                    raise ValueError(f"{matrix.parameter}: has the shape {tuple(rows.shape)}, not {shape}")
                yield rows
        elif tuple(weight.shape) != matrix.floats:
            raise ValueError(f"{matrix.parameter}: has the shape {tuple(weight.shape)}, not {matrix.floats}")
        elif matrix.count is None:
            yield weight
        else:
            yield from (rows.t() if matrix.transposed else rows for rows in weight)

    def _blocks(self, matrix: Matrix, weight: torch.Tensor) -> torch.Tensor:
        """The blocks of a matrix; in pieces, so that there is no second copy of it in floats."""
        config, name = self.quantization_config, matrix.parameter
        if not is_trellis(matrix.qtype):
            weight = self._ternary(name, weight.float())
        return torch.cat(
            [
                quantize(_finite(rows.float(), name), matrix.qtype, effort=config.effort, threads=config.threads)
                for rows in weight.split(max(1, _PIECE // weight.shape[1]))
            ]
        )

    def _ternary(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        values = _finite(matrix, name).cpu().numpy()
        if ternary.recognise(values) is not None:
            return matrix
        if not self.quantization_config.ternarize:
            raise ValueError(
                f"{name}: is not ternary; use qtype {DEFAULT.identifier}, modules_to_not_convert, or ternarize=True"
            )
        return torch.from_numpy(ternary.ternarize(values, "absmean").weights()).to(matrix.device)

    # ------------------------------------------------------------------------------------------- after the weights

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.refused is not None:
            raise self.refused
        if not self.pre_quantized:
            model._keep_in_fp32_modules_strict = self._kept
            # Blocks are saved as they are held, not taken apart again.
            if used := getattr(model, "_weight_conversions", None):
                model._weight_conversions = [entry for entry in used if not isinstance(entry, Stacked)]
        self.actions.clear()
        if self.quantization_config.norms_folded:
            model.add_model_tags(FOLDED_TAG)
        if self.quantization_config.rescaling is not None:
            model.add_model_tags(EQUALIZED_TAG + self.quantization_config.rescaling)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Ordinary layers and experts with the decoded matrices, in place of the packed ones."""
        if isinstance(dtype, str):  # of the config, once the model has been saved
            dtype = getattr(torch, dtype)
        for name, layer in list(model.named_modules()):
            if isinstance(layer, PackedLinear):
                device = layer.weight.device
                dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
                dense.weight = nn.Parameter(layer.dequantize(dtype or self._dtype).to(device), requires_grad=False)
                dense.bias = layer.bias
                model.set_submodule(name, dense)
            elif isinstance(layer, PackedExperts):
                floats = self._experts[name].module
                for part in layer.stacks:
                    matrices = layer.dequantize(part, dtype or self._dtype)
                    setattr(floats, part, nn.Parameter(matrices, requires_grad=False))
                    if (bias := getattr(layer, f"{part}_bias")) is not None:
                        setattr(floats, f"{part}_bias", bias)
                model.set_submodule(name, floats)
        return model


def _finite(weights: torch.Tensor, name: str) -> torch.Tensor:
    """The weights; raises ValueError where one is no number."""
    if not torch.isfinite(weights).all():
        raise ValueError(f"{name}: has NaN or infinite weights; repair the checkpoint")
    return weights


def _listed(names: Collection[str]) -> str:
    few = ", ".join(list(names)[:4])
    return few + (f" and {len(names) - 4} more" if len(names) > 4 else "")
