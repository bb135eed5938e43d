"""docs/converting.md has every option of upstream's converter and of llama-quantize, and says the truth about each."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import pytest

from gguf_itq3s import upstream
from gguf_itq3s.convert.command import add_arguments

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "converting.md").read_text()


def of_converter() -> set[str]:
    """Option names in the source of convert_hf_to_gguf.py."""
    tree = ast.parse((upstream.fetch_source() / "convert_hf_to_gguf.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    names = [str(argument.value) for call in added for argument in call.args if isinstance(argument, ast.Constant)]
    return {name for name in names if name.startswith("--")} | {"--help"}


def of_quantize() -> set[str]:
    """Option names in the source of llama-quantize."""
    source = (upstream.fetch_source() / "tools" / "quantize" / "quantize.cpp").read_text()
    return set(re.findall(r'strcmp\(argv\[arg_idx\], "(--[a-z-]+)"\)', source))


def rows(section: str) -> tuple[set[str], set[str]]:
    """The options of a section's two tables: taken, and left out with a reason."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    taken, left_out = text.split("\nLeft out:\n")
    found = []
    for table in (taken, left_out):
        cells = re.findall(r"^\| `(--[a-z0-9-]+)` \|(.*)\|$", table, re.MULTILINE)
        assert len(cells) == len({name for name, _ in cells})
        assert all(reason.strip() or name == "--help" for name, reason in cells)
        found.append({name for name, _ in cells})
    return found[0], found[1]


def of_ours() -> set[str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {name for action in actions for name in action.option_strings if name.startswith("--")}


@pytest.mark.parametrize(
    "section,expected", [("Options of convert_hf_to_gguf.py", of_converter), ("Options of llama-quantize", of_quantize)]
)
def test_every_option_is_on_the_page(section: str, expected: object) -> None:
    taken, left_out = rows(section)
    assert callable(expected)
    theirs = expected()
    assert len(theirs) > 12 and taken | left_out == theirs and not taken & left_out
    assert taken <= of_ours(), "said to be taken"
    assert not left_out & of_ours(), "said to be left out"


def test_options_of_our_own_are_named() -> None:
    text = PAGE.split("## Options of its own\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(--[a-z-]+)`", text)) - {"--help"}
    others = {name for name in of_ours() if not name.startswith("--no-") or f"--{name[5:]}" not in of_ours()}
    assert named == others - of_converter() - of_quantize()
