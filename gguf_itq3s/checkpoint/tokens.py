"""Tokens that a tokenizer has and the model has no row of its embedding for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def beyond(folder: Path, rows: int) -> dict[int, str]:
    """Tokens that were added to a tokenizer and lie beyond the rows of an embedding, with their text.

    Files that are no tokenizer's are left to who reads them.
    """
    added: list[tuple[Any, Any]] = []
    if isinstance(found := _read(folder / "added_tokens.json"), dict):
        added += [(number, text) for text, number in found.items()]
    if isinstance(found := _entry(folder / "tokenizer_config.json", "added_tokens_decoder"), dict):
        added += [(number, token.get("content")) for number, token in found.items() if isinstance(token, dict)]
    if isinstance(found := _entry(folder / "tokenizer.json", "added_tokens"), list):
        added += [(token.get("id"), token.get("content")) for token in found if isinstance(token, dict)]
    numbers = {int(number): str(text) for number, text in added if str(number).isdecimal()}
    return {number: numbers[number] for number in sorted(numbers) if number >= rows}


def named(tokens: dict[int, str]) -> str:
    """The first of some tokens, for a message, and how many there are."""
    number, text = next(iter(tokens.items()))
    return f"{text!r:.80} ({number})" + (f" and {len(tokens) - 1} more" if len(tokens) > 1 else "")


def _entry(path: Path, name: str) -> Any:
    found = _read(path)
    return found.get(name) if isinstance(found, dict) else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
