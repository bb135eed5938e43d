"""Linear layers of packed blocks: decoding, products and their gradients, and living in PyTorch's ways."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.family import FAMILY, TrellisType, is_trellis
from gguf_itq3s.codec.ternary import TQ1_0, TQ2_0
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.torch import (
    PackedLinear,
    TernaryLinear,
    decode,
    products,
    quantize,
    replace_linears,
    rotate,
    transform,
)
from packed import TYPES, deviation, matrix, packed_rows

DATA = Path(__file__).resolve().parents[1] / "data"
#: From the exact product in float32, of |x| |w|: half of what two paths may differ by.
TOLERANCE = 1e-6
#: Lengths of blocks that are rotated.
BLOCKS = sorted({row.format.block for row in FAMILY.values()})
#: Types whose rows may be no multiple of 256, and what they take the place of then.
SHORT = {row.fallback: row.type for row in FAMILY.values() if is_trellis(row.fallback)}


def assert_close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert deviation(y, x, weight) <= tolerance


# ---------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)
def test_reference_blocks_decode_to_the_rotated_values(row: TrellisType) -> None:
    data = np.load(DATA / f"{row.identifier}_decode.npz")
    kind = decode.LAYOUTS[row.type]
    values = decode.weights(torch.from_numpy(data["blocks"]), kind)
    np.testing.assert_allclose(values.numpy(), data["rotated"], rtol=1e-6)
    decoded = products.dequantize(torch.from_numpy(data["blocks"]), row.type)
    np.testing.assert_allclose(decoded.numpy(), data["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_rotation_is_the_codecs_and_its_own_inverse(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(3, 3 * block)
    rotated = rotate(x, block=block)
    np.testing.assert_allclose(rotated.numpy(), fwht(x.numpy(), block), atol=2e-6)
    torch.testing.assert_close(rotate(rotated, block=block), x)
    integers = torch.randint(-63, 64, (4, block)).float()
    assert torch.equal(transform.fwht(integers, block), torch.from_numpy(fwht(integers.numpy(), block)))
    assert rotate(x.bfloat16(), block=block).dtype == torch.float32
    monkeypatch.setattr(transform, "PIECE", 2 * block)
    assert torch.equal(rotate(x, block=block), rotated)
    with pytest.raises(ValueError, match=rf"\(3, {block // 2}\) is not a multiple of {block}"):
        rotate(x[:, : block // 2], block=block)


# ---------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"), [(1, 256, 7), (3, 768, 33), (17, 1024, 5), (0, 256, 3), (2, 512, 1)]
)
def test_product_is_that_of_the_dequantized_matrix(qtype: Type, rows: int, columns: int, outputs: int) -> None:
    data = torch.from_numpy(packed_rows(qtype, outputs, columns))
    layer = PackedLinear.from_blocks(data, matrix(1, outputs)[0], qtype=qtype)
    x = matrix(rows, columns, 1)
    expected = torch.from_numpy(gguf.quants.dequantize(data.numpy(), qtype))
    y = layer(x)
    assert y.dtype == torch.float32 and y.shape == (rows, outputs)
    assert_close(y - layer.bias, x, expected, 3e-6)  # the bias rounds once more


@pytest.mark.parametrize("qtype", SHORT, ids=lambda t: t.name)
@pytest.mark.parametrize("columns", [64, 576, 832])
def test_rows_that_are_no_multiple_of_256(qtype: Type, columns: int) -> None:
    """The products and the gradient, whatever is left of a slice of 256 columns."""
    data = torch.from_numpy(packed_rows(qtype, 7, columns))
    expected = torch.from_numpy(gguf.quants.dequantize(data.numpy(), qtype))
    layer = PackedLinear.from_blocks(data, qtype=qtype)
    x, g = matrix(3, columns, 1).requires_grad_(), matrix(3, 7, 2)
    y = layer(x)
    y.backward(g)
    assert x.grad is not None
    assert_close(y.detach(), x.detach(), expected, 2e-6)
    assert_close(x.grad, g, expected.t(), 2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    layer = PackedLinear.from_weight(matrix(65, 512))
    x = matrix(9, 512, 1).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert_close(y, x, layer.dequantize(), tolerance)


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_gradient_is_that_of_the_decoded_matrix(qtype: Type) -> None:
    layer = PackedLinear.from_blocks(torch.from_numpy(packed_rows(qtype, 33, 768)), qtype=qtype)
    gradients = []
    decoded = layer.dequantize()
    for compute in (layer, lambda x: x @ decoded.t()):
        x = matrix(2 * 3, 768, 1).view(2, 3, 768).requires_grad_()
        compute(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4 * float(gradients[1].abs().max()))
    half = matrix(2, 768).bfloat16().requires_grad_()
    layer(half).sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16


# --------------------------------------------------------------------------------------------------------- quantizing


@pytest.mark.parametrize(("short", "asked"), SHORT.items(), ids=lambda t: t.name)
def test_a_width_asks_for_shorter_blocks(short: Type, asked: Type) -> None:
    """As the converter writes it; where both fit, the type that is asked for."""
    weight = matrix(5, 320)
    layer = PackedLinear.from_weight(weight, qtype=asked, effort="fast")
    assert layer.qtype == short
    np.testing.assert_array_equal(
        layer.weight.numpy(), blocks.quantize(weight.numpy(), effort="fast", fmt=FAMILY[short].format)
    )
    assert float((layer.dequantize() - weight).norm() / weight.norm()) < 0.3
    other = PackedLinear(320, 5, bias=False, qtype=asked)
    other.load_state_dict(layer.state_dict())
    assert other.qtype == short and torch.equal(other(weight), layer(weight))
    assert PackedLinear(512, 5, qtype=asked).qtype == asked and PackedLinear(512, 5, qtype=short).qtype == short


@pytest.mark.parametrize("qtype", [TQ1_0, TQ2_0], ids=lambda t: t.name)
def test_ternary_matrices_keep_their_weights(qtype: Type) -> None:
    weight = torch.sign(matrix(6, 512)) * (matrix(6, 512, 1) > 0) * 0.5
    assert torch.equal(TernaryLinear.from_weight(weight, qtype=qtype).dequantize(), weight)


def test_clear_errors() -> None:
    with pytest.raises(ValueError, match="ITQ3_N rows must be a multiple of 64 long, not 352"):
        PackedLinear(352, 4)
    with pytest.raises(ValueError, match="TQ2_0 rows must be a multiple of 256 long, not 320"):
        PackedLinear(320, 4, qtype=TQ2_0)
    with pytest.raises(ValueError, match="ITQ3_S rows must be a multiple of 256 long, not 320"):
        quantize(matrix(2, 320))
    with pytest.raises(ValueError, match="Q4_K weights cannot stay packed"):
        PackedLinear(256, 4, qtype=Type.Q4_K)
    with pytest.raises(ValueError, match="NaN"):
        quantize(torch.full((1, 256), torch.nan))
    with pytest.raises(ValueError, match="a matrix is needed"):
        quantize(torch.zeros(256))
    with pytest.raises(ValueError, match=r"uint8 \(rows, k \* 100\)"):
        PackedLinear.from_blocks(torch.zeros(2, 66, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a bias of shape"):
        PackedLinear.from_blocks(torch.zeros(2, 100, dtype=torch.uint8), torch.zeros(3))


# ----------------------------------------------------------------------------------------------------- PyTorch's ways


@pytest.fixture
def layer() -> PackedLinear:
    return PackedLinear.from_weight(matrix(9, 512), matrix(1, 9)[0])


def test_state_goes_through_safetensors(layer: PackedLinear, tmp_path: Path) -> None:
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = PackedLinear(512, 9)
    x = matrix(3, 512, 1)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), layer(x))


@pytest.mark.slow
def test_compiles_in_one_graph(layer: PackedLinear) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = matrix(3, 512, 1).requires_grad_()
    y = compiled(x)
    torch.testing.assert_close(y, layer(x))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_linears_of_a_model_are_replaced() -> None:
    model = torch.nn.ModuleDict({
        "body": torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256, bias=False)),
        "narrow": torch.nn.Linear(320, 4),
        "odd": torch.nn.Linear(100, 4),
        "lm_head": torch.nn.Linear(256, 8),
    })  # fmt: skip
    bias = model["body"][0].bias  # type: ignore[index]
    assert replace_linears(model.eval()) == ["body.0", "body.2", "narrow"]
    assert model["narrow"].qtype.name == "ITQ3_N"
    assert type(model["lm_head"]) is torch.nn.Linear and type(model["odd"]) is torch.nn.Linear
    first = model["body"][0]  # type: ignore[index]
    assert isinstance(first, PackedLinear) and first.bias is bias and not first.training
    assert replace_linears(model, wanted=lambda name, _: name == "lm_head") == ["lm_head"]
