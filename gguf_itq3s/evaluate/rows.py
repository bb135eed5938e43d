"""Rows of an evaluation: what each is called and the command that makes its file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from ..codec.family import DEFAULT, FAMILY
from ..codec.transform import BLOCK


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        key: name for ``--rows``.
        type: as the table shows it.
        how: what the table says about its making.
        command: ``llama-quantize`` with its options and the type, or ``convert`` with its options; empty for the F16
            file itself. ``{imatrix}``, ``{statistics}``, ``{text}``, ``{tokens}`` and ``{size}`` are put in.
        runtime: further arguments of llama-perplexity, for the rows with a quantized KV cache.
        environment: variables set for llama-perplexity.
        like: the row whose file has the ``{size}``.
    """

    key: str
    type: str
    how: str
    command: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    like: Row | None = None

    @property
    def maker(self) -> str:
        """``llama-quantize``, ``convert``, or empty."""
        return self.command[0] if self.command else ""

    @property
    def learns(self) -> bool:
        """Whether it needs a text to learn from."""
        return any(word.startswith("{") for word in self.command)


IMATRIX: Final = ("--imatrix", "{imatrix}")
STATISTICS: Final = ("--statistics", "{statistics}")
LAYERWISE: Final = ("--layerwise", "{text}", "--tokens", "{tokens}")
FISHER: Final = (*LAYERWISE, "--fisher")
#: llama-quantize refuses them without an importance matrix: IQ3_XXS because its mix has IQ2_S.
_NEED_MATRIX: Final = ("IQ3_XXS", "IQ2_XXS")


def quantized(key: str, qtype: str, how: str, *options: str) -> list[Row]:
    """Rows of llama-quantize's, without an importance matrix where it can be, and with one; the type comes last."""
    *flags, name = options
    plain = Row(key, qtype, how, ("llama-quantize", *options))
    weighted = Row(f"{key}-imatrix", qtype, f"{how}, imatrix", ("llama-quantize", *flags, *IMATRIX, name))
    return [weighted] if name in _NEED_MATRIX else [plain, weighted]


def converted(
    key: str, qtype: str, how: str, ways: Iterable[tuple[str, str, tuple[str, ...]]], *options: str
) -> list[Row]:
    """Rows of the converter's, one for each way: what the key and the description end with, and options."""
    return [Row(key + end, qtype, how + said, ("convert", *options, *more)) for end, said, more in ways]


#: What a calibration can be.
WAYS: Final = (
    ("", "", ()), ("-calibrated", ", calibrated", STATISTICS),
    ("-sequential", ", calibrated in sequence", LAYERWISE), ("-fisher", ", calibrated in sequence, Fisher", FISHER),
)  # fmt: skip
#: Name for llama-quantize -> that of its ``--pure`` row, None where another has it.
_STOCK: Final = {
    "Q8_0": "Q8_0", "Q4_K_M": "Q4_K", "IQ4_XS": "IQ4_XS", "Q3_K_M": "Q3_K", "Q3_K_S": None, "IQ3_S": "IQ3_S",
    "IQ3_XXS": "IQ3_XXS", "Q2_K": "Q2_K", "IQ2_XXS": "IQ2_XXS", "TQ1_0": "TQ1_0", "TQ2_0": "TQ2_0",
}  # fmt: skip
_NO_MATRIX: Final = ("Q8_0", "TQ1_0", "TQ2_0")
#: Sizes that types are chosen for, bits a weight over all tensors; those of them that are calibrated in sequence too.
_FRONT: Final = ("2.7", "3.4", "3.85", "4.3", "4.65", "5")
_BEST: Final = ("2.7", "3.85")


def weight_rows() -> list[Row]:
    """Every row of the first table; norms are folded where a row says so."""
    rows = [Row("f16", "F16", "")]
    own = [row for row in FAMILY.values() if row.format.block == BLOCK]
    for name, pure in {**_STOCK, **{row.name: row.name for row in own}}.items():
        made = quantized(name.lower(), name, "mix", name)
        if pure:
            made += quantized(f"{pure.lower()}-pure", pure, "pure", "--pure", name)
        rows += [row for row in made if name not in _NO_MATRIX or not row.learns]
    for trellis in own:
        key = "convert" if trellis is DEFAULT else f"convert-{trellis.identifier}"
        options = ("--outtype", trellis.identifier, "--fold-norms")
        rows += converted(key, trellis.name, "mix, folded", WAYS, *options)
        rows += converted(f"{key}-pure", trellis.name, "pure, folded", WAYS, *options, "--pure")
    # llama.cpp's own types, rounded with statistics, for any llama.cpp.
    stock = (WAYS[1], WAYS[3])
    rows += converted("convert-q4_k-pure", "Q4_K", "pure", stock, "--outtype", "q4_k_s", "--pure")
    rows += converted("convert-q4_k_m", "Q4_K_M", "mix", stock, "--outtype", "q4_k_m")
    for bits in _FRONT:
        ways = (("", ", calibrated", STATISTICS), *((WAYS[3],) if bits in _BEST else ()))
        sized = ("--target-bpw", bits, "--fold-norms")
        rows += converted(f"convert-bpw-{bits}", "mix", f"types for {bits} bits", ways, *sized)
    others = (
        ("unfolded", ", by the package", ()), ("fast", ", folded, fast", ("--effort", "fast", "--fold-norms")),
        ("ternary", ", folded, literal ternary", ("--codec", "ternary", "--fold-norms")),
    )  # fmt: skip
    return [*rows, *converted("convert-pure-", DEFAULT.name, "pure", others, "--pure")]


def kv_rows() -> list[Row]:
    """Rows of a quantized KV cache, rotated (llama.cpp's default) and not: F16 weights, the converter's default."""
    by_key = {row.key: row for row in weight_rows()}
    rows = []
    for weights, short in ((by_key["f16"], "f16"), (by_key["convert"], DEFAULT.identifier)):
        for cache in ("q8_0", "q4_0"):
            how = f"{weights.how}; KV {cache}".removeprefix("; ")
            runtime = ("-ctk", cache, "-ctv", cache, "-fa", "on")
            rotated = replace(weights, key=f"kv-{short}-{cache}", how=f"{how}, rotated", runtime=runtime)
            off = (("LLAMA_ATTN_ROT_DISABLE", "1"),)
            unrotated = replace(rotated, key=f"{rotated.key}-unrotated", how=f"{how}, not rotated", environment=off)
            rows += [rotated, unrotated]
    return rows
