"""Which cases of a parametrised test make test runs, and which wait for make test-all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def crossed(*lists: Iterable[Any]) -> list[Any]:
    """Every combination. ``make test`` runs those that differ from the first of each list in one place at most."""
    values = [list(items) for items in lists]
    return some(
        product(*values), lambda *case: sum(a != own[0] for a, own in zip(case, values, strict=True)) <= 1
    )  # fmt: skip


def some(cases: Iterable[Any], short: Callable[..., bool], mark: Any = pytest.mark.long) -> list[Any]:
    """The cases, those for which ``short`` is false marked."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if short(*values) else mark))
    return found
