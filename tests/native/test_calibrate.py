"""Conversion with collected statistics, by the C encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from gguf_itq3s.calibrate import store
from gguf_itq3s.calibrate.store import read_manifest
from gguf_itq3s.codec import blocks, native
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.rounding import hessian


def test_conversion_with_statistics(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, library: native.NativeLibrary
) -> None:
    """Less Hessian-weighted error than without, folded or not; the statistics are turned to fit."""
    model, out = calibrated("llama")
    opened = store.Calibration(out, read_manifest(out))
    plain: dict[tuple[str, bool], float] = {}
    for folded in (False, True):
        convert(ConvertOptions.of(model, tmp_path / "f16.gguf", outtype="f16", fold_norms=folded))
        weights = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "f16.gguf").tensors}
        for statistics in (None, out):
            path = tmp_path / "out.gguf"
            convert(
                ConvertOptions.of(model, path, pure=True, fold_norms=folded, equalize=False, calibration=statistics)
            )
            reader = {t.name: t for t in gguf.GGUFReader(path).tensors}
            for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
                collected = opened.hessian(name)
                assert collected is not None
                h: npt.NDArray[np.floating] = collected
                entry = opened.entries[name]
                if entry.norm and not folded:
                    h = hessian.scale_columns(h, weights[entry.norm])
                error = fwht(blocks.dequantize(np.array(reader[name].data)) - weights[name].astype(np.float32))
                cost = hessian.cost(error, h)
                if statistics is None:
                    plain[name, folded] = cost
                else:
                    assert 0 < cost < 0.7 * plain[name, folded], (name, folded)
            if statistics is not None:
                fields = gguf.GGUFReader(path).fields
                assert fields["itq3s.calibrated"].contents() is True
                assert fields["itq3s.norms_folded"].contents() is folded
    assert len(plain) == 4
