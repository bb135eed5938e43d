"""Memory of the paths: what is measured is the page's formula, and no path but the dense one holds the matrix."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.codec.ternary import TQ1_0, TQ2_0
from gguf_itq3s.codec.types import ITQ3_S
from gguf_itq3s.torch import PackedLinear, products, transform
from packed import matrix, packed_rows
from scripts.tables.torch_memory import StorageTracker, additional, measure


def layer(qtype: Type, residual: Type | None, outputs: int, columns: int) -> PackedLinear:
    blocks = torch.from_numpy(packed_rows(qtype, outputs, columns))
    second = None if residual is None else torch.from_numpy(packed_rows(residual, outputs, columns))
    return PackedLinear.from_blocks(blocks, torch.zeros(outputs), qtype=qtype, residual=second)


PASSES = [(ITQ3_S, None), (ITQ3_S, ITQ3_S), (ITQ3_S, TQ2_0), (TQ1_0, None), (TQ2_0, None)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"), [(1, 1024, 512), (300, 512, 700), (40, 256, 5000), (5000, 256, 7)]
)
@pytest.mark.parametrize(("qtype", "residual"), PASSES)
def test_reference_takes_what_the_page_says(
    qtype: Type, residual: Type | None, rows: int, columns: int, outputs: int, dtype: torch.dtype
) -> None:
    built = layer(qtype, residual, outputs, columns).to(dtype)
    x = matrix(rows, columns).to(dtype)
    assert rows * columns <= transform.PIECE or rows == 5000
    measured = measure(built, x, "reference").peak
    expected = additional(rows, columns, outputs, qtype=qtype, residual_type=residual, dtype=dtype)
    # The scales of a slice, four bytes a row, are not in the formula.
    assert expected <= measured <= expected + 5 * 4 * min(outputs, products.SLICE_ROWS)


@pytest.mark.parametrize("residual", [None, ITQ3_S])
@pytest.mark.parametrize("rows", [1, 64])
def test_nothing_as_large_as_the_matrix_is_made(rows: int, residual: Type | None) -> None:
    built = layer(ITQ3_S, residual, 2048, 2048)
    x = matrix(rows, 2048)
    whole = 2048 * 2048 * 4
    tracker = measure(built, x, "reference")
    assert tracker.largest <= whole / 8
    assert tracker.peak < whole / 2


def test_the_dense_path_would_be_found_out() -> None:
    """The test before this one can fail."""
    built = layer(ITQ3_S, None, 2048, 2048)
    x = matrix(1, 2048)
    with torch.no_grad(), StorageTracker() as tracker:
        built(x, path="dense")
    assert tracker.largest == 2048 * 2048 * 4
    assert measure(built, x, "dense").peak == additional(1, 2048, 2048, path="dense")  # the matrix is there now


def test_backward_makes_nothing_as_large() -> None:
    built = layer(ITQ3_S, None, 2048, 2048)
    x = matrix(3, 2048).requires_grad_()
    y = built(x)
    with StorageTracker() as tracker:
        y.sum().backward()
    assert tracker.largest <= 2048 * 2048 * 4 / 8


def test_what_is_gone_is_not_counted() -> None:
    with StorageTracker() as tracker:
        first = torch.zeros(1000)
        first += torch.ones(1000)
        view = first[10:]
        del first
        assert (tracker.live, tracker.peak) == (4000, 8000)
        del view
        assert tracker.live == 0
