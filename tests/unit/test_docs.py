"""What the documents say is what the programs do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from gguf_itq3s.codec.family import FAMILY

ROOT = Path(__file__).resolve().parents[2]


def test_the_format_description() -> None:
    """Levels and offsets of every type, in the order of the table."""
    page = (ROOT / "docs" / "format.md").read_text()
    tables = {tuple(row.format.levels): row.format.levels for row in FAMILY.values()}.values()
    subsets = [(subset, levels[subset::8].tolist()) for levels in tables for subset in range(8)]
    found = re.findall(r"^\| ([0-7]) \| (-[0-9 -]+) \|$", page, re.MULTILINE)
    assert [(int(subset), [int(n) for n in levels.split()]) for subset, levels in found] == subsets
    offsets = [
        (offset, field)
        for row in FAMILY.values() for fmt in [row.format]
        for offset, field in [
            (0, f"uint8 qs[{fmt.symbol_bytes}]"), (fmt.symbol_bytes, f"uint8 sel[{fmt.block // 8}]"),
            (fmt.scale_offset, "fp16 d"), *[(fmt.scale_offset + 2, "fp16 z")] * fmt.zero_point,
        ]
    ]  # fmt: skip
    assert [
        (int(at), field) for at, field in re.findall(r"^\| (\d+) \| `(\w+ [^`]+)` \|", page, re.MULTILINE)
    ] == offsets
    for row in FAMILY.values():
        assert f"| tensor type `{row.name}` | {int(row.type)} |" in page
        assert f"| file type `MOSTLY_{row.name}` in `general.file_type` | {int(row.file_type)} |" in page


def test_make_without_a_target_lists_the_targets() -> None:
    done = subprocess.run(["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True)
    for target in ("demo", "test", "build", "lint", "clean"):
        assert re.search(rf"^ +make {target} ", done.stdout, re.MULTILINE)
