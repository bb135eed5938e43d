#!/usr/bin/env python3
"""The ternary path from end to end: a trained checkpoint beside its float model, TQ1_0 and TQ2_0 files.

scripts/train/ternary_model.py --data DIR --from models/demo-llama --out build/ternary/model
scripts/papers/ternary.py build/ternary/model --update scripts/papers/README.md
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import positive, report_errors
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.evaluate.tools import Tools
from scripts.papers.reference import test_text

#: Name, folder, options of the converter; the embedding, which is the output matrix too, stays as it is.
FILES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("the float model, F16", "float", {"outtype": "f16"}),
    ("F16", "ternary", {"outtype": "f16"}),
    ("TQ2_0, recognised", "ternary", {"ternary_type": "tq2_0"}),
    ("TQ1_0, recognised", "ternary", {"ternary_type": "tq1_0"}),
    ("TQ2_0, latent weights forced", "latent", {"ternary": "force"}),
    ("TQ2_0, latent weights by their largest magnitude", "latent", {"ternary": "force", "ternary_scale": "maxabs"}),
    ("ITQ3_S, latent weights", "latent", {}),
)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="what scripts/train/ternary_model.py wrote")
    parser.add_argument("--chunks", type=positive, default=32, help="windows of 512 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=2, help="default: %(default)s")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between its marks in this file")
    args = parser.parse_args()
    tools, work = Tools.find(args.threads), args.model / "files"
    work.mkdir(exist_ok=True)
    text, base, log = work / "text.txt", work / "base.kld", work / "log.txt"
    text.write_text(test_text(), encoding="utf-8", newline="\n")
    rows, whole, reference = [], 0.0, 0.0
    for number, (name, folder, options) in enumerate(FILES):
        path = work / f"{number}.gguf"
        options = {"token_embedding_type": "f16", "threads": args.threads, **options}
        done = convert(ConvertOptions.of(args.model / folder, path, **options), io.StringIO())
        if number < 2:  # what the file itself, and then what those of the ternary model are compared with
            tools.log_probabilities(path, text, base, args.chunks, 512, log)
        found = tools.divergence(path, base, 512, log)
        whole, reference = whole or found["perplexity"], found["perplexity"] if number == 1 else reference
        bits = 8 * path.stat().st_size / sum(row.weights for row in done.rows)
        figures = [f"{found['mean_kld']:.6f}", f"{100 * found['same_top']:.2f}"] if number else ["", ""]
        rows.append([name, f"{bits:.2f}", f"{found['perplexity']:.3f}", *figures])
    base.unlink()
    table = report.markdown(["file", "bits/w", "PPL", "mean KLD", "same top, %"], rows)
    table += f"\nPerplexity of the ternary model over the float model's: {reference / whole:.3f}.\n"
    print(table)
    if args.update:
        report.replace_section(args.update, "ternary", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
