"""Importance matrices: reading them, and rounding by them in both converters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import llama
from checkpoints import NOVEL
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.rounding import hessian, imatrix


def test_both_converters_round_by_it(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """--imatrix and llama-quantize --imatrix lower the weighted error of unfolded tensors by the same amount."""
    model, f16 = uneven("llama"), tmp_path / "f16.gguf"
    convert(ConvertOptions.of(model, f16, outtype="f16"))
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    matrix = tmp_path / "imatrix.gguf"
    llama.run("llama-imatrix", "-m", f16, "-f", text, "-c", "128", "--chunks", "6", "-o", matrix, "-t", "1")
    made = {"plain": tmp_path / "plain.gguf", "ours": tmp_path / "ours.gguf", "theirs": tmp_path / "theirs.gguf"}
    convert(ConvertOptions.of(model, made["plain"], pure=True, fold_norms=False))
    convert(ConvertOptions.of(model, made["ours"], pure=True, equalize=False, imatrix=matrix))
    llama.run("llama-quantize", "--pure", "--imatrix", matrix, f16, made["theirs"], "ITQ3_S", "2")
    weights = {t.name: np.array(t.data) for t in gguf.GGUFReader(f16).tensors}
    found = {key: {t.name: t for t in gguf.GGUFReader(path).tensors} for key, path in made.items()}
    for key in ("ours", "theirs"):
        fields = gguf.GGUFReader(made[key]).fields
        assert fields["itq3s.calibrated"].contents() is True
        coded = {t.name: int(t.n_elements) for t in found[key].values() if t.tensor_type.name == "ITQ3_S"}
        shares = sum(coded[name] for name in imatrix.read(matrix).moments if name in coded) / sum(coded.values())
        share = fields["itq3s.calibrated_share"].contents()
        assert share < 1 and share == pytest.approx(shares)
    read, compared = imatrix.read(matrix), 0
    for name in read.moments:
        if not name.startswith("blk."):
            continue
        diagonal = read.diagonal(name, weights[name].shape[-1])
        assert diagonal is not None
        h = hessian.from_diagonal(diagonal)
        cost = {
            key: hessian.cost(fwht(blocks.dequantize(np.array(t[name].data)) - weights[name].astype(np.float32)), h)
            for key, t in found.items()
        }
        assert cost["ours"] < cost["plain"], name
        assert cost["theirs"] == pytest.approx(cost["ours"], rel=0.01), name
        compared += 1
    assert compared == 14


Q = "blk.0.attn_q.weight"
EVEN = np.arange(1.0, 257, dtype=np.float32)
BAD: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "zero": ({Q: np.zeros(256, np.float32)}, f"the same value for every column of {Q}"),
    "constant": ({Q: np.full(256, 3.0, np.float32)}, f"the same value for every column of {Q}"),
    "huge": ({Q: np.full(256, 3e38, np.float32)}, f"the same value for every column of {Q}"),
    "negative": ({Q: -EVEN}, f"negative values for {Q}"),
    "one negative": ({Q: np.where(EVEN == 9, -1, EVEN).astype(np.float32)}, f"negative values for {Q}"),
    "NaN": ({Q: np.where(EVEN == 9, np.nan, EVEN).astype(np.float32)}, "non-finite"),
    "infinite": ({Q: np.where(EVEN == 9, np.inf, EVEN).astype(np.float32)}, "non-finite"),
    "no token": ({Q: EVEN}, f"the same value for every column of {Q}"),
    "another model": ({"blk.9.attn_q.weight": EVEN}, "nothing on the trellis-coded tensors"),
}


@pytest.mark.parametrize("kind", BAD)
def test_llama_quantize_refuses_importance_that_says_nothing(
    kind: str, uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    f16, out = tmp_path / "f16.gguf", tmp_path / "out.gguf"
    convert(ConvertOptions.of(uneven("llama"), f16, outtype="f16"))
    values, expected = BAD[kind]
    count = 0.0 if kind == "no token" else 1.0
    done = llama.run("llama-quantize", "--imatrix", _imatrix(tmp_path, values, count), f16, out, "ITQ3_S", check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if expected in line]
    assert (done.returncode, len(said)) == (1, 1), done.stderr
    assert not out.exists()


def test_llama_quantize_takes_importance_of_any_size(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """Only how the columns differ counts: the same bytes for 2^100 times the matrix, and not the plain ones."""
    f16 = tmp_path / "f16.gguf"
    convert(ConvertOptions.of(uneven("llama"), f16, outtype="f16"))
    data = []
    for factor in (1.0, 2.0**100, None):
        out = tmp_path / "out.gguf"
        given: list[str | Path] = []
        if factor is not None:
            given = ["--imatrix", _imatrix(tmp_path, {Q: EVEN * np.float32(factor)}, 1.0)]
        llama.run("llama-quantize", *given, f16, out, "ITQ3_S")
        data.append(next(t.data.tobytes() for t in gguf.GGUFReader(out).tensors if t.name == Q))
    assert data[0] == data[1] != data[2]


def _imatrix(folder: Path, values: dict[str, np.ndarray], count: float) -> Path:
    """A file as llama-imatrix writes it, of sums over that many tokens."""
    writer = gguf.GGUFWriter(folder / "i.gguf", "", use_temp_file=False)
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["x"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, value in values.items():
        writer.add_tensor(f"{name}.in_sum2", value[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), count, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "i.gguf"
