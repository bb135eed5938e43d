"""Memory planning where the file holds types that only the built library writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from gguf_itq3s.cli import convert_main
from gguf_itq3s.inspect import plan


@pytest.mark.parametrize("name", ["llama-odd"])
def test_sizes_are_those_of_the_file(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.gguf"
    assert convert_main([str(checkpoint(name)), str(out), "--pure", "--effort", "fast"]) == 0
    written = sum(int(t.n_bytes) for t in gguf.GGUFReader(out).tensors)
    planned = plan.plan(checkpoint(name), 128, None)["types"]["ITQ3_S"]["pure_bytes"]
    assert planned == pytest.approx(written, rel=1e-9)
