"""Runs the Triton kernels in Triton's interpreter and prints what came out, as JSON.

A program of its own: ``TRITON_INTERPRET`` has to be set before the kernels are imported, and must not reach other
tests. ``tests/unit/test_torch_triton.py`` reads the figures.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import gguf
import numpy as np
import torch

import triton_shapes
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.torch import PackedExperts, PackedLinear, decode, kernels, products, rotate
from gguf_itq3s.torch.experts import Stack
from packed import TYPES, deviation, matrix, packed_rows


def layer(qtype: int, outputs: int, columns: int) -> tuple[PackedLinear, torch.Tensor]:
    """A layer, and its matrix as gguf-py decodes it."""
    kind = gguf.GGMLQuantizationType(qtype)
    data = packed_rows(kind, outputs, columns)
    decoded = torch.from_numpy(gguf.quants.dequantize(data, kind))
    return PackedLinear.from_blocks(torch.from_numpy(data), qtype=kind), decoded


def forward() -> dict[str, float]:
    """Case -> deviation in float32."""
    found = {}
    for case in triton_shapes.FORWARD:
        built, decoded = layer(case.qtype, case.outputs, case.columns)
        x = matrix(case.rows, case.columns, 1)
        found[triton_shapes.name(case)] = deviation(built(x, path="triton"), x, decoded)
    return found


def backward() -> dict[str, float]:
    """Type/rows -> deviation of the gradient to the input, in float32."""
    found = {}
    for qtype in TYPES:
        for rows in (1, 17):
            columns = 2 * decode.LAYOUTS[qtype].block
            built, decoded = layer(qtype, 33, columns)
            x, g = matrix(rows, columns, 1).requires_grad_(), matrix(rows, 33, 2)
            built(x, path="triton").backward(g)
            assert x.grad is not None
            found[f"{qtype.name}/{rows}"] = deviation(x.grad, g, decoded.t())
    return found


def halves() -> dict[str, list[float]]:
    """Type/dtype -> deviation forward, and of the gradient."""
    found = {}
    for qtype in TYPES:
        for dtype in (torch.float16, torch.bfloat16):
            built, decoded = layer(qtype, 9, 768)
            x, g = matrix(17, 768, 1).to(dtype).requires_grad_(), matrix(17, 9, 2).to(dtype)
            y = built(x, path="triton")
            y.backward(g)
            assert y.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
            found[f"{qtype.name}/{dtype}"] = [
                deviation(y.detach(), x.detach(), decoded), deviation(x.grad, g, decoded.t())
            ]  # fmt: skip
    return found


def experts() -> dict[str, list[float]]:
    """Type -> differences of the output and of the gradient from the path reference, relative."""
    found = {}
    for qtype in TYPES:
        stacks = {"up_proj": Stack(33, 512, qtype), "down_proj": Stack(512, 256, None)}
        built = PackedExperts(3, stacks, lambda x: torch.nn.functional.pad(x, (0, 223)))
        state = {"up_proj": packed_rows(qtype, 3 * 33, 512).reshape(3, 33, -1)}
        built.load_state_dict({name: torch.from_numpy(data) for name, data in state.items()}, strict=False)
        built.down_proj.data.normal_(generator=torch.Generator().manual_seed(4))
        x, index = matrix(9, 512, 1).requires_grad_(), torch.arange(18).view(9, 2) % 5  # two of five are none
        results = []
        for path in ("reference", "triton"):
            built.path = path
            y = built(x, index, torch.ones(9, 2))
            results.append((y, *torch.autograd.grad(y.square().sum(), x)))
        found[qtype.name] = [float((b - a).norm() / a.norm()) for a, b in zip(*results, strict=True)]
    return found


def rotation() -> None:
    x = matrix(67, 768)
    for block in (64, 256):
        assert np.array_equal(rotate(x, "triton", block).numpy(), fwht(x.numpy(), block))
    assert rotate(x[:0], "triton").shape == (0, 768)


def tiles() -> None:
    """Tiles smaller than the matrix, and up to as many shares of the columns as there are blocks."""
    kernels._interpreted = lambda rows, outputs: {"BLOCK_M": 16, "BLOCK_N": 16}
    for split in (1, 2, 5):
        kernels._split = lambda *_, count=split: count  # type: ignore[misc]
        built, decoded = layer(TYPES[0], 35, 768)
        x, g = matrix(37, 768, 1).requires_grad_(), matrix(37, 35, 2)
        y = built(x, path="triton")
        y.backward(g)
        assert x.grad is not None and torch.equal(built(x, path="triton"), y)
        assert max(deviation(y.detach(), x.detach(), decoded), deviation(x.grad, g, decoded.t())) < 1e-6


def others() -> None:
    """What PyTorch does with the operators, and inputs that are no plain matrices."""
    built, decoded = layer(TYPES[0], 5, 512)
    built.path = "triton"
    x = matrix(3, 512, 1).requires_grad_()
    torch.library.opcheck(products._rotate, (x, 256, True))
    for transposed, rows in ((False, x), (True, matrix(3, 5).requires_grad_())):
        torch.library.opcheck(products._product, (rows, built.weight, int(TYPES[0]), torch.float32, True, transposed))
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(compiled, built(x)) and torch.equal(built(x, rotated=rotate(x, "triton")), compiled)
    strided = matrix(512, 3, 1).t()
    moved = torch.zeros(1 + 5 * 200, dtype=torch.uint8)[1:].view(5, 200)
    moved.copy_(built.weight)
    for number in (built(strided), PackedLinear.from_blocks(moved)(strided, path="triton"), built(strided.double())):
        assert deviation(number.detach(), strided, decoded) < 1e-6
    assert built(x[:0].view(2, 0, 512)).shape == (2, 0, 5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({part.__name__: part() for part in (forward, backward, halves, experts)}))
    rotation()
    others()
    tiles()  # changes the kernels
