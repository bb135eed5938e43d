"""The rows of the evaluation: what each is called and how its file is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

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


#: Types of llama-quantize: name, name of the ``--pure`` row (None: same as another's), whether it takes a matrix.
_TYPES: Final = (
    ("Q8_0", "Q8_0", False),
    ("Q4_K_M", "Q4_K", True),
    ("IQ4_XS", "IQ4_XS", True),
    ("Q3_K_M", "Q3_K", True),
    ("Q3_K_S", None, True),
    ("IQ3_S", "IQ3_S", True),
    ("IQ3_XXS", "IQ3_XXS", True),
    ("ITQ3_S", "ITQ3_S", True),
)

#: llama-quantize refuses it without an importance matrix, for its mix even needs IQ2_S; ggml does not.
_NEEDS_MATRIX: Final = "IQ3_XXS"


def _by_quantize(key: str, label: str, how: str, arguments: tuple[str, ...], *, imatrix: bool = False) -> Row:
    """A row of llama-quantize's, or of ggml's where that refuses it."""
    key, how = key + "-imatrix" * imatrix, how + ", imatrix" * imatrix
    if arguments[-1] == _NEEDS_MATRIX and not imatrix:
        return Row(key, label, f"{how}, by ggml", "ggml", arguments[-1:])
    return Row(key, label, how, "llama-quantize", arguments, imatrix)


def _llama_quantize_rows() -> list[Row]:
    rows = []
    for name, pure, takes_matrix in _TYPES:
        ways = (False, True)[: 1 + takes_matrix]
        mixes = [imatrix for imatrix in ways if imatrix or name != _NEEDS_MATRIX]
        rows += [_by_quantize(name.lower(), name, "mix", (name,), imatrix=imatrix) for imatrix in mixes]
        if pure:
            key, arguments = f"{pure.lower()}-pure", ("--pure", name)
            rows += [_by_quantize(key, pure, "pure", arguments, imatrix=imatrix) for imatrix in ways]
    for name in ("TQ1_0", "TQ2_0"):
        rows.append(_by_quantize(name.lower(), name, "mix", (name,)))
        rows.append(_by_quantize(f"{name.lower()}-pure", name, "pure", ("--pure", name)))
    return rows


#: Sizes that types are chosen for, bits a weight over all tensors: a front just below llama-quantize's mixes.
_FRONT: Final = (3.4, 3.85, 4.3, 4.65, 5.0)
#: The one of them that is calibrated in sequence too.
_BEST: Final = 3.85


def _by_package(key: str, label: str, how: str, **options: Any) -> Row:
    """A row of the converter's. Of ``options`` the flags of a row are taken out."""
    flags = {name: options.pop(name, False) for name in ("imatrix", "calibrated", "sequential")}
    return Row(key, label, how, "package", options=tuple(options.items()), **flags)


def _package_rows() -> list[Row]:
    """Rows of the converter; norms are folded where a row says so."""
    rows = []
    kinds: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("convert", "ITQ3_S", "mix, folded", {"fold_norms": True}),
        ("convert-pure", "ITQ3_S", "pure, folded", {"pure": True, "fold_norms": True}),
        # llama.cpp's own types, rounded with statistics, for any llama.cpp; norms are not folded.
        ("convert-q4_k-pure", "Q4_K", "pure", {"outtype": "q4_k_s", "pure": True}),
        ("convert-q4_k_m", "Q4_K_M", "mix", {"outtype": "q4_k_m"}),
    )
    for key, label, how, options in kinds:
        own = label == "ITQ3_S"
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
    how = f"types for {_BEST:g} bits, calibrated in sequence, Fisher"
    best = {"target_bpw": _BEST, "fisher": True, "fold_norms": True}
    rows.append(_by_package(f"convert-bpw-{_BEST:g}-fisher", "mix", how, sequential=True, **best))
    others: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("unfolded", "pure, by the package", {}),
        ("fast", "pure, folded, fast", {"effort": "fast", "fold_norms": True}),
        ("ternary", "pure, folded, literal ternary", {"codec": "ternary", "fold_norms": True}),
    )
    rows += [_by_package(f"convert-pure-{key}", "ITQ3_S", how, pure=True, **options) for key, how, options in others]
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
    return [*cache_rows(by_key["f16"], "f16"), *cache_rows(by_key["convert"], "itq3_s")]


# ------------------------------------------------------------------------------------------------- a real model

#: Embedding and output stay in F16, so that a row shows its type alone.
_OUTER: Final = ("token_embedding_type", "output_tensor_type")


def _upstream_row(qtype: str, *, imatrix: bool) -> Row:
    """The layers in a type, by llama-quantize."""
    name = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S"}.get(qtype, qtype)
    kept = [argument for option in _OUTER for argument in (f"--{option.replace('_', '-')}", "f16")]
    return _by_quantize(qtype.lower(), qtype, "layers", ("--pure", *kept, name), imatrix=imatrix)


def _our_row(key: str, how: str, **options: Any) -> Row:
    """The layers in ITQ3_S, by the converter."""
    return _by_package(key, "ITQ3_S", f"layers, {how}", pure=True, **dict.fromkeys(_OUTER, "f16"), **options)


def layer_rows() -> list[Row]:
    """Of a real model: the matrices of the layers in one type, embedding and output in F16."""
    plain = {"fold_norms": False, "equalize": False}
    rows = [
        _our_row("itq3_s", "no data", fold_norms=False),
        _our_row("itq3_s-folded", "no data, folded", fold_norms=True),
        _our_row("itq3_s-equalize", "equalized, no text given", fold_norms=False, equalize=True),
        _our_row("itq3_s-imatrix-plain", "imatrix, not equalized", imatrix=True, **plain),
        _our_row("itq3_s-imatrix", "imatrix, equalized", imatrix=True, fold_norms=False, equalize=True),
        _our_row("itq3_s-calibrate-plain", "calibrated in sequence, not equalized", sequential=True, **plain),
        _our_row("itq3_s-calibrate", "calibrated in sequence", sequential=True),
        _our_row("itq3_s-fisher", "calibrated in sequence, Fisher", sequential=True, fisher=True),
    ]
    for qtype in ("Q3_K", "IQ3_S", "IQ3_XXS"):
        rows += [_upstream_row(qtype, imatrix=imatrix) for imatrix in (False, True)]
    return [*rows, *(_upstream_row(qtype, imatrix=True) for qtype in ("IQ4_XS", "Q4_K"))]


def mix_rows() -> list[Row]:
    """Of a real model: whole files as a user makes them, embedding and output quantized too."""
    sized = tuple(
        (
            f"bpw-{bits:g}",
            f"types for {bits:g} bits, calibrated in sequence, Fisher",
            {"sequential": True, "target_bpw": bits, "fisher": True},
        )
        for bits in (_BEST, 4.3)
    )
    ours: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("itq3_s", "mix, no data", {}),
        ("itq3_s-imatrix", "mix, imatrix", {"imatrix": True}),
        ("itq3_s-calibrate", "mix, calibrated in sequence", {"sequential": True}),
        ("itq3_s-fisher", "mix, calibrated in sequence, Fisher", {"sequential": True, "fisher": True}),
        *sized,
    )
    theirs = ("IQ3_XXS", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_K_M")
    return [
        *(_by_package(f"mix-{key}", "mix" if "bpw" in key else "ITQ3_S", how, **made) for key, how, made in ours),
        *(_by_quantize(f"mix-{name.lower()}", name, "mix", (name,), imatrix=True) for name in theirs),
    ]
