"""Teacher and student: a model of Transformers, and a copy of it whose matrices compute with their codes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from ..base.errors import UserError
from ..calibrate.groups import Layout, Reader
from ..calibrate.layers import decoder_of
from ..checkpoint import experts, policy, rescaling
from ..checkpoint.gguf_file import GGUFFile, open_gguf, rescaling_of, shape_of
from ..checkpoint.patches import patched
from ..checkpoint.quantization import entry_of
from ..checkpoint.rescaling import Rescaling
from ..checkpoint.row_order import row_order
from ..checkpoint.source import Checkpoint, SourceTensor
from ..torch import decode
from .codes import CodedMatrix, Encode, codes_of, matrices, scaled
from .optimizer import Group
from .options import TYPES, DistillOptions


def load_model(options: DistillOptions, device: torch.device) -> Any:
    """The model in float32, without gradients.

    Raises:
        UserError: transformers cannot run it, or its weights are not floats.
    """
    try:
        with patched(options.model, options.trust_remote_code) as transformers:
            config = transformers.AutoConfig.from_pretrained(options.model)
            if entry_of(config.to_dict()):
                raise UserError(options.model, "comes quantized", "distil the model that it was made from")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                options.model, dtype=torch.float32, use_safetensors=True
            )
    except UserError:
        raise
    except Exception as error:  # a config can be wrong in many ways
        raise UserError(options.model, f"transformers cannot run it: {error}", "update transformers") from error
    model.config.use_cache = False
    return model.eval().requires_grad_(False).to(device)


@dataclass(frozen=True)
class Place:
    """A parameter of the student that holds a matrix, or those of experts.

    Attributes:
        names: GGUF names of its tensors: of experts two where gate and up are one parameter, the gate's rows first.
        module: that holds it.
        parameter: its name there.
        path: its name in the model.
    """

    names: tuple[str, ...]
    module: torch.nn.Module
    parameter: str
    path: str

    @property
    def name(self) -> str:
        """What it is called: one GGUF name."""
        return self.names[0] if len(self.names) == 1 else experts.gate_and_up(self.names[0])

    @property
    def weight(self) -> torch.Tensor:
        """The weights, (rows, columns) or (experts, rows, columns)."""
        found: torch.Tensor = getattr(self.module, self.parameter)
        return found

    @property
    def matrices(self) -> int:
        """How many matrices of a file it holds."""
        return len(self.names) * (self.weight.shape[0] if self.weight.ndim == 3 else 1)


class Student:
    """A model that is trained to its codes.

    Attributes:
        model: of Transformers.
        matrices: those that are coded, by GGUF name.
        norms: the norm modules of the layers, by GGUF name.
        rescaling: of the file that it starts from, so that its weights are those of the codes.
        left: GGUF names of the layers' matrices that are not coded, with the reason.
        count: how many matrices are coded, each expert's for itself.
    """

    def __init__(self, teacher: Any, checkpoint: Checkpoint, options: DistillOptions) -> None:
        self.model = copy.deepcopy(teacher)
        self.checkpoint, self.options = checkpoint, options
        self.matrices: dict[str, CodedMatrix] = {}
        self.left: dict[str, str] = {}
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        base, prefix = decoder_of(self.model)
        self.layers = base.layers
        self.layout = Layout(checkpoint.model.arch, len(base.layers), prefix, self._tensors)
        self._places: dict[str, Place] = {}  # by GGUF name
        self._written: dict[str, bool] = {}  # whether a place can be written as tensors of the checkpoint
        readers: list[tuple[Reader, Place, torch.nn.Module]] = []
        for number, layer in enumerate(base.layers):
            for name, path in self.layout.modules(number, layer).items():
                module = layer.get_submodule(path)
                if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
                    self._places[name] = Place((name,), module, "weight", f"{prefix}.{number}.{path}.weight")
            readers += [
                (reader, self._place(reader, layer, f"{prefix}.{number}"), layer)
                for group in self.layout.groups(number, layer)
                for reader in group.readers
            ]
        found: dict[str, Place] = {}
        for reader, place, layer in readers:
            if problem := self._problem(reader, place, layer):
                self.left[reader.entry] = problem
            else:
                found[place.name] = place
        file = open_gguf(options.start) if options.start else None
        self.rescaling = Rescaling()
        if file:
            self.rescaling = self._rescale(file)
        self.norms = {norm: self._places[norm].module for norm in self.layout.norms.readers if norm in self._places}
        codes = self._codes(file, found) if file else {}
        self.count = sum(place.matrices for place in found.values())
        for name, place in found.items():
            if name in codes:
                place.weight.data.copy_(codes[name])
            block = self._coded_as(place.weight.shape[-1]).block
            self.matrices[name] = CodedMatrix(name, place.module, place.parameter, block)
        self._coded = found
        if not self.matrices:
            what = f"has no matrix that would be {options.type.upper()}"
            least = decode.layout_for(TYPES[options.type], 1).block
            raise UserError(options.model, what, f"rows have to be a multiple of {least} long")

    def _coded_as(self, columns: int) -> decode.Layout:
        """What rows of so many weights are coded as."""
        return decode.layout_for(TYPES[self.options.type], columns)

    def _place(self, reader: Reader, layer: torch.nn.Module, prefix: str) -> Place:
        """The parameter that holds a matrix; noted for each of its names."""
        path = f"{prefix}.{reader.path}.{reader.parameter}"
        stack = experts.stack(path)
        names = stack.tensors if stack else (reader.name,)
        place = Place(names, layer.get_submodule(reader.path), reader.parameter, path)
        if reader.expert is None or reader.parameter != "weight":
            self._places |= dict.fromkeys(names, place)
        return place

    def _problem(self, reader: Reader, place: Place, layer: torch.nn.Module) -> str | None:
        """Why a matrix is not coded, None where it is."""
        qtype = TYPES[self.options.type]
        if reader.parameter == "weight" and reader.expert is not None:
            return "of an expert that is a module"
        for name in place.names:
            tensor = self._tensors[name]
            chosen = policy.choose(tensor.name, tensor.shape, tensor.stored, qtype, self.checkpoint.model).type
            if chosen != self._coded_as(tensor.shape[-1]).qtype:
                return f"{chosen.name} in the converter's mix"
        tensor = self._tensors[reader.name]
        if reader.expert is None and len(tensor.sources) != 1:
            return "made of several tensors"
        if tuple(reader.rows(layer).shape) != tensor.shape[-2:]:
            return "of another shape in a file"
        if not reader.expert:  # once for all experts
            weights = torch.empty_like(place.weight, device="meta")
            self._written[place.name] = bool(self._sources(place, weights))
        if not self._written[place.name]:
            return "of experts that the checkpoint holds in another way"
        return None

    def _sources(self, place: Place, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter as the tensors of the checkpoint that it is made of; empty where they are not known."""
        if weights.ndim == 2 or place.parameter == "weight":
            sources = self._tensors[place.name].sources
            return {sources[0]: weights} if len(sources) == 1 else {}
        known = {source for name in place.names for source in self._tensors[name].sources}
        with patched(self.options.model, self.options.trust_remote_code) as transformers:
            revert = transformers.core_model_loading.revert_weight_conversion
            found: dict[str, torch.Tensor] = revert(self.model, {place.path: weights})
        return found if known >= found.keys() else {}

    def _rescale(self, file: GGUFFile) -> Rescaling:
        """Multiply the weights by what a file says that its tensors are multiplied by.

        Raises:
            UserError: the file's description is damaged, or a tensor is none of this model's parameters.
        """
        path = file.paths[0]
        found = rescaling_of(file, rescaling.gains(self.checkpoint.tensors, self.options.model))
        for name in [name for name in self._tensors if found.touches(name)]:
            place = self._places.get(name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name)
            if place is None:
                remedy = "convert the model anew, with --no-equalize --no-fold-norms"
                raise UserError(path, "is rescaled in a tensor that is no parameter here", remedy, name)
            if len(self._tensors[name].shape) == 1:
                self._rescale_vector(found, name, place)
                continue
            rows = next(rows for part, rows in self._parts(place) if part == name)
            orders = self._orders(name, self._tensors[name], rows) if found.rows(name, 0) is not None else None
            for number, matrix in enumerate(rows if rows.ndim == 3 else [rows]):
                expert = number if rows.ndim == 3 else None
                columns, factors = found.columns(name, expert), found.rows(name, expert)
                order = next(orders) if orders is not None else None
                if columns is not None:
                    matrix.mul_(torch.from_numpy(columns).to(matrix.device))
                if factors is not None and order is not None:
                    matrix[torch.from_numpy(order)] *= torch.from_numpy(factors).to(matrix.device)[:, None]
        return found

    def _rescale_vector(self, found: Rescaling, name: str, place: Place) -> None:
        """The same of a norm, also where the model adds one to what is stored, or of a bias."""
        was = self._tensors[name].vector()
        by = torch.from_numpy(found.scale(name, was) - was).to(self.model.device)
        vector: torch.Tensor = place.weight if place.weight.ndim == 1 else place.module.bias
        vector.data.add_(by)

    def _codes(self, file: GGUFFile, found: Mapping[str, Place]) -> dict[str, torch.Tensor]:
        """The weights in the file to start from, in the order of the model's rows."""
        path = file.paths[0]
        here = {tensor.name: tensor for tensor in file.tensors}
        return {
            name: torch.cat([self._start(path, here, part, place, rows) for part, rows in self._parts(place)], dim=-2)
            for name, place in found.items()
        }

    @staticmethod
    def _parts(place: Place) -> list[tuple[str, torch.Tensor]]:
        """GGUF name and weights of each tensor that a parameter holds."""
        return list(zip(place.names, place.weight.detach().chunk(len(place.names), dim=-2), strict=True))

    def _start(self, path: Path, here: Mapping[str, Any], name: str, place: Place, rows: torch.Tensor) -> torch.Tensor:
        """The weights of a tensor in the file to start from."""
        tensor, source = here.get(name), self._tensors[name]
        qtype = self._coded_as(source.shape[-1]).qtype
        remedy = f"give a file of this model in {self.options.type.upper()}, written by convert-hf-to-itq3s"
        if tensor is None or tensor.tensor_type != qtype or shape_of(tensor) != source.shape:
            raise UserError(path, f"is not a {qtype.name} matrix of this model's shape", remedy, name)
        decoded = gguf.quants.dequantize(tensor.data, qtype).reshape(source.shape)
        if not np.isfinite(decoded).all():
            raise UserError(path, "has weights that are not finite", "write or download it again", name)
        put = np.empty_like(decoded, dtype=np.float32)
        for to, matrix, order in zip(matrices(put), matrices(decoded), self._orders(name, source, rows), strict=True):
            to[order] = matrix
        codes = torch.from_numpy(put).to(rows.device)
        distance = float((codes - rows).square().sum() / rows.square().sum())
        if not distance < 1:
            raise UserError(path, f"is of another model: {distance:.2g} of the weights' energy differs", remedy, name)
        return codes

    def _orders(self, name: str, source: SourceTensor, rows: torch.Tensor) -> Iterator[np.ndarray]:
        """Which row of the model each row of the tensor is, matrix by matrix, by the weights before the codes."""
        weights = self.rescaling.scale(name, source.whole())
        try:
            for ours, theirs in zip(matrices(rows.cpu().numpy()), matrices(weights), strict=True):
                yield row_order(ours, theirs)
        except ValueError as problem:
            raise UserError(
                self.options.model, f"cannot start from a file: {problem}", "leave --start out", name
            ) from None

    def encode(self, encode: Encode) -> None:
        """Encode every matrix anew."""
        for matrix in self.matrices.values():
            self._encode(matrix, encode)

    def _encode(self, matrix: CodedMatrix, encode: Encode) -> None:
        try:
            matrix.encode(encode)
        except ValueError as error:
            what = f"cannot be encoded any more: {error}"
            raise UserError(self.options.model, what, "lower --lr and --scale-lr", matrix.name) from error

    def groups(self) -> list[Group]:
        """What is trained; names are those of a checkpoint of the training."""
        options = self.options
        latent = {f"latent/{name}": matrix.latent for name, matrix in self.matrices.items()}
        factors = {f"factor/{name}": matrix.coded.factor for name, matrix in self.matrices.items()}
        norms = {f"norm/{name}": norm.weight for name, norm in self.norms.items()}
        ends: dict[str, torch.nn.Parameter] = {}
        for name, module in (
            ("input", self.model.get_input_embeddings()),
            ("output", self.model.get_output_embeddings()),
        ):
            if module is not None and not any(module.weight is other for other in ends.values()):
                ends[f"embedding/{name}"] = module.weight
        groups = [Group(latent, options.lr), Group(factors, options.scale_lr), Group(norms, options.norm_lr),
                  Group(ends, options.embedding_lr)]  # fmt: skip
        for group in groups:
            for parameter in group.parameters.values():
                parameter.requires_grad_(group.lr > 0)
        return [group for group in groups if group.lr > 0 and group.parameters]

    def checkpoint_layers(self) -> None:
        """Compute what is within a layer again for the gradient, instead of keeping it."""
        from torch.utils.checkpoint import checkpoint

        def again(own: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: checkpoint(own, *args, use_reentrant=False, **kwargs)

        for layer in self.layers:
            layer.forward = again(layer.forward)

    def changed(self, encode: Encode) -> dict[str, torch.Tensor]:
        """The tensors that differ from the checkpoint's, by their names there; on the CPU.

        Coded matrices are float16 where that can hold them, which their code survives; others are float32.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, matrix in self.matrices.items():
            code = codes_of(matrix.latent, encode).cpu()
            factor = matrix.coded.factor.detach().float().cpu()
            weights = scaled(code, factor)
            half = weights.half()
            tensors |= self._sources(self._coded[name], half if half.isfinite().all() else weights)
        trained = set(self.norms) if self.options.norm_lr else set()
        changed = {
            place.path: place
            for name, place in self._places.items()
            if place.name not in self._coded and (name in trained or self.rescaling.touches(name))
        }
        for place in changed.values():
            tensors |= self._sources(place, place.weight.detach().float().cpu().clone())
        for name, bias in self._tensors.items():
            if name.endswith(".bias") and self.rescaling.touches(name):
                module = self._places[f"{name.removesuffix('.bias')}.weight"].module
                tensors[bias.sources[0]] = module.bias.detach().float().cpu().clone()
        ends = [
            ("token_embd.weight", self.model.get_input_embeddings()),
            ("output.weight", self.model.get_output_embeddings()),
        ]
        for name, module in ends if self.options.embedding_lr else ():
            tensor = self._tensors.get(name)
            if tensor is not None and module is not None and len(tensor.sources) == 1:
                tensors[tensor.sources[0]] = module.weight.detach().float().cpu().clone()
        return tensors
