"""Importance matrices: reading them, and rounding by them in both converters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import metadata
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.errors import UserError
from gguf_itq3s.rounding import hessian, imatrix


def write(path: Path, moments: dict[str, np.ndarray], counts: float = 10.0) -> Path:
    """A file as llama-imatrix writes it, for mean squares (experts, n)."""
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_string("general.type", "imatrix")
    for name, value in moments.items():
        writer.add_tensor(f"{name}.in_sum2", (value * counts).astype(np.float32))
        writer.add_tensor(f"{name}.counts", np.full((len(value), 1), counts, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def test_gains_are_taken_out_where_norms_are_folded(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    model = uneven("llama")
    convert(ConvertOptions(model, tmp_path / "f16.gguf", outtype="f16"))
    convert(ConvertOptions(model, tmp_path / "folded.gguf", outtype="f16", fold_norms=True))
    plain = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "f16.gguf").tensors}
    folded = {t.name: np.array(t.data).astype(np.float32) for t in gguf.GGUFReader(tmp_path / "folded.gguf").tensors}
    gain = plain["blk.0.attn_norm.weight"].astype(np.float64)
    normalised = np.exp(np.random.default_rng(1).standard_normal(256))
    matrix = write(tmp_path / "i.gguf", {"blk.0.attn_q.weight": (normalised * gain**2)[None]})
    for statistics in (None, matrix):
        convert(ConvertOptions(model, tmp_path / "out.gguf", pure=True, effort="fast", imatrix=statistics))
        data = next(t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors if t.name == "blk.0.attn_q.weight").data
        error = fwht(blocks.dequantize(np.array(data)) - folded["blk.0.attn_q.weight"])
        cost = hessian.cost(error, hessian.from_diagonal(normalised))
        if statistics is None:
            before = cost
    assert cost < 0.9 * before


def test_options_that_exclude_each_other(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    matrix = write(tmp_path / "i.gguf", {"a.weight": np.arange(256.0)[None]})
    out = tmp_path / "x.gguf"
    with pytest.raises(UserError, match="not both"):
        convert(ConvertOptions(uneven("llama"), out, imatrix=matrix, calibration=tmp_path))
    with pytest.raises(UserError, match="trellis code"):
        convert(ConvertOptions(uneven("llama"), out, imatrix=matrix, codec="ternary"))
    with pytest.raises(UserError, match="damping"):
        convert(ConvertOptions(uneven("llama"), out, imatrix=matrix, damping=0.0))
    with pytest.raises(UserError, match="lookahead"):
        convert(ConvertOptions(uneven("llama"), out, imatrix=matrix, lookahead=99))


def test_an_importance_matrix_without_the_models_matrices_is_refused(
    uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    other = write(tmp_path / "other.gguf", {"a.weight": np.arange(256.0)[None]})
    with pytest.raises(UserError, match=r"other\.gguf: has nothing on the matrices of this model"):
        convert(ConvertOptions(uneven("llama"), tmp_path / "x.gguf", imatrix=other))


@pytest.mark.parametrize(
    "rows",
    [np.zeros((1, 256)), np.ones((1, 256)), np.full((1, 256), 1e30), np.stack([np.zeros(256), np.full(256, 2.0)])],
    ids=["zero", "one", "huge", "experts"],
)
def test_importance_that_says_nothing_is_refused(rows: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"i\.gguf: a\.weight: has the same value for every column, or none"):
        imatrix.read(write(tmp_path / "i.gguf", {"a.weight": rows}))


def test_counts_are_looked_at(tmp_path: Path) -> None:
    rows = np.arange(256.0)[None]
    with pytest.raises(UserError, match="or none"):
        imatrix.read(write(tmp_path / "i.gguf", {"a.weight": rows}, counts=0.0))
    with pytest.raises(UserError, match="counts that are not finite or negative"):
        imatrix.read(write(tmp_path / "i.gguf", {"a.weight": -rows}, counts=-1.0))


def test_the_header_says_what_share_was_rounded_with_statistics(
    uneven: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = write(tmp_path / "i.gguf", {"blk.0.attn_q.weight": np.arange(1.0, 257)[None]})
    convert(ConvertOptions(uneven("llama"), tmp_path / "x.gguf", imatrix=matrix, effort="fast", pure=True))
    facts = metadata(tmp_path / "x.gguf")
    coded = [t for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors if t.tensor_type.name == "ITQ3_S"]
    share = 256 * 256 / sum(int(t.n_elements) for t in coded)
    assert (facts["itq3s.calibrated"], facts["itq3s.calibrated_share"]) == (True, pytest.approx(share))
    warned = capsys.readouterr().err
    assert "  blk.0.attn_k.weight" in warned and "  blk.0.attn_q.weight" not in warned


def test_the_share_counts_the_experts_of_a_stack(tmp_path: Path) -> None:
    rows = np.stack([np.arange(256.0), np.zeros(256), np.arange(256.0), np.full(256, 3.0)])
    read = imatrix.read(write(tmp_path / "i.gguf", {"e.weight": rows}))
    assert (read.share("e.weight"), read.share("a.weight")) == (0.5, 0.0)
    assert read.diagonal("e.weight", 256, 0) is not None
    assert read.diagonal("e.weight", 256, 3) is None
