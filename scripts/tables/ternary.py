#!/usr/bin/env python3
"""The ternary path from end to end: a trained checkpoint beside its float model, TQ1_0 and TQ2_0 files, text.

scripts/train/ternary_model.py --data DIR --from models/demo-llama --out build/ternary/model
scripts/tables/ternary.py build/ternary/model                    # prints the table
scripts/tables/ternary.py build/ternary/model --results docs     # and writes it into docs/results.md
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, report_errors  # noqa: E402
from gguf_itq3s.convert.options import ConvertOptions  # noqa: E402
from gguf_itq3s.convert.pipeline import convert  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from gguf_itq3s.evaluate.runner import describe  # noqa: E402
from gguf_itq3s.evaluate.tools import Tools  # noqa: E402

#: Name, folder, options of the converter.
FILES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("F16", "ternary", {"outtype": "f16"}),
    ("TQ2_0, recognised", "ternary", {"ternary_type": "tq2_0"}),
    ("TQ1_0, recognised", "ternary", {"ternary_type": "tq1_0"}),
    ("TQ2_0, latent weights forced", "latent", {"ternary": "force"}),
    ("TQ2_0, latent weights by their largest magnitude", "latent", {"ternary": "force", "ternary_scale": "maxabs"}),
    ("ITQ3_S, latent weights", "latent", {}),
)

#: What the models go on from, and how they draw words.
PROMPT = "The old house"
DRAW = ("-n", "64", "--temp", "0.7", "--seed", "1", "--ignore-eos", "-no-cnv")

#: The embedding, which is the output matrix too, stays as it is: the ternary matrices are what is compared.
COMMON: dict[str, Any] = {"token_embedding_type": "f16"}


def continuation(tools: Tools, model: Path) -> str:
    """What a model makes of the prompt, in one line."""
    command = [str(tools.folder / "llama-completion"), "-m", str(model), "-p", PROMPT, "-t", str(tools.threads), *DRAW]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(model, f"llama-completion ended with code {done.returncode}", "run it by hand")
    words = done.stdout.decode("utf-8", errors="replace").split()
    return " ".join(word for word in words if word != "</s>").replace("|", "")


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="what scripts/train/ternary_model.py wrote")
    parser.add_argument("--chunks", type=int, default=32, help="windows of 512 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--results", type=Path, help="folder of results.md to update")
    args = parser.parse_args()
    tools = Tools.find(args.threads)
    work = args.model / "files"
    work.mkdir(exist_ok=True)
    text, base, log = work / "wiki.test.txt", work / "base.kld", work / "log.txt"
    text.write_text(wikitext.read(wikitext.test_path()), encoding="utf-8", newline="\n")
    rows: list[list[str]] = []
    reference = 0.0
    plain = work / "float.gguf"
    convert(ConvertOptions.of(args.model / "float", plain, threads=args.threads, outtype="f16"))
    tools.log_probabilities(plain, text, base, args.chunks, 512, log)
    whole = tools.divergence(plain, base, args.chunks * 255, 512, log)["perplexity"]
    for name, folder, options in FILES:
        path = work / f"{len(rows)}.gguf"
        convert(ConvertOptions.of(args.model / folder, path, threads=args.threads, **COMMON, **options))
        if not rows:
            tools.log_probabilities(path, text, base, args.chunks, 512, log)
        figures = tools.divergence(path, base, args.chunks * 255, 512, log)
        reference = reference or figures["perplexity"]
        facts = describe(path)
        change = 100 * (figures["perplexity"] / reference - 1)
        rows.append([name, f"{facts['file_bits']:.2f}", f"{figures['perplexity']:.3f}", f"{change:+.3f}%",
                     f"{figures['mean_kld']:.6f}", f"{100 * figures['same_top']:.2f}"])  # fmt: skip
    base.unlink()
    rows.insert(0, ["the float model, F16", f"{describe(plain)['file_bits']:.2f}", f"{whole:.3f}", "", "", ""])
    table = report.markdown(["file", "bits/w", "PPL", "against F16", "mean KLD", "same top, %"], rows)
    table += f"\nPerplexity of the ternary model over the float model's: {reference / whole:.3f}.\n"
    for name, path in (("The float model", plain), ("TQ2_0", work / "1.gguf")):
        table += f"\n{name}:\n\n> {continuation(tools, path)}\n"
    print(table)
    if args.results:
        report.replace_section(args.results / "results.md", "ternary", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
