"""The inputs that fuzzing starts from and those that it found, on the built llama.cpp; numpy's codec on the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

import ggml_library as ggml
import llama
from gguf_itq3s import upstream
from gguf_itq3s.codec.blocks import decode_blocks, encode_blocks
from gguf_itq3s.codec.family import FAMILY
from scripts.check import fuzz

FUZZ = llama.ROOT / "tests" / "fuzz"
SOURCES = llama.ROOT / "ggml-patch" / "src"
NATIVE = sorted({part.inputs for part in fuzz.PARTS if part.native})
#: The input that libFuzzer begins with, and one without any choice in it.
ALWAYS = {"empty": b"", "zeros": bytes(4096), "ones": b"\xff" * 4096}


def inputs(part: str) -> list[Path]:
    """The inputs kept for a fuzzer."""
    folders = [FUZZ / "corpus" / part, FUZZ / "found" / part]
    return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir())


def compile_replay(part: str, folder: Path) -> Path:
    """The fuzzer of a part as a plain program that runs the files it is given."""
    source = upstream.fetch_source()
    tree = folder / "include"
    shutil.copytree(SOURCES / "cpu", tree / "itq3s", dirs_exist_ok=True)  # as in the patched tree: ggml-cpu/itq3s
    for name in ("itq-ldlq.h", "grid-ldlq.h"):
        shutil.copyfile(SOURCES / "format" / name, tree / name)
    program = folder / f"replay-{part}"
    libraries = ["-lllama", "-lggml"] if part == "header" else []
    command: list[str | Path] = [
        os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-g", "-w",
        FUZZ / f"{part}.cpp", FUZZ / "replay.cpp", f"-I{ggml.headers()}", f"-I{tree}",
        *(f"-I{source / 'ggml' / path}" for path in ("src", "src/ggml-cpu")), "-o", program,
        "-L", llama.BIN, *libraries, "-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{llama.BIN}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("part", NATIVE)
def test_the_kept_inputs(part: str, tmp_path: Path) -> None:
    program = compile_replay(part, tmp_path)
    files = inputs(part)
    assert files, f"tests/fuzz/corpus/{part} is empty"
    for name, data in ALWAYS.items():
        files.append(tmp_path / name)
        files[-1].write_bytes(data)
    done = subprocess.run([program, *files], capture_output=True, text=True, errors="replace", timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    counted = [line.split() for line in done.stderr.splitlines() if line.startswith("counted ")]
    assert int(counted[0][2]) >= len(files)


def content(part: str) -> np.ndarray:
    """All bytes of the kept inputs, as many as 64 blocks of random ones, and those of the odd floats."""
    odd = np.array([0, -0.0, 1e-45, 1e-38, 65504, 65536, 2.0**52, 2.0**55, 3e38, np.inf, -np.inf, np.nan], "<f4")
    data = b"".join(path.read_bytes() for path in inputs(part))
    random = np.random.default_rng(5).integers(0, 256, 64 * 1024, dtype=np.uint8)
    return np.concatenate([np.frombuffer(data, np.uint8), np.repeat(odd, 256).view(np.uint8), random])


@pytest.mark.parametrize("kind", [*FAMILY, gguf.GGMLQuantizationType.TQ1_0, gguf.GGMLQuantizationType.TQ2_0])
def test_decoding_any_bytes_as_numpy_does(kind: gguf.GGMLQuantizationType) -> None:
    length, size = gguf.GGML_QUANT_SIZES[kind]
    data = content("decode")
    blocks = data[: data.size // size * size].reshape(-1, size)
    with np.errstate(all="ignore"):  # scales of any bits
        if kind in FAMILY:
            expected = decode_blocks(blocks, FAMILY[kind].format)
        else:
            expected = gguf.quants.dequantize(blocks, kind)
    np.testing.assert_array_equal(ggml.dequantize(kind, blocks, length), expected)


@pytest.mark.parametrize("kind", FAMILY)
def test_encoding_any_floats_as_numpy_does(kind: gguf.GGMLQuantizationType) -> None:
    """The same bytes, and the blocks that numpy refuses are those that C marks as no number."""
    fmt = FAMILY[kind].format
    data = content("encode")
    rows = data[: data.size // 1024 * 1024].view("<f4").reshape(-1, fmt.block)
    ordinary = np.random.default_rng(6).standard_normal((64, fmt.block)) * 2.0 ** np.arange(-40, 88, 2)[:, None]
    rows = np.concatenate([rows, np.nan_to_num(rows, nan=0, posinf=0, neginf=0) % 1, ordinary.astype(np.float32)])
    got = ggml.quantize_chunk(kind, rows)
    scale = fmt.block // 8 * (fmt.symbol_bits + 1)
    refused = np.isnan(got[:, scale : scale + 2].copy().view("<f2"))[:, 0]
    assert 0 < refused.sum() < len(rows)
    np.testing.assert_array_equal(got[~refused], encode_blocks(rows[~refused], fmt=fmt))
    for row in rows[refused]:
        with pytest.raises(ValueError, match="NaN, infinite or too large"), np.errstate(all="ignore"):
            encode_blocks(row[None], fmt=fmt)
