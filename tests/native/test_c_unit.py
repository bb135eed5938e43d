"""The C side: decoder, kernels, type tables, the GGUF reader, and the sources under the sanitizers."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggml_library as ggml
import llama
import sanitizers
from checkpoints import DATA
from distributions import all_rows, smooth
from gguf_itq3s import upstream
from gguf_itq3s.codec.blocks import decode_blocks, quantize, unpack
from gguf_itq3s.codec.family import FAMILY, TrellisType
from gguf_itq3s.codec.transform import hadamard_matrix

of_types = pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)
SOURCES = llama.ROOT / "ggml-patch" / "src"
PROGRAM = llama.ROOT / "tests" / "c" / "test-itq.c"

# Activations by the length of a block: type, name and layout; block_q8_K of ggml-common.h, block_q8_n_h of ggml-itq.h.
ACTIVATIONS = {
    256: (ggml.Q8_K_H, b"q8_K_h", np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])),
    64: (ggml.Q8_N_H, b"q8_n_h", np.dtype([("d", "<f4"), ("sum", "<i4"), ("qs", "i1", 64)])),
}


@of_types
def test_shared_vectors_decode(row: TrellisType) -> None:
    vectors = np.load(DATA / f"{row.identifier}_decode.npz")
    weights = ggml.dequantize(row.type, vectors["blocks"], row.format.block)
    assert len(weights) == len(vectors["blocks"])
    largest = np.abs(vectors["weights"]).max(axis=1, keepdims=True)
    assert (np.abs(weights - vectors["weights"]) <= 1e-6 * largest).all()
    np.testing.assert_array_equal(weights, decode_blocks(vectors["blocks"], row.format))


@of_types
def test_type_tables(row: TrellisType) -> None:
    number, name, layout = ACTIVATIONS[row.format.block]
    ours, activation = ggml.traits(row.type), ggml.traits(number)
    assert (ours.type_name, ours.blck_size, ours.type_size) == (
        row.identifier.encode(), row.format.block, row.format.block_bytes,
    )  # fmt: skip
    assert (activation.type_name, activation.blck_size, activation.type_size) == (
        name, row.format.block, layout.itemsize,
    )  # fmt: skip
    assert ours.is_quantized and ours.to_float and ours.from_float_ref
    cpu = ggml.cpu_traits(row.type)
    assert cpu.from_float and cpu.vec_dot and cpu.vec_dot_type == number
    assert ggml.cpu_traits(number).from_float


def test_numbers_that_belong_to_nobody() -> None:
    """Those between upstream's types and ours."""
    for kind in range(43, min(FAMILY)):
        assert ggml.traits(kind).type_name is None and ggml.traits(kind).blck_size == 0


@of_types
def test_every_way_to_quantize_gives_the_same_bytes(row: TrellisType) -> None:
    rows = all_rows()["gaussian"]
    expected = quantize(rows, row.format)
    np.testing.assert_array_equal(ggml.quantize_chunk(row.type, rows), expected)
    np.testing.assert_array_equal(ggml.from_float(row.type, rows), expected)


@of_types
def test_validate_row_data(row: TrellisType, capfd: pytest.CaptureFixture[str]) -> None:
    size = row.format.block_bytes
    good = quantize(all_rows()["gaussian"], row.format).reshape(-1, size)
    validate = ggml.base().ggml_validate_row_data
    assert validate(row.type, good.ctypes.data, good.size)
    assert not validate(row.type, good.ctypes.data, good.size - 1)
    for offset in range(row.format.scale_offset, size, 2):  # d, and z where there is one
        for value in (np.nan, np.inf, -np.inf):
            bad = good.copy()
            bad[5, offset : offset + 2] = np.array([value], "<f2").view(np.uint8)
            assert not validate(row.type, bad.ctypes.data, bad.size)
    assert "at block 5" in capfd.readouterr().err
    # what cannot be encoded
    rows = np.ones((2, row.format.block), dtype=np.float32)
    rows[1, 7] = np.nan
    bad = ggml.quantize_chunk(row.type, rows)
    assert validate(row.type, bad.ctypes.data, size) and not validate(row.type, bad.ctypes.data, 2 * size)


def activations(name: str, rows: int, n: int, seed: int = 11) -> np.ndarray:
    """float32 (rows, n); "outliers" as in the residual stream of a language model: a few large columns."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n))
    if name == "outliers":
        x[:, rng.choice(n, 8, replace=False)] *= 30
    elif name == "zero-blocks":
        x[:, 256:768] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("length", ACTIVATIONS)
@pytest.mark.parametrize("name", ["gaussian", "outliers", "zero-blocks"])
def test_rotated_activations(name: str, length: int) -> None:
    """The 8-bit code of the rotated row, that of Q8_K_H upstream's: at most half a step of error, exact sums."""
    number, _, layout = ACTIVATIONS[length]
    x = activations(name, 8, 2048)
    blocks = ggml.from_float(number, x).reshape(-1).view(layout).reshape(8, -1)
    rotated = (hadamard_matrix(length) @ x.reshape(-1, length).T).T.reshape(8, -1, length)
    step = np.abs(blocks["d"])
    np.testing.assert_allclose(step, np.abs(rotated).max(-1) / 127, rtol=1e-5)
    error = np.abs(blocks["d"][..., None] * blocks["qs"] - rotated)
    assert (error <= 0.501 * step[..., None]).all()
    sums = blocks["qs"].astype(int).reshape(8, -1, length // 16, 16).sum(-1)
    if length == 64:
        np.testing.assert_array_equal(blocks["sum"], sums.sum(-1))
    else:
        np.testing.assert_array_equal(blocks["bsums"], sums)


@pytest.mark.parametrize(
    "row,kind", [(row, codec) for row in FAMILY.values() for codec in row.format.codecs],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
@pytest.mark.parametrize("name", ["gaussian", "outliers", "zero-blocks"])
def test_vec_dot_is_the_product_of_what_is_stored(row: TrellisType, kind: str, name: str) -> None:
    """Against float64 over the stored levels and the stored 8-bit activations only float32 rounding remains."""
    n = 4096
    weights = quantize(smooth(64 * n)["laplace"], row.format, codec=kind)
    number, _, layout = ACTIVATIONS[row.format.block]
    rows = ggml.from_float(number, activations(name, 8, n))
    blocks = rows.reshape(-1).view(layout).reshape(8, -1)
    stored = (blocks["d"][..., None].astype(np.float64) * blocks["qs"]).reshape(8, n)
    path, z = unpack(weights.reshape(-1, row.format.block_bytes), row.format)
    values = (row.format.levels[path.indices] - z.astype(np.float64)) * (path.d.astype(np.float64) / 32)
    rotated = values.T.reshape(64, n)
    exact = rotated @ stored.T
    scale = np.linalg.norm(rotated, axis=1)[:, None] * np.linalg.norm(stored, axis=1)
    assert np.abs(ggml.vec_dot(row.type, weights, rows, n) - exact).max() <= 1e-6 * scale.max()


def dot_error(kind: int, weights: np.ndarray, x: np.ndarray) -> float:
    """Error of vec_dot against float64 over the decoded weights and the exact activations, relative to |w| |x|."""
    n = x.shape[1]
    decoded = ggml.dequantize(kind, weights, n).astype(np.float64)
    got = ggml.vec_dot(kind, weights, ggml.from_float(ggml.cpu_traits(kind).vec_dot_type, x), n)
    scale = np.linalg.norm(decoded, axis=1)[:, None] * np.linalg.norm(x.astype(np.float64), axis=1)
    return float(np.sqrt(np.mean(((got - decoded @ x.astype(np.float64).T) / scale) ** 2)))


@of_types
@pytest.mark.parametrize("name", ["gaussian", "outliers"])
def test_vec_dot_error_is_that_of_8_bit_activations(name: str, row: TrellisType) -> None:
    """As exact as upstream's Q3_K, whose activations have 8 bits too; more so where the rotation spreads outliers."""
    n = 4096
    w = smooth(96 * n)["gaussian"]
    x = activations(name, 16, n)
    ours = dot_error(row.type, ggml.quantize_chunk(row.type, w), x)
    q3_k = dot_error(ggml.Q3_K, ggml.quantize_chunk(ggml.Q3_K, w), x)
    print(f"{name}: {row.name} {ours:.2e}, Q3_K {q3_k:.2e}")
    assert ours <= 1.15 * q3_k


def test_quantize_fns() -> None:
    """Upstream's own test, with the new types in it."""
    done = llama.run("test-quantize-fns", "-v")
    for row in FAMILY.values():
        lines = [line for line in done.stdout.splitlines() if line.lstrip().startswith(row.identifier)]
        assert len(lines) == 3 and all("ok" in line for line in lines), done.stdout
    assert re.search(r"^0 tests failed", done.stdout, re.MULTILINE)


def write_gguf(path: Path, tensors: list[tuple[str, int, int, int]], data: int) -> Path:
    """A GGUF file by hand: (name, type, row length, offset) of 1-D tensors and ``data`` bytes of zeros."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0)
    for name, kind, length, offset in tensors:
        out += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQIQ", 1, length, kind, offset)
    out += bytes(-len(out) % 32)
    path.write_bytes(out + bytes(data))
    return path


def test_the_reader_takes_whole_rows(tmp_path: Path) -> None:
    # 512 weights are 200 bytes, padded to 224
    path = write_gguf(tmp_path / "x.gguf", [("a", 510, 512, 0), ("b", 510, 256, 224)], 352)
    assert ggml.gguf_opens(path, data=True)


@pytest.mark.parametrize(
    "tensors,data,message",
    [
        (
            [("a", 510, 300, 0)],
            128,
            "'a' of type 510 (itq3_s) has 300 elements per row, not a multiple of block size (256)",
        ),
        ([("a", 510, 512, 0), ("b", 510, 256, 128)], 352, "'b' has offset 128, expected 224"),
        ([("a", 510, 512, 0)], 100, "failed to read"),
        ([("a", 43, 256, 0)], 128, "'a' has invalid ggml type 43"),
        ([("a", 500, 256, 0)], 128, "'a' has invalid ggml type 500"),
        ([("a", 518, 256, 0)], 128, "'a' has invalid ggml type 518"),
        ([("a", 9, 256, 0)], 512, "'a' has type q8_1, which is never in a file"),
        ([("a", 15, 256, 0)], 512, "'a' has type q8_K, which is never in a file"),
        ([("a", 511, 256, 0)], 512, "'a' has type q8_K_h, which is never in a file"),
        ([("a", 515, 256, 0)], 512, "'a' has type q8_n_h, which is never in a file"),
    ],
    ids=["row", "size", "truncated", "gap-start", "gap-end", "beyond", "q8_1", "q8_K", "q8_K_h", "q8_n_h"],
)
def test_the_reader_refuses(
    tensors: list[tuple[str, int, int, int]], data: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "x.gguf", tensors, data)
    assert not ggml.gguf_opens(path, data=True)
    assert message in capfd.readouterr().err


@pytest.fixture(scope="module")
def under_the_sanitizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Path]]:
    """How C files are compiled under the sanitizers, with all warnings as errors, and what that makes of ours."""
    folder = tmp_path_factory.mktemp("objects")
    compiler = os.environ.get("CC", "cc")
    sanitizers.require(compiler, folder)
    source = upstream.fetch_source()
    includes = [ggml.headers(), SOURCES / "format", SOURCES / "cpu"]
    system = [source / "ggml" / "src", source / "ggml" / "src" / "ggml-cpu"]
    command = [
        compiler, "-std=c11", "-O0", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-ffp-contract=off",
        *sanitizers.FLAGS, "-DGGML_CPU_GENERIC", *(f"-I{path}" for path in includes),
        *(part for path in system for part in ("-isystem", str(path))),
    ]  # fmt: skip
    files = [*sorted((SOURCES / "format").glob("*.c")), SOURCES / "cpu" / "itq-quants.c"]
    subprocess.run([*command, "-c", *files], check=True, stderr=sys.stderr, cwd=folder)
    return command, [folder / f"{path.stem}.o" for path in files]


@pytest.mark.long
@of_types
def test_sources_under_the_sanitizers(
    row: TrellisType, under_the_sanitizers: tuple[list[str], list[Path]], tmp_path: Path
) -> None:
    """Our C files run under the address and undefined-behaviour sanitizers."""
    gaussian = np.random.default_rng(1).standard_normal((64, 4096)).astype(np.float32)
    error = np.square(gaussian - ggml.dequantize(row.type, quantize(gaussian, row.format), gaussian.shape[-1])).mean()
    vectors = np.load(DATA / f"{row.identifier}_decode.npz")
    blob = tmp_path / "vectors.bin"
    blob.write_bytes(
        b"".join(b.tobytes() + w.tobytes() for b, w in zip(vectors["blocks"], vectors["weights"], strict=True))
    )

    flags, objects = under_the_sanitizers
    library: list[str | Path] = ["-L", llama.BIN, "-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{llama.BIN}", "-lm"]
    command: list[str | Path] = [
        *flags, f"-DTYPE={row.identifier}", f"-DLENGTH={row.format.block}", f"-DCODECS={len(row.format.codecs)}",
        f"-DERROR={error}", PROGRAM, *objects, *library, "-o", tmp_path / "test-itq",
    ]  # fmt: skip
    subprocess.run(command, check=True, stderr=sys.stderr)
    done = subprocess.run([tmp_path / "test-itq", blob], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all passed" in done.stdout
