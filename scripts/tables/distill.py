#!/usr/bin/env python3
"""What self-distillation adds to sequential calibration, and what it makes of the nearest codes.

    scripts/tables/distill.py models/demo-llama --novels novels.txt.xz --valid wiki.valid.tokens.txt
    ... --results docs    # and the section of docs/training.md

Mean KL divergence from the F16 model, every matrix of the layers in the row's type, the token embedding in F16, on the
test split of WikiText-2, whose domain half of the training text shares, and on the reference topics in Python's own
library. Trained models stay in the work folder; interrupt it at any time, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import report_errors  # noqa: E402
from gguf_itq3s.codec.native import processors  # noqa: E402
from gguf_itq3s.convert.options import ConvertOptions  # noqa: E402
from gguf_itq3s.convert.pipeline import convert  # noqa: E402
from gguf_itq3s.distill.options import DistillOptions  # noqa: E402
from gguf_itq3s.distill.pipeline import distill  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from gguf_itq3s.evaluate.tools import Tools  # noqa: E402
from scripts.tables.calibration import calibration_text, plain_split  # noqa: E402

#: The matrices of the layers alone.
KEPT: Final[dict[str, Any]] = {"pure": True, "token_embedding_type": "f16", "output_tensor_type": "f16"}
FISHER: Final = "`--calibrate --fisher`"
NEAREST: Final = "nearest codes"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        how: its first cell.
        start: ``fisher``, or empty for the nearest codes.
        training: options of the distillation, empty for none.
    """

    how: str
    start: str
    training: dict[str, Any] = field(default_factory=dict, hash=False)


ROWS: Final = {
    "fisher": Row(FISHER, "fisher"),
    "A": Row("... 240 steps, rate 0.0005", "fisher", {"steps": 240, "lr": 5e-4, "norm_lr": 1e-3}),
    "B": Row("... 240 steps, rate 0.003", "fisher", {"steps": 240, "lr": 3e-3, "norm_lr": 2e-3}),
    "E": Row("... 160 steps, rate 0.003, embedding 0.001", "fisher",
             {"steps": 160, "lr": 3e-3, "norm_lr": 2e-3, "embedding_lr": 1e-3}),
    "nearest": Row(NEAREST, ""),
    "N": Row("... 60 steps, rate 0.001", "", {"steps": 60, "lr": 1e-3, "norm_lr": 2e-3}),
}  # fmt: skip
#: Of all trained rows.
COMMON: Final[dict[str, Any]] = {
    "tokens": 1 << 20, "context": 256, "batch": 8, "every": 10, "scale_lr": 1e-3, "precision": "bfloat16",
}  # fmt: skip


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """The table as Markdown; ratios are to the row that a training began with."""
    lines = []
    for key, row in ROWS.items():
        base = results["fisher" if row.start else "nearest"]
        cells = []
        for text, found in results[key].items():
            ratio = f" ({found['mean_kld'] / base[text]['mean_kld']:.3f})" if row.training else ""
            cells.append(f"{found['mean_kld']:.5f} ± {found['mean_kld_error']:.5f}{ratio}")
        lines.append([row.how, *cells])
    return report.markdown(["mean KLD (over the start's)", "WikiText-2 test", "Python reference topics"], lines)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a small model")
    parser.add_argument("--novels", type=Path, required=True, help="training text, plain or .xz")
    parser.add_argument("--valid", type=Path, required=True, help="training text: WikiText's validation split")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "distill", help="models and cached results")
    parser.add_argument("--tokens", type=int, default=131072, help="of the calibration (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=64, help="windows of 512 to score (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=processors(), help="default: %(default)s")
    parser.add_argument("--results", type=Path, help="folder of training.md to update")
    args = parser.parse_args()
    work, tools = args.work_dir, Tools.find(args.threads)
    work.mkdir(parents=True, exist_ok=True)
    log = work / "log.txt"
    valid = work / "valid.txt"
    valid.write_text(plain_split(args.valid), encoding="utf-8")
    files = {key: work / f"{key}.gguf" for key in ROWS}
    if not files["fisher"].exists():
        mix = calibration_text(args.novels, args.valid, args.tokens, work / "text.txt")
        convert(ConvertOptions.of(args.model, files["fisher"], calibrate=(mix,), tokens=args.tokens, context=512,
                               fisher=True, threads=args.threads, **KEPT))  # fmt: skip
    if not files["nearest"].exists():
        convert(ConvertOptions.of(args.model, files["nearest"], threads=args.threads, **KEPT))
    for key, row in ROWS.items():
        if not row.training or files[key].exists():
            continue
        if not (work / key).exists():
            start = files["fisher"] if row.start else None
            distill(DistillOptions(args.model, (valid, args.novels), out=work / key, start=start, threads=args.threads,
                                   **COMMON, **row.training))  # fmt: skip
        convert(ConvertOptions.of(work / key, files[key], fold_norms=False, threads=args.threads, **KEPT))
    plain = work / "f16.gguf"
    if not plain.exists():
        convert(ConvertOptions.of(args.model, plain, outtype="f16", threads=args.threads))
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    results: dict[str, dict[str, dict[str, float]]] = {key: {} for key in ROWS}
    for name, text in (("wikitext", wikitext.read(wikitext.test_path())), ("topics", topics)):
        path, base = work / f"{name}.txt", work / f"{name}.kld"
        path.write_text(text, encoding="utf-8", newline="\n")
        if not base.exists():
            tools.log_probabilities(plain, path, base, args.chunks, 512, log)
        for key, file in files.items():
            cached = work / f"{key}-{name}.json"
            if not cached.exists():
                cached.write_text(json.dumps(tools.divergence(file, base, args.chunks * 255, 512, log)))
            results[key][name] = json.loads(cached.read_text())
    found = table(results)
    print(found)
    if args.results:
        report.replace_section(args.results / "training.md", "distill", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
