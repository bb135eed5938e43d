"""What may not be lost: least ratios and speeds of the CPU kernels, and how a processor's results meet them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scripts.bench import results

#: Test, numerator, denominator, least ratio.
RATIOS: Final = (
    ("generation", "ITQ3_S", "Q4_K", 1.25),
    ("generation", "ITQ3_S", "Q3_K", 1.6),
    ("generation", "ITQ3_S", "IQ3_S", 3.5),
    ("generation", "ITQ3_S (AVX2)", "Q4_K (AVX2)", 1.25),
    ("generation", "ITQ3_S (AVX2)", "Q3_K (AVX2)", 1.8),
    ("generation", "ITQ3_S (AVX2)", "IQ3_S (AVX2)", 3.5),
    ("generation", "TQ2_0", "TQ2_0 (stock)", 1.05),
    ("generation", "TQ1_0", "TQ1_0 (stock)", 1.5),
    ("mapped", "ITQ3_S", "Q3_K", 1.0),
    ("mapped", "TQ2_0", "Q3_K", 1.0),
    ("mapped", "ITQ3_S (AVX2)", "Q3_K (AVX2)", 1.0),
    ("mapped", "TQ2_0 (AVX2)", "Q3_K (AVX2)", 1.0),
    ("products_1", "ITQ3_S", "Q3_K", 2.8),
    ("products_1", "ITQ3_S", "Q4_K", 1.3),
    ("products_1", "ITQ3_S", "IQ3_S", 4.0),
    ("products_1", "ITQ3_S (AVX2)", "Q3_K (AVX2)", 1.3),
    ("products_4", "ITQ3_S", "Q4_K", 1.8),
    ("products_4", "ITQ3_S (AVX2)", "Q4_K (AVX2)", 1.2),
    ("products_4", "TQ2_0", "TQ2_0 (stock)", 2.0),
    ("products_4", "TQ1_0", "TQ1_0 (stock)", 2.5),
    ("prompt", "ITQ3_S", "IQ3_S", 1.1),
    ("prompt", "ITQ3_S", "Q3_K", 1.1),
    ("prompt", "ITQ3_S", "Q4_K", 1.6),
    ("prompt", "ITQ3_S (AVX2)", "Q4_K (AVX2)", 1.7),
    ("prompt", "ITQ3_S (AVX2)", "Q3_K (AVX2)", 1.3),
    ("prompt", "ITQ3_S (AVX2)", "IQ3_S (AVX2)", 1.2),
    ("prompt", "TQ2_0", "TQ2_0 (stock)", 2.5),
    ("prompt", "TQ1_0", "TQ1_0 (stock)", 4.0),
    ("quantize", "ITQ3_S", "IQ3_S", 1.0),
    *(
        (test, f"ITQ2_S{build}", f"{other}{build}", least)
        for build in ("", " (AVX2)")
        for test, other, least in (
            ("products_1", "ITQ3_S", 1.05), ("products_1", "IQ2_XXS", 5.0),
            ("generation", "ITQ3_S", 1.25), ("generation", "IQ2_XXS", 3.5), ("generation", "Q2_K", 1.7),
            ("prompt", "IQ2_XXS", 1.5), ("prompt", "Q2_K", 1.5),
        )
    ),
    ("quantize", "ITQ2_S", "IQ2_XXS", 10.0),
    ("quantize", "ITQ3_S (calibrated, avx2)", "ITQ3_S", 0.067),
    ("quantize", "ITQ3_S (calibrated, avx512)", "ITQ3_S", 0.067),
    *(
        ("products_1", f"ITQ3_N{build}", f"{other}{build}", least)
        for build in ("", " (AVX2)") for other, least in (("ITQ3_S", 0.9), ("IQ4_NL", 1.2))
    ),
)  # fmt: skip
#: Test, what, its unit, least value.
VALUES: Final = (
    ("share_1", "ITQ3_S", "share of one core's memory speed", 0.85),
    ("share_1", "ITQ3_S (AVX2)", "share of one core's memory speed", 0.85),
    ("share_1", "TQ2_0", "share of one core's memory speed", 0.8),
    ("share_1", "TQ2_0 (AVX2)", "share of one core's memory speed", 0.8),
    ("quantize", "ITQ3_S", "M weights/s", 30.0),
    ("quantize", "ITQ3_S (numpy)", "M weights/s", 0.8),
)


@dataclass(frozen=True)
class Check:
    """A target and what was measured of it.

    Attributes:
        test: a test, as the results name it.
        what: what is compared.
        got: the ratio or value, None if it was not measured.
        least: what is asked.
    """

    test: str
    what: str
    got: float | None
    least: float

    @property
    def text(self) -> str:
        """For a table; one that is missed says so."""
        if self.got is None:
            return ""
        return f"{self.got:.2f}{'' if self.got >= self.least else ' (missed)'}"


def checks(file: results.File) -> list[Check]:
    """Every target beside what a processor's file has of it."""
    found = [
        Check(test, f"{over} over {under}", results.ratio(file, test, over, under), least)
        for test, over, under, least in RATIOS
    ]
    values = [
        Check(test, f"{name}, {unit}", results.median(file, test, name), least) for test, name, unit, least in VALUES
    ]
    return found + values
