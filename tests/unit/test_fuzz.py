"""Damaged models as fuzzing makes them, those that it found, and what the check says of itself."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.check import fuzz

sys.path.insert(0, str(fuzz.FUZZ))
damage = importlib.import_module("damage")

FOUND = [
    (part, path) for part in sorted(damage.COMMANDS) for path in sorted((fuzz.FUZZ / "found" / part).glob("*.json"))
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is damaged."""
    return damage.make(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(damage.COMMANDS))
def test_an_undamaged_model_is_taken(part: str, whole: Path, tmp_path: Path) -> None:
    for command in damage.COMMANDS[part]:
        assert not damage.run_case(part, {"command": command, "damage": []}, whole, tmp_path), command


@pytest.mark.parametrize(("part", "path"), FOUND, ids=lambda value: getattr(value, "stem", value))
def test_what_was_found(part: str, path: Path, whole: Path, tmp_path: Path) -> None:
    damage.run_case(part, json.loads(path.read_text()), whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(damage.COMMANDS))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_random_damage(part: str, seed: int, whole: Path, tmp_path: Path) -> None:
    damage.run_case(part, damage.random_case(part, whole, random.Random(seed)), whole, tmp_path)


def test_a_command_that_ends_in_a_traceback_is_seen(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"command": "plan", "damage": []}

    def leaves_a_file(_arguments: list[str]) -> int:
        (tmp_path / "out" / "out.gguf.partial").touch()
        return 0

    programs: dict[str, Any] = {
        "internal error": lambda _: print("error: internal error: KeyError: 'x'") or 1,
        "with the errors": lambda _: 1,
        "KeyError": lambda _: vars(fuzz)["x"],
        "left": leaves_a_file,
    }
    for message, program in programs.items():
        monkeypatch.setattr(damage, "program", program)
        with pytest.raises(damage.CaseError, match=message):
            damage.run_case("checkpoint", case, whole, tmp_path)


def test_damages_are_applied(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    damaged = tmp_path / "x.safetensors"
    damaged.write_bytes(damage.write_json(damaged, b"", header) + b"12345678")
    damage.apply(tmp_path, [["set", "x.safetensors", ["a", "shape", 0], 3], ["bytes", "x.safetensors", -1, "00"]])
    data = damaged.read_bytes()
    assert damage.read_json(damaged, data) == {"a": {**header["a"], "shape": [3]}} and data.endswith(b"1234567\0")
    damage.apply(tmp_path, [["delete", "x.safetensors", ["a", "dtype"]], ["cut", "x.safetensors", 40]])
    assert len(damaged.read_bytes()) == 40
    damage.apply(tmp_path, [["remove", "x.safetensors"]])
    assert not damaged.exists()


def test_the_page_has_the_counts() -> None:
    results = json.loads(fuzz.RESULTS.read_text())
    page = fuzz.PAGE.read_text()
    assert fuzz.table(results) in page
    assert set(results) == {part.name for part in fuzz.PARTS}
    assert not any(entry["failures"] for entry in results.values())
