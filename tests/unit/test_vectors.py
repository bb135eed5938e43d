"""The reference blocks of short blocks are what an implementation of its own makes, and what the codec decodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.family import FAMILY
from scripts.check import vectors

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", vectors.TYPES)
def test_files_are_what_the_script_writes(name: str) -> None:
    stored, made = np.load(DATA / f"{name}_decode.npz"), vectors.vectors(name)
    assert set(stored.files) == set(made) and len(made["blocks"]) == 64
    for key in made:
        np.testing.assert_array_equal(stored[key], made[key])


@pytest.mark.parametrize("name", vectors.TYPES)
def test_codec_decodes_them(name: str) -> None:
    (row,) = [row for row in FAMILY.values() if row.identifier == name]
    stored = np.load(DATA / f"{name}_decode.npz")
    weights = blocks.decode_blocks(stored["blocks"], row.format)
    largest = np.abs(stored["weights"]).max(axis=1, keepdims=True)
    assert np.all(np.abs(weights - stored["weights"]) <= 1e-6 * largest)
