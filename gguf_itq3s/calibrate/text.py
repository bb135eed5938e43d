"""The text of a calibration, as windows of tokens."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from ..base.errors import UserError
from ..checkpoint.patches import patched
from .options import BUNDLED, CalibrationOptions

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
_GOLDEN: Final = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Text:
    """Windows of tokens.

    Attributes:
        tokens: int64 (windows, context).
        of: int64 (windows,), the file that each is from.
        files: where they are from.
    """

    tokens: np.ndarray
    of: np.ndarray
    files: tuple[Path, ...]


def windows(options: CalibrationOptions, longest: int, messages: TextIO | None = None) -> np.ndarray:
    """The tokens of :func:`read`."""
    return read(options, longest, messages).tokens


def read(options: CalibrationOptions, longest: int, messages: TextIO | None = None) -> Text:
    """Windows of tokens from places spread evenly over the texts, of which no two of a file share a token.

    They are as many as are asked for, or as the texts hold. A text that is given twice, under whatever names, counts
    once, and so does a window. Control tokens are read where the model's chat template writes them, nowhere else.

    Args:
        longest: context of the model.
        messages: where it is said if the text holds fewer tokens than are asked for.

    Returns:
        windows, each with the tokens before it that the model's tokenizer puts before a text.

    Raises:
        UserError: a text cannot be read, or has not one window; the context does not fit the model.
    """
    planned = options.context or min(longest, usual_context(options.tokens))
    if not 16 <= planned <= longest:
        raise UserError(options.model, f"a context of {planned} does not fit it", f"give 16 to {longest}")
    with patched(options.model, options.trust_remote_code) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    before = _before_a_text(tokenizer)
    files: dict[str, tuple[Path, float]] = {}
    for path, part in zip(options.text, options.parts, strict=True):
        files.setdefault(read_text(path), (path, part))
    parts = [part for _, part in files.values()]

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
        return ids

    # Of a long text, only what is needed is made tokens of.
    texts: list[list[list[int]]] = []
    for (text, (path, _)), count in zip(files.items(), _shares(max(1, options.tokens // planned), parts), strict=True):
        if _has_records(path):
            # Windows that begin with a record leave up to half of the tokens out.
            texts.append(list(_records(path, text, tokenizer, encoded, before, 2 * count * planned)))
        else:
            texts.append([encoded(piece) for piece in excerpts(text, max(1, count), planned * _CHARACTERS)])
    held = sum(len(ids) for pieces in texts for ids in pieces)
    context = options.context or min(longest, usual_context(min(options.tokens, held)))
    asked = max(1, options.tokens // context)
    length = context - len(before)
    rows: dict[tuple[int, ...], int] = {}
    for number, ((path, _), pieces, count) in enumerate(zip(files.values(), texts, _shares(asked, parts), strict=True)):
        if _has_records(path):
            found = list(_packed(pieces, max(1, count), length))
        else:
            found = [
                tuple(ids[start : start + length])
                for ids, part in zip(pieces, _shares(max(1, count), [1.0] * len(pieces)), strict=True)
                for start in places(tokenizer.convert_ids_to_tokens(ids), part, length)
            ]
        if not found:
            raise UserError(path, f"is too short for a window of {context} tokens", "give more text, or less --context")
        for ids in found:
            rows.setdefault((*before, *ids), number)
    if len(rows) < asked and messages is not None:
        what = f"{len(rows)} windows of {context} tokens, {len(rows) * context} of the {options.tokens} asked for"
        print(f"note: the text holds {what}", file=messages)
    paths = tuple(path for path, _ in files.values())
    return Text(np.array(list(rows), dtype=np.int64), np.array(list(rows.values()), dtype=np.int64), paths)


def _shares(count: int, parts: Sequence[float]) -> list[int]:
    """A count dealt out by parts."""
    ends = np.floor(count * np.cumsum([0.0, *parts]) / sum(parts) + 1e-9).astype(int).tolist()
    return [stop - start for start, stop in pairwise(ends)]


def _has_records(path: Path) -> bool:
    return path.name.removesuffix(".xz").endswith(".jsonl")


def _records(
    path: Path, text: str, tokenizer: Any, encoded: Callable[[str], list[int]], before: tuple[int, ...], tokens: int
) -> Iterator[list[int]]:
    """Token ids of lines of a JSONL file, spread evenly over it, until there are so many tokens: of ``text``, or of
    ``messages`` as the model's chat template writes them; without what comes before every window."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    # However many come first in this order, they are spread evenly over all (three gap theorem).
    order = np.argsort(np.arange(len(lines)) * _GOLDEN % 1.0)
    for number, line in (lines[place] for place in order):
        try:
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("text"), str):
                ids = encoded(record["text"])
            elif isinstance(record, dict) and isinstance(record.get("messages"), list):
                if path == BUNDLED:
                    ids = _conversation(record, tokenizer, encoded)
                elif not tokenizer.chat_template:
                    remedy = "give a model with one, or lines with a text"
                    raise UserError(path, "has messages, and the model's tokenizer no chat template", remedy)
                else:
                    ids = tokenizer.apply_chat_template(record["messages"], tokenize=True, return_dict=False)
            else:
                raise ValueError("there is neither a text nor messages")
        except UserError:
            raise
        except Exception as error:  # a template raises what it likes
            said = str(error).strip().partition("\n")[0]
            what = f"line {number} cannot be read: {said or type(error).__name__}"
            raise UserError(path, what, "give objects with text, or messages of role and content") from error
        if tuple(ids[: len(before)]) == before:
            ids = ids[len(before) :]
        yield list(ids)
        tokens -= len(ids)
        if tokens <= 0:
            return


def _conversation(record: dict[str, Any], tokenizer: Any, encoded: Callable[[str], list[int]]) -> list[int]:
    """One of the bundled text: models that have not learnt to converse, or know no system, read it as a text."""
    if tokenizer.chat_template:
        with suppress(Exception):  # a template raises what it likes
            return list(tokenizer.apply_chat_template(record["messages"], tokenize=True, return_dict=False))
    return encoded(_as_text(record))


def _as_text(record: dict[str, Any]) -> str:
    return str(record.get("text") or "\n\n".join(message["content"] for message in record["messages"]))


def bundled_text() -> str:
    """The bundled text without templates, for programs that read characters."""
    return "\n\n".join(_as_text(json.loads(line)) for line in read_text(BUNDLED).split("\n") if line)


def _packed(records: Sequence[list[int]], count: int, length: int) -> Iterator[tuple[int, ...]]:
    """Windows that begin where a record does, or go on where the window before has cut one off."""
    window: list[int] = []
    for ids in records:
        window += ids
        while len(window) >= length and count:
            yield tuple(window[:length])
            count -= 1
            # What is left of a record is a window, or nothing.
            window = window[length:] if len(window) >= 2 * length else []


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
