"""The text of a calibration, as windows of tokens."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Final

import numpy as np

from ..checkpoint import trust
from ..errors import UserError
from .options import CalibrationOptions

#: The text that comes with the package; beside it stands where it is from.
BUNDLED: Final = Path(__file__).parent / "text.txt.xz"

# Characters of text for each token of a window: more than any tokenizer needs on average.
_CHARACTERS: Final = 8


def windows(options: CalibrationOptions, longest: int) -> np.ndarray:
    """Windows of tokens from places spread evenly over the text: int64 (windows, context)."""
    context = options.context or min(longest, 2048)
    if not 16 <= context <= longest:
        raise UserError(options.model, f"a context of {context} does not fit it", f"give 16 to {longest}")
    count = max(1, options.tokens // context)
    with trust.transformers_for(options.model, options.trust_remote_code) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows: list[list[int]] = []
    for number, path in enumerate(options.text):
        share = (count * (number + 1)) // len(options.text) - (count * number) // len(options.text)
        text = read_text(path)
        for start in np.linspace(0, max(0, len(text) - context * _CHARACTERS), share).astype(int):
            # From the next word on; a window that starts inside one is unlike anything the model has seen.
            begin = text.find(" ", start) + 1 if start else 0
            ids = tokenizer(text[begin : begin + context * _CHARACTERS]).input_ids
            if len(ids) < context:
                what = f"is too short for {share} windows of {context} tokens"
                raise UserError(path, what, "give more text, or less --tokens or --context")
            rows.append(ids[:context])
    return np.array(rows, dtype=np.int64)


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
