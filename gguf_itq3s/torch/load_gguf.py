"""A GGUF file as a Transformers model whose trellis-coded and ternary matrices stay packed, those of experts too.

``from_pretrained(folder, gguf_file=...)`` reads such a file too, since gguf-py knows the type, but decodes everything:
Transformers admits no quantization method beside its own reading of GGUF. So configuration, names and what a tensor
needs on its way are asked of Transformers, and the tensors are handed to ``from_pretrained`` as a state.

Rows of a packed matrix may change places and nothing else may: llama.cpp orders the rows of queries and keys of Llama
its own way, and a row is whole blocks. Of experts a file has the gate's and the up matrices apart, which Transformers
has one above the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, modeling_gguf_pytorch_utils
from transformers.quantizers.base import get_keys_to_not_convert

from ..base.errors import UserError
from ..checkpoint import experts
from ..checkpoint.gguf_file import GGUFFile, contents_of, open_gguf, shape_of
from ..checkpoint.patches import patched
from ..checkpoint.rescaling import ID, NORMS_FOLDED, is_id
from ..checkpoint.validation import check_counts, check_counts_by_shapes
from . import decode, settings, stacked
from .config import QTYPES, ITQ3SConfig
from .decode import QType

_NAMES: Final = {qtype: name for name, qtype in QTYPES.items()}
_REMEDY: Final = "write or download it again"
#: Of experts and of their rows, far beyond any model.
_MOST: Final = 1 << 24
_EXPERT_COUNTS: Final = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True)
class _Lazy:
    """A tensor that is made when Transformers takes it."""

    load: Callable[[], torch.Tensor]
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.load()

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def load_gguf(path: str | Path, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A model of the class that Transformers has for a GGUF file, with packed layers where the file has our types.

    Other types (the output matrix, the token embedding) are decoded, a tensor at a time.

    Args:
        path: the file, or any part of a split one.
        dtype: of what is not packed; None for PyTorch's default.
        options: further ones of ``from_pretrained``, such as ``device_map``.

    Returns:
        The model, as ``from_pretrained`` returns it; ``save_pretrained`` writes it packed.

    Raises:
        UserError: the file is damaged, of an architecture that Transformers does not read, or does not fit its own
            description; or this version of Transformers cannot be kept from running code of its folder.
    """
    path = Path(path)
    file = open_gguf(path)
    arch = contents_of(file, "general.architecture")
    if arch not in settings.ARCHITECTURES:
        raise UserError(
            path, f"is of the architecture {arch}, whose settings or tensors are not known here",
            "run it with llama.cpp, or load the checkpoint that it was made of",
        )  # fmt: skip
    with patched(path.parent, trusted=False):
        return _load(file, path, arch, dtype or torch.get_default_dtype(), options)


def _load(file: GGUFFile, path: Path, arch: str, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        if arch == "llama" and contents_of(file, "llama.expert_count"):  # to llama.cpp Mixtral is a Llama
            config = _mixtral(config, file)
        settings.apply(config, file, arch, path)
        shapes = {tensor.name: shape_of(tensor) for tensor in file.tensors}
        check_counts(path, config.to_dict())
        _check_experts(path, config)
        check_counts_by_shapes(path, config.to_dict(), shapes)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        settings.check_rotations(model, file, arch, path)
        known = modeling_gguf_pytorch_utils.TENSOR_PROCESSORS
        processor = known.get(arch, modeling_gguf_pytorch_utils.TensorProcessor)(config=config.to_dict())
        kind = "llama" if config.model_type == "mixtral" else None
        names = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map(model, processor, kind)
    except UserError:
        raise
    except Exception as error:  # a file can say anything, and Transformers takes its word for it
        raise UserError(path, f"cannot be read by Transformers ({error})", _REMEDY) from error
    state, types = _state(file, path, model, processor, names)
    config.quantization_config = _config(model, types, file).to_dict()
    loaded = type(model).from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options)
    loaded.config.name_or_path = str(path)
    return loaded


def _mixtral(config: Any, file: GGUFFile) -> Any:
    """The config of a Mixtral, out of what Transformers reads as that of a Llama."""
    known = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    return MixtralConfig(
        **known,
        num_local_experts=contents_of(file, "llama.expert_count"),
        num_experts_per_tok=contents_of(file, "llama.expert_used_count"),
    )


def _check_experts(path: Path, config: Any) -> None:
    """Refuse numbers of experts that are none.

    Raises:
        UserError: one is text, negative or beyond any model, or a token would go to more experts than there are.
    """
    for name in _EXPERT_COUNTS:
        value = getattr(config, name, None)
        if value is not None and (type(value) is not int or not 0 <= value <= _MOST):
            raise UserError(path, f"has {name} {value!r:.80}, which is no count", _REMEDY)
    count = getattr(config, "num_experts", getattr(config, "num_local_experts", None))
    chosen = getattr(config, "num_experts_per_tok", None)
    if count is not None and chosen is not None and chosen > count:
        raise UserError(path, f"sends a token to {chosen} of {count} experts", _REMEDY)


def _state(
    file: GGUFFile, path: Path, model: nn.Module, processor: Any, names: Mapping[str, str]
) -> tuple[dict[str, _Lazy], dict[str, str]]:
    """The tensors by the names of the model, and the type of each matrix or stack of them that stays packed."""
    parameters = dict(model.named_parameters())
    untouched = set(get_keys_to_not_convert(model)) - {"lm_head"}
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear and name not in untouched}
    state: dict[str, _Lazy] = {}
    types: dict[str, str] = {}
    stacks: dict[str, dict[str, Any]] = {}
    in_stacks = {
        part: name for name in parameters if (stack := experts.stack(name)) for part in (*stack.tensors, stack.whole)
    }
    for tensor in file.tensors:
        if tensor.name in in_stacks:
            stacks.setdefault(in_stacks[tensor.name], {})[tensor.name] = tensor
            continue
        name = names.get(tensor.name)
        if name is None or name not in parameters:
            if tensor.name in settings.TENSORS:
                continue
            raise UserError(path, "is a tensor that the model of Transformers has no place for", _REMEDY, tensor.name)
        expected, shape = tuple(parameters[name].shape), shape_of(tensor)
        # Transformers adds an axis to the gate of shared experts, which some files have without it.
        if [n for n in shape if n != 1] != [n for n in expected if n != 1]:
            raise _misshapen(path, tensor, shape, expected)
        module = name.removesuffix(".weight")
        if _stays_packed(tensor.tensor_type, shape[-1]) and module in linear and shape == expected:
            types[module] = _NAMES[tensor.tensor_type]
            state[name] = _packed(tensor, processor, path)
        else:
            state[name] = _floats(tensor, processor, expected)
    for name, parts in stacks.items():
        state[name], kind = _stacked(path, model, name, parts)
        if kind is not None:
            types[name] = kind
    if missing := sorted(set(parameters) - set(state) - set(getattr(model, "all_tied_weights_keys", ()))):
        raise UserError(path, f"has no tensor for {missing[0]}", _REMEDY)
    return state, types


def _stays_packed(qtype: QType, columns: int) -> bool:
    """Whether a layer can hold the rows of a tensor as they are."""
    return qtype in _NAMES and decode.layout(qtype).fits(columns)


def _misshapen(path: Path, tensor: Any, shape: tuple[int, ...], expected: tuple[int, ...]) -> UserError:
    what = f"has the shape {list(shape)}, and the model's is {list(expected)}"
    return UserError(path, what, _REMEDY, tensor.name)


def _stacked(path: Path, model: nn.Module, name: str, parts: Mapping[str, Any]) -> tuple[_Lazy, str | None]:
    """A parameter of experts, made of ``parts`` (GGUF name -> tensor), and its type where it stays packed.

    Raises:
        UserError: tensors are missing or of another shape, or the model does not hold experts as they are known.
    """
    stack = experts.stack(name)
    assert stack is not None
    names = next((names for names in (stack.tensors, (stack.whole,)) if set(names) == set(parts)), None)
    if names is None:
        raise UserError(path, f"has no two tensors, of gate and up, for {name}", _REMEDY, min(parts))
    tensors = [parts[name] for name in names]
    module, _, parameter = name.rpartition(".")
    expected = tuple(model.get_parameter(name).shape)
    known = stacked.find(model.get_submodule(module))
    if isinstance(known, str) or known.stacks[parameter].transposed:
        raise UserError(
            path, f"has experts that Transformers holds in another way, {module}",
            "take from_pretrained(folder, gguf_file=...), which decodes them", tensors[0].name,
        )  # fmt: skip
    shapes = [shape_of(tensor) for tensor in tensors]
    for tensor, shape in zip(tensors, shapes, strict=True):
        if shape != (expected[0], expected[1] // len(tensors), expected[2]):
            raise _misshapen(path, tensor, shape, (expected[0], expected[1] // len(tensors), expected[2]))
    kinds = {tensor.tensor_type for tensor in tensors}
    qtype = next(iter(kinds))
    if len(kinds) == 1 and _stays_packed(qtype, expected[2]):
        data = [tensor.data for tensor in tensors]
        shape = (*expected[:2], data[0].shape[2])
        return _Lazy(lambda: torch.from_numpy(np.concatenate(data, axis=1)), torch.uint8, shape), _NAMES[qtype]

    def load() -> torch.Tensor:
        floats = torch.empty(expected)
        for number in range(expected[0]):
            rows = [gguf.quants.dequantize(tensor.data[number], tensor.tensor_type) for tensor in tensors]
            floats[number] = torch.from_numpy(np.concatenate(rows))
        return floats

    return _Lazy(load, torch.float32, expected), None


def _packed(tensor: Any, processor: Any, path: Path) -> _Lazy:
    rows = int(tensor.shape[1])
    # Asked of Transformers' own code, on numbers of rows: two columns, so that a transposed matrix is noticed.
    numbers = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
    done = np.asarray(processor.process(numbers, tensor.name).weights)
    order = (done[:, 0] // 2).astype(np.int64) if done.shape == numbers.shape else np.zeros(0, np.int64)
    if not np.array_equal(numbers[order], done) or not np.array_equal(np.sort(order), np.arange(rows)):
        raise UserError(path, "is rearranged within its rows", "take from_pretrained(gguf_file=...)", tensor.name)
    data = tensor.data
    return _Lazy(lambda: torch.from_numpy(np.array(data[order])), torch.uint8, tuple(data.shape))


def _floats(tensor: Any, processor: Any, shape: tuple[int, ...]) -> _Lazy:
    def load() -> torch.Tensor:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(processor.process(weights, tensor.name).weights)).reshape(shape)

    return _Lazy(load, torch.float32, shape)


def _config(model: nn.Module, types: Mapping[str, str], file: GGUFFile) -> ITQ3SConfig:
    """What says which matrices are packed: the commonest type, and those that are not of it by name."""
    common = max(QTYPES, key=list(types.values()).count)
    others: dict[str, list[str]] = {}
    for name, kind in types.items():
        if kind != common:
            others.setdefault(kind, []).append(name)
    kept = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and name not in types]
    for name, module in model.named_modules():
        kept += [stack for part in stacked.stacks(module) if (stack := f"{name}.{part}") not in types]
    found = contents_of(file, ID)
    return ITQ3SConfig(
        common, modules_to_not_convert=kept, other_types=others or None,
        norms_folded=contents_of(file, NORMS_FOLDED) is True,
        rescaling=str(found) if is_id(found) else None,
    )  # fmt: skip
