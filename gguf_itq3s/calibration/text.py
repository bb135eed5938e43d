"""The text of a calibration, as windows of tokens."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ..base.errors import UserError
from ..checkpoint.patches import patched
from .options import RunOptions

# Characters of text for each token of a window: more than any tokenizer needs on average.
_CHARACTERS: Final = 8
# Length of a window unless another is asked for: at most the longest, and shorter, down to the least, where the tokens
# would be fewer windows than so many: many places of a text say more than few.
_LONGEST: Final = 2048
_LEAST: Final = 512
_WINDOWS: Final = 40


def windows(options: RunOptions, longest: int) -> np.ndarray:
    """Windows of tokens from places spread evenly over the text: int64 (windows, context)."""
    context = options.context or min(longest, usual_context(options.tokens))
    if not 16 <= context <= longest:
        raise UserError(options.model, f"a context of {context} does not fit it", f"give 16 to {longest}")
    count = max(1, options.tokens // context)
    with patched(options.model, options.trust_remote_code) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows: list[list[int]] = []
    for number, path in enumerate(options.text):
        share = (count * (number + 1)) // len(options.text) - (count * number) // len(options.text)
        for piece in excerpts(read_text(path), share, context):
            ids = tokenizer(piece).input_ids
            if len(ids) < context:
                what = f"is too short for {share} windows of {context} tokens"
                raise UserError(path, what, "give more text, or less --tokens or --context")
            rows.append(ids[:context])
    return np.array(rows, dtype=np.int64)


def usual_context(tokens: int) -> int:
    """The length of a window where none is asked for: a power of two."""
    context = _LONGEST
    while context > _LEAST and tokens < _WINDOWS * context:
        context //= 2
    return context


def excerpts(text: str, count: int, context: int) -> Iterator[str]:
    """Pieces from places spread evenly over a text, each with characters enough for ``context`` tokens."""
    length = context * _CHARACTERS
    for start in np.linspace(0, max(0, len(text) - length), count).astype(int):
        # From the next word on; a window that starts inside one is unlike anything the model has seen.
        begin = text.find(" ", start) + 1 if start else 0
        yield text[begin : begin + length]


def read_text(path: Path) -> str:
    """A text file, UTF-8, plain or compressed with xz.

    Raises:
        UserError: it cannot be read.
    """
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read as text: {error}", "give UTF-8 text, plain or .xz") from error
