"""scripts/tables/autoround.py: AutoRound is no dependency."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_itq3s.base.errors import UserError
from scripts.tables import autoround


def test_without_the_program_one_line_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not installed.*pip install"):
        autoround.program(str(tmp_path / "auto-round"))
