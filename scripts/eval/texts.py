#!/usr/bin/env python3
"""KL divergence of GGUF files from their model, text by text: what a calibration's text is good for.

    scripts/eval/texts.py MODEL_DIR a.gguf b.gguf --texts wiki.txt code.txt chat.jsonl

Unlike llama-perplexity, which reads a text as characters, conversations are read as the model's chat template writes
them. Transformers decodes the files. The second half of every window is scored; ratios are to the first file, with
paired errors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gguf_itq3s  # noqa: F401 - the types of the files become known to gguf-py
from gguf_itq3s.base import report
from gguf_itq3s.base.errors import positive, report_errors
from gguf_itq3s.calibrate.options import TEXTS, CalibrationOptions, text_of
from gguf_itq3s.calibrate.text import read
from gguf_itq3s.evaluate import tables

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import numpy as np
import torch
import transformers
from tqdm import tqdm

CONTEXT: Final = 512


def log_likely(model: Any, window: np.ndarray) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary) behind the second half of a window, but for its last token."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(window)[None], use_cache=False).logits[0, CONTEXT // 2 : -1]
    return torch.log_softmax(logits.float(), -1)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("files", type=Path, nargs="+", help="GGUF files of it")
    parser.add_argument("--texts", nargs="+", type=text_of, required=True, metavar="TEXT", help=TEXTS)
    parser.add_argument("--windows", type=positive, default=8, help="of each text (default: %(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    asked = CONTEXT * args.windows * len(args.texts)
    text = read(CalibrationOptions(args.model, [path for path, _ in args.texts], asked, CONTEXT), CONTEXT)
    windows = text.tokens
    load = transformers.AutoModelForCausalLM.from_pretrained
    found: list[np.ndarray] = []
    with tempfile.TemporaryFile() as kept:  # log-probabilities are large
        original = load(args.model, dtype=torch.float32)
        shape = len(windows), CONTEXT - CONTEXT // 2 - 1, original.get_output_embeddings().weight.shape[0]
        expected = np.memmap(kept, np.float32, "w+", shape=shape)
        for place, window in zip(expected, tqdm(windows, desc="original"), strict=True):
            place[:] = log_likely(original, window).numpy()
        del original
        for path in args.files:
            model = load(path.parent, gguf_file=path.name, dtype=torch.float32)
            divergences = []
            for place, window in zip(expected, tqdm(windows, desc=path.name), strict=True):
                right, now = torch.from_numpy(np.array(place)), log_likely(model, window)
                divergences.append(float((right.exp() * (right - now)).sum(-1).mean()))
            found.append(np.array(divergences))
            del model
    lines = []
    for path, means in zip(args.files, found, strict=True):
        cells = []
        for number in range(len(text.files)):
            mine, first = means[text.of == number], found[0][text.of == number]
            ratio, error = tables.paired(mine.tolist(), first.tolist())
            cells.append(f"{mine.mean():.4f} ({ratio:.3f} ± {error:.3f})")
        lines.append([path.name, *cells])
    print(report.markdown(["", *(path.name for path in text.files)], lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
