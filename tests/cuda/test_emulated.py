"""The CUDA kernels on the CPU: compiled as C++, every thread a fiber (tests/cuda/emulate), compared with numpy.

Another test file runs a launcher of its own with ``build("tensor-core", folder, [its .cpp, SOURCES / "the launcher's
.cu"])`` and calls ``device("name", ...)`` for ``extern "C" void emulate_name(...)`` of that .cpp.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from gguf_itq3s.codec.blocks import decode_blocks, unpack
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.codec.trellis import LEVELS

ROOT = Path(__file__).resolve().parents[2]
EMULATE = ROOT / "tests" / "cuda" / "emulate"
SOURCES = ROOT / "ggml-patch" / "src" / "cuda"
VECTORS = ROOT / "tests" / "data" / "itq3_s_decode.npz"

BLOCK = 256
TYPES = {"itq3_s": 0, "tq1_0": 1, "tq2_0": 2}
LAYOUTS = {
    "tensor-core": ["-DTURING_MMA_AVAILABLE", "-DAMPERE_MMA_AVAILABLE"],
    "dp4a": [],
    "dp4a-pascal": ["-DEMULATE_MMQ_ROWS=64"],
}
SEEDS = (0, 1, 2, 3)  # orders of threads: of their numbers, any, by priorities, any

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]


class Device:
    """The emulated device: a shared library of the kernels for one tile layout."""

    def __init__(self, library: Path, tile_rows: int = 128) -> None:
        self.tile_rows = tile_rows  # of MMQ
        self.library = ctypes.CDLL(str(library))
        if hasattr(self.library, "emulate_vec_dot"):
            self.library.emulate_vec_dot.restype = ctypes.c_float

    def __call__(self, name: str, *args: npt.NDArray[Any] | int | np.integer[Any] | None) -> float:
        converted = [
            a.ctypes.data_as(ctypes.c_void_p)
            if isinstance(a, np.ndarray)
            else ctypes.c_int64(operator.index(a))
            if a is not None
            else None
            for a in args
        ]
        return float(getattr(self.library, "emulate_" + name)(*converted) or 0.0)

    def configure(
        self, *, cc: int = 900, nsm: int = 2, smpbo: int = 227 * 1024, seed: int = 0, max_grid: int = 65535
    ) -> None:
        """The device that the launchers see, and the order of the threads."""
        self("configure", cc, nsm, smpbo, seed, max_grid)


def as_cpp(source: str) -> str:
    """CUDA source whose launches, dynamic shared memory and largest grid are launch.h's."""
    source = re.sub(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\]", r"\1 * \2 = emulate::dynamic_shared<\1>()", source)
    source = re.sub(
        r"(\w+(?:<[^<>;]*>)?)\s*<<<([^;]*?)>>>\(",
        r"ggml_cuda_kernel_launch(\1, ggml_cuda_kernel_launch_params(\2), ",
        source,
    )
    return source.replace("(int64_t) 65535", "emulate::device.max_grid")


def build(
    layout: str,
    folder: Path,
    sources: Sequence[Path] = (),
    base: Sequence[Path] = (EMULATE / "device.cpp", SOURCES / "itq3s-quantize.cu"),
) -> Device:
    """The device with the kernels of these sources."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "a C++ compiler is needed"
    library = folder / f"emulated-{layout}.so"
    converted = folder / "sources"
    converted.mkdir(exist_ok=True)
    for path in (*SOURCES.glob("*.cu*"), *base, *sources):
        (converted / path.name).write_text(as_cpp(path.read_text()))
    command = [compiler, *LAYOUTS[layout], "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing"]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-D__shared__=static"]
    command += ["-fsanitize=undefined", "-fno-sanitize-recover=all"]  # misaligned vector accesses end the test
    command += [f"-I{converted}", f"-I{EMULATE}", f"-I{ROOT / 'ggml-patch' / 'src' / 'format'}", "-o", str(library)]
    for path in (*base, *sources):
        command += ["-x", "c++", str(converted / path.name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return Device(library, 64 if layout == "dp4a-pascal" else 128)


@pytest.fixture(scope="session")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Device]:
    """A device for each layout of the tiles, which nothing but the products of tiles depends on."""
    return functools.cache(lambda layout: build(layout, tmp_path_factory.mktemp("cuda"), [EMULATE / "kernels.cpp"]))


@pytest.fixture
def device(devices: Callable[[str], Device], request: pytest.FixtureRequest) -> Device:
    """The device as it is by default, with an order of threads of the test's own."""
    device = devices("tensor-core")
    device.configure(seed=zlib.crc32(request.node.name.encode()))
    return device


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> npt.NDArray:
    """Zeros at an address that is ``offset`` bytes past a multiple of 256, as device memory is allocated."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 512, dtype=np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + size].view(dtype).reshape(shape)


def random_blocks(name: str, count: int, seed: int = 1) -> ByteArray:
    """Blocks of every kind of content, ITQ3_S with zero-points 0, 2 and others."""
    rng = np.random.default_rng(seed)
    if name == "itq3_s":
        blocks = rng.integers(0, 256, (count, 100), dtype=np.uint8)
        d = rng.uniform(-0.2, 0.2, count).astype("<f2")
        z = rng.choice(np.array([0, 0, 0, 2, -1, 0.375, -70.25], "<f2"), count)
        blocks[:, 96:98] = d.view(np.uint8).reshape(-1, 2)
        blocks[:, 98:100] = z.view(np.uint8).reshape(-1, 2)
        return blocks
    weights = rng.integers(-1, 2, (count, BLOCK)).astype(np.float32) * rng.uniform(0.5, 2, (count, 1)).astype(
        np.float32
    )
    return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name.upper()]).reshape(count, -1)


def weights_of(name: str, blocks: ByteArray) -> FloatArray:
    """float32 (count, 256) by the numpy codecs."""
    if name == "itq3_s":
        return decode_blocks(blocks).reshape(-1, BLOCK)
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()]).reshape(-1, BLOCK)


def rotated(x: FloatArray) -> FloatArray:
    return fwht(x)


def decoded_offset(t: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where weight t of a block is in decoded order, stated in words of the layout (itq3s-decode.cuh)."""
    chunk, within = t // 32, t % 32
    half, group = chunk % 2, chunk // 2
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


def by_weight(d: FloatArray, rotate: bool) -> FloatArray:
    """The scales of the halves, (..., 2), for each of the 256 values."""
    return np.take(d, np.arange(BLOCK) // 32 % 2 if rotate else np.arange(BLOCK) // 128, axis=-1)


def test_levels_of_the_shared_vectors(device: Device) -> None:
    blocks = np.load(VECTORS)["blocks"]
    indices, _, _, _ = unpack(blocks)
    expected = LEVELS[indices].astype(np.int8).T
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
        indices = unpack(block.reshape(1, 100))[0][:, 0]
        np.testing.assert_array_equal(halves, LEVELS[indices])
        np.testing.assert_array_equal(eights, LEVELS[indices])
        seen.update(indices.tolist())
    assert seen == set(range(16))


def test_dequantize_of_the_shared_vectors(device: Device) -> None:
    vectors = np.load(VECTORS)
    blocks = aligned(vectors["blocks"].shape, np.uint8)
    blocks[:] = vectors["blocks"]
    out = aligned((64, BLOCK), np.float32)
    device("dequantize", 0, 0, blocks, out, np.array([64 * BLOCK, 1, 1, 1]), np.array([0, 0, 0]))
    np.testing.assert_allclose(out, vectors["weights"], rtol=1e-6)
    np.testing.assert_array_equal(out, decode_blocks(vectors["blocks"]).reshape(64, BLOCK))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("max_grid,offset", [(65535, 0), (2, 4)])  # the grid covers the rows or loops; aligned or not
def test_dequantize_any_strides(device: Device, name: str, dtype: str, max_grid: int, offset: int) -> None:
    ne = np.array([11 * BLOCK, 3, 2, 2])  # 11 blocks: the last CUDA block of a row is not full
    blocks = random_blocks(name, 400)
    stored = aligned(blocks.shape, np.uint8, 100 if name == "itq3_s" else 2)
    stored[:] = blocks
    strides = np.array([13, 90, 195])  # in blocks: gaps between rows, channels and samples
    codes = {"float32": (np.float32, 0), "float16": (np.uint16, 1), "bfloat16": (np.uint16, 2)}
    out = aligned((2, 2, 3, 11 * BLOCK), codes[dtype][0], offset)
    device.configure(max_grid=max_grid, seed=1)
    device("dequantize", TYPES[name], codes[dtype][1], stored, out, ne, strides)

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
    device("quantize_mmvq", rotate, x, y, ne00, s01, 4 * s01, 12 * s01, padded, 4, 3, 2)

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
    device("quantize_mmq", rotate, x, ids, y, ne00, s01, columns * s01, 0, padded, columns, channels, 1)
    for channel in range(channels):
        source = np.zeros((columns, 4, BLOCK), np.float32)
        source[:, :3] = x[channel][ids if with_ids else slice(None), :ne00].reshape(columns, 3, BLOCK)
        q, d = quantize_halves(rotated(source) if rotate else source, bool(rotate))
        values, scales = unpack_mmq(y[channel], columns, bool(rotate))
        np.testing.assert_array_equal(values, q)
        np.testing.assert_array_equal(scales, np.repeat(d[..., None], 4, axis=-1))


def test_quantize_and_scatter_for_mmq(device: Device) -> None:
    """Mixture of experts: a token is quantized once and copied to the rows of its experts."""
    ne00, padded, tokens, used = 2 * BLOCK, 2 * BLOCK, 3, 2
    x = activations((tokens, ne00))
    slots = np.array([[5, 0], [1, 4], [2, 3]], np.int32)
    y = aligned((padded // 128, tokens * used, 144), np.uint8)
    device("quantize_scatter_mmq", x, slots, y, ne00, ne00, padded, tokens, tokens * used, used)
    q, d = quantize_halves(rotated(x.reshape(tokens, 2, BLOCK)), True)
    values, scales = unpack_mmq(y, tokens * used, True)
    for token in range(tokens):
        for row in slots[token]:
            np.testing.assert_array_equal(values[row], q[token])
            np.testing.assert_array_equal(scales[row], np.repeat(d[token][..., None], 4, axis=-1))


@pytest.mark.parametrize("name", TYPES)
def test_vec_dot(device: Device, name: str) -> None:
    nblocks = 6
    blocks = random_blocks(name, 4 * nblocks, seed=3)
    stored = aligned(blocks.shape, np.uint8)
    stored[:] = blocks
    x = activations((1, nblocks * BLOCK), seed=4)
    y = aligned((nblocks * 288,), np.uint8)
    rotate = int(name == "itq3_s")
    device("quantize_mmvq", rotate, x, y, nblocks * BLOCK, 0, 0, 0, nblocks * BLOCK, 1, 1, 1)

    # The product that the kernel owes: weights times the activation as it was rounded, in float64.
    source = x.reshape(nblocks, BLOCK)
    q, d = quantize_chunks(rotated(source) if rotate else source)
    rounded = q.reshape(-1, 8, 32) * d.astype(np.float16).astype(np.float64)[..., None]
    for row in range(4):
        weights = weights_of(name, blocks[row * nblocks : (row + 1) * nblocks]).astype(np.float64)
        if rotate:
            weights = rotated(weights.astype(np.float32)).astype(np.float64)
        products = weights * rounded.reshape(nblocks, BLOCK)
        result = device("vec_dot", TYPES[name], stored, y, nblocks, row * nblocks)
        assert result == pytest.approx(products.sum(), abs=1e-6 * np.abs(products).sum())


#: Widths of upstream's tiles, and whether rows may be missing: those that all devices have, those of Volta and newer.
TILES = [(j, fallback) for fallback, js in ((1, (8, 16, 32, 64)), (0, (8, 16, 24, 32, 40, 48, 64))) for j in js]
WIDE_TILES = [(128, 1), *((j, 0) for j in (80, 96, 112, 128))]
LAYOUT_TILES = [
    (layout, *tile) for layout in LAYOUTS for tile in TILES + (WIDE_TILES if layout != "dp4a-pascal" else [])
]


def check_mmq_tile(device: Device, name: str, columns: int, fallback: int, rows: int, zero_point: float | None) -> None:
    """A tile of upstream's, ``rows`` rows of it there, against the product in float64."""
    nblocks, stride, first = 2, 3, 1
    blocks = random_blocks(name, rows * stride + first, seed=5)
    if zero_point is not None:
        blocks[:, 98:100] = np.array([zero_point], "<f2").view(np.uint8)
    stored = aligned(blocks.shape, np.uint8)
    stored[:] = blocks
    x = activations((columns, nblocks * BLOCK), seed=6)
    y = aligned((nblocks * 2, columns, 144), np.uint8)
    source = x.reshape(columns, nblocks, BLOCK)
    rotate = name == "itq3_s"
    device("quantize_mmq", int(rotate), x, None, y, nblocks * BLOCK, x.shape[1], 0, 0, nblocks * BLOCK, columns, 1, 1)
    q, d = quantize_halves(rotated(source) if rotate else source, rotate)
    out = aligned((columns, device.tile_rows), np.float32)
    device("mmq", TYPES[name], columns, fallback, stored, y, out, first, rows - 1, stride, nblocks)

    index = first + stride * np.arange(rows)[:, None] + np.arange(nblocks)
    weights = weights_of(name, blocks)[index].astype(np.float64)
    if name == "itq3_s":
        weights = rotated(weights.astype(np.float32)).astype(np.float64)
    rounded = q * by_weight(d, rotate).astype(np.float64)
    expected = np.einsum("cbt,rbt->cr", rounded, weights)
    size = np.einsum("cbt,rbt->cr", np.abs(rounded), np.abs(weights))
    assert np.abs(out[:, :rows] - expected).max() <= 2e-6 * size.max()


@pytest.mark.parametrize("layout,columns,fallback", LAYOUT_TILES)
@pytest.mark.parametrize("name", TYPES)
def test_mmq_tile(devices: Callable[[str], Device], layout: str, name: str, columns: int, fallback: int) -> None:
    device = devices(layout)
    device.configure(seed=columns + fallback)
    check_mmq_tile(device, name, columns, fallback, 37 if fallback else device.tile_rows, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns,fallback", [(16, 1), (64, 0)])  # 16 and 32 rows a warp
@pytest.mark.parametrize("zero_point", [0, 2, 0.375])
def test_mmq_tile_of_zero_points(
    devices: Callable[[str], Device], layout: str, columns: int, fallback: int, zero_point: float
) -> None:
    device = devices(layout)
    for seed in SEEDS:
        device.configure(seed=seed)
        check_mmq_tile(device, "itq3_s", columns, fallback, device.tile_rows, zero_point)


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


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    build("tensor-core", folder, base=[EMULATE / "faults.cpp"])
    return folder / "emulated-tensor-core.so"


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
