"""Memory of the paths: none holds the matrix."""

from __future__ import annotations

import pytest
import torch

from gguf_itq3s.codec.types import ITQ3_S
from gguf_itq3s.torch import PackedLinear
from packed import matrix, packed_rows
from storage import StorageTracker, measure


def layer(outputs: int, columns: int) -> PackedLinear:
    blocks = torch.from_numpy(packed_rows(ITQ3_S, outputs, columns))
    return PackedLinear.from_blocks(blocks, torch.zeros(outputs))


@pytest.mark.parametrize("rows", [1, 64])
def test_nothing_as_large_as_the_matrix_is_made(rows: int) -> None:
    built = layer(2048, 2048)
    x = matrix(rows, 2048)
    whole = 2048 * 2048 * 4
    tracker = measure(built, x, "reference")
    assert tracker.largest <= whole / 8
    assert tracker.peak < whole / 2


def test_backward_makes_nothing_as_large() -> None:
    built = layer(2048, 2048)
    x = matrix(3, 2048).requires_grad_()
    y = built(x)
    with StorageTracker() as tracker:
        y.sum().backward()
    assert tracker.largest <= 2048 * 2048 * 4 / 8
