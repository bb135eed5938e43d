"""The rows of the evaluation: what each is called and how its file is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ..codec.family import DEFAULT, FAMILY, TrellisType
from ..codec.transform import BLOCK

Maker = Literal["none", "llama-quantize", "ggml", "package"]


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        key: name for ``--rows`` and the caches.
        label: type as the table shows it.
        how: what the table says about its making.
        maker: who writes the file: nobody (the F16 file itself), llama-quantize, ggml's quantizer called directly, or
            this package's converter.
        arguments: of ``llama-quantize`` (the type last), or the type for ggml.
        imatrix: whether llama-quantize is given an importance matrix.
        calibrated: whether the converter is given a calibration.
        sequential: whether it calibrates while it quantizes.
        runtime: further arguments of llama-perplexity, for the rows with a quantized KV cache.
        environment: variables set for llama-perplexity.
        options: of the converter, fields of :class:`gguf_itq3s.convert.options.ConvertOptions`.
    """

    key: str
    label: str
    how: str
    maker: Maker
    arguments: tuple[str, ...] = ()
    imatrix: bool = False
    calibrated: bool = False
    sequential: bool = False
    runtime: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def learns(self) -> bool:
        """Whether it needs a text to learn from."""
        return self.imatrix or self.calibrated or self.sequential


#: The trellis types of a model whose rows are multiples of 256, and those that other rows ask for besides.
_LONG: Final = tuple(row for row in FAMILY.values() if row.format.block == BLOCK)
_SHORT: Final = tuple(row for row in FAMILY.values() if row.format.block != BLOCK)

#: Types of llama-quantize: name, name of the ``--pure`` row (None: same as another's), whether it takes a matrix.
_TYPES: Final = (
    ("Q8_0", "Q8_0", False),
    ("Q4_K_M", "Q4_K", True),
    ("IQ4_XS", "IQ4_XS", True),
    ("Q3_K_M", "Q3_K", True),
    ("Q3_K_S", None, True),
    ("IQ3_S", "IQ3_S", True),
    ("IQ3_XXS", "IQ3_XXS", True),
    ("Q2_K", "Q2_K", True),
    ("IQ2_XXS", "IQ2_XXS", True),
    *((row.name, row.name, True) for row in _LONG),
)

#: llama-quantize refuses them without an importance matrix: the mix of IQ3_XXS needs IQ2_S.
NEED_MATRIX: Final = ("IQ3_XXS", "IQ2_XXS")
#: ggml does not refuse it.
_BY_GGML: Final = "IQ3_XXS"


def _by_quantize(key: str, label: str, how: str, arguments: tuple[str, ...], *, imatrix: bool = False) -> Row:
    """A row of llama-quantize's, or of ggml's where that refuses it."""
    key, how = key + "-imatrix" * imatrix, how + ", imatrix" * imatrix
    if arguments[-1] == _BY_GGML and not imatrix:
        return Row(key, label, f"{how}, by ggml", "ggml", arguments[-1:])
    return Row(key, label, how, "llama-quantize", arguments, imatrix)


def _llama_quantize_rows() -> list[Row]:
    rows = []
    for name, pure, takes_matrix in _TYPES:
        ways = (False, True)[: 1 + takes_matrix]
        mixes = [imatrix for imatrix in ways if imatrix or name not in NEED_MATRIX]
        rows += [_by_quantize(name.lower(), name, "mix", (name,), imatrix=imatrix) for imatrix in mixes]
        if pure:
            key, arguments = f"{pure.lower()}-pure", ("--pure", name)
            known = mixes if name != _BY_GGML else ways
            rows += [_by_quantize(key, pure, "pure", arguments, imatrix=imatrix) for imatrix in known]
    for name in ("TQ1_0", "TQ2_0"):
        rows.append(_by_quantize(name.lower(), name, "mix", (name,)))
        rows.append(_by_quantize(f"{name.lower()}-pure", name, "pure", ("--pure", name)))
    return rows


#: Sizes that types are chosen for, bits a weight over all tensors: a front just below llama-quantize's mixes.
_FRONT: Final = (2.7, 3.4, 3.85, 4.3, 4.65, 5.0)
#: Those of them that are calibrated in sequence too.
_BEST: Final = (2.7, 3.85)


def _by_package(key: str, label: str, how: str, **options: Any) -> Row:
    """A row of the converter's. Of ``options`` the flags of a row are taken out."""
    flags = {name: options.pop(name, False) for name in ("imatrix", "calibrated", "sequential")}
    return Row(key, label, how, "package", options=tuple(options.items()), **flags)


def _named(row: TrellisType) -> tuple[str, dict[str, Any]]:
    """What keys of rows of a trellis type end with, and the options that name it; both empty of the default."""
    return ("", {}) if row is DEFAULT else (f"-{row.identifier}", {"outtype": row.identifier})


def _package_rows() -> list[Row]:
    """Rows of the converter; norms are folded where a row says so."""
    rows = []
    kinds: list[tuple[str, str, str, dict[str, Any]]] = []
    for row in _LONG:
        mark, named = _named(row)
        kinds += [
            (f"convert{mark}", row.name, "mix, folded", {**named, "fold_norms": True}),
            (f"convert{mark}-pure", row.name, "pure, folded", {**named, "pure": True, "fold_norms": True}),
        ]
    kinds += [
        # llama.cpp's own types, rounded with statistics, for any llama.cpp; norms are not folded.
        ("convert-q4_k-pure", "Q4_K", "pure", {"outtype": "q4_k_s", "pure": True}),
        ("convert-q4_k_m", "Q4_K_M", "mix", {"outtype": "q4_k_m"}),
    ]
    names = {row.name for row in FAMILY.values()}
    for key, label, how, options in kinds:
        own = label in names
        sequential = f"{how}, calibrated in sequence"
        rows += [_by_package(key, label, how, **options)] if own else []
        rows.append(_by_package(f"{key}-calibrated", label, f"{how}, calibrated", calibrated=True, **options))
        rows += [_by_package(f"{key}-sequential", label, sequential, sequential=True, **options)] if own else []
        rows.append(
            _by_package(f"{key}-fisher", label, f"{sequential}, Fisher", sequential=True, **options, fisher=True)
        )
    for bits in _FRONT:
        sized = {"target_bpw": bits, "fold_norms": True}
        how = f"types for {bits:g} bits, calibrated"
        rows.append(_by_package(f"convert-bpw-{bits:g}", "mix", how, calibrated=True, **sized))
    for bits in _BEST:
        how = f"types for {bits:g} bits, calibrated in sequence, Fisher"
        best = {"target_bpw": bits, "fisher": True, "fold_norms": True}
        rows.append(_by_package(f"convert-bpw-{bits:g}-fisher", "mix", how, sequential=True, **best))
    others: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("unfolded", "pure, by the package", {}),
        ("fast", "pure, folded, fast", {"effort": "fast", "fold_norms": True}),
        ("ternary", "pure, folded, literal ternary", {"codec": "ternary", "fold_norms": True}),
    )
    rows += [
        _by_package(f"convert-pure-{key}", DEFAULT.name, how, pure=True, **options) for key, how, options in others
    ]
    return rows


#: KV cache types of the second table; the default is F16.
_CACHES: Final = ("q8_0", "q4_0")


def cache_rows(weights: Row, short: str) -> list[Row]:
    """Rows with the weights of ``weights`` and a quantized KV cache, rotated (llama.cpp's default) and not."""
    rows = []
    for cache in _CACHES:
        how = f"{weights.how}; KV {cache}".removeprefix("; ")
        rotated = replace(
            weights, key=f"kv-{short}-{cache}", how=f"{how}, rotated",
            runtime=("-ctk", cache, "-ctv", cache, "-fa", "on"),
        )  # fmt: skip
        off = (("LLAMA_ATTN_ROT_DISABLE", "1"),)
        rows += [rotated, replace(rotated, key=f"{rotated.key}-unrotated", how=f"{how}, not rotated", environment=off)]
    return rows


def weight_rows() -> list[Row]:
    """Every row of the first table."""
    return [Row("f16", "F16", "", "none"), *_llama_quantize_rows(), *_package_rows()]


def kv_rows() -> list[Row]:
    """Every row of the second table: F16 weights, and those of the converter's default."""
    by_key = {row.key: row for row in weight_rows()}
    return [*cache_rows(by_key["f16"], "f16"), *cache_rows(by_key["convert"], DEFAULT.identifier)]


# ------------------------------------------------------------------------------------------------- a real model

#: Embedding and output stay in F16, so that a row shows its type alone.
_OUTER: Final = ("token_embedding_type", "output_tensor_type")


def _upstream_row(qtype: str, *, imatrix: bool) -> Row:
    """The layers in a type, by llama-quantize."""
    name = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S"}.get(qtype, qtype)
    kept = [argument for option in _OUTER for argument in (f"--{option.replace('_', '-')}", "f16")]
    return _by_quantize(qtype.lower(), qtype, "layers", ("--pure", *kept, name), imatrix=imatrix)


def _our_row(row: TrellisType, way: str, how: str, **options: Any) -> Row:
    """The layers in a trellis type, by the converter."""
    options = {"pure": True, **dict.fromkeys(_OUTER, "f16"), **_named(row)[1], **options}
    return _by_package(row.identifier + f"-{way}" * bool(way), row.name, f"layers, {how}", **options)


def layer_rows(*, short: bool = False) -> list[Row]:
    """Of a real model: the matrices of the layers in one type, embedding and output in F16.

    Args:
        short: with the types in shorter blocks, and what llama-quantize takes in their place, for a model with rows
            that are no multiple of 256.
    """
    plain = {"fold_norms": False, "equalize": False}
    ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("", "no data", {"fold_norms": False}),
        ("folded", "no data, folded", {"fold_norms": True}),
        ("equalize", "equalized, no text given", {"fold_norms": False, "equalize": True}),
        ("imatrix-plain", "imatrix, not equalized", {"imatrix": True, **plain}),
        ("imatrix", "imatrix, equalized", {"imatrix": True, "fold_norms": False, "equalize": True}),
        ("calibrate-plain", "calibrated in sequence, not equalized", {"sequential": True, **plain}),
        ("calibrate", "calibrated in sequence", {"sequential": True}),
        ("fisher", "calibrated in sequence, Fisher", {"sequential": True, "fisher": True}),
    )
    # What equalization and folding are worth is shown of one type.
    rows = [
        _our_row(row, way, how, **options)
        for row in (*_LONG, *_SHORT * short)
        for way, how, options in ways
        if row is DEFAULT or way in ("", "imatrix", "calibrate", "fisher")
    ]
    for qtype in ("Q3_K", "IQ3_S", "IQ3_XXS"):
        rows += [_upstream_row(qtype, imatrix=imatrix) for imatrix in (False, True)]
    others = ("IQ4_XS", "Q4_K", "Q2_K", "IQ2_XXS", *("IQ4_NL",) * short)
    return [*rows, *(_upstream_row(qtype, imatrix=True) for qtype in others)]


def mix_rows(*, short: bool = False) -> list[Row]:
    """Of a real model: whole files as a user makes them, embedding and output quantized too.

    Args:
        short: as of :func:`layer_rows`.
    """
    sized = tuple(
        (
            f"bpw-{bits:g}",
            f"types for {bits:g} bits, calibrated in sequence, Fisher",
            {"sequential": True, "target_bpw": bits, "fisher": True},
        )
        for bits in (*_BEST, 4.3)
    )
    ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("", "mix, no data", {}),
        ("-imatrix", "mix, imatrix", {"imatrix": True}),
        ("-calibrate", "mix, calibrated in sequence", {"sequential": True}),
        ("-fisher", "mix, calibrated in sequence, Fisher", {"sequential": True, "fisher": True}),
    )
    theirs = ("IQ3_XXS", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q2_K", "IQ2_XXS", *("Q3_K_S", "IQ4_NL") * short)
    return [
        *(
            _by_package(f"mix-{row.identifier}{way}", row.name, how, **made, **_named(row)[1])
            for row in (*_LONG, *_SHORT * short)
            for way, how, made in ways
        ),
        *(_by_package(f"mix-{key}", "mix", how, **made) for key, how, made in sized),
        *(_by_quantize(f"mix-{name.lower()}", name, "mix", (name,), imatrix=True) for name in theirs),
    ]
