"""Upstream's products with our functions inside, on the emulated device, compared with numpy.

Compiled are upstream's own files as the patches leave them: mmvq.cu, mmq.cu and mmq.cuh with all that they include,
quantize.cu and mmid.cu. What runs is what the backend calls, ``ggml_cuda_mul_mat_vec_q`` and ``ggml_cuda_mul_mat_q``,
with tensors: activations, experts, launchers, stream-k and its second kernel.

Not compiled is ``ggml-cuda.cu``, which chooses between them: it takes every kernel of the backend, cuBLAS and CUDA
graphs. Nor are kernels of other types and, to save minutes, most widths of tiles of the ternary types and of two
architectures (``emulated_cuda.widths``); the code of those differs by the width alone.

Where upstream's kernels count on more than a product says, the tests give it to them: MMVQ reads up to three rows past
the last and takes the distance between columns, or experts, of the result for the number of rows; MMQ reads the
activations of columns past the last.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from emulated_cuda import HOPPER, LENGTHS, PASCAL, ROTATED, SHORT_BLOCKS, TURING, TYPES, VOLTA, Device, widths
from tests.cuda.planted import FAULTS
from tests.cuda.test_emulated import (
    BLOCK,
    ByteArray,
    FloatArray,
    by_weight,
    quantize_chunks,
    quantize_halves,
    random_blocks,
    rotated,
    weights_of,
)
from tests.cuda.test_products import GLU, glu, quantize_rows, row_blocks

#: The kernels for few columns and those for many, as drivers.cpp numbers them.
FEW, MANY = 1, 2
#: Numbers between columns of the result. For few columns upstream takes their distance for the number of rows.
GAP = {FEW: 0, MANY: 3}

Array = npt.NDArray[np.float64]


def blocks_of(name: str, *shape: int, seed: int = 1, zero_point: float | None = None) -> ByteArray:
    """uint8 (*shape, bytes of a block)."""
    blocks = random_blocks(name, int(np.prod(shape)), seed)
    if zero_point is not None:
        blocks[:, 98:100] = np.array([zero_point], "<f2").view(np.uint8)
    return blocks.reshape(*shape, -1)


def row_length(name: str, nblocks: int) -> int:
    return nblocks * LENGTHS[name]


def activations(*shape: int, seed: int = 2) -> FloatArray:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[..., :32] = 0  # a chunk without a scale
    return x


def rounded(name: str, kernels: int, architecture: int, y: FloatArray) -> Array:
    """The activations as the kernels round them, those for trellis types rotated: (..., n)."""
    y = y.reshape(*y.shape[:-1], -1, LENGTHS[name])
    rotate = name in ROTATED
    if rotate:
        y = rotated(y)
    numbers: Array
    if name in SHORT_BLOCKS:
        numbers = quantize_rows(y, LENGTHS[name])
    elif kernels == MANY:
        q, d = quantize_halves(y, rotate)
        numbers = q.astype(np.float64) * by_weight(d, rotate)
    elif architecture >= 800:
        numbers = quantize_rows(y)
    else:
        q, d = quantize_chunks(y)
        numbers = q.astype(np.float64) * np.repeat(d.astype(np.float16).astype(np.float64), 32, axis=-1)
    return numbers.reshape(*y.shape[:-2], -1)


def weights(name: str, blocks: ByteArray) -> Array:
    """(..., n, bytes) to (..., n*length), those of trellis types rotated."""
    w = weights_of(name, blocks.reshape(-1, blocks.shape[-1]))
    w = rotated(w) if name in ROTATED else w
    return w.astype(np.float64).reshape(*blocks.shape[:-2], -1)


def mul_mat(
    device: Device,
    kernels: int,
    name: str,
    x: ByteArray,
    y: FloatArray,
    dst: FloatArray,
    ids: npt.NDArray[np.int32] | None = None,
    x_bias: FloatArray | None = None,
    gate: ByteArray | None = None,
    gate_bias: FloatArray | None = None,
    op: str = "swiglu",
) -> None:
    """``dst = x*y``: tensors of ggml with the shapes and strides of these arrays, x and gate (..., rows, n, bytes)."""
    arrays = (x, y, dst, ids, x_bias, gate, gate_bias)
    device("mul_mat", kernels, TYPES.index(name), *arrays, *shapes(arrays, [0, 5], LENGTHS[name]), GLU[op])


def shapes(
    arrays: Sequence[npt.NDArray[Any] | None], of_blocks: Sequence[int], length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Four numbers and four strides for each, as ggml has them.

    ``of_blocks``: which arrays have blocks of ``length`` weights, (..., rows, n, bytes).
    """
    sizes, strides = np.ones((len(arrays), 4), np.int64), np.ones((len(arrays), 4), np.int64)
    for i, array in enumerate(arrays):
        if array is not None:
            shape, steps = array.shape, array.strides
            if i in of_blocks:
                shape, steps = (*shape[:-2], shape[-2] * length), (*steps[:-2], shape[-1])
            sizes[i, : len(shape)] = shape[::-1]
            strides[i, : len(steps)] = steps[::-1]
            strides[i, len(steps) :] = strides[i, len(steps) - 1] * sizes[i, len(steps) - 1]
    return sizes, strides


def product(device: Device, kernels: int, name: str, x: ByteArray, y: FloatArray) -> None:
    """x (rows, n, bytes) by y (columns, n*length) is what it should be, and nothing is written beside it."""
    rows, columns = len(x), len(y)
    dst = np.full((columns + 1, rows + GAP[kernels]), np.nan, np.float32)
    mul_mat(device, kernels, name, x, y, dst[:columns, :rows])
    assert np.isnan(dst[columns:]).all() and np.isnan(dst[:, rows:]).all(), "written past the end"
    compare(dst[:columns, :rows], rounded(name, kernels, device.architecture, y), weights(name, x))


def compare(found: FloatArray, y: Array, w: Array) -> None:
    """Equal to y*w but for the rounding of sums in float32."""
    size = np.abs(y) @ np.abs(w).swapaxes(-1, -2)
    np.testing.assert_array_less(np.abs(found - y @ w.swapaxes(-1, -2)), 2e-6 * size.max() + 1e-30)


@pytest.fixture
def on(devices: Callable[[int], Device], request: pytest.FixtureRequest) -> Callable[..., Device]:
    """``on(architecture, ...)``: that device, with an order of threads of the test's own."""

    def configured(architecture: int, **settings: int) -> Device:
        device = devices(architecture)
        device.configure(**{"seed": zlib.crc32(request.node.name.encode()), **settings})
        return device

    return configured


@pytest.mark.parametrize(
    "architecture,cc,most",
    [(HOPPER, 900, 64), (HOPPER, 1200, 64), (HOPPER, 750, 8), (TURING, 750, 8), (VOLTA, 700, 8), (PASCAL, 610, 8)],
)
def test_which_kernels(on: Callable[..., Device], architecture: int, cc: int, most: int) -> None:
    """Up to ``most`` columns go to the kernels for few, whatever the library was compiled for.

    Of short blocks, whose products on tensor cores are four times as many, up to 16 at most.
    """
    device = on(architecture, cc=cc)
    for number in range(len(TYPES)):
        last = min(most, 16) if TYPES[number] in SHORT_BLOCKS else most
        choices = [int(device("choice", number, columns, 0)) for columns in (1, last, last + 1, 4096)]
        assert [choice == FEW for choice in choices] == [True, True, False, False]
        if architecture <= cc:  # else there are no kernels for the device
            assert choices[2] == MANY


@pytest.mark.parametrize("name", TYPES)
def test_a_card_with_little_shared_memory(on: Callable[..., Device], name: str) -> None:
    """As the RTX 30 to 50 have it: as many columns go to the kernels for few as fit."""
    device = on(HOPPER, smpbo=99 * 1024)
    most = 32 if name == "itq4_s" else 16 if name in SHORT_BLOCKS else 64
    choices = [int(device("choice", TYPES.index(name), columns, 0)) for columns in (most, most + 1)]
    assert choices == [FEW, MANY]
    product(device, FEW, name, blocks_of(name, 20, 3), activations(most, row_length(name, 3)))


# ---------------------------------------------------------------------------------------------------------------------
# mul_mat_vec_q


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    "architecture,kernels,columns",
    [(HOPPER, FEW, 3), (TURING, FEW, 3), (PASCAL, FEW, 3), (HOPPER, MANY, 70), (TURING, MANY, 12)],
)
def test_what_is_no_number_comes_out_as_nan(
    on: Callable[..., Device], architecture: int, kernels: int, columns: int, name: str, value: float
) -> None:
    """In its column, and nowhere else."""
    device = on(architecture)
    nblocks = row_blocks(name, 3)
    x, y = blocks_of(name, 19, nblocks), activations(columns, row_length(name, nblocks))
    dst = np.zeros((2, columns, 19), np.float32)
    mul_mat(device, kernels, name, x, y, dst[0])
    y[1, 300] = value
    mul_mat(device, kernels, name, x, y, dst[1])
    assert np.isnan(dst[1, 1]).all()
    others = np.arange(columns) != 1
    np.testing.assert_array_equal(dst[1, others], dst[0, others])


@pytest.mark.parametrize(
    "architecture,name,columns",
    [
        *itertools.product((TURING, PASCAL), TYPES, range(1, 9)),
        *itertools.product((HOPPER,), SHORT_BLOCKS, range(1, 17)),
    ],
)
def test_few_columns(on: Callable[..., Device], architecture: int, name: str, columns: int) -> None:
    nblocks = row_blocks(name, 5)
    product(on(architecture), FEW, name, blocks_of(name, 19, nblocks), activations(columns, row_length(name, nblocks)))


@pytest.mark.parametrize("name", SHORT_BLOCKS)
@pytest.mark.parametrize("architecture,kernels,columns", [(HOPPER, FEW, 2), (TURING, FEW, 1), (HOPPER, MANY, 16)])
@pytest.mark.parametrize("nblocks", range(1, 10))
def test_every_end_of_a_row(
    on: Callable[..., Device], architecture: int, kernels: int, columns: int, name: str, nblocks: int
) -> None:
    x, y = blocks_of(name, 21, nblocks), activations(columns, row_length(name, nblocks))
    product(on(architecture), kernels, name, x, y)


@pytest.mark.parametrize("architecture", [HOPPER, TURING])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows,nblocks,columns", [(5, 33, 1), (4, 40, 2), (1, 1, 1)])
def test_long_and_short_rows(
    on: Callable[..., Device], architecture: int, name: str, rows: int, nblocks: int, columns: int
) -> None:
    """One column of long rows has a row for each CUDA block, of short ones a row for each warp."""
    nblocks = row_blocks(name, nblocks)
    x, y = blocks_of(name, rows, nblocks), activations(columns, row_length(name, nblocks))
    product(on(architecture), FEW, name, x, y)


def strided(name: str, samples: int, channels: int, rows: int, nblocks: int) -> ByteArray:
    """Blocks (samples, channels, rows, nblocks, bytes) with gaps between rows, channels and samples."""
    return blocks_of(name, samples, channels + 1, rows + 1, nblocks + 2)[:, :channels, :rows, :nblocks]


def broadcast_product(device: Device, kernels: int, name: str, rows: int, columns: int, nblocks: int = 3) -> None:
    """Two samples and four channels of activations for one sample and two channels of weights, all with gaps."""
    nblocks = row_blocks(name, nblocks)
    length = row_length(name, nblocks)
    x = strided(name, 1, 2, rows, nblocks)
    y = activations(2, 5, columns + 1, length + 64)[:, :4, :columns, :length]
    dst = np.full((2, 5, columns + 2, rows + GAP[kernels]), np.nan, np.float32)
    mul_mat(device, kernels, name, x, y, dst[:, :4, :columns, :rows])
    assert np.isnan(dst[:, 4:]).all() and np.isnan(dst[:, :, columns:]).all() and np.isnan(dst[..., rows:]).all()
    for sample in range(2):
        for channel in range(4):
            y_rounded = rounded(name, kernels, device.architecture, y[sample, channel])
            compare(dst[sample, channel, :columns, :rows], y_rounded, weights(name, x[0, channel // 2]))


@pytest.mark.parametrize("architecture", [HOPPER, TURING, PASCAL])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("columns", [1, 3])
def test_few_columns_of_channels_and_samples(
    on: Callable[..., Device], architecture: int, name: str, columns: int
) -> None:
    broadcast_product(on(architecture), FEW, name, 9, columns)


def expert_product(
    device: Device, kernels: int, name: str, rows: int, tokens: int, used: int, *, broadcast: bool, nblocks: int = 3
) -> None:
    """``used`` of seven experts for each token, with activations for all of them or for each."""
    experts, nblocks = 7, row_blocks(name, nblocks)
    x = strided(name, 1, experts, rows, nblocks)[0]
    y = activations(tokens, 1 if broadcast else used, row_length(name, nblocks))
    chosen = np.random.default_rng(tokens + used)
    ids = np.full((tokens, used + 2), -1, np.int32)  # a view of longer rows
    ids[:, :used] = [chosen.permutation(experts - 1)[:used] for _ in range(tokens)]  # nobody asks for the last one
    dst = np.full((tokens, used, rows), np.nan, np.float32)
    mul_mat(device, kernels, name, x, y, dst, ids[:, :used])
    w, y_rounded = weights(name, x), rounded(name, kernels, device.architecture, y)
    for token in range(tokens):
        for slot in range(used):
            column = y_rounded[token, 0 if broadcast else slot]
            compare(dst[token, slot], column[None], w[ids[token, slot]])


@pytest.mark.parametrize("architecture", [HOPPER, TURING, PASCAL])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("broadcast", [True, False])
def test_experts_of_few_tokens(
    on: Callable[..., Device], architecture: int, name: str, tokens: int, broadcast: bool
) -> None:
    # For one token upstream's kernel takes four short rows at a time and writes past the last one of an expert.
    rows = 9 if tokens > 1 or architecture == HOPPER else 12
    expert_product(on(architecture), FEW, name, rows, tokens, 3, broadcast=broadcast)


@pytest.mark.parametrize("architecture", [HOPPER, TURING])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    "op,with_gate,with_bias,tokens",
    [
        ("swiglu", True, True, 0),
        ("geglu", True, False, 0),
        ("reglu", True, True, 1),
        ("swiglu_oai", True, False, 1),
        ("swiglu_clamp", True, True, 0),
        ("swiglu", False, True, 1),
        ("swiglu", True, True, 2),
        ("geglu", False, True, 2),
    ],
)
def test_fusion(
    on: Callable[..., Device], architecture: int, name: str, op: str, with_gate: bool, with_bias: bool, tokens: int
) -> None:
    """Gate, bias and activation function in the product; ``tokens`` with experts of their own, 0 for one without."""
    device = on(architecture)
    rows, nblocks, experts, used = 12, row_blocks(name, 3), 3, 2
    x, gate = (blocks_of(name, experts, rows, nblocks, seed=seed) for seed in (1, 5))
    x_bias, gate_bias = np.random.default_rng(9).standard_normal((2, experts, rows)).astype(np.float32)
    y = activations(max(tokens, 1), 1, row_length(name, nblocks)) * np.float32(0.05)
    ids = np.array([[2, 0], [1, 2]], np.int32)[:tokens] if tokens else None
    if ids is None:
        x, gate, x_bias, gate_bias = x[0], gate[0], x_bias[0], gate_bias[0]
    dst = np.full((tokens, used, rows) if tokens else (1, rows), np.nan, np.float32)
    mul_mat(
        device,
        FEW,
        name,
        x,
        y if tokens else y[0],
        dst,
        ids,
        x_bias if with_bias else None,
        gate if with_gate else None,
        gate_bias if with_bias and with_gate else None,
        op,
    )
    y_rounded = rounded(name, FEW, architecture, y)[:, 0]
    for index in np.ndindex(dst.shape[:-1]):
        expert = () if ids is None else ids[index]
        column = y_rounded[index[0]]
        up = weights(name, x[expert]) @ column + with_bias * x_bias[expert]
        expected = (
            glu(op, weights(name, gate[expert]) @ column + with_bias * gate_bias[expert], up) if with_gate else up
        )
        np.testing.assert_allclose(dst[index], expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


# ---------------------------------------------------------------------------------------------------------------------
# mul_mat_q

TILES = [
    (architecture, name, width, fallback)
    for architecture in (HOPPER, TURING, VOLTA, PASCAL)
    for name in TYPES
    for fallback in (True, False)
    for width in widths(architecture, name, fallback)
]


def shared_bytes(architecture: int, width: int) -> int:
    """Of a CUDA block: indices and activations of the columns, weights and their scales."""
    rows, stride = (64 if architecture == PASCAL else 128), (76 if architecture >= TURING else 73.25)
    return 4 * width + int(4 * rows * stride) + -(-144 * width // 1024) * 1024


@pytest.mark.parametrize("architecture,name,width,fallback", TILES)
def test_every_tile(on: Callable[..., Device], name: str, architecture: int, width: int, fallback: bool) -> None:
    device = on(architecture)
    nblocks = row_blocks(name, 2)
    x, y = blocks_of(name, 37 if fallback else 128, nblocks), activations(width - 3, row_length(name, nblocks))
    product(device, MANY, name, x, y)
    assert shared_bytes(architecture, width) in [launch[-1] for launch in device.launches()]


@pytest.mark.parametrize("architecture", [HOPPER, TURING, VOLTA, PASCAL])
@pytest.mark.parametrize("columns", [16, 64])  # 16 and 32 rows a warp
@pytest.mark.parametrize("zero_point", [0, 2, 0.375])
def test_zero_points(on: Callable[..., Device], architecture: int, columns: int, zero_point: float) -> None:
    for seed in range(2):
        x = blocks_of("itq3_s", 128, 2, zero_point=zero_point)
        product(on(architecture, seed=seed), MANY, "itq3_s", x, activations(columns, 2 * BLOCK))


@pytest.mark.parametrize("architecture", [HOPPER, VOLTA])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    "rows,columns,nblocks,nsm",
    [
        (128, 9, 7, 3),  # a tile in three parts
        (128, 9, 3, 8),  # CUDA blocks without a part
        (300, 50, 5, 2),  # three tiles, the last one not full, on two multiprocessors
        (256, 250, 2, 3),  # more columns than a tile has: four tiles on three
    ],
)
def test_stream_k(
    on: Callable[..., Device], architecture: int, name: str, rows: int, columns: int, nblocks: int, nsm: int
) -> None:
    """Tiles that are shared by multiprocessors: parts go to a buffer, and a second kernel adds them up."""
    device = on(architecture, nsm=nsm)
    nblocks = row_blocks(name, nblocks)
    product(device, MANY, name, blocks_of(name, rows, nblocks), activations(columns, row_length(name, nblocks)))
    _, product_launch, fixup_launch = device.launches()
    assert product_launch[:3] == (nsm, 1, 1)
    assert fixup_launch[:3] == (nsm, 128 // 32, 1)


def test_as_many_blocks_as_tiles(on: Callable[..., Device]) -> None:
    """Nothing is shared where tiles fill the device."""
    device = on(HOPPER, nsm=2)
    product(device, MANY, "itq3_s", blocks_of("itq3_s", 256, 2), activations(9, 2 * BLOCK))
    assert len(device.launches()) == 2


@pytest.mark.parametrize("architecture", [HOPPER, VOLTA, PASCAL])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows,nsm", [(37, 3), (128, 16)])
def test_many_columns_of_channels_and_samples(
    on: Callable[..., Device], architecture: int, name: str, rows: int, nsm: int
) -> None:
    broadcast_product(on(architecture, nsm=nsm), MANY, name, rows, 9)


@pytest.mark.parametrize("architecture", [HOPPER, VOLTA, PASCAL])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows,used", [(37, 2), (128, 3)])  # helpers for two experts and for any number
@pytest.mark.parametrize("broadcast", [True, False])
def test_experts_of_many_tokens(
    on: Callable[..., Device], architecture: int, name: str, rows: int, used: int, broadcast: bool
) -> None:
    expert_product(on(architecture, nsm=5), MANY, name, rows, 16, used, broadcast=broadcast)


# ---------------------------------------------------------------------------------------------------------------------
# Both


@pytest.mark.parametrize("architecture", [HOPPER, TURING])
@pytest.mark.parametrize("kernels,columns", [(FEW, 2), (MANY, 16)])
@pytest.mark.parametrize(
    "names,quantized",
    [
        (("itq3_s", "itq3_s"), 1),
        (("tq2_0", "tq2_0"), 1),
        (("itq2_s", "itq2_s"), 1),
        (("itq3_n", "itq3_n"), 1),
        (("itq3_s", "tq1_0"), 2),
    ],
)
def test_products_that_share_activations(
    on: Callable[..., Device], architecture: int, kernels: int, columns: int, names: tuple[str, str], quantized: int
) -> None:
    device = on(architecture, nsm=1)
    nblocks = row_blocks(names[0], 3)
    x = [blocks_of(name, rows, nblocks, seed=rows) for name, rows in zip(names, (8, 12), strict=True)]
    y = activations(columns, row_length(names[0], nblocks))
    dst = [np.full((columns, len(blocks)), np.nan, np.float32) for blocks in x]
    arrays = (x[0], dst[0], x[1], dst[1], y)
    device("mul_mat_shared", kernels, *map(TYPES.index, names), *arrays, *shapes(arrays, [0, 2], LENGTHS[names[0]]))
    for name, blocks, found in zip(names, x, dst, strict=True):
        compare(found, rounded(name, kernels, architecture, y), weights(name, blocks))
    assert len(device.launches()) == quantized + 2


# ---------------------------------------------------------------------------------------------------------------------
# These tests find mistakes


def finds(check: Callable[[], None]) -> bool:
    """Whether a check fails or ends its process."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            check()
        except AssertionError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def check_of_fault(fault: int, device: Device) -> None:
    name = "itq3_s"
    if fault in (1, 3):
        product(device, MANY, name, blocks_of(name, 128, 7), activations(9, 7 * BLOCK))
    elif fault < 7:
        product(device, MANY, name, blocks_of(name, 128, 3, zero_point=0), activations(9, 3 * BLOCK))
    elif fault == 8:
        expert_product(device, FEW, name, 9, 3, 2, broadcast=False)
    elif fault in (7, 9, 18, 19):
        product(device, FEW, name, blocks_of(name, 5, 33), activations(1, 33 * BLOCK))
    else:
        name, (kernels, columns) = "itq3_n", (MANY, 9) if fault in (11, 12) else (FEW, 3)
        product(device, kernels, name, blocks_of(name, 128, 9), activations(columns, row_length(name, 9)))


@pytest.mark.parametrize("fault", range(1, len(FAULTS) + 1))
def test_planted_mistakes_are_found(on: Callable[..., Device], fault: int) -> None:
    device = on(TURING if fault < 13 else HOPPER, nsm=3)

    def check(planted: int) -> None:
        device("plant", planted)
        check_of_fault(fault, device)

    assert not finds(lambda: check(0))
    assert finds(lambda: check(fault))
