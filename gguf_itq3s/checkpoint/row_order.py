"""Which row of a model's matrix each row of a GGUF tensor is: the conversion permutes the rows of some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..base.errors import UserError


def row_order(model: npt.NDArray[np.floating], tensor: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The order of the rows, by their values.

    Args:
        model: (m, n) as Transformers has it.
        tensor: (m, n) as GGUF has it.

    Returns:
        (m,), ``tensor[i] == model[order[i]]``.

    Raises:
        ValueError: the rows are not the same.
    """
    if model.shape != tensor.shape:
        raise ValueError(f"it is {tensor.shape} in GGUF and {model.shape} in the model")
    here, there = (np.ascontiguousarray(array, dtype=np.float32) + np.float32(0) for array in (model, tensor))
    if np.array_equal(here, there):
        return np.arange(len(here))
    kind = np.dtype((np.void, here.shape[1] * 4))
    of_here, of_there = (np.argsort(array.view(kind).ravel(), kind="stable") for array in (here, there))
    if not np.array_equal(here[of_here], there[of_there]):
        raise ValueError("its weights in GGUF are not those of the model, row by row")
    order = np.empty(len(here), dtype=np.int64)
    order[of_there] = of_here
    return order


def of_matrix(
    folder: Path, entry: str, model: npt.NDArray[np.floating], tensor: npt.NDArray[np.floating]
) -> npt.NDArray[np.int64]:
    """As :func:`row_order`, for the matrix ``entry`` of a model that is quantized layer by layer.

    Raises:
        UserError: the rows are not the same.
    """
    try:
        return row_order(model, tensor)
    except ValueError as problem:
        remedy = "use gguf-itq3s calibrate and --calibration"
        raise UserError(folder, f"cannot be quantized layer by layer: {problem}", remedy, entry) from problem
