"""The bytes of converted files do not change: the bundled model by every way to quantize, against recorded hashes.

The statistics of the calibrated files are made so that every factorization of them is exact in float64 (small dyadic
numbers), whatever LAPACK does.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import llama
from checkpoints import DATA
from gguf_itq3s.calibrate.store import Entry, Manifest, model_hash
from gguf_itq3s.checkpoint import channels
from gguf_itq3s.codec import native
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

RECORDED = DATA / "bytes.json"
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "folded": {"fold_norms": True},
    "pure": {"pure": True, "fold_norms": True},
    "fast": {"pure": True, "effort": "fast", "fold_norms": True},
    "literal ternary": {"pure": True, "codec": "ternary", "fold_norms": True},
    "TQ2_0": {"outtype": "tq2_0", "ternary": "force"},
    "TQ1_0": {"outtype": "tq1_0"},
    "F16": {"outtype": "f16"},
    "calibrated": {"pure": True, "calibration": "hessians", "damping": 1.0, "fold_norms": True},
    "calibrated, not folded": {"calibration": "plain", "damping": 1.0, "equalize": False, "segment": 12},
    "importance matrix": {"imatrix": "importance.gguf", "equalize": False},
    "equalized": {"imatrix": "importance.gguf"},
    "ITQ2_S": {"outtype": "itq2_s"},
    "ITQ2_S, fast": {"outtype": "itq2_s", "pure": True, "effort": "fast", "fold_norms": True},
    "ITQ2_S, calibrated": {
        "outtype": "itq2_s", "pure": True, "calibration": "hessians", "damping": 1.0, "fold_norms": True,
    },
    "ITQ2_S, importance matrix": {"outtype": "itq2_s", "imatrix": "importance.gguf", "equalize": False},
    "ITQ4_S": {"outtype": "itq4_s"},
    "ITQ4_S, calibrated": {
        "outtype": "itq4_s", "pure": True, "calibration": "hessians", "damping": 1.0, "fold_norms": True,
    },
}  # fmt: skip


def exact_hessian(n: int, seed: int) -> np.ndarray:
    """float32 (n, n): H + mean(diag H) I is L L^T in reverse order, with L of small dyadic numbers."""
    rng = np.random.default_rng(seed)
    lower = np.eye(n)
    for offset in (1, 2, 5, 17):
        i = np.arange(offset, n)
        lower[i, i - offset] = rng.integers(-4, 5, n - offset) / 16
    lower *= np.where(rng.random(n) < 1 / 8, 2.0, 1.0)
    product = (lower @ lower.T)[::-1, ::-1].copy()
    # The last pivot alone takes what makes the mean of the diagonal dyadic.
    product[0, 0] += -round(np.trace(product) * 1024) % n / 1024
    hessian = product - np.trace(product) / n / 2 * np.eye(n)
    assert (hessian.astype(np.float32) == hessian).all() and np.diagonal(hessian).min() > 0
    return np.ascontiguousarray(hessian, dtype=np.float32)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibration and an importance matrix of the bundled model."""
    folder = tmp_path_factory.mktemp("statistics")
    files = [llama.MODEL / "model.safetensors"]
    f16 = folder / "f16.gguf"
    convert(ConvertOptions.of(llama.MODEL, f16, outtype="f16"))
    matrices = {t.name: int(t.shape[0]) for t in gguf.GGUFReader(f16).tensors if t.name.startswith("blk.")}
    matrices = {name: n for name, n in matrices.items() if "norm" not in name}
    tensors = {}
    writer = gguf.GGUFWriter(folder / "importance.gguf", "imatrix")
    for number, (name, columns) in enumerate(matrices.items()):
        tensors[name] = exact_hessian(columns, number)
        # One value a block: its rotated Hessian is diagonal. With one block it would say nothing, and be refused.
        sums = np.repeat(2.0 ** np.random.default_rng(number).integers(-3, 4, columns // 256), 256).astype(np.float32)
        if columns == 256:
            continue
        writer.add_tensor(f"{name}.in_sum2", sums[None])
        writer.add_tensor(f"{name}.counts", np.ones((1, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # With the gain left out of the statistics, and with it in: neither has to be turned into the other.
    norms = [f"blk.{number}.{part}_norm.weight" for number in range(6) for part in ("attn", "ffn")]
    known = channels.plan_norms("llama", [*matrices, *norms])
    for kind, norm_of in (("hessians", known.norm_of), ("plain", lambda _: None)):
        (folder / kind).mkdir()
        save_file(tensors, folder / kind / "layer-0000.safetensors")
        entries = {name: Entry("layer-0000.safetensors", name, 100, norm_of(name)) for name in tensors}
        Manifest(model_hash(files), "llama", "", 100, {}, entries, complete=True).write(folder / kind)
    return folder


def content(path: Path) -> str:
    """Hash of names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for tensor in gguf.GGUFReader(path).tensors:
        digest.update(f"{tensor.name} {tensor.tensor_type.name} {tensor.shape.tolist()}".encode())
        digest.update(tensor.data.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("way", WAYS)
def test_the_bytes_are_those_recorded(
    way: str, statistics: Path, tmp_path: Path, library: native.NativeLibrary
) -> None:
    options = dict(WAYS[way])
    for key in ("calibration", "imatrix"):
        if key in options:
            options[key] = statistics / options[key]
    path = tmp_path / "out.gguf"
    convert(ConvertOptions.of(llama.MODEL, path, **options))
    recorded = json.loads(RECORDED.read_text())
    assert content(path) == recorded[way], "the bytes of converted files have changed"
