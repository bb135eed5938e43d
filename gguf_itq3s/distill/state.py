"""The checkpoint of a training: one safetensors file, replaced whole, that says of which run it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from ..base.journal import save_arrays

_FACTS: Final = "distill"


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Replace the checkpoint.

    Args:
        path: of the file.
        tensors: what is trained, and the optimizer's moments.
        facts: key of the run, steps done, losses; anything JSON holds.

    Raises:
        OSError: it cannot be written.
    """
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    save_arrays(arrays, path, metadata={_FACTS: json.dumps(facts)})


def read_state(path: Path, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    """Go on from a checkpoint: its tensors are copied into ``tensors``.

    Args:
        path: of the file.
        key: of the run.
        tensors: what is trained, and the optimizer's moments.

    Returns:
        The facts; None where there is no checkpoint.

    Raises:
        UserError: it is of another run, damaged, or not one of ours.
    """
    if not path.exists():
        return None
    remedy = f"remove {path.parent}, or choose another output folder"
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[_FACTS])
            if facts["key"] != key:
                what = "holds a training of another model, text or other options"
                raise UserError(path.parent, what, remedy)
            step, losses = facts["step"], facts["losses"]
            numbers = all(isinstance(facts[name], float) for name in ("before", "confidence"))
            if not isinstance(step, int) or not isinstance(losses, list) or step < 0 or not numbers:
                raise ValueError("its facts are not those of a training")
            if set(file.keys()) != set(tensors):
                raise ValueError("it has other tensors")
            for name, tensor in tensors.items():
                found = file.get_tensor(name)
                if found.dtype != tensor.dtype or found.shape != tensor.shape:
                    raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)}")
                with torch.no_grad():
                    tensor.copy_(found)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(path, f"is not a checkpoint of this training: {error}", remedy) from error
    return dict(facts)
