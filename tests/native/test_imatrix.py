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
    convert(ConvertOptions(model, f16, outtype="f16"))
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    matrix = tmp_path / "imatrix.gguf"
    llama.run("llama-imatrix", "-m", f16, "-f", text, "-c", "128", "--chunks", "6", "-o", matrix, "-t", "1")
    made = {"plain": tmp_path / "plain.gguf", "ours": tmp_path / "ours.gguf", "theirs": tmp_path / "theirs.gguf"}
    convert(ConvertOptions(model, made["plain"], pure=True, fold_norms=False))
    convert(ConvertOptions(model, made["ours"], pure=True, fold_norms=False, imatrix=matrix))
    llama.run("llama-quantize", "--pure", "--imatrix", matrix, f16, made["theirs"], "ITQ3_S", "2")
    weights = {t.name: np.array(t.data) for t in gguf.GGUFReader(f16).tensors}
    found = {key: {t.name: t for t in gguf.GGUFReader(path).tensors} for key, path in made.items()}
    assert gguf.GGUFReader(made["theirs"]).fields["itq3s.calibrated"].contents() is True
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
