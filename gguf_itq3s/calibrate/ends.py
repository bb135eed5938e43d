"""Statistics of a model's two ends, the token embedding and the output matrix, which are in no layer.

Rows of the embedding are looked up, so an error in row v counts as often as token v is in the text; what it does to the
model is seen at the input of the first layer. The output matrix reads what the final norm gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from ..codec.transform import rotation_block
from ..rounding import hessian
from .activations import activations
from .layers import LayeredModel, Stop
from .moments import Moment, rotated
from .ranks import ALONE, Ranks

#: In a folder of statistics; folders of earlier versions have none.
ENDS: Final = "ends.safetensors"


@dataclass(frozen=True)
class Ends:
    """Statistics of both ends.

    Attributes:
        frequency: float64 (tokens of the vocabulary,), share of the text's tokens.
        output: rotated second moment of the output matrix's inputs, (n, n) or (n / b, b, b) as in
            :mod:`gguf_itq3s.rounding.hessian`; None where its rows are not whole blocks.
    """

    frequency: npt.NDArray[np.float64]
    output: npt.NDArray[np.floating] | None


def collect(
    model: LayeredModel, folder: Path, text: np.ndarray, batches: Sequence[np.ndarray], *, full: bool, ranks: Ranks =
    ALONE,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The contents of :data:`ENDS`.

    Args:
        text: int64 (windows, context), of all ranks.
        ranks: those that have others of the text's windows; only the first has the second moment then.

    Raises:
        UserError: what the last layer gives is not finite.
    """
    import torch

    rows = model.model.get_output_embeddings().weight.shape[0]
    result = {"frequency": np.bincount(text.reshape(-1), minlength=rows).astype(np.float64) / text.size}
    if not rotation_block(model.hidden):
        return result
    moment = Moment(model.hidden, full)
    own = text[ranks.part(len(text))]
    source = activations(folder, model.layers, (*own.shape, model.hidden), "r", model.dtype)

    def see(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        moment.add(rotated(args[0]))
        raise Stop  # before the product with the output matrix

    with model.head() as head, torch.no_grad():
        handle = model.model.get_output_embeddings().register_forward_pre_hook(see)
        try:
            for batch in batches:
                with suppress(Stop):
                    head(torch.from_numpy(np.array(source[batch])).to(model.device))
        finally:
            handle.remove()
    moment.reduce(ranks, text.size, model.device, 0)
    if ranks.first and not np.isfinite(moment.mean()).all():
        what = "gives inputs of the output matrix that are NaN or infinite"
        raise UserError(model.folder, what, "repair the checkpoint or download it again")
    return {**result, "output": moment.mean()}


def read(folder: Path) -> Ends | None:
    """The statistics of a folder, None where it has none of the ends.

    Raises:
        UserError: they are damaged.
    """
    path = folder / ENDS
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            frequency = np.asarray(file.get_tensor("frequency"), dtype=np.float64)
            output = file.get_tensor("output") if "output" in file.keys() else None  # noqa: SIM118
        if output is not None:
            hessian.check_form(output)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise UserError(path, f"cannot be read: {error}", "calibrate again") from error
    finite = np.isfinite(frequency).all() and (output is None or np.isfinite(output).all())
    if frequency.ndim != 1 or not finite or (frequency < 0).any() or not frequency.any():
        raise UserError(path, "has frequencies of tokens or moments that cannot be", "calibrate again")
    return Ends(frequency, output)
