"""The paper's kernel on the CPU: weights rotated back while they are loaded, F16 product (itq-fused.cuh)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from emulated_cuda import Device
from gguf_itq3s.codec.blocks import decode_blocks

BLOCK = 256
WIDTHS = (32, 64, 128)  # columns of a tile

FloatArray = npt.NDArray[np.float32]


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros at an address that is a multiple of 256, as device memory is allocated."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, dtype=np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].view(dtype).reshape(shape)


def random_blocks(shape: tuple[int, ...], seed: int, zero_points: tuple[float, ...]) -> npt.NDArray[np.uint8]:
    """Blocks of random symbols and selectors, (*shape, 100)."""
    rng = np.random.default_rng(seed)
    blocks = aligned((*shape, 100), np.uint8)
    blocks[:] = rng.integers(0, 256, blocks.shape, dtype=np.uint8)
    blocks[..., 96:98] = rng.uniform(-0.2, 0.2, shape).astype("<f2")[..., None].view(np.uint8)
    blocks[..., 98:100] = rng.choice(np.array(zero_points, "<f2"), shape)[..., None].view(np.uint8)
    blocks[..., 98] = blocks[..., 98] & 0xC0 | rng.integers(0, 64, shape)  # the start state
    return blocks


def product(
    device: Device,
    width: int,
    blocks: npt.NDArray[np.uint8],
    y: npt.NDArray[np.float16],
    padding: tuple[int, int] = (0, 0),
) -> FloatArray:
    """(samples, channels, rows, blocks, 100) by (samples, channels, columns, k) to (samples, channels, columns, rows).

    ``padding`` is the number of blocks after each row and of numbers after each column of the result.
    """
    samples_x, channels_x, rows, nblocks, _ = blocks.shape
    samples, channels, columns, k = y.shape
    stored = aligned((samples_x, channels_x, rows, nblocks + padding[0], 100), np.uint8)
    stored[..., :nblocks, :] = blocks
    stored[..., nblocks:, :] = 0xFF  # not a number, if it were read
    activations = aligned(y.shape, np.float16)
    activations[:] = y
    out = aligned((samples, channels, columns, rows + padding[1]), np.float32)
    out[:] = -7

    row = nblocks + padding[0]
    dims = np.array([nblocks, rows, columns, channels_x, samples_x, channels, samples], np.int64)
    strides = [row, row * rows, row * rows * channels_x, k, k * columns, k * columns * channels]
    strides += [out.shape[3], out.shape[3] * columns, out.shape[3] * columns * channels]
    arguments = (stored, activations, out, dims, np.array(strides, np.int64))
    seed = rows + columns + width  # of the order of the threads
    device("fused", seed, width, *arguments)
    assert (out[..., rows:] == -7).all()  # nothing is written past the rows
    return out[..., :rows]


def expected(blocks: npt.NDArray[np.uint8], y: npt.NDArray[np.float16]) -> tuple[npt.NDArray, npt.NDArray]:
    """The product of the weights rounded to F16, in float64, and the sum of its terms' sizes."""
    samples_x, channels_x, rows, nblocks, _ = blocks.shape
    samples, channels, _, _ = y.shape
    w = decode_blocks(blocks.reshape(-1, 100)).astype(np.float16).astype(np.float64)
    w = w.reshape(samples_x, channels_x, rows, nblocks * BLOCK)
    w = w.repeat(samples // samples_x, axis=0).repeat(channels // channels_x, axis=1)
    y64 = y.astype(np.float64)
    return y64 @ w.swapaxes(2, 3), np.abs(y64) @ np.abs(w).swapaxes(2, 3)


def compare(out: FloatArray, blocks: npt.NDArray[np.uint8], y: npt.NDArray[np.float16]) -> None:
    """Equal but for the order in which float32 adds up: products of two F16 are exact in it."""
    exact, size = expected(blocks, y)
    terms = y.shape[-1]
    np.testing.assert_array_less(np.abs(out - exact), terms * 2.0**-24 * size + 1e-30)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows,columns", [(1, 1), (131, 35)])  # the last tiles are full or not
def test_product(device: Device, width: int, rows: int, columns: int) -> None:
    blocks = random_blocks((1, 1, rows, 2), seed=rows, zero_points=(0, 0, 2, -1, 0.375, -70.25))
    y = np.random.default_rng(3).standard_normal((1, 1, columns, 2 * BLOCK)).astype(np.float16)
    compare(product(device, width, blocks, y, padding=(1, 3)), blocks, y)


def test_a_unit_activation_reads_the_weights(device: Device) -> None:
    """Each column picks one weight of each row, to the bit."""
    blocks = random_blocks((1, 1, 128, 1), seed=5, zero_points=(0, 2, 0.375))
    y = np.eye(BLOCK, dtype=np.float16).reshape(2, 1, 128, BLOCK)
    out = product(device, 128, blocks, y)
    weights = decode_blocks(blocks.reshape(-1, 100)).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out.reshape(BLOCK, 128), weights.T)


def test_more_than_one_tile_of_columns(device: Device) -> None:
    blocks = random_blocks((1, 1, 7, 1), seed=6, zero_points=(0,))
    y = np.random.default_rng(7).standard_normal((1, 1, 67, BLOCK)).astype(np.float16)
    compare(product(device, 32, blocks, y), blocks, y)


def test_channels_and_samples(device: Device) -> None:
    """Matrices shared by two channels and two samples each."""
    blocks = random_blocks((1, 2, 5, 1), seed=8, zero_points=(0, 2))
    y = np.random.default_rng(9).standard_normal((2, 4, 9, BLOCK)).astype(np.float16)
    compare(product(device, 32, blocks, y, padding=(0, 1)), blocks, y)


def test_activations_and_weights_at_the_ends_of_f16(device: Device) -> None:
    """Subnormal activations count and the largest ones add up in float32."""
    blocks = random_blocks((1, 1, 16, 1), seed=10, zero_points=(0,))
    y = np.zeros((1, 1, 2, BLOCK), np.float16)
    y[..., 0, :] = 2.0**-24
    y[..., 1, :] = 65504
    compare(product(device, 32, blocks, y), blocks, y)
