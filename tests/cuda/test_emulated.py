"""Our CUDA kernels on the CPU: conversions, activations, decoders, compared with numpy; the emulated device itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from emulated_cuda import LENGTHS, LONG_BLOCKS, SHORT_BLOCKS, TYPES, VOLTA, Device
from gguf_itq3s.codec.blocks import decode_blocks, unpack
from gguf_itq3s.codec.family import FAMILY, TrellisType
from gguf_itq3s.codec.formats import ITQ3_S_LEVELS as LEVELS
from gguf_itq3s.codec.transform import fwht

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
VECTORS = DATA / "itq3_s_decode.npz"
#: By their names in the C interfaces.
TRELLIS = {row.identifier: row for row in FAMILY.values()}

#: Weights of a long block, and of a warp; SHORT of a short one.
BLOCK, SHORT = 256, 64
SEEDS = (0, 1, 2, 3)  # orders of threads: of their numbers, any, by priorities, any

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> npt.NDArray:
    """Zeros at an address that is ``offset`` bytes past a multiple of 256, as device memory is allocated."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 512, dtype=np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + size].view(dtype).reshape(shape)


def random_blocks(name: str, count: int, seed: int = 1) -> ByteArray:
    """Blocks of every kind of content, with start states, zero-points 0, 2 and others where there are."""
    rng = np.random.default_rng(seed)
    if name in TRELLIS:
        fmt = TRELLIS[name].format
        blocks = rng.integers(0, 256, (count, fmt.block_bytes), dtype=np.uint8)
        d = rng.uniform(-0.2, 0.2, count).astype("<f2")
        z = rng.choice(np.array([0, 0, 0, 2, -1, 0.375, -70.25], "<f2"), count)
        scales = np.stack([d, z][: 1 + fmt.zero_point], axis=1).view("<u2")
        scales[:, -1] = scales[:, -1] & 0xFFC0 | rng.integers(0, 64, count)
        blocks[:, fmt.scale_offset :] = scales.view(np.uint8)
        return blocks
    weights = rng.integers(-1, 2, (count, BLOCK)).astype(np.float32) * rng.uniform(0.5, 2, (count, 1)).astype(
        np.float32
    )
    return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name.upper()]).reshape(count, -1)


def weights_of(name: str, blocks: ByteArray) -> FloatArray:
    """float32 (count, weights of a block) by the numpy codecs."""
    if name in TRELLIS:
        return decode_blocks(blocks, TRELLIS[name].format)
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()]).reshape(-1, BLOCK)


def rotated(x: FloatArray) -> FloatArray:
    """The blocks along the last axis."""
    return fwht(x, x.shape[-1])


def decoded_offset(t: npt.NDArray[np.int64], length: int = BLOCK) -> npt.NDArray[np.int64]:
    """Where weight t of a block is in decoded order, stated in words of the layout (itq-decode.cuh)."""
    chunk, within = t // 32, t % 32
    half, group = (chunk % 2, chunk // 2) if length == BLOCK else (0, chunk)
    word, byte = within // 4, within % 4
    return 128 * half + 32 * group + 8 * byte + word


def quantize_chunks(x: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Symmetric 8 bits per 32 values: int8 (..., 256) and scales float32 (..., 8)."""
    chunks = x.reshape(*x.shape[:-1], 8, 32).astype(np.float32)
    d = np.abs(chunks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        q = np.where(d == 0, np.float32(0), chunks / d)
    q = np.copysign(np.floor(np.abs(q) + np.float32(0.5)), q)  # half away from zero, as roundf
    return q.astype(np.int8).reshape(x.shape), d[..., 0]


def quantize_halves(x: FloatArray, rotate: bool) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """8 bits with one scale for 128 values, of even and odd chunks (rotate) or of halves: int8 (..., 256), (..., 2)."""
    chunks = x.reshape(*x.shape[:-1], 8, 32)
    halves = (
        np.stack([chunks[..., 0::2, :], chunks[..., 1::2, :]], -3) if rotate else x.reshape(*x.shape[:-1], 2, 4, 32)
    )
    d = np.abs(halves).max(axis=(-1, -2), keepdims=True).astype(np.float32) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        q = np.where(d == 0, np.float32(0), halves / d)
    q = np.copysign(np.floor(np.abs(q) + np.float32(0.5)), q).astype(np.int8)
    natural = np.swapaxes(q, -3, -2) if rotate else q
    return natural.reshape(x.shape), d[..., 0, 0]


def quantize_blocks(x: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Symmetric 8 bits with one scale for the last axis: int8 (..., n) and float32 (...)."""
    d = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        q = np.where(d == 0, np.float32(0), x / d)
    return np.copysign(np.floor(np.abs(q) + np.float32(0.5)), q).astype(np.int8), d[..., 0]


def by_weight(d: FloatArray, rotate: bool) -> FloatArray:
    """The scales of the halves, (..., 2), for each of the 256 values."""
    return np.take(d, np.arange(BLOCK) // 32 % 2 if rotate else np.arange(BLOCK) // 128, axis=-1)


def test_levels_of_the_shared_vectors(device: Device) -> None:
    blocks = np.load(VECTORS)["blocks"]
    expected = LEVELS[unpack(blocks)[0].indices].astype(np.int8).T
    for z in (0, 2, -64, 64):
        for block, levels in zip(blocks, expected, strict=True):
            block = np.ascontiguousarray(block)
            halves, eights = np.empty(BLOCK, np.int8), np.empty(BLOCK, np.int8)
            device("levels", block, z, halves, eights)
            np.testing.assert_array_equal(halves, levels - z)
            np.testing.assert_array_equal(eights, levels - z)


def test_every_index_has_its_level(device: Device) -> None:
    block = random_blocks("itq3_s", 1)[0]
    seen = set()
    for seed in range(8):
        block[:96] = np.random.default_rng(seed).integers(0, 256, 96)
        halves, eights = np.empty(BLOCK, np.int8), np.empty(BLOCK, np.int8)
        device("levels", block, 0, halves, eights)
        indices = unpack(block.reshape(1, 100))[0].indices[:, 0]
        np.testing.assert_array_equal(halves, LEVELS[indices])
        np.testing.assert_array_equal(eights, LEVELS[indices])
        seen.update(indices.tolist())
    assert seen == set(range(32))


@pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)
def test_dequantize_of_the_shared_vectors(device: Device, row: TrellisType) -> None:
    vectors = np.load(DATA / f"{row.identifier}_decode.npz")
    blocks = aligned(vectors["blocks"].shape, np.uint8)
    blocks[:] = vectors["blocks"]
    out = aligned(vectors["weights"].shape, np.float32)
    device("dequantize", TYPES.index(row.identifier), 0, blocks, out, np.array([out.size, 1, 1, 1]), np.zeros(3, int))
    np.testing.assert_allclose(out, vectors["weights"], rtol=1e-6)
    np.testing.assert_array_equal(out, decode_blocks(vectors["blocks"], row.format))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("max_grid,offset", [(65535, 0), (2, 4)])  # the grid covers the rows or loops; aligned or not
def test_dequantize_any_strides(device: Device, name: str, dtype: str, max_grid: int, offset: int) -> None:
    ne = np.array([11 * LENGTHS[name], 3, 2, 2])  # 11 blocks: the last CUDA block of a row, or warp, is not full
    blocks = random_blocks(name, 400)
    stored = aligned(blocks.shape, np.uint8, 100 if name == "itq3_s" else 2)
    stored[:] = blocks
    strides = np.array([13, 90, 195])  # in blocks: gaps between rows, channels and samples
    codes = {"float32": (np.float32, 0), "float16": (np.uint16, 1), "bfloat16": (np.uint16, 2)}
    out = aligned((2, 2, 3, int(ne[0])), codes[dtype][0], offset)
    device.configure(max_grid=max_grid, seed=1)
    device("dequantize", TYPES.index(name), codes[dtype][1], stored, out, ne, strides)

    first = (
        strides[2] * np.arange(2)[:, None, None, None]
        + strides[1] * np.arange(2)[:, None, None]
        + strides[0] * np.arange(3)[:, None]
        + np.arange(11)
    )
    expected = weights_of(name, blocks)[first].reshape(out.shape)
    if dtype == "float16":
        np.testing.assert_array_equal(out.view(np.float16), expected.astype(np.float16))
    elif dtype == "bfloat16":
        bits = expected.view(np.uint32)
        np.testing.assert_array_equal(out, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))
    else:
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", SHORT_BLOCKS)
@pytest.mark.parametrize("nblocks", [1, 4, 35])  # a part of a warp, a warp, more than a CUDA block has
@pytest.mark.parametrize("max_grid", [65535, 1])
def test_get_rows(device: Device, name: str, nblocks: int, max_grid: int) -> None:
    """Rows of two channels and three samples by five numbers for each, all with gaps between."""
    rows, picked, length = 6, 5, LENGTHS[name]
    x = random_blocks(name, 3 * 2 * rows * (nblocks + 1)).reshape(3, 2, rows, nblocks + 1, -1)
    ids = np.full((3, 2, picked + 2), -1, np.int32)
    ids[..., :picked] = np.random.default_rng(4).integers(0, rows, (3, 2, picked))
    out = aligned((3, 2, picked, nblocks * length + 8), np.float32)
    out[:] = np.nan
    ne = np.array([nblocks * length, picked, 2, 3])
    nb = np.array([*x.strides[2::-1], *ids.strides[::-1], *out.strides[2::-1]])
    device.configure(max_grid=max_grid, seed=nblocks)
    device("get_rows", TYPES.index(name), x, ids, out, ne, nb)
    for sample, channel in np.ndindex(3, 2):
        chosen = x[sample, channel, ids[sample, channel, :picked], :nblocks]
        expected = weights_of(name, chosen.reshape(-1, x.shape[-1])).reshape(picked, -1)
        np.testing.assert_array_equal(out[sample, channel, :, : nblocks * length], expected)
    assert np.isnan(out[..., nblocks * length :]).all(), "written past the end"


def activations(shape: tuple[int, ...], offset: int = 0, seed: int = 2) -> FloatArray:
    x = aligned(shape, np.float32, offset)
    x[:] = np.random.default_rng(seed).standard_normal(shape)
    x[..., :32] = 0  # a chunk without a scale
    return x


def unpack_mmvq(y: ByteArray) -> tuple[npt.NDArray[np.int8], FloatArray, npt.NDArray[np.int16]]:
    """Groups of 144 bytes to values int8 (..., 2, 128), scales float32 and sums int16 (..., 2, 4)."""
    groups = y.reshape(*y.shape[:-1], -1, 2, 144)
    ds = np.ascontiguousarray(groups[..., :16]).view(np.int16).reshape(*groups.shape[:-1], 4, 2)
    scales = np.ascontiguousarray(ds[..., 0]).view(np.float16).astype(np.float32)
    return groups[..., 16:].view(np.int8), scales, ds[..., 1]


@pytest.mark.parametrize("rotate", [1, 0])
@pytest.mark.parametrize("offset", [0, 4])
def test_quantize_for_mmvq(device: Device, rotate: int, offset: int) -> None:
    ne00, padded = 5 * BLOCK, 6 * BLOCK
    x = activations((2, 3, 4, ne00 + 8), offset)  # rows of a view: 8 values of a row are not its own
    y = aligned((2, 3, 4, padded // 128 * 144), np.uint8)
    s01 = x.shape[-1]
    device.configure(cc=VOLTA, seed=rotate + offset)
    name = "itq3_s" if rotate else "tq2_0"
    device("quantize_mmvq", TYPES.index(name), x, y, ne00, s01, 4 * s01, 12 * s01, padded, 4, 3, 2)

    source = np.zeros((2, 3, 4, 6, BLOCK), np.float32)
    source[..., :5, :] = x[..., :ne00].reshape(2, 3, 4, 5, BLOCK)
    q, d = quantize_chunks(rotated(source) if rotate else source)
    values, scales, sums = unpack_mmvq(y)
    if rotate:
        natural = values.reshape(*values.shape[:-2], BLOCK)[..., decoded_offset(np.arange(BLOCK))]
        order = np.arange(8).reshape(4, 2).T  # half j holds the chunks j, j + 2, j + 4, j + 6
    else:
        natural = values.reshape(*values.shape[:-2], BLOCK)
        order = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(natural, q)
    np.testing.assert_array_equal(scales, d.astype(np.float16).astype(np.float32)[..., order])
    np.testing.assert_array_equal(sums, q.reshape(*q.shape[:-1], 8, 32).sum(axis=-1, dtype=np.int64)[..., order])


@pytest.mark.parametrize("name", SHORT_BLOCKS)
@pytest.mark.parametrize("nblocks", [1, 4, 5, 10, 15])
@pytest.mark.parametrize("offset", [0, 4])
def test_quantize_short_blocks_for_mmvq(device: Device, name: str, nblocks: int, offset: int) -> None:
    """block_q8_n_h: a scale, the sum of the values, 64 values."""
    ne00, padded = nblocks * SHORT, 4 * BLOCK
    x = activations((2, 3, 4, ne00 + 8), offset)
    y = aligned((2, 3, 4, padded // SHORT, 72), np.uint8)
    s01 = x.shape[-1]
    device.configure(cc=VOLTA, seed=nblocks + offset)
    device("quantize_mmvq", TYPES.index(name), x, y, ne00, s01, 4 * s01, 12 * s01, padded, 4, 3, 2)

    source = np.zeros((2, 3, 4, padded // SHORT, SHORT), np.float32)
    source[..., :nblocks, :] = x[..., :ne00].reshape(2, 3, 4, nblocks, SHORT)
    q, d = quantize_blocks(rotated(source))
    heads = np.ascontiguousarray(y[..., :8])
    np.testing.assert_array_equal(heads.view(np.float32)[..., 0], d)
    np.testing.assert_array_equal(heads.view(np.int32)[..., 1], q.sum(axis=-1, dtype=np.int64))
    np.testing.assert_array_equal(y[..., 8:].view(np.int8)[..., decoded_offset(np.arange(SHORT), SHORT)], q)


def unpack_mmq(y: ByteArray, columns: int, rotate: bool) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """block_q8_1_mmq, a row of 128 values of all columns after the other, to (columns, blocks, 256) and (.., 2, 4)."""
    rows = y.reshape(-1, 2, columns, 144).transpose(2, 0, 1, 3)
    d = np.ascontiguousarray(rows[..., :16]).view(np.float32)
    values = np.ascontiguousarray(rows[..., 16:]).view(np.int8).reshape(columns, -1, BLOCK)
    return values[..., decoded_offset(np.arange(BLOCK))] if rotate else values, d


@pytest.mark.parametrize("rotate", [1, 0])
@pytest.mark.parametrize("with_ids", [False, True])
def test_quantize_for_mmq(device: Device, with_ids: bool, rotate: int) -> None:
    ne00, padded, columns, channels = 3 * BLOCK, 4 * BLOCK, 5, 2
    x = activations((channels, columns, ne00 + 4))
    y = aligned((channels, padded // 128, columns, 144), np.uint8)
    ids = np.array([4, 2, 2, 0, 1], np.int32) if with_ids else None
    s01 = x.shape[-1]
    name = "itq3_s" if rotate else "tq2_0"
    device("quantize_mmq", TYPES.index(name), x, ids, y, ne00, s01, columns * s01, 0, padded, columns, channels, 1)
    for channel in range(channels):
        source = np.zeros((columns, 4, BLOCK), np.float32)
        source[:, :3] = x[channel][ids if with_ids else slice(None), :ne00].reshape(columns, 3, BLOCK)
        q, d = quantize_halves(rotated(source) if rotate else source, bool(rotate))
        values, scales = unpack_mmq(y[channel], columns, bool(rotate))
        np.testing.assert_array_equal(values, q)
        np.testing.assert_array_equal(scales, np.repeat(d[..., None], 4, axis=-1))


def unpack_mmq_short(y: ByteArray, columns: int) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """The same with blocks of 64 in it: (columns, blocks, 64), and the scales of their chunks (columns, blocks, 2)."""
    rows = y.reshape(-1, columns, 144).transpose(1, 0, 2)
    d = np.ascontiguousarray(rows[..., :16]).view(np.float32).reshape(columns, -1, 2)
    values = np.ascontiguousarray(rows[..., 16:]).view(np.int8).reshape(columns, -1, SHORT)
    return values[..., decoded_offset(np.arange(SHORT), SHORT)], d


@pytest.mark.parametrize("nblocks", [1, 6, 9])
@pytest.mark.parametrize("with_ids", [False, True])
def test_quantize_short_blocks_for_mmq(device: Device, with_ids: bool, nblocks: int) -> None:
    ne00, padded, columns, channels = nblocks * SHORT, 4 * BLOCK, 5, 2
    x = activations((channels, columns, ne00 + 4))
    y = aligned((channels, padded // 128, columns, 144), np.uint8)
    ids = np.array([4, 2, 2, 0, 1], np.int32) if with_ids else None
    s01 = x.shape[-1]
    number = TYPES.index("itq3_n")
    device("quantize_mmq", number, x, ids, y, ne00, s01, columns * s01, 0, padded, columns, channels, 1)
    for channel in range(channels):
        source = np.zeros((columns, padded // SHORT, SHORT), np.float32)
        chosen = x[channel][ids if with_ids else slice(None), :ne00]
        source[:, :nblocks] = chosen.reshape(columns, nblocks, SHORT)
        q, d = quantize_blocks(rotated(source))
        values, scales = unpack_mmq_short(y[channel], columns)
        np.testing.assert_array_equal(values, q)
        np.testing.assert_array_equal(scales, np.repeat(d[..., None], 2, axis=-1))


@pytest.mark.parametrize("name", [LONG_BLOCKS[0], SHORT_BLOCKS[-1]])
def test_quantize_and_scatter_for_mmq(device: Device, name: str) -> None:
    """Mixture of experts: a token is quantized once and copied to the rows of its experts."""
    ne00, padded, tokens, used, length = 2 * BLOCK, 2 * BLOCK, 3, 2, LENGTHS[name]
    x = activations((tokens, ne00))
    slots = np.array([[5, 0], [1, 4], [2, 3]], np.int32)
    y = aligned((padded // 128, tokens * used, 144), np.uint8)
    device("quantize_scatter_mmq", TYPES.index(name), x, slots, y, ne00, ne00, padded, tokens, tokens * used, used)
    blocks = rotated(x.reshape(tokens, -1, length))
    q, d = quantize_halves(blocks, True) if length == BLOCK else quantize_blocks(blocks)
    values, scales = unpack_mmq(y, tokens * used, True) if length == BLOCK else unpack_mmq_short(y, tokens * used)
    for token in range(tokens):
        for row in slots[token]:
            np.testing.assert_array_equal(values[row], q[token])
            np.testing.assert_array_equal(scales[row], np.repeat(d[token][..., None], scales.shape[-1], axis=-1))


@pytest.mark.parametrize("name", TYPES)
def test_vec_dot(device: Device, name: str) -> None:
    nblocks, length = 6, LENGTHS[name]
    blocks = random_blocks(name, 4 * nblocks, seed=3)
    stored = aligned(blocks.shape, np.uint8)
    stored[:] = blocks
    x = activations((1, nblocks * length), seed=4)
    padded = -(-x.shape[1] // BLOCK) * BLOCK
    y = aligned((padded // 32 * 36,), np.uint8)
    rotate = name in TRELLIS
    device.configure(cc=VOLTA)
    device("quantize_mmvq", TYPES.index(name), x, y, x.shape[1], 0, 0, 0, padded, 1, 1, 1)

    # The product that the kernel owes: weights times the activation as it was rounded, in float64.
    source = x.reshape(nblocks, length)
    source = rotated(source) if rotate else source
    if name in LONG_BLOCKS:
        q, d = quantize_chunks(source)
        rounded = q.reshape(-1, 8, 32) * d.astype(np.float16).astype(np.float64)[..., None]
    else:
        q, d = quantize_blocks(source)
        rounded = q * d.astype(np.float64)[..., None]
    for row in range(4):
        weights = weights_of(name, blocks[row * nblocks : (row + 1) * nblocks]).astype(np.float64)
        if rotate:
            weights = rotated(weights.astype(np.float32)).astype(np.float64)
        products = weights * rounded.reshape(nblocks, length)
        result = device("vec_dot", TYPES.index(name), stored, y, nblocks, row * nblocks)
        assert result == pytest.approx(products.sum(), abs=1e-6 * np.abs(products).sum())


# ---------------------------------------------------------------------------------------------------------------------
# The emulated device itself


@pytest.mark.parametrize("seed", range(3))
def test_tensor_cores(device: Device, seed: int) -> None:
    """Any A and B, in the layout of the PTX instructions, added to what is there."""
    rng = np.random.default_rng(seed)
    a, b = (aligned((rows, 32), np.int8) for rows in (16, 8))
    c = aligned((16, 8), np.int32)
    a[:], b[:], c[:] = (rng.integers(-128, 128, x.shape) for x in (a, b, c))
    expected = c + a.astype(np.int32) @ b.astype(np.int32).T
    device("tile_product", 0, a, b, c)
    np.testing.assert_array_equal(c, expected)

    a, b = (aligned((rows, 16), np.float16) for rows in (16, 8))
    f = aligned((16, 8), np.float32)
    a[:], b[:], f[:] = (rng.integers(-64, 64, x.shape) for x in (a, b, f))  # exact in any order
    exact = f + a.astype(np.float32) @ b.astype(np.float32).T
    device("tile_product", 1, a, b, f)
    np.testing.assert_array_equal(f, exact)


@pytest.fixture
def faults(device: Device) -> Path:
    return device.path


FAULT = """
import ctypes, sys
data = [(ctypes.c_uint32 * 64)(*(n + 1 for n in range(64))) for _ in range(2)]
ctypes.CDLL(sys.argv[1]).emulate_fault(int(sys.argv[2]), ctypes.c_int64(int(sys.argv[3])), *data)
print(*data[1])
"""


def run_fault(library: Path, fault: int, seed: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FAULT, str(library), str(fault), str(seed)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


REVERSED = list(range(64, 0, -1))


def test_a_correct_kernel_passes(faults: Path) -> None:
    for seed in SEEDS:
        assert list(map(int, run_fault(faults, 0, seed).stdout.split())) == REVERSED


@pytest.mark.parametrize("fault", [1, 2])  # no wait for the copies; no barrier after it
def test_what_is_read_too_early_is_garbage(faults: Path, fault: int) -> None:
    results = [list(map(int, run_fault(faults, fault, seed).stdout.split())) for seed in SEEDS]
    assert all(result != REVERSED for result in results)


@pytest.mark.parametrize(
    "fault,message",
    [
        (3, "access past the shared memory"),
        (4, "written outside of the shared memory"),
        (5, "a copy that is not aligned"),
        (6, "a copy to somewhere else"),
        (7, "different operations"),
        (8, "wait"),
        (9, "wait"),
        (10, "copies on their way"),
        (11, "more shared memory than the kernel is allowed"),
        (12, "above that of the device"),
        (13, "a grid of a size"),
        (14, "a block of a size"),
    ],
)
def test_faults_end_the_test(faults: Path, fault: int, message: str) -> None:
    for seed in SEEDS[:3]:
        done = run_fault(faults, fault, seed)
        assert done.returncode != 0
        assert message.replace("a copy", "an asynchronous copy") in done.stderr
