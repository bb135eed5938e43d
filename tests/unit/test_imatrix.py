"""Importance matrices: reading them, and rounding by them in both converters."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.rounding import hessian, imatrix
from importance import write


def test_mean_squares_are_read(tmp_path: Path) -> None:
    values = {"a.weight": np.arange(1.0, 257)[None], "e.weight": np.random.default_rng(0).random((3, 512))}
    read = imatrix.read(write(tmp_path / "i.gguf", values))
    plain, expert = read.diagonal("a.weight", 256), read.diagonal("e.weight", 512, 2)
    assert plain is not None and expert is not None
    np.testing.assert_allclose(plain, values["a.weight"][0], rtol=1e-6)
    np.testing.assert_allclose(expert, values["e.weight"][2], rtol=1e-6)
    assert read.diagonal("b.weight", 256) is None
    with pytest.raises(UserError, match="512 values for a matrix of 256"):
        read.diagonal("e.weight", 256, 0)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there"):
        imatrix.read(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("no")
    with pytest.raises(UserError, match="not a GGUF file"):
        imatrix.read(tmp_path / "text.gguf")
    with pytest.raises(UserError, match="negative"):
        imatrix.read(write(tmp_path / "negative.gguf", {"a.weight": -np.ones((1, 256))}))
    with pytest.raises(UserError, match="holds no importance matrix"):
        imatrix.read(write(tmp_path / "empty.gguf", {}))


@pytest.mark.slow
def test_gains_are_taken_out_where_norms_are_folded(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    model = uneven("llama")
    convert(ConvertOptions.of(model, tmp_path / "f16.gguf", outtype="f16"))
    convert(ConvertOptions.of(model, tmp_path / "folded.gguf", outtype="f16", fold_norms=True))
    plain = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "f16.gguf").tensors}
    folded = {t.name: np.array(t.data).astype(np.float32) for t in gguf.GGUFReader(tmp_path / "folded.gguf").tensors}
    gain = plain["blk.0.attn_norm.weight"].astype(np.float64)
    normalised = np.exp(np.random.default_rng(1).standard_normal(256))
    matrix = write(tmp_path / "i.gguf", {"blk.0.attn_q.weight": (normalised * gain**2)[None]})
    for statistics in (None, matrix):
        convert(
            ConvertOptions.of(
                model, tmp_path / "out.gguf", pure=True, effort="fast", imatrix=statistics, fold_norms=True
            )
        )
        data = next(t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors if t.name == "blk.0.attn_q.weight").data
        error = fwht(blocks.dequantize(np.array(data)) - folded["blk.0.attn_q.weight"])
        cost = hessian.cost(error, hessian.from_diagonal(normalised))
        if statistics is None:
            before = cost
    assert cost < 0.9 * before


@pytest.mark.parametrize(
    "rows",
    [np.zeros((1, 256)), np.ones((1, 256)), np.full((1, 256), 1e30), np.stack([np.zeros(256), np.full(256, 2.0)])],
    ids=["zero", "one", "huge", "experts"],
)
def test_importance_that_says_nothing_is_refused(rows: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"i\.gguf: a\.weight: has the same value for every column, or none"):
        imatrix.read(write(tmp_path / "i.gguf", {"a.weight": rows}))


def test_matrices_that_are_multiplied_together_are_one_row_of_the_file(tmp_path: Path) -> None:
    """Those of the heads of multi-head latent attention: one count, and their sums one after the other."""
    heads, other = np.random.default_rng(0).random((4, 64)), np.arange(1.0, 257)[None]
    path = write(tmp_path / "i.gguf", {"blk.0.attn_k_b.weight": heads.reshape(1, -1), "a.weight": other})
    shapes = {"blk.0.attn_k_b.weight": (4, 128, 64), "a.weight": (512, 128)}
    read = imatrix.read(path, shapes)
    for number in range(4):
        found = read.diagonal("blk.0.attn_k_b.weight", 64, number)
        assert found is not None
        np.testing.assert_allclose(found, heads[number], rtol=1e-6)
    for name, columns in (("blk.0.attn_k_b.weight", 64), ("a.weight", 128)):
        with pytest.raises(UserError, match=f"has 1 x 256 values for a matrix of {columns} columns"):
            imatrix.read(path, {**shapes, "blk.0.attn_k_b.weight": (8, 128, 64)}).diagonal(name, columns, 0)


@pytest.mark.parametrize("count", [4, 8])
def test_a_file_of_another_number_of_experts_is_refused(count: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((6, 64))
    read = imatrix.read(write(tmp_path / "i.gguf", {"e.weight": rows}), {"e.weight": (count, 128, 64)})
    with pytest.raises(UserError, match="has 1 x 384 values for a matrix of 64 columns"):
        read.diagonal("e.weight", 64, 0)


# ------------------------------------------------------------------------------------------------------ the older form


def legacy(path: Path, entries: dict[str, tuple[int, np.ndarray]], tail: bytes | None = None) -> Path:
    """A file as llama-imatrix wrote it before GGUF: means times calls."""
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, means) in entries.items():
        values = (means.ravel() * max(calls, 1)).astype("<f4").tobytes()
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", calls, means.size), values]
    if tail is None:
        tail = struct.pack("<ii", 7, 8) + b"text.txt"
    path.write_bytes(b"".join(parts) + tail)
    return path


def test_the_older_form_is_read(tmp_path: Path) -> None:
    plain, experts = np.arange(1.0, 257), np.random.default_rng(0).random((3, 512))
    path = legacy(tmp_path / "i.dat", {"a.weight": (10, plain), "e.weight": (4, experts), "n.weight": (0, plain)})
    read = imatrix.read(path, {"a.weight": (64, 256), "e.weight": (3, 64, 512)})
    assert (read.datasets, read.chunks) == (("text.txt",), 7)
    for name, columns, number, expected in (
        ("a.weight", 256, None, plain), ("e.weight", 512, 2, experts[2]), ("n.weight", 256, None, plain),
    ):  # fmt: skip
        found = read.diagonal(name, columns, number)
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert read.moments["e.weight"].shape == (3, 512)
    with pytest.raises(UserError, match="1 x 1536 values for a matrix of 512 columns"):
        imatrix.read(path).diagonal("e.weight", 512, 1)
    bare = imatrix.read(legacy(tmp_path / "bare.dat", {"a.weight": (10, plain)}, b""))
    assert (bare.datasets, bare.chunks) == ((), 0)


def damaged_legacy(path: Path) -> dict[str, bytes]:
    """Files that are none, by what is wrong with them."""
    row = np.arange(1.0, 257)
    data = legacy(path, {"a.weight": (10, row)}).read_bytes()
    huge = struct.pack("<i", 0x7FFFFFFF)
    nan = np.where(row == 9, np.nan, row)
    return {
        "empty": b"", "short": b"no", "no entry": struct.pack("<i", 0), "negative entries": struct.pack("<i", -1),
        "many entries": huge + data[4:], "long name": data[:4] + huge + data[8:],
        "negative name": data[:4] + b"\xff" * 4,
        "many values": data[:20] + huge + data[24:], "negative values": data[:20] + struct.pack("<i", -5) + data[24:],
        "torn": data[:500], "long dataset": data[:-12] + huge + data[-8:], "half a tail": data[:-10],
        "twice": legacy(path, {"a.weight": (1, row), "b.weight": (1, row)}).read_bytes().replace(b"b.w", b"a.w"),
        "NaN": legacy(path, {"a.weight": (10, nan)}).read_bytes(),
        "negative": legacy(path, {"a.weight": (10, -row)}).read_bytes(),
        "negative calls": data[:16] + struct.pack("<i", -3) + data[20:],
        "the same": legacy(path, {"a.weight": (10, np.ones(256))}).read_bytes(),
        "a line break": data.replace(b"a.weight", b"a\nweight"),
    }  # fmt: skip


def test_damage_to_the_older_form_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    for kind, data in damaged_legacy(path).items():
        path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            imatrix.read(path)
        said = str(caught.value)
        assert said.startswith(f"{path}: ") and said.endswith("; give a file that llama-imatrix wrote"), kind
        assert "\n" not in said, kind


@pytest.mark.slow
def test_chance_bytes_take_neither_time_nor_memory(tmp_path: Path) -> None:
    """Every prefix and many changed bytes: a result or one line, never anything else."""
    path = tmp_path / "i.dat"
    whole = bytearray(
        legacy(path, {"a.weight": (10, np.arange(1.0, 65)), "b.weight": (3, np.arange(2.0, 66))}).read_bytes()
    )
    chance, read = np.random.default_rng(1), 0
    for number in range(600):
        data = whole.copy()
        if number % 3 == 0:
            del data[int(chance.integers(len(data))) :]
        for place in chance.integers(0, 40, 2):
            if place < len(data):
                data[place] = int(chance.integers(256))
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            read += bool(imatrix.read(path).moments)
    assert read > 10


def test_entries_are_left_out_by_name(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    row = np.arange(1.0, 257)[None]
    path = write(
        tmp_path / "i.gguf", {f"blk.{n}.{part}.weight": row for n in range(2) for part in ("attn_q", "ffn_up")}
    )
    read = imatrix.read(path)
    assert list(read.filtered(("attn",), ()).moments) == ["blk.0.attn_q.weight", "blk.1.attn_q.weight"]
    assert list(read.filtered((), ("blk.0", "ffn")).moments) == ["blk.1.attn_q.weight"]
    with pytest.raises(UserError, match="has no entry that --include-weights and --exclude-weights leave"):
        read.filtered(("nothing",), ())
    options = {"include_weights": ("attn",), "exclude_weights": ("ffn",)}
    for names in (("include_weights", "exclude_weights"), ("include_weights",), ("exclude_weights",)):
        given = {name: options[name] for name in names}
        both: dict[str, Any] = {**given, **({"imatrix": path} if len(names) == 2 else {})}
        with pytest.raises(UserError, match="give one of them, beside --imatrix"):
            convert(ConvertOptions.of(uneven("llama"), tmp_path / "x.gguf", **both))
