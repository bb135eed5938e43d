#!/usr/bin/env python3
"""Calibration by several processes of this machine beside one: time, memory, bytes sent, divergence.

    scripts/bench/distributed.py MODEL_DIR --text FILE --layers 3 --update docs/distributed.md
    scripts/bench/distributed.py MODEL_DIR --text FILE --whole --fisher --score BASE.kld --update docs/distributed.md

One process has as many threads as there are cores; of several each has its share, so that all runs have the same cores.
Runs follow each other, and are repeated with --rounds, of which medians are taken. Without --whole a run ends after
--layers layers, of which the first, with which the run warms up, is not counted. Bytes are those that the loopback
interface has carried during the counted layers, beside those of the sums, each counted once; Linux alone counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, positive, report_errors
from gguf_itq3s.calibrate.activations import DTYPES
from gguf_itq3s.calibrate.finished import Finished
from gguf_itq3s.calibrate.joining import joined
from gguf_itq3s.calibrate.run import Sequential
from gguf_itq3s.codec.native import processors
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert_together
from gguf_itq3s.evaluate.tables import paired
from gguf_itq3s.evaluate.tools import Tools

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "docs" / "results"
#: Of activations and gradients between layers, where none is named.
DTYPE: Final = "float32"


def carried() -> int:
    """Bytes that the loopback interface has carried, 0 where nobody counts them."""
    path = Path("/proc/net/dev")
    found = re.search(r"^\s*lo:\s*(\d+)", path.read_text(), re.M) if path.exists() else None
    return int(found[1]) if found else 0


def resident() -> int:
    """Largest resident memory of this process so far, bytes."""
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class _Enough(Exception):  # noqa: N818 (a signal, not an error)
    """As many layers as are wanted are done."""


def worker(options: ConvertOptions, layers: int, result: Path) -> int:
    """One process of a run: convert, note what it took."""
    marks: list[tuple[float, int, int]] = []
    with joined(result, options.run.device, sys.stderr) as (ranks, messages):

        def mark() -> None:
            marks.append((time.monotonic(), carried(), ranks.summed))

        own_add, own_layers, own_gradients = Finished.add, Sequential._layers, Sequential.collect_fisher
        gradients = [0.0]

        def add(self: Finished, number: int, matrices: Any) -> None:
            own_add(self, number, matrices)
            mark()
            if layers and number + 1 >= layers:
                ranks.meet()
                raise _Enough

        def every_layer(self: Sequential, *rest: Any) -> None:
            mark()
            own_layers(self, *rest)

        def collect(self: Sequential, folder: Path) -> Any:
            started = time.monotonic()
            found = own_gradients(self, folder)
            gradients[0] = time.monotonic() - started
            return found

        for owner, name, made in (
            (Finished, "add", add), (Sequential, "_layers", every_layer), (Sequential, "collect_fisher", collect),
        ):  # fmt: skip
            setattr(owner, name, made)
        started = time.monotonic()
        with contextlib.suppress(_Enough):
            convert_together(options, messages, ranks)
        seconds = time.monotonic() - started
    of = {"marks": marks, "seconds": seconds, "gradients": gradients[0], "memory": resident()}
    result.with_name(f"{result.name}-{ranks.rank}").write_text(json.dumps(of))
    return 0


def run(count: int, arguments: list[str], result: Path, threads: int) -> list[dict[str, Any]]:
    """What each of so many processes with so many threads each has noted."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [__file__, *arguments, "--worker", str(result), "--threads", str(threads)]
    launcher = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    print(f"{count} x", *arguments, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *launcher, *command], env=environment, check=False)
    if done.returncode:
        raise UserError(result, f"a run of {count} processes failed", "see above")
    return [json.loads(result.with_name(f"{result.name}-{rank}").read_text()) for rank in range(count)]


def figures(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Of one run: seconds a layer, memory of the largest process, bytes sent a layer over those of the sums."""
    marks = ranks[0]["marks"]
    first = min(1, len(marks) - 2)  # the first layer warms up
    (begin, before, summed), (end, after, total) = marks[first], marks[-1]
    count = len(marks) - 1 - first
    return {
        "seconds_a_layer": (end - begin) / count, "seconds": ranks[0]["seconds"], "gradients": ranks[0]["gradients"],
        "memory": max(rank["memory"] for rank in ranks), "sent_a_layer": (after - before) / count,
        "summed_a_layer": (total - summed) / count,
    }  # fmt: skip


def divergence(model: Path, base: Path, context: int) -> dict[str, Any]:
    """Mean KL divergence, its standard error and that of each window, by llama-perplexity.

    Args:
        model: what is scored.
        base: logits of the original.
        context: length of their windows.
    """
    found = Tools.find(processors()).divergence(model, base, context, model.with_suffix(".log"))
    return {key: found[key] for key in ("mean_kld", "mean_kld_error", "windows")}


def table(results: dict[str, Any]) -> str:
    """The figures as a table."""
    alone = next(iter(results["runs"].values()))
    rows = []
    for name, found in results["runs"].items():
        count = int(name.split()[0])
        ratio = found["sent_a_layer"] / found["summed_a_layer"] if found["summed_a_layer"] else 0.0
        timed = [
            f"{results['cores'] // count or 1}",
            f"{found['seconds_a_layer'] / alone['seconds_a_layer']:.2f}",
            f"{found['gradients'] / alone['gradients']:.2f}" if results["fisher"] else "-",
            f"{found['memory'] / alone['memory']:.2f} ({report.size(found['memory'])})",
            f"{report.size(int(found['sent_a_layer']))}" if ratio else "-", f"{ratio:.2f}" if ratio else "-",
        ]  # fmt: skip
        row = [name, *(timed if results["timed"] else ())]
        for score in found.get("kld", []):
            over = " ({:.3f} ± {:.3f})".format(*score["over_first"]) if "over_first" in score else ""
            row.append(f"{score['mean_kld']:.4f} ± {score['mean_kld_error']:.4f}{over}")
        rows.append(row)
    head = ["processes"]
    if results["timed"]:
        head += ["threads each", "time a layer", "time of gradients", "memory of a process"]
        head += ["sent a layer", "over the sums"]
    head += [f"KLD {name}" for name in results["bases"]]
    said = [f"{results['model']} in {results['outtype'].upper()}", f"{results['tokens']} tokens"]
    said += [f"{results['layers'] or 'all'} layers", f"--effort {results['effort']}"]
    said += ["with output Fisher matrices"] if results["fisher"] else []
    if results["timed"]:
        said += [f"{results['cores']} cores", f"{results['rounds']} round{'s' * (results['rounds'] > 1)}"]
        said += ["times and memory over those of one process"]
    if results["bases"]:
        said += ["mean KL divergence, over that of the first row with paired errors"]
    return ", ".join(said) + ":\n\n" + report.markdown(head, rows) + spread(results)


def spread(results: dict[str, Any]) -> str:
    """The means over runs of the same number of processes as a table, empty where each has run once."""
    by_count: dict[int, list[dict[str, Any]]] = {}
    for name, found in results["runs"].items():
        by_count.setdefault(int(name.split()[0]), []).append(found)
    if not results["bases"] or min(map(len, by_count.values())) < 2:
        return ""
    rows, first = [], None
    for count, runs in by_count.items():
        values = np.array([[score["mean_kld"] for score in run["kld"]] for run in runs])
        means, errors = values.mean(axis=0), values.std(axis=0, ddof=1) / len(values) ** 0.5
        first = first or (means, errors)
        ratios = means / first[0]
        doubts = ratios * np.hypot(errors / means, first[1] / first[0])
        row = [str(count), str(len(runs))]
        for mean, error, ratio, doubt in zip(means, errors, ratios, doubts, strict=True):
            row.append(f"{mean:.4f} ± {error:.4f}" + (f" ({ratio:.3f} ± {doubt:.3f})" if first[0] is not means else ""))
        rows.append(row)
    said = "\nMeans of the runs of each number of processes, with errors by how far these runs are apart:\n\n"
    return said + report.markdown(["processes", "runs", *(f"KLD {name}" for name in results["bases"])], rows)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--name", help="of the model in the table (default: of its folder)")
    parser.add_argument("--text", type=Path, required=True, help="of the calibration")
    parser.add_argument("--tokens", type=positive, default=10240, help="default: %(default)s")
    parser.add_argument("--context", type=positive, default=512, help="default: %(default)s")
    parser.add_argument("--outtype", default="itq3_s", help="default: %(default)s")
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2, 4], help="default: 1 2 4")
    parser.add_argument("--layers", type=positive, default=3, help="to run, the first uncounted; default: %(default)s")
    parser.add_argument("--whole", action="store_true", help="all layers, and the file")
    parser.add_argument("--effort", default="default", help="default: %(default)s")
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=[DTYPE],
        help="those after the first with the first number of processes alone (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--dtype", default=DTYPE, help=argparse.SUPPRESS)
    parser.add_argument("--fisher", action="store_true", help="with output Fisher matrices")
    parser.add_argument("--score", type=Path, nargs="*", default=[], help="logits of the original, for --whole")
    parser.add_argument("--rounds", type=positive, default=1, help="of every run; default: %(default)s")
    parser.add_argument(
        "--also-threads", type=positive, nargs="+", default=[], metavar="N",
        help="every number of processes with so many threads each too: the same work, other last bits",
    )  # fmt: skip
    parser.add_argument("--untimed", action="store_true", help="leave times and memory out, where other work is done")
    parser.add_argument("--threads", type=positive, default=processors(), help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help="folder for the files (default: a temporary one)")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks in the file")
    parser.add_argument("--section", default="processes", help="name of the marks; default: %(default)s")
    args = parser.parse_args()
    if args.worker:
        options = ConvertOptions.of(
            args.model, args.worker.with_suffix(".gguf"), calibrate=(args.text,), tokens=args.tokens,
            context=args.context, outtype=args.outtype, fisher=args.fisher, threads=args.threads, pure=True,
            token_embedding_type="f16", effort=args.effort, dtype=args.dtype,
        )  # fmt: skip
        return worker(options, 0 if args.whole else args.layers, args.worker)
    arguments = list(sys.argv[1:])
    cores = processors()
    kinds = {
        f"{count}" if dtype == DTYPE else f"{count} ({dtype})": (count, dtype, max(1, cores // count))
        for dtype in args.dtypes for count in (args.processes if dtype == args.dtypes[0] else args.processes[:1])
    }  # fmt: skip
    for threads in args.also_threads:
        for count in args.processes:
            if threads != max(1, cores // count):
                kinds[f"{count} (of {threads} thread{'s' * (threads > 1)})"] = (count, DTYPE, threads)
    names = list(kinds)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    scores: dict[str, list[dict[str, Any]]] = {}
    for round_number in range(args.rounds):
        for name, (count, dtype, threads) in kinds.items():
            with tempfile.TemporaryDirectory(dir=args.work) as folder:
                result = Path(folder, f"run-{count}")
                runs[name].append(figures(run(count, [*arguments, "--dtype", dtype], result, threads)))
                if args.whole and round_number == 0:
                    scores[name] = [divergence(result.with_suffix(".gguf"), base, args.context) for base in args.score]
                    print(name, [score["mean_kld"] for score in scores[name]], file=sys.stderr, flush=True)
    for found in scores.values():
        for score, first in zip(found, scores[names[0]], strict=True):
            if score is not first:
                score["over_first"] = paired(score["windows"], first["windows"])
    medians = {
        count: {key: statistics.median(one[key] for one in every) for key in every[0]}
        | ({"kld": scores[count]} if scores.get(count) else {})
        for count, every in runs.items()
    }
    results = {
        "model": args.name or args.model.name, "tokens": args.tokens, "cores": cores, "rounds": args.rounds,
        "layers": 0 if args.whole else args.layers, "fisher": args.fisher, "outtype": args.outtype,
        "effort": args.effort, "timed": not args.untimed,
        "bases": [base.name.split("-")[1] if "-" in base.name else base.stem for base in args.score], "runs": medians,
    }  # fmt: skip
    print(table(results))
    if args.update:
        (RESULTS / f"{args.section}.json").write_text(json.dumps(results, indent=1) + "\n")
        report.replace_section(args.update, args.section, table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
