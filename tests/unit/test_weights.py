"""Weights as a model of Transformers has them: those of the file, whatever the checkpoint holds them in."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrating import options, statistics
from gguf_itq3s import upstream
from gguf_itq3s.calibration import energies
from gguf_itq3s.calibration.pipeline import calibrate
from gguf_itq3s.checkpoint import patches
from gguf_itq3s.checkpoint.reading import open_checkpoint
from quantized import PACKINGS, quantized
from selection import some

Make = Callable[[str], Path]
#: A packing of each kind of code, and the others.
_SHORT = ("fp8-blocks", "gptq")


@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_are_what_the_codes_mean(packing: str, uneven: Make, tmp_path: Path) -> None:
    """Every matrix, and what is stored beside them as it is."""
    folder, meant = quantized(uneven("llama"), tmp_path, packing)
    weights = open_checkpoint(folder).weights
    tensors = load_file(meant / "model.safetensors")
    assert len(tensors) == 21
    for name, tensor in tensors.items():
        torch.testing.assert_close(weights.get(name, tensor.shape).float(), tensor.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("packing", some(PACKINGS, lambda name: name in _SHORT, pytest.mark.slow))
def test_statistics_of_codes_are_those_of_what_they_mean(packing: str, uneven: Make, tmp_path: Path) -> None:
    """Second moments of a calibration, and the mean squares that equalization asks for."""
    found, wanted = (collected(folder, tmp_path) for folder in quantized(uneven("llama"), tmp_path, packing))
    assert found.keys() == wanted.keys() and len(wanted) == 2 * 14
    for name, moment in wanted.items():
        np.testing.assert_allclose(found[name], moment, rtol=0, atol=1e-3 * np.abs(moment).max(), err_msg=name)


def collected(folder: Path, scratch: Path) -> dict[str, np.ndarray]:
    """What a calibration and a short run find of every matrix."""
    place = scratch / f"{folder.name}-statistics"
    calibrate(options(folder), place, io.StringIO())
    means = energies.measure(options(folder), open_checkpoint(folder), io.StringIO()).means
    return {name: moment for name, (moment, *_) in statistics(place).items()} | {
        f"mean square of {name}": mean for name, mean in means.items()
    }


def test_one_expert_of_stacked_codes_is_read_alone(
    uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of FP8 in blocks with all experts in one tensor, as Transformers 5 has them: no other expert's bytes."""
    folder = Path(shutil.copytree(uneven("qwen3-moe"), tmp_path / "stacked"))
    tensors = load_file(folder / "model.safetensors")
    place = "model.layers.0.mlp.experts"
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        codes = torch.stack([torch.cat([tensors.pop(f"{place}.{n}.{p}.weight") for p in parts]) for n in range(4)])
        tensors[f"{place}.{name}"] = codes.to(torch.float8_e4m3fn)
        tensors[f"{place}.{name}_scale_inv"] = torch.rand(4, codes.shape[1] // 128, codes.shape[2] // 128)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": PACKINGS["fp8-blocks"][0]}))
    monkeypatch.setattr(upstream.load_conversion().base.TextModel, "get_vocab_base_pre", lambda *_: "default")
    weights = open_checkpoint(folder).weights
    read: list[int] = []
    own = patches._read_bytes

    def counted(tensor: Any) -> np.ndarray:
        read.append(tensor.data_range.size)
        return own(tensor)

    for name, shape in (("gate_up_proj", (512, 256)), ("down_proj", (256, 256))):
        whole = weights.get(f"{place}.{name}", torch.Size((4, *shape)))
        with monkeypatch.context() as patch:
            patch.setattr(patches, "_read_bytes", counted)
            for number in range(4):
                read.clear()
                assert torch.equal(weights.expert(f"{place}.{name}", number, torch.Size(shape)), whole[number])
                assert sum(read) == shape[0] * shape[1] * (1 + 4 / 128**2)
