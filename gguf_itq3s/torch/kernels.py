# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The products in Triton: weights are decoded in registers, tile by tile, and never stored.

Three kernels: the rotation; the product ``x V^T``, which splits the columns among programs where rows are few; the
product ``g V`` of the gradient. They differ by type only in :func:`_indices` and :func:`_scales`, which are picked by
constants when a kernel is compiled (:func:`unit_options`). Levels stay small integers, exact in float16 and bfloat16,
and are multiplied by ``tl.dot`` with sums in float32; a block's sum is scaled in float32, and its zero-point, where the
type has one, is taken off with the sum of the inputs.

Nothing is summed by atomic operations: results are the same from run to run. In Triton's interpreter
(``TRITON_INTERPRET=1``) the kernels run on the CPU, untuned.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from triton import knobs

from ..codec.family import FAMILY
from ..codec.scale import STATE_MASK
from ..codec.trellis import Trellis
from .decode import Layout, layout

#: Columns decoded at a time: of a block of 256 weights a quarter, which is one plane of symbols of two bits; a whole
#: block of 64.
PART: Final = tl.constexpr(64)

# The trellis of the family.
_TRELLIS: Final[Trellis] = next(iter(FAMILY.values())).format.trellis
_CHECK2, _CHECK1, _CHECK0 = map(tl.constexpr, _TRELLIS.checks)
_MEMORY: Final = tl.constexpr(_TRELLIS.memory)
_WITHOUT_STATE: Final = tl.constexpr(0xFFFF & ~int(STATE_MASK))

#: Rows up to which the columns are split, and how many programs are wanted for each multiprocessor then.
SPLIT_ROWS: Final = 16
_PROGRAMS: Final = 4


@triton.jit
def _rotate_kernel(
    x, out, blocks,
    LENGTH: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Blocks of LENGTH by butterflies in float32, in the order of stages of :mod:`gguf_itq3s.codec.transform`.

    Each stage takes pairs of neighbours apart and puts sums before differences: the index turns by one bit, so that
    the next stage finds its pairs side by side, and after all stages it is what it was.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    mask = (row < blocks)[:, None]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(values, (ROWS, LENGTH // 2, 2)))
        values = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, LENGTH))
    tl.store(out + place, (values * NORM).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _parity(now, before, CHECK: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    """A parity check of WIDTH selector bits, in the low bits; bit i of CHECK taps the bit i places before."""
    plane = now ^ now
    for tap in tl.static_range(_MEMORY + 1):
        if (CHECK >> tap) & 1:
            if tap == 0:
                plane ^= now
            else:
                plane ^= (now << tap) | (before >> (WIDTH - tap))
    return plane


@triton.jit
def _word(units, mask, WIDTH: tl.constexpr):  # noqa: N803
    """WIDTH bits, 16 or 32, in the low bits of an unsigned number."""
    word = tl.load(units, mask=mask, other=0)
    if WIDTH == 32:
        return word.to(tl.uint32, bitcast=True)
    else:  # noqa: RET505  (both branches of a constexpr need their return)
        return word.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _selectors_before(last, WIDTH: tl.constexpr):  # noqa: N803
    """The start state in a block's last number, of 16 bits, as the WIDTH selectors before the first."""
    before = last ^ last
    for i in tl.static_range(_MEMORY):
        before |= ((last >> i) & 1) << (WIDTH - 1 - i)
    return before


@triton.jit
def _nibble_in_bytes(plane, shift):
    """Four neighbouring bits to the lowest bits of four bytes: copies 7 places apart."""
    return (((plane >> shift) & 15) * 0x00204081) & 0x01010101


@triton.jit
def _trellis_indices(
    units, mask, part,
    BITS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Level indices of a part of blocks, one block a row: four at a time, in the bytes of a word.

    ``units`` points to the first unit, of WIDTH bits, of each block, (ROWS, 1).
    """
    i = tl.arange(0, PART // 4)[None, :]
    first = LENGTH * BITS // WIDTH  # where the selectors begin
    place = part * (PART // WIDTH) + i // (WIDTH // 4)
    now = _word(units + first + place, mask, WIDTH)
    last = _word(units + SIZE - 1, mask, WIDTH) >> (WIDTH - 16)
    before = _word(units + first + place - 1, mask & (place > 0), WIDTH)
    before = tl.where(place > 0, before, _selectors_before(last, WIDTH))
    shift = (4 * (i % (WIDTH // 4))).to(tl.uint32)
    c2 = _nibble_in_bytes(_parity(now, before, _CHECK2, WIDTH), shift)
    c1 = _nibble_in_bytes(_parity(now, before, _CHECK1, WIDTH), shift)
    c0 = _nibble_in_bytes(_parity(now, before, _CHECK0, WIDTH), shift)
    if BITS == 1:
        symbols = _nibble_in_bytes(_word(units + place, mask, WIDTH), shift)
    else:
        fours = i % (LENGTH // 16)  # of bytes, each with symbols of four planes
        plane = part + i // (LENGTH // 16)
        if WIDTH == 32:
            symbols = _word(units + fours, mask, WIDTH)
        else:
            symbols = _word(units + 2 * fours, mask, WIDTH) | (_word(units + 2 * fours + 1, mask, WIDTH) << 16)
        symbols = (symbols >> (2 * plane).to(tl.uint32)) & 0x03030303
        if BITS == 3:
            symbols |= _nibble_in_bytes(_word(units + LENGTH // 4 * 8 // WIDTH + place, mask, WIDTH), shift) << 2
    packed = (symbols << 3) | (c2 << 2) | (c1 << 1) | c0
    byte = (8 * tl.arange(0, 4)).to(tl.uint32)
    return tl.reshape((packed[:, :, None] >> byte[None, None, :]) & 255, (ROWS, PART)).to(tl.int32)


@triton.jit
def _tq2_0_indices(codes, mask, part):
    """Digits of a part of TQ2_0 blocks: halves of 32 bytes, four planes each."""
    t = part * PART + tl.arange(0, PART)[None, :]
    byte = tl.load(codes + (t // 128) * 32 + t % 32, mask=mask, other=0).to(tl.int32)
    return (byte >> (2 * (t % 128 // 32))) & 3


@triton.jit
def _tq1_0_indices(codes, mask, part):
    """Digits of a part of TQ1_0 blocks: five planes of 32 weights, five of 16, four of 4.

    Digit n is the overflow of the byte times 3 ** (n + 1), one multiplication by three after the other.
    """
    t = part * PART + tl.arange(0, PART)[None, :]
    first, second = t < 160, t < 240
    place = tl.where(first, t % 32, tl.where(second, 32 + t % 16, 48 + t % 4))
    digit = tl.where(first, t // 32, tl.where(second, (t - 160) // 16, (t - 240) // 4))
    byte = tl.load(codes + place, mask=mask, other=0).to(tl.int32)
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    return (((byte * power) & 255) * 3) >> 8


@triton.jit
def _indices(
    packed, mask, part,
    BITS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,  # noqa: N803
    DIGITS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Indices into the level table: int32 (ROWS, PART)."""
    if BITS > 0:
        return _trellis_indices(packed, mask, part, BITS, LENGTH, WIDTH, SIZE, ROWS)
    elif DIGITS == 4:  # noqa: RET505
        return _tq2_0_indices(packed, mask, part)
    else:
        return _tq1_0_indices(packed, mask, part)


@triton.jit
def _float16(bits):
    """The number that the low 16 bits stand for, in float32."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scales(
    packed, mask, WIDTH: tl.constexpr, OFFSET: tl.constexpr, HAS_Z: tl.constexpr, UNIT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Scale, times the unit of the values, and zero-point of every block: float32 (rows, 1) each.

    What has the start state, of trellis types the last of them, is read without it.
    """
    place = packed + OFFSET // (WIDTH // 8)
    if WIDTH == 32:
        word = _word(place, mask, WIDTH)
        scale, second = _float16(word), (word >> 16) & _WITHOUT_STATE
    elif WIDTH == 16:
        scale, second = _float16(_word(place, mask, WIDTH) & _WITHOUT_STATE), 0
    else:
        low = tl.load(place, mask=mask, other=0).to(tl.uint32)
        high = tl.load(place + 1, mask=mask, other=0).to(tl.uint32)
        scale, second = _float16(low | (high << 8)), 0
    zero = _float16(second) if HAS_Z else scale * 0.0
    return scale * UNIT, zero


@triton.jit(do_not_specialize=["m", "bucket", "split"])
def _product_kernel(
    x, packed, levels, out, m, n, blocks, bucket, split,
    BITS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, DIGITS: tl.constexpr,  # noqa: N803
    HAS_Z: tl.constexpr, SIZE: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """A tile of ``x V^T`` over a share of the blocks of columns; share s goes to the s-th matrix of ``out``.

    ``packed`` points to units of WIDTH bits (:func:`unit_options`); SIZE is a block's size in them. ``bucket`` is only
    a key of the tuning.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    row_mask, output_mask = (rows < m)[:, None], (outputs < n)[:, None]
    columns = tl.arange(0, PART)[None, :]
    inputs = x + rows[:, None] * (blocks * LENGTH) + columns
    codes = packed + outputs[:, None] * (blocks * SIZE)
    each = tl.cdiv(blocks, split)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(share * each, tl.minimum(share * each + each, blocks)):
        place = codes + block * SIZE
        scale, zero = _scales(place, output_mask, WIDTH, OFFSET, HAS_Z, UNIT)
        products = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        sums = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for part in range(LENGTH // PART):
            a = tl.load(inputs + block * LENGTH + part * PART, mask=row_mask, other=0.0)
            b = tl.load(levels + _indices(place, output_mask, part, BITS, LENGTH, WIDTH, SIZE, DIGITS, BLOCK_N))
            products = tl.dot(a, tl.trans(b), products, input_precision="ieee")
            if HAS_Z:
                sums += tl.sum(a.to(tl.float32), axis=1)
        if HAS_Z:
            products -= sums[:, None] * tl.trans(zero)
        total += products * tl.trans(scale)
    target = out + share.to(tl.int64) * m * n + rows[:, None] * n + outputs[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask & (outputs < n)[None, :])


@triton.jit
def _sum_kernel(partial, out, count, split, SIZE: tl.constexpr):  # noqa: N803
    """The sum of ``split`` matrices of ``count`` numbers, in order."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = place < count
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for share in range(split):
        total += tl.load(partial + share * count + place, mask=mask, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m", "bucket"])
def _transposed_kernel(
    x, packed, levels, out, m, n, blocks, bucket,
    BITS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, DIGITS: tl.constexpr,  # noqa: N803
    HAS_Z: tl.constexpr, SIZE: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """A tile of ``x V``: BLOCK_M rows and one part of one block of columns, summed over all rows of V.

    The scale of a block differs from row to row of V, so it goes to the inputs.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(1) % (LENGTH // PART)
    block = tl.program_id(1) // (LENGTH // PART)
    row_mask = (rows < m)[:, None]
    total = tl.zeros((BLOCK_M, PART), dtype=tl.float32)
    offsets = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, n, BLOCK_N):
        outputs = start + tl.arange(0, BLOCK_N)
        mask = (outputs < n)[:, None]
        place = packed + outputs[:, None].to(tl.int64) * (blocks * SIZE) + block * SIZE
        scale, zero = _scales(place, mask, WIDTH, OFFSET, HAS_Z, UNIT)
        inputs = x + rows[:, None] * n + outputs[None, :]
        a = tl.load(inputs, mask=row_mask & (outputs < n)[None, :], other=0.0).to(tl.float32) * tl.trans(scale)
        if HAS_Z:
            offsets += tl.sum(a * tl.trans(zero), axis=1)
        b = tl.load(levels + _indices(place, mask, part, BITS, LENGTH, WIDTH, SIZE, DIGITS, BLOCK_N))
        total = tl.dot(a.to(x.dtype.element_ty), b, total, input_precision="ieee")
    if HAS_Z:
        total -= offsets[:, None]
    columns = block * LENGTH + part * PART + tl.arange(0, PART)
    target = out + rows[:, None] * (blocks * LENGTH) + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask)


def _config(rows: int, outputs: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_M": rows, "BLOCK_N": outputs}, num_warps=warps, num_stages=stages)


#: Tile sizes that are tried, by whether rows are few.
_FEW: Final = [_config(16, 64, 4, 2)] + [_config(16, outputs, warps, 2) for outputs in (16, 32) for warps in (2, 4)]
_MANY: Final = [
    _config(32, 64, 4, 2), _config(64, 64, 4, 2), _config(64, 64, 8, 2), _config(64, 128, 8, 2),
    _config(128, 64, 8, 2),
]  # fmt: skip

_KEY: Final = ["n", "blocks", "bucket", "BITS", "LENGTH", "DIGITS"]
_tuned_few = triton.autotune(_FEW, key=_KEY)(_product_kernel)
_tuned_many = triton.autotune(_MANY, key=_KEY)(_product_kernel)
_tuned_transposed = triton.autotune([*_FEW, *_MANY], key=_KEY)(_transposed_kernel)


@functools.lru_cache(maxsize=64)
def _table(qtype: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What an index stands for, made once a device: exact in every floating dtype."""
    fmt = layout(qtype).fmt
    values = np.arange(-1, 3, dtype=np.float32) if fmt is None else fmt.level_values
    with torch.inference_mode(False):
        return torch.from_numpy(values).to(device, dtype)


def _split(rows: int, outputs: int, blocks: int, device: torch.device) -> int:
    """Among how many programs the columns are split: enough to keep the device busy where rows are few."""
    if rows > SPLIT_ROWS:
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(blocks, triton.cdiv(_PROGRAMS * processors, triton.cdiv(outputs, 32))))


def unit_options(kind: Layout) -> tuple[str, dict[str, Any]]:
    """What the kernels read packed rows in, as Triton names a pointer to it, and what they have to know of the type.

    Blocks of trellis types are read in the widest units, of 32 or 16 bits, that their size is a multiple of; others in
    bytes. BITS are those of a symbol, 0 of other types; LENGTH the weights of a block; DIGITS the ternary digits of a
    byte.
    """
    width, bits, digits, has_z = 8, 0, -(-kind.block // kind.scale_offset), False
    if kind.fmt is not None:
        width = 16 if kind.block_bytes % 4 else 32
        bits, digits, has_z = kind.fmt.symbol_bits, 0, kind.fmt.zero_point
    options = {
        "BITS": bits, "LENGTH": kind.block, "WIDTH": width, "DIGITS": digits, "HAS_Z": has_z,
        "SIZE": kind.block_bytes * 8 // width, "OFFSET": kind.scale_offset, "UNIT": kind.unit,
    }  # fmt: skip
    return {8: "*u8", 16: "*i16", 32: "*i32"}[width], options


def _units(packed: torch.Tensor, kind: Layout) -> tuple[torch.Tensor, dict[str, Any]]:
    """The packed rows in those units."""
    _, options = unit_options(kind)
    packed = packed.contiguous()
    size = options["WIDTH"] // 8
    if size > 1:
        aligned = packed.data_ptr() % size == 0 and packed.storage_offset() % size == 0
        packed = (packed if aligned else packed.clone()).view(torch.int32 if size == 4 else torch.int16)
    return packed, options


def _bucket(rows: int) -> int:
    """Numbers of rows that are tuned together: between powers of two, the few as one."""
    return min(max(SPLIT_ROWS, triton.next_power_of_2(rows)), 1024)


def _interpreted(rows: int, outputs: int) -> dict[str, int]:
    """Tile sizes in the interpreter, which has nothing to tune; few large operations are the fastest there."""
    sizes = (min(max(16, triton.next_power_of_2(size)), 128) for size in (rows, outputs))
    return dict(zip(("BLOCK_M", "BLOCK_N"), sizes, strict=True))


def _operand(x: torch.Tensor) -> torch.Tensor:
    """The input as the kernels take it; the interpreter's ``tl.dot`` knows no bfloat16."""
    return x.float() if knobs.runtime.interpret and x.dtype == torch.bfloat16 else x.contiguous()


def rotation_options(block: int) -> dict[str, Any]:
    """What the rotation has to know of a block."""
    rows = 64 if knobs.runtime.interpret else 1024 // block
    return {"LENGTH": block, "STAGES": block.bit_length() - 1, "NORM": block**-0.5, "ROWS": rows}


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """Every block of the last axis rotated: (..., k * block), the dtype of ``x``, contiguous."""
    x = x.contiguous()
    out, blocks, options = torch.empty_like(x), x.numel() // block, rotation_options(block)
    if blocks:
        _rotate_kernel[(triton.cdiv(blocks, options["ROWS"]),)](x, out, blocks, **options)
    return out


def product(x: torch.Tensor, packed: torch.Tensor, kind: Layout, dtype: torch.dtype) -> torch.Tensor:
    """``x V^T``: (m, columns), uint8 (n, bytes of a row) -> (m, n) in ``dtype``; float32, float16 or bfloat16."""
    x = _operand(x)
    m, n = x.shape[0], packed.shape[0]
    out = x.new_empty((m, n), dtype=dtype)
    if not out.numel():
        return out
    units, options = _units(packed, kind)
    blocks = kind.columns(packed) // kind.block
    split = _split(m, n, blocks, x.device)
    target = out if split == 1 else x.new_empty((split, m, n), dtype=torch.float32)

    def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
        return triton.cdiv(m, meta["BLOCK_M"]), triton.cdiv(n, meta["BLOCK_N"]), split

    arguments = (x, units, _table(int(kind.qtype), x.device, x.dtype), target, m, n, blocks, _bucket(m), split)
    if knobs.runtime.interpret:
        _product_kernel[grid](*arguments, **options, **_interpreted(m, n))
    else:
        (_tuned_few if m <= SPLIT_ROWS else _tuned_many)[grid](*arguments, **options)
    if split > 1:
        size = 1024
        _sum_kernel[(triton.cdiv(out.numel(), size),)](target, out, out.numel(), split, SIZE=size)
    return out


def product_transposed(x: torch.Tensor, packed: torch.Tensor, kind: Layout, dtype: torch.dtype) -> torch.Tensor:
    """``x V``: (m, n), uint8 (n, bytes of a row) -> (m, columns) in ``dtype``."""
    x = _operand(x)
    columns = kind.columns(packed)
    out = x.new_empty((x.shape[0], columns), dtype=dtype)
    if not out.numel():
        return out
    units, options = _units(packed, kind)
    blocks = columns // kind.block
    m = x.shape[0]

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(m, meta["BLOCK_M"]), blocks * (kind.block // PART.value)

    table = _table(int(kind.qtype), x.device, x.dtype)
    arguments = (x, units, table, out, m, packed.shape[0], blocks, _bucket(m))
    if knobs.runtime.interpret:
        _transposed_kernel[grid](*arguments, **options, **_interpreted(m, packed.shape[0]))
    else:
        _tuned_transposed[grid](*arguments, **options)
    return out
