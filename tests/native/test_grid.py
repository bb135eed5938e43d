"""Rounding to the grids of ggml's types: numpy against C, against gguf-py and against the nearest value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.codec import grids, native
from gguf_itq3s.rounding import grid, hessian
from hessians import blocks_of, rows, second_moment

TYPES = pytest.mark.parametrize("qtype", grids.GRIDS, ids=lambda qtype: qtype.name)


@TYPES
def test_gguf_py_decodes_what_is_put_together(library: native.NativeLibrary, qtype: Type) -> None:
    weights, of = rows(9, 512), grids.GRIDS[qtype]
    codes = np.random.default_rng(1).integers(of.low, of.high + 1, weights.shape).astype(np.int8)
    blocks = grids.put_codes(library.quantize_type(weights, qtype), codes, qtype)
    scale, minimum = (np.repeat(array, of.group, axis=1) for array in grids.scales_of(blocks, qtype))
    levels = codes.astype(np.float32) if of.table is None else of.table[codes]
    np.testing.assert_array_equal(gguf.quants.dequantize(blocks, qtype), scale * levels - minimum)


@TYPES
def test_numpy_and_c_give_the_same_bytes(variants: list[native.NativeLibrary], qtype: Type) -> None:
    weights, h = rows(71, 768), second_moment(768, 90)
    weights[3] = 0
    weights[5] *= 1e-4
    weights[7, 300] = 5
    for form in (h, blocks_of(h)):
        factor = hessian.factorize(form)
        expected = grid.quantize(weights, qtype, factor, library=variants[0], native=False)
        for library in variants:
            np.testing.assert_array_equal(grid.quantize(weights, qtype, factor, library=library, threads=3), expected)


@TYPES
def test_rows_of_blocks_of_32_are_rounded_with_feedback(variants: list[native.NativeLibrary], qtype: Type) -> None:
    """Rows that are no multiple of 256, by both forms of a Hessian, cost less than without."""
    length = 576
    if length % gguf.GGML_QUANT_SIZES[qtype][0]:
        return
    weights, h = rows(33, length), second_moment(length, 90)
    short = np.stack([h[i : i + 64, i : i + 64] for i in range(0, length, 64)])

    def cost(data: np.ndarray) -> float:
        error = gguf.quants.dequantize(data, qtype).astype(np.float64) - weights
        return float(np.einsum("ij,jk,ik->", error, h, error))

    plain = cost(variants[0].quantize_type(weights, qtype, importance=np.diagonal(h).astype(np.float32)))
    for form, most in ((h, 0.8), (short, 1.0)):
        factor = hessian.factorize(form)
        expected = grid.quantize(weights, qtype, factor, library=variants[0], native=False)
        assert cost(expected) < most * plain
        for library in variants:
            np.testing.assert_array_equal(grid.quantize(weights, qtype, factor, library=library, threads=3), expected)


@TYPES
def test_the_identity_gives_the_nearest_codes(library: native.NativeLibrary, qtype: Type) -> None:
    weights, of = rows(20, 512), grids.GRIDS[qtype]
    data = grid.quantize(weights, qtype, hessian.factorize(np.eye(512)), library=library)
    error = np.abs(gguf.quants.dequantize(data, qtype) - weights)
    for code in range(of.low, of.high + 1):
        other = grids.put_codes(data, np.full(weights.shape, code, dtype=np.int8), qtype)
        assert (error <= np.abs(gguf.quants.dequantize(other, qtype) - weights) + 1e-8).all()
