"""Teacher and student: a model of Transformers, and a copy of it whose matrices compute with their codes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ..calibration.groups import Layout, Reader
from ..calibration.streams import row_order
from ..checkpoint import fold, policy, trust
from ..checkpoint.reader import Checkpoint, SourceTensor
from ..codec.types import ITQ3_S
from ..convert.sequential import whole
from ..errors import UserError
from ..inspect.reader import open_gguf
from .codes import CodedMatrix, Encode
from .optimizer import Group
from .options import DistillOptions

QTYPES: Final = {"itq3_s": ITQ3_S, "tq2_0": Type.TQ2_0}


def load_model(options: DistillOptions, device: torch.device) -> Any:
    """The model in float32, without gradients.

    Raises:
        UserError: transformers cannot run it, or its weights are not floats.
    """
    try:
        with trust.transformers_for(options.model, options.trust_remote_code) as transformers:
            config = transformers.AutoConfig.from_pretrained(options.model)
            if getattr(config, "quantization_config", None):
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


class Student:
    """A model that is trained to its codes.

    Attributes:
        model: of Transformers.
        matrices: those that are coded, by GGUF name.
        norms: the norm modules of the layers whose gains are folded, by GGUF name.
        left: GGUF names of the layers' matrices that are not coded, with the reason.
    """

    def __init__(self, teacher: Any, checkpoint: Checkpoint, options: DistillOptions) -> None:
        self.model = copy.deepcopy(teacher)
        self.checkpoint, self.options = checkpoint, options
        self.matrices: dict[str, CodedMatrix] = {}
        self.norms: dict[str, torch.nn.Module] = {}
        self.left: dict[str, str] = {}
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        base = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.model
        self.layers = base.layers
        prefix = next(name for name, module in self.model.named_modules() if module is base.layers)
        self.layout = Layout(checkpoint.model.arch, len(base.layers), prefix, self._tensors)
        found: dict[str, torch.nn.Linear] = {}
        modules: dict[str, torch.nn.Module] = {}
        for number, layer in enumerate(base.layers):
            modules |= {name: layer.get_submodule(path) for name, path in self.layout.modules(number, layer).items()}
            for group in self.layout.groups(number, layer):
                for reader in group.readers:
                    if problem := self._problem(reader, layer):
                        self.left[reader.entry] = problem
                    else:
                        found[reader.name] = layer.get_submodule(reader.path)
        self._fold(modules)
        codes = self._codes(found) if options.start else {}
        for name, linear in found.items():
            if name in codes:
                linear.weight.data.copy_(codes[name])
            self.matrices[name] = CodedMatrix(name, self._tensors[name].sources[0], linear)
        if not self.matrices:
            what = f"has no matrix that would be {options.type.upper()}"
            raise UserError(options.model, what, "rows have to be a multiple of 256 long")

    def _problem(self, reader: Reader, layer: torch.nn.Module) -> str | None:
        """Why a matrix is not coded, None where it is."""
        tensor = self._tensors[reader.name]
        qtype = QTYPES[self.options.type]
        if reader.parameter != "weight" or reader.expert is not None:
            return "of an expert"
        chosen = policy.choose(tensor.name, tensor.shape, tensor.stored, qtype, self.checkpoint.model).type
        if chosen != qtype:
            return f"{chosen.name} in the converter's mix"
        if len(tensor.sources) != 1 or tuple(reader.rows(layer).shape) != tensor.shape:
            return "made of several tensors"
        return None

    def _fold(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Multiply norm gains into the matrices that read them, where all of these are plain ones."""
        gain_of = fold.gains(self.checkpoint.tensors, str(self.options.model))
        for norm, readers in self.layout.folding.norms.items():
            layers = [modules[name] for name in readers if isinstance(modules.get(name), torch.nn.Linear)]
            if norm not in modules or len(layers) < len(readers):
                continue
            gain = torch.from_numpy(gain_of(norm)).to(self.model.device)
            for module in layers:
                module.weight.data.mul_(gain)
            modules[norm].weight.data.add_(1 - gain)  # also where the model adds one to what is stored
            self.norms[norm] = modules[norm]

    def _codes(self, found: Mapping[str, torch.nn.Linear]) -> dict[str, torch.Tensor]:
        """The weights in the file to start from, in the order of the model's rows."""
        path = self.options.start
        assert path is not None
        file = open_gguf(path)
        field = file.fields.get(fold.NORMS_FOLDED)
        folds = bool(field is not None and field.contents())
        if folds != bool(self.norms) or set(self.norms) != set(self.layout.folding.norms if folds else ()):
            what = "has its norms folded otherwise than they are here"
            raise UserError(path, what, "convert the model anew, with --fold-norms where it is ternary")
        here = {tensor.name: tensor for tensor in file.tensors}
        qtype = QTYPES[self.options.type]
        codes = {}
        for name, linear in found.items():
            tensor, source = here.get(name), self._tensors[name]
            remedy = f"give a file of this model in {qtype.name}, written by convert-hf-to-itq3s"
            if tensor is None or tensor.tensor_type != qtype or tuple(reversed(tensor.shape.tolist())) != source.shape:
                raise UserError(path, f"is not a {qtype.name} matrix of this model's shape", remedy, name)
            decoded = gguf.quants.dequantize(tensor.data, qtype).reshape(source.shape)
            if not np.isfinite(decoded).all():
                raise UserError(path, "has weights that are not finite", "write or download it again", name)
            order = self._order(name, source, linear)
            put = np.empty_like(decoded, dtype=np.float32)
            put[order] = decoded
            codes[name] = torch.from_numpy(put).to(linear.weight.device)
            rows = linear.weight.detach()
            distance = float((codes[name] - rows).square().sum() / rows.square().sum())
            if not distance < 1:
                raise UserError(
                    path, f"is of another model: {distance:.2g} of the weights' energy differs", remedy, name
                )
        return codes

    def _order(self, name: str, source: SourceTensor, linear: torch.nn.Linear) -> np.ndarray:
        """Which row of the model each row of the tensor is, found on the weights before folding."""
        rows = linear.weight.detach().cpu().numpy()
        weights = whole(source)
        norm = self.layout.folding.norm_of(name)
        if norm in self.norms:
            weights = weights * fold.gains(self.checkpoint.tensors, str(self.options.model))(norm)
        try:
            return row_order(rows, weights)
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
        for matrix in self.matrices.values():
            code = torch.from_numpy(encode(np.ascontiguousarray(matrix.latent.detach().float().cpu().numpy())))
            factor = matrix.coded.factor.detach().float().cpu()
            weights = (code.unflatten(1, (-1, code.shape[1] // factor.shape[1])) * factor[..., None]).flatten(1)
            half = weights.half()
            tensors[matrix.source] = half if half.isfinite().all() else weights
        coded = {matrix.layer for matrix in self.matrices.values()}
        ends = [
            ("token_embd.weight", self.model.get_input_embeddings()),
            ("output.weight", self.model.get_output_embeddings()),
        ]
        if not self.options.embedding_lr:
            ends = []
        folded = [
            (name, module)
            for norm in self.norms
            for name, module in self._named(norm)
            if module not in coded
        ]  # fmt: skip
        for name, module in (*folded, *ends):
            tensor = self._tensors.get(name)
            if tensor is not None and module is not None and len(tensor.sources) == 1:
                tensors[tensor.sources[0]] = module.weight.detach().float().cpu().clone()
        return tensors

    def _named(self, norm: str) -> list[tuple[str, torch.nn.Module]]:
        """A folded norm and the matrices that read it, with their modules."""
        number = int(norm.split(".")[1])
        layer = self.layers[number]
        paths = self.layout.modules(number, layer)
        names = (norm, *self.layout.folding.norms[norm])
        return [(name, layer.get_submodule(paths[name])) for name in names]
