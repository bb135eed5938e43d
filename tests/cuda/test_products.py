"""Products with few columns on the emulated tensor cores: launcher, activations and kernel, compared with numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from emulated_cuda import LENGTHS, LONG_BLOCKS, ROTATED, SHORT_BLOCKS, TYPES, Device
from tests.cuda.test_emulated import BLOCK, FloatArray, aligned, quantize_blocks, random_blocks, rotated, weights_of

GLU = {"reglu": 0, "geglu": 1, "swiglu": 2, "swiglu_oai": 3, "swiglu_clamp": 6}


def row_blocks(name: str, n: int) -> int:
    """Blocks of a row of 256*n weights; of short ones 1 to 3 less, so that rows end in the middle of a tile."""
    return n if LENGTHS[name] == BLOCK else 4 * n - 1 - n % 3


def quantize_rows(x: FloatArray, length: int = BLOCK) -> npt.NDArray[np.float64]:
    """Activations (..., n*length) in 8 bits with one scale per block, as numbers again."""
    q, d = quantize_blocks(x.reshape(*x.shape[:-1], -1, length))
    return (q.astype(np.float64) * d[..., None]).reshape(x.shape)


def expected_product(name: str, blocks: npt.NDArray[np.uint8], x: FloatArray) -> npt.NDArray[np.float64]:
    """Rows (..., n, bytes) times columns (..., n*length): (..., columns, rows). The rotation is orthogonal."""
    length = LENGTHS[name]
    rows = weights_of(name, blocks.reshape(-1, blocks.shape[-1])).reshape(*blocks.shape[:-2], -1).astype(np.float64)
    if name in ROTATED:
        shape = x.shape
        x = rotated(x.reshape(*shape[:-1], -1, length)).reshape(shape)
        in_blocks = rows.astype(np.float32).reshape(*rows.shape[:-1], -1, length)
        rows = rotated(in_blocks).reshape(rows.shape).astype(np.float64)
    return np.einsum("...jk,...ik->...ji", quantize_rows(x, length), rows)


def stored_blocks(name: str, count: int, offset: int = 0, seed: int = 1) -> npt.NDArray[np.uint8]:
    blocks = random_blocks(name, count, seed)
    stored = aligned(blocks.shape, np.uint8, offset)
    stored[:] = blocks
    return stored


def activations(shape: tuple[int, ...], seed: int = 2) -> FloatArray:
    x = aligned(shape, np.float32)
    x[:] = np.random.default_rng(seed).standard_normal(shape)
    x[..., :BLOCK] *= 1e-3
    return x


def buffer_for(columns: int, length: int, channels: int = 1) -> npt.NDArray[np.uint8]:
    """What upstream takes for the activations in q8_1."""
    return aligned((channels * columns * -(-length // 512) * 2 * 288,), np.uint8)


def product(
    device: Device, name: str, rows: int, nblocks: int, columns: int, offset: int = 0, seed: int = 1
) -> tuple[FloatArray, npt.NDArray[np.float64]]:
    blocks = stored_blocks(name, rows * nblocks, offset, seed)
    x = activations((columns, nblocks * LENGTHS[name]))
    dst = aligned((columns + 1, rows + 3), np.float32)
    dst[:] = np.nan
    dims = np.array([nblocks, rows, columns, 1, 1, 1, 1, 1])
    strides = np.array([nblocks, 0, 0, x.shape[1], 0, 0, rows + 3, 0, 0])
    y = buffer_for(columns, x.shape[-1])
    device("product", TYPES.index(name), blocks, x, y, None, 0, None, None, None, 0, dst, dims, strides)
    assert np.isnan(dst[columns:]).all() and np.isnan(dst[:, rows:]).all(), "written past the end"
    return dst[:columns, :rows], expected_product(name, blocks.reshape(rows, nblocks, -1), x)


def check(found: npt.NDArray, expected: npt.NDArray[np.float64]) -> None:
    scale = np.abs(expected).max(axis=-1, keepdims=True) + 1e-30
    np.testing.assert_allclose(found / scale, expected / scale, atol=3e-6)


#: Of each kernel for so many columns one that is full and one with the fewest, and one between.
COLUMNS = [(name, n) for name in LONG_BLOCKS for n in (1, 2, 7, 8, 9, 16, 17, 33, 64)]
COLUMNS += [(name, n) for name in SHORT_BLOCKS for n in (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16)]


@pytest.mark.parametrize("name,columns", COLUMNS)
def test_columns(device: Device, name: str, columns: int) -> None:
    check(*product(device, name, 35, row_blocks(name, 4), columns))


@pytest.mark.parametrize("name", LONG_BLOCKS)
@pytest.mark.parametrize("rows,nblocks", [(1, 1), (16, 2), (17, 3), (150, 2), (40, 8), (33, 17), (300, 1)])
def test_shapes(device: Device, name: str, rows: int, nblocks: int) -> None:
    check(*product(device, name, rows, nblocks, 3))


@pytest.mark.parametrize("name", SHORT_BLOCKS)
@pytest.mark.parametrize("nblocks", [*range(1, 10), 29, 42])  # the last two 1856 and 2688 weights
@pytest.mark.parametrize("offset", [0, 2])
def test_rows_of_short_blocks(device: Device, name: str, nblocks: int, offset: int) -> None:
    """Rows end anywhere in a unit of the ring, and begin at a word or in the middle of one."""
    check(*product(device, name, 37, nblocks, 1 + nblocks % 3, offset))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("nsm,smpbo", [(1, 227 * 1024), (3, 99 * 1024), (132, 227 * 1024)])
def test_devices(device: Device, name: str, nsm: int, smpbo: int) -> None:
    """Few CUDA blocks take many tiles each; many warps share rows where there are CUDA blocks to spare."""
    device.configure(nsm=nsm, smpbo=smpbo, seed=nsm)
    check(*product(device, name, 200, row_blocks(name, 6), 2))


@pytest.mark.parametrize("name", ["itq4_s", "tq1_0", "tq2_0"])
@pytest.mark.parametrize("offset", [0, 2])
def test_rows_that_do_not_start_at_words(device: Device, name: str, offset: int) -> None:
    check(*product(device, name, 20, 5, 2, offset))


@pytest.mark.parametrize("name", ["itq3_s", "itq4_s", "itq3_n", "itq4_n"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_order_of_threads(device: Device, name: str, seed: int) -> None:
    device.configure(nsm=1, seed=seed)
    check(*product(device, name, 130, row_blocks(name, 5), 5))


def test_columns_do_not_depend_on_each_other(device: Device) -> None:
    """The same bits for a column alone and among others of its kernel, and with integer zero-points in every kernel."""
    for name, numbers in (("tq2_0", (8, 9, 30, 64)), ("itq3_n", (2, 4, 7, 16))):
        alone, _ = product(device, name, 35, row_blocks(name, 4), 1)
        for columns in numbers:
            together, _ = product(device, name, 35, row_blocks(name, 4), columns)
            np.testing.assert_array_equal(together[0], alone[0])


@pytest.mark.parametrize("name", TYPES)
def test_channels_and_samples(device: Device, name: str) -> None:
    rows, nblocks, columns = 21, row_blocks(name, 3), 4
    length = nblocks * LENGTHS[name]
    blocks = stored_blocks(name, 2 * 2 * rows * nblocks).reshape(2, 2, rows, nblocks, -1)
    x = activations((2, 4, columns, length))
    dst = aligned((2, 4, columns, rows), np.float32)
    dims = np.array([nblocks, rows, columns, 2, 4, 4, 2, 2])
    strides = np.array([nblocks, rows * nblocks, 2 * rows * nblocks, *(s // 4 for s in x.strides[-2::-1])])
    strides = np.append(strides, [s // 4 for s in dst.strides[-2::-1]])
    y = buffer_for(columns, length, 8)
    device("product", TYPES.index(name), blocks, x, y, None, 0, None, None, None, 0, dst, dims, strides)
    for sample in range(2):
        for channel in range(4):
            check(dst[sample, channel], expected_product(name, blocks[sample, channel // 2], x[sample, channel]))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("broadcast", [True, False])
def test_experts(device: Device, name: str, broadcast: bool) -> None:
    """Two experts of five for each of three tokens, with the same activations for both or their own."""
    rows, nblocks, tokens, used = 18, row_blocks(name, 3), 3, 2
    length = nblocks * LENGTHS[name]
    blocks = stored_blocks(name, 5 * rows * nblocks).reshape(5, rows, nblocks, -1)
    x = activations((tokens, 1 if broadcast else used, length))
    ids = np.array([[4, 0, -1], [2, 2, -1], [1, 3, -1]], np.int32)
    dst = aligned((tokens, used, rows), np.float32)
    ne11 = x.shape[1]
    dims = np.array([nblocks, rows, tokens, 5, ne11, used, 1, 1])
    strides = np.array([nblocks, rows * nblocks, 0, ne11 * length, length, 0, used * rows, rows, 0])
    y = buffer_for(ne11, length, tokens)
    device("product", TYPES.index(name), blocks, x, y, ids, 3, None, None, None, 0, dst, dims, strides)
    for token in range(tokens):
        for slot in range(used):
            column = x[token, 0 if broadcast else slot][None]
            check(dst[token, slot][None], expected_product(name, blocks[ids[token, slot]], column))


def glu(
    op: str, gate: npt.NDArray[np.float64], up: npt.NDArray[np.float64], limit: float = 0.5
) -> npt.NDArray[np.float64]:
    """The functions of ggml's GLU operators; ``limit`` is swiglu_clamp's."""
    if op == "swiglu":
        return gate / (1 + np.exp(-gate)) * up
    if op == "geglu":
        return 0.5 * gate * (1 + np.tanh(0.79788456080286535587989211986876 * gate * (1 + 0.044715 * gate**2))) * up
    if op == "swiglu_oai":
        gate = np.minimum(gate, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (1 + np.clip(up, -7, 7))
    if op == "swiglu_clamp":
        return glu("swiglu", np.minimum(gate, limit), np.clip(up, -limit, limit))
    return gate * up


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("op,with_gate,with_bias", [("swiglu", 1, 1), ("geglu", 1, 0), ("reglu", 0, 1)])
@pytest.mark.parametrize("with_ids", [False, True])
def test_fusion(device: Device, name: str, op: str, with_gate: int, with_bias: int, with_ids: bool) -> None:
    rows, nblocks, experts = 37, row_blocks(name, 3), 3
    blocks = stored_blocks(name, experts * rows * nblocks).reshape(experts, rows, nblocks, -1)
    gates = stored_blocks(name, experts * rows * nblocks, seed=5).reshape(experts, rows, nblocks, -1)
    x = activations((1, nblocks * LENGTHS[name])) * 0.05
    rng = np.random.default_rng(9)
    biases = [rng.standard_normal((experts, rows)).astype(np.float32) for _ in range(2)]
    ids = np.array([2, 0], np.int32) if with_ids else None
    channels = 2 if with_ids else 1
    dst = aligned((channels, rows), np.float32)
    dims = np.array([nblocks, rows, 1, experts if with_ids else 1, 1, channels, 1, 1])
    strides = np.array([nblocks, rows * nblocks, 0, x.shape[1], x.shape[1], 0, channels * rows, rows, 0])
    y = buffer_for(1, x.shape[-1])
    device(
        "product",
        TYPES.index(name),
        blocks,
        x,
        y,
        ids,
        2,
        gates if with_gate else None,
        biases[0] if with_bias else None,
        biases[1] if with_bias and with_gate else None,
        GLU[op],
        dst,
        dims,
        strides,
    )
    for channel, expert in enumerate([2, 0] if with_ids else [0]):
        up = expected_product(name, blocks[expert], x)[0] + with_bias * biases[0][expert]
        gate = expected_product(name, gates[expert], x)[0] + with_bias * biases[1][expert]
        result = glu(op, gate, up) if with_gate else up
        np.testing.assert_allclose(dst[channel], result, rtol=2e-5, atol=2e-5 * np.abs(result).max())
