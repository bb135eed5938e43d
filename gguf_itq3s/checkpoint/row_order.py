"""Which row of a model's matrix each row of a GGUF tensor is: the conversion permutes the rows of some, and splits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def row_order(model: npt.NDArray[np.floating], tensor: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The order of the rows, by their values.

    Args:
        model: (M, n) as Transformers has it.
        tensor: (m, n) as GGUF has it, all rows or some.

    Returns:
        (m,), ``tensor[i] == model[order[i]]``, no row twice.

    Raises:
        ValueError: the rows are not among those of the model.
    """
    if model.shape[1:] != tensor.shape[1:] or len(model) < len(tensor):
        raise ValueError(f"it is {tensor.shape} in GGUF and {model.shape} in the model")
    here, there = (np.ascontiguousarray(array, dtype=np.float32) + np.float32(0) for array in (model, tensor))
    if np.array_equal(here, there):
        return np.arange(len(here))
    of_here, of_there = _hashes(here), _hashes(there)
    sorted_here, sorted_there = np.argsort(of_here, kind="stable"), np.argsort(of_there, kind="stable")
    hashes = of_there[sorted_there]
    # Of rows that are the same, the first to the first.
    places = np.searchsorted(of_here[sorted_here], hashes) + np.arange(len(there)) - np.searchsorted(hashes, hashes)
    order = np.empty(len(there), dtype=np.int64)
    order[sorted_there] = sorted_here[np.minimum(places, len(here) - 1)]
    if (places >= len(here)).any() or not np.array_equal(here[order], there):
        raise ValueError("its weights in GGUF are not those of the model, row by row")
    return order


def _hashes(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """A number for each row that equal rows share and others hardly ever."""
    factors = np.random.default_rng(0).integers(1, 1 << 64, rows.shape[1], dtype=np.uint64)
    parts = [part.view(np.uint32).astype(np.uint64) @ factors for part in np.array_split(rows, 1 + len(rows) // 1024)]
    return np.concatenate(parts)
