"""The text of a calibration, as windows of tokens."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from ..base.errors import UserError
from ..checkpoint.patches import patched
from .options import CalibrationOptions

# Characters of text for each token of a window: more than any tokenizer needs on average.
_CHARACTERS: Final = 8
# Length of a window unless another is asked for: at most the longest, and shorter, down to the least, where the tokens
# would be fewer windows than so many: many places of a text say more than few.
_LONGEST: Final = 2048
_LEAST: Final = 512
_WINDOWS: Final = 40
# How far a window begins behind its place at most, so that it begins with a word: one that starts inside a word is
# unlike anything the model has seen, but not every script has spaces.
_NEAR: Final = 64
# What tokens of the usual tokenizers begin with where a word does, and end with where the next begins a line.
_BEFORE_A_WORD: Final = ("\u2581", "\u0120")
_BEFORE_A_LINE: Final = ("\n", "\u010a", "<0x0A>")


def windows(options: CalibrationOptions, longest: int, messages: TextIO | None = None) -> np.ndarray:
    """Windows of tokens from places spread evenly over the text, of which no two of a file share a token.

    They are as many as are asked for, or as the text holds. A text that is given twice, under whatever names, counts
    once, and so does a window.

    Args:
        longest: context of the model.
        messages: where it is said if the text holds fewer tokens than are asked for.

    Returns:
        int64 (windows, context), each with the tokens before it that the model's tokenizer puts before a text.

    Raises:
        UserError: a text cannot be read, or has not one window; the context does not fit the model.
    """
    planned = options.context or min(longest, usual_context(options.tokens))
    if not 16 <= planned <= longest:
        raise UserError(options.model, f"a context of {planned} does not fit it", f"give 16 to {longest}")
    with patched(options.model, options.trust_remote_code) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    before = _before_a_text(tokenizer)
    files = {read_text(path): path for path in options.text}

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    texts: list[list[list[int]]] = []
    for text, count in zip(files, _shares(max(1, options.tokens // planned), len(files)), strict=True):
        # Of a long text, only what is needed is made tokens of.
        texts.append([encoded(piece) for piece in excerpts(text, max(1, count), planned * _CHARACTERS)])
    held = sum(len(ids) for pieces in texts for ids in pieces)
    context = options.context or min(longest, usual_context(min(options.tokens, held)))
    asked = max(1, options.tokens // context)
    rows: dict[tuple[int, ...], None] = {}
    for path, pieces, count in zip(files.values(), texts, _shares(asked, len(files)), strict=True):
        found = [
            (*before, *ids[start : start + context - len(before)])
            for ids, part in zip(pieces, _shares(max(1, count), len(pieces)), strict=True)
            for start in places(tokenizer.convert_ids_to_tokens(ids), part, context - len(before))
        ]
        if not found:
            raise UserError(path, f"is too short for a window of {context} tokens", "give more text, or less --context")
        rows.update(dict.fromkeys(found))
    if len(rows) < asked and messages is not None:
        what = f"{len(rows)} windows of {context} tokens, {len(rows) * context} of the {options.tokens} asked for"
        print(f"note: the text holds {what}", file=messages)
    return np.array(list(rows), dtype=np.int64)


def _shares(count: int, parts: int) -> list[int]:
    """A count dealt out evenly."""
    return [count * (number + 1) // parts - count * number // parts for number in range(parts)]


def _before_a_text(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that a tokenizer puts before a text, such as one that begins a sequence."""
    whole, text = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    return next((tuple(whole[:at]) for at in range(len(whole)) if whole[at : at + len(text)] == text), ())


def usual_context(tokens: int) -> int:
    """The length of a window where none is asked for: a power of two."""
    context = _LONGEST
    while context > _LEAST and tokens < _WINDOWS * context:
        context //= 2
    return context


def excerpts(text: str, count: int, length: int) -> list[str]:
    """Pieces of so many characters, one from each of ``count`` equal parts of a text; all of one that is shorter."""
    if len(text) <= count * length:
        return [text]
    return [text[start : start + length] for start in (len(text) * number // count for number in range(count))]


def places(tokens: Sequence[str], count: int, length: int) -> list[int]:
    """Where disjoint windows begin, spread evenly over tokens, with a word where one begins near.

    Args:
        tokens: as the tokenizer calls them.
        count: of windows at most.
    """
    count = min(count, len(tokens) // length)
    bounds = [len(tokens) * number // max(1, count) for number in range(count + 1)]
    return [
        next((at for at in range(start, min(stop - length, start + _NEAR) + 1) if _begins_word(tokens, at)), start)
        for start, stop in pairwise(bounds)
    ]


def _begins_word(tokens: Sequence[str], at: int) -> bool:
    return at == 0 or tokens[at].startswith(_BEFORE_A_WORD) or tokens[at - 1].endswith(_BEFORE_A_LINE)


def read_text(path: Path) -> str:
    """A text file, UTF-8, plain or compressed with xz; UserError if it cannot be read."""
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read as text: {error}", "give UTF-8 text, plain or .xz") from error
