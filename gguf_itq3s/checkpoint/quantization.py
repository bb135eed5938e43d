"""Checkpoints that come quantized: what upstream's reader of them has to be told, and what it cannot read.

Upstream's ``conversion`` package makes weights of codes and scales as ``quantization_config`` says. What that says in
other words, or leaves to be understood, is put into upstream's here; what is left then is refused by name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..base.errors import UserError, failed_line

if TYPE_CHECKING:
    import torch

REMEDY: Final = "convert the model that it was made from, or what Transformers saves of it dequantized"
#: Scales of activations and caches, which weights do not need.
_OF_ACTIVATIONS: Final = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", "_activation_scale",
    ".activation_scale", ".input_scale_ub", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
#: The same, with other names of the scales.
_FP8: Final = ("fp8", "fbgemm_fp8")
#: What stands for a matrix in checkpoints of this kind, and what else.
_CODES: Final = re.compile(r"\.(qweight|weight_packed)$")
_PARTS: Final = re.compile(
    r"\.(qzeros|scales|g_idx|scale|weight_(scale(_inv|_2)?|shape|zero_point|g_idx|global_scale))$"
    "|" + "|".join(map(re.escape, (*_OF_ACTIVATIONS, ".input_global_scale"))) + "$"
)


def entry_of(hparams: dict[str, Any]) -> dict[str, Any] | None:
    """What ``config.json`` says of the quantization; None where it says nothing."""
    entry = hparams.get("quantization_config", hparams.get("compression_config"))
    return entry if isinstance(entry, dict) else None


def plain_name(name: str) -> str | None:
    """The matrix that a tensor of a quantized checkpoint stands for, None for its scales and the like."""
    return None if _PARTS.search(name) else _CODES.sub(".weight", name)


def is_scale(name: str) -> bool:
    """Whether a tensor is what codes need to become weights, by its name."""
    return plain_name(name) is None and not name.endswith(_OF_ACTIVATIONS)


def prepare(converter: Any) -> None:
    """Put what config and tensors of an object of the ``conversion`` package say into the words that it knows.

    Raises:
        UserError: its codes are in an order that is not there, or their model rotates what they are multiplied by.
    """
    entry, tensors = copy.deepcopy(entry_of(converter.hparams)), converter.model_tensors
    if entry is None:
        return
    method = entry.get("quant_method")
    if method != "bitnet" and not any(_is_coded(load()) for load in tensors.values()):
        converter.hparams = {**converter.hparams, "quantization_config": None}  # left over: the weights are plain
        return
    converter.hparams = {**converter.hparams, "quantization_config": entry}
    if method == "gptq":
        _add_order(converter, entry)
    elif method == "compressed-tensors":
        _refuse_rotations(converter.dir_model, entry)
        _tell_strategies(entry)
    elif method in _FP8 and _by_upstreams_base(converter):
        entry["quant_method"] = "fp8"
        _rename_scales(converter)
    if method in _FP8 or (method == "compressed-tensors" and "nvfp4" not in str(entry)):
        for name in [name for name in tensors if name.endswith(_OF_ACTIVATIONS)]:
            del tensors[name]


def unpack_bitnet(converter: Any) -> bool:
    """Replace packed BitNet b1.58 weights by their matrices, float32, and take the scales out; whether there were some.

    The layout is that of ``transformers.integrations.bitnet``: a matrix of r rows is stored as r / 4 rows of bytes, and
    bits 2i, 2i + 1 of a byte in row j hold the trit + 1 of row ``i * r / 4 + j``. ``weight_scale`` is 1 / gamma for
    layers of class ``bitlinear`` and gamma for ``autobitlinear``. llama.cpp's ``conversion`` reads the first kind
    alone, and its unpacking mixes tensors that are evaluated later with ones that are there, which torch refuses.
    """
    import torch

    entry, tensors = entry_of(converter.hparams), converter.model_tensors
    scales = [name for name in tensors if name.endswith(".weight_scale")]
    if entry is None or entry.get("quant_method") != "bitnet" or not scales:
        return False
    inverse = entry.get("linear_class", "bitlinear") != "autobitlinear"

    def matrix(load: Callable[[], Any], load_scale: Callable[[], Any]) -> torch.Tensor:
        packed, scale = load().view(torch.uint8), load_scale().float()
        trits = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=0).float() - 1
        # One magnitude for all: the quotient is taken once, so every weight is exactly -a, 0 or a.
        return trits * (1 / scale if inverse else scale)

    for name in scales:
        scale, weight = tensors.pop(name), name.removesuffix("_scale")
        tensors[weight] = partial(matrix, tensors[weight], scale)
    return True


def _add_order(converter: Any, entry: dict[str, Any]) -> None:
    """GPTQ's groups of columns where the checkpoint leaves them out, which are in order then."""
    import torch

    tensors, bits, size = converter.model_tensors, entry.get("bits"), entry.get("group_size", -1)

    def order(codes: Callable[[], Any], scales: Any) -> Any:
        found, count = codes(), scales().shape[0]
        word = found.dtype.itemsize * 8
        columns = found.shape[0] * word // bits
        whole = size if size > 0 else columns
        if word % bits == 0 and -(-columns // whole) != count:  # upstream refuses other numbers of bits
            raise ValueError(f"{columns} columns in groups of {whole}, and {count} scales of each row")
        groups = torch.arange(columns, dtype=torch.int32) // whole
        return type(found).from_eager(groups) if converter.lazy else groups

    for name in [name for name in tensors if name.endswith(".qweight")]:
        order_name, scales_name = (f"{name.removesuffix('qweight')}{end}" for end in ("g_idx", "scales"))
        if order_name in tensors or not isinstance(bits, int) or not isinstance(size, int) or bits < 1:
            continue
        if entry.get("desc_act"):
            what = "has columns in another order (desc_act), and no g_idx that tells it"
            raise UserError(converter.dir_model, what, "take the checkpoint with its g_idx", name)
        tensors[order_name] = partial(order, tensors[name], tensors.get(scales_name))


def _refuse_rotations(folder: Path, entry: dict[str, Any]) -> None:
    """Refuse rotations that run with the model (QuIP, SpinQuant's R3 and R4); those of weights are in the weights."""
    schemes = (entry.get("transform_config") or {}).get("config_groups") or {}
    for name, scheme in schemes.items():
        if any(not place.get("location", "").startswith("weight_") for place in scheme.get("apply", ())):
            what = f"rotates activations while it runs (transform {name}), which llama.cpp does not"
            raise UserError(folder / "config.json", what, REMEDY)


def _tell_strategies(entry: dict[str, Any]) -> None:
    """One scale for a matrix as for a channel, groups of columns as blocks of one row; equal groups are one."""
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return
    kinds = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    if len(kinds) == len(groups) and all(kind == kinds[0] for kind in kinds):
        entry["config_groups"] = dict([next(iter(groups.items()))])
    for weights in kinds:
        if not isinstance(weights, dict) or entry.get("format") == "pack-quantized":
            continue
        if weights.get("strategy") == "tensor":
            weights["strategy"] = "channel"
        elif weights.get("strategy") == "group" and isinstance(weights.get("group_size"), int):
            weights |= {"strategy": "block", "block_structure": [1, weights["group_size"]], "group_size": None}


def _rename_scales(converter: Any) -> None:
    """Other names of the scale of FP8 weights: vLLM's, and that of DeepSeek's own code."""
    tensors = converter.model_tensors
    for name in [name for name in tensors if name.endswith((".weight_scale", ".scale"))]:
        weight = f"{name.removesuffix('.scale').removesuffix('.weight_scale')}.weight"
        if weight in tensors and _is_coded(tensors[weight]()) and f"{weight}_scale_inv" not in tensors:
            tensors[f"{weight}_scale_inv"] = tensors.pop(name)


@contextmanager
def dequantizing(converter: Any) -> Iterator[None]:
    """Within, upstream makes weights of codes; its errors say that it cannot, and codes that it leaves are refused.

    Raises:
        UserError: it cannot, or leaves some.
    """
    entry, before = entry_of(converter.hparams), dict(converter.model_tensors)
    method = None if entry is None else entry.get("quant_method")
    try:
        yield
        if entry is not None and converter.lazy:
            for name, load in converter.model_tensors.items():
                if before.get(name) is not load:
                    load()  # shapes and types alone
    except (UserError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or failed_line(error)
        what = f"is quantized ({method}) in a way that is not read: {reason}"
        raise UserError(converter.dir_model, what, REMEDY) from error
    for name, load in converter.model_tensors.items():
        if not name.endswith(".weight") or before.get(name) is not load or not _by_upstreams_base(converter):
            continue
        tensor = converter.model_tensors[name]()
        # Eight bits of a float are plain weights where nothing says otherwise.
        if _is_coded(tensor) and not (entry is None and tensor.dtype.is_floating_point):
            what = f"is {str(tensor.dtype).removeprefix('torch.')} codes, and nothing gives their scale"
            raise UserError(converter.dir_model, what, REMEDY, name)


def _by_upstreams_base(converter: Any) -> bool:
    """Whether no class but the base of all has a say in what codes mean."""
    overriding = [kind for kind in type(converter).__mro__ if "dequant_model" in vars(kind)]
    return len(overriding) == 1


def _is_coded(tensor: torch.Tensor) -> bool:
    """Whether a matrix is of codes by its type: eight bits, or words of several."""
    import torch

    kind = tensor.dtype
    return tensor.ndim > 1 and ((kind.itemsize == 1 and kind != torch.bool) or kind in (torch.int16, torch.int32))


def explain(error: Exception, folder: Path, hparams: dict[str, Any]) -> UserError | None:
    """An error of upstream's on a tensor that it does not know, where the checkpoint is quantized; else None."""
    unknown = re.fullmatch(r"Can not map tensor '(.+)'", str(error))
    if unknown is None or (entry := entry_of(hparams)) is None:
        return None
    what = f"is quantized ({entry.get('quant_method')}) in a way that is not read: no use is known of this tensor"
    return UserError(folder, what, REMEDY, unknown[1])
