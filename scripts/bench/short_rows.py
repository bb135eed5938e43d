#!/usr/bin/env python3
"""Mixtures of experts whose rows are no multiple of 256: what they take in the trellis types and in llama.cpp's.

    scripts/bench/short_rows.py --results docs                   everything, and the table in docs/converting.md
    scripts/bench/short_rows.py --prepare speed                  only write the files that are timed
    scripts/bench/short_rows.py speed --results docs             time them again

sizes: of whole models by their config.json and the headers of their safetensors files, no weights: the converter's
choice of types, and that of llama-quantize, which is asked with --dry-run. files: of models with a few layers and
experts and random weights, converted by the converter and by llama-quantize, beside what is said of them without
weights. speed: llama-bench on a part of Nemotron 3 Nano, the types in turn, round after round. Its layers are of each
kind as many as there are in the whole, and its vocabulary is smaller by as much; an eighth of its experts differ, the
rest are copies, which are read from places of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gguf_itq3s  # noqa: E402, F401  (before anything imports gguf)

# isort: split
import gguf  # noqa: E402
from gguf import LlamaFileType  # noqa: E402

from gguf_itq3s import upstream  # noqa: E402
from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, positive, report_errors  # noqa: E402
from gguf_itq3s.checkpoint import patches, policy  # noqa: E402
from gguf_itq3s.checkpoint.reading import open_without_weights  # noqa: E402
from gguf_itq3s.checkpoint.source import Checkpoint  # noqa: E402
from gguf_itq3s.checkpoint.stock import f16_file  # noqa: E402
from gguf_itq3s.codec import native  # noqa: E402
from gguf_itq3s.convert.options import ConvertOptions  # noqa: E402
from gguf_itq3s.convert.pipeline import convert  # noqa: E402
from gguf_itq3s.inspect import plan  # noqa: E402
from scripts.bench import kernels, processor, results, short_row_models  # noqa: E402

DEMO: Final = ROOT / "models" / "demo-llama"
RESULTS: Final = Path("results", "short_rows.json")
PAGE: Final = "converting.md"
WORK: Final = ROOT / "build" / "bench" / "short_rows"
PARTS: Final = ("sizes", "files", "speed")

MODELS: Final[Mapping[str, str]] = {
    "nemotron": "Nemotron 3 Nano 30B-A3B: 2688 columns, experts of 1856",
    "glm": "GLM-4.5-Air: 4096 columns, experts of 1408",
}

#: Experts' matrices that write to the residual stream, in seven of ten layers: with these in ITQ3_N Nemotron takes less
#: than 0.6 of what llama-quantize makes of Q3_K_S.
MOST_DOWN: Final = r"[1235679]\.ffn_down_exps"
#: Files of the trellis types: label -> what the converter is asked for.
TRELLIS: Final[Mapping[str, ConvertOptions]] = {
    "itq3_s": ConvertOptions.of(Path(), outtype="itq3_s"),
    f"itq2_s --tensor-type '{MOST_DOWN}=itq3_n'": ConvertOptions.of(
        Path(), outtype="itq2_s", tensor_types=((MOST_DOWN, "itq3_n"),)
    ),
    "itq2_s": ConvertOptions.of(Path(), outtype="itq2_s"),
    "itq3_s --fallback iq4_nl": ConvertOptions.of(Path(), outtype="itq3_s", fallback="iq4_nl"),
}
#: Files of llama-quantize.
STOCK: Final = ("Q3_K_S", "IQ3_S", "Q2_K", "IQ2_XXS")
#: Of them, those that are not written without an importance matrix.
WITH_STATISTICS: Final = ("IQ2_XXS",)
#: What other files are compared with.
REFERENCE: Final = "Q3_K_S"
#: The files that are timed.
TIMED: Final = (*(label for label, asked in TRELLIS.items() if asked.fallback == "trellis"), REFERENCE)

#: The first nine layers of Nemotron have four with experts, four of Mamba-2 and one of attention, as 23 : 23 : 6.
TIMED_LAYERS: Final = 9
#: Experts that differ, and copies of each.
DIFFERENT: Final = 16
COPIES: Final = 8
PROMPT: Final = 128
GENERATED: Final = 32

Sizes = dict[str, dict[str, Any]]


def whole(name: str) -> short_row_models.Model:
    """The whole model of a name of :data:`MODELS`."""
    return short_row_models.nemotron() if name == "nemotron" else short_row_models.glm()


def reduced(name: str) -> short_row_models.Model:
    """A few layers of it, one of each kind, with four experts and a vocabulary of 4096."""
    if name == "nemotron":
        return short_row_models.nemotron("ME*", experts=4, vocabulary=4096)
    return short_row_models.glm(layers=2, experts=4, vocabulary=4096)


def timed_model(experts: int) -> short_row_models.Model:
    """The part of Nemotron that is timed; its vocabulary as much smaller as it has fewer layers."""
    pattern = short_row_models.NEMOTRON_PATTERN
    vocabulary = 131072 * TIMED_LAYERS // len(pattern) // 32 * 32
    return short_row_models.nemotron(pattern[:TIMED_LAYERS], experts, vocabulary)


#
# sizes
#


def sizes_of(checkpoint: Checkpoint) -> Sizes:
    """What the tensors take in every type, by the rules alone.

    Args:
        checkpoint: its tensors need no weights.

    Returns:
        Label -> ``bytes``, ``bits`` a weight, ``short`` (the share of the weights that are in another type because of
        the length of their rows), ``types`` (name of a type -> bytes in it).
    """
    weights = sum(tensor.size for tensor in checkpoint.tensors)
    found: Sizes = {}

    def add(label: str, choices: Mapping[str, policy.Choice]) -> None:
        types: dict[str, int] = defaultdict(int)
        short = 0
        for tensor in checkpoint.tensors:
            choice = choices[tensor.name]
            types[choice.type.name] += tensor.bytes_in(choice.type)
            short += tensor.size if choice.type != choice.wanted else 0
        total = sum(types.values())
        found[label] = {
            "bytes": total, "bits": 8 * total / weights, "short": short / weights,
            "types": dict(sorted(types.items(), key=lambda item: -item[1])),
        }  # fmt: skip

    for label, asked in TRELLIS.items():
        target = plan.OUTTYPES[asked.outtype][0]
        choices = {
            tensor.name: policy.choose(
                tensor.name, tensor.shape, tensor.stored, target, checkpoint.model, overrides=asked.overrides,
                fallback=asked.fallback,
            )
            for tensor in checkpoint.tensors
        }  # fmt: skip
        add(label, choices)
        planned = plan.weight_bytes(checkpoint, target, pure=False, fallback=asked.fallback)
        assert asked.tensor_types or found[label]["bytes"] == planned
    file = f16_file(checkpoint)
    for label in STOCK:
        add(label, file.choices(LlamaFileType[f"MOSTLY_{label}"], statistics=label in WITH_STATISTICS))
    return found


def opened(folder: Path) -> Checkpoint:
    """A folder by its config.json and the headers of its safetensors files, as ``gguf-itq3s plan`` opens it."""
    return open_without_weights(folder)


def measure_sizes(work: Path) -> dict[str, Any]:
    """The sizes of the whole models."""
    found = {}
    for name in MODELS:
        model = whole(name)
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            folder = Path(scratch, name)
            short_row_models.write_without_weights(folder, model)
            found[name] = {"weights": model.weights, "sizes": sizes_of(opened(folder))}
    return found


#
# files
#


@contextmanager
def one_tokenizer(folder: Path) -> Iterator[None]:
    """Within, the architecture of a folder takes the SentencePiece tokenizer beside it whatever its own is."""
    conversion = upstream.load_conversion()
    hparams = conversion.ModelBase.load_hparams(folder, False)
    model_class = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))
    with patches.replaced_in(model_class, "set_vocab", lambda reader: reader._set_vocab_sentencepiece()):
        yield


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def write_trellis(folder: Path, out: Path, label: str) -> None:
    """Convert a folder to a type of :data:`TRELLIS`, or to F16."""
    asked = TRELLIS.get(label, ConvertOptions.of(Path(), outtype=label))
    say("converting", folder.name, "to", label)
    with one_tokenizer(folder):
        convert(ConvertOptions.of(folder, out, **dataclasses.asdict(asked)), messages=io.StringIO())
    gc.collect()


def quantize(source: Path, out: Path, label: str) -> None:
    """Let llama-quantize write a file of another.

    Raises:
        results.BenchError: it failed.
    """
    say("llama-quantize", source.name, "to", label)
    kernels.run([native.tools_folder() / "llama-quantize", source, out, label])


def tensor_bytes(path: Path) -> int:
    """Bytes of the tensors of a GGUF file, without its head and padding."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


def measure_files(work: Path) -> dict[str, Any]:
    """The sizes of files of reduced models, and what is said of them without weights."""
    found = {}
    for name in MODELS:
        model = reduced(name)
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            folder, base, out = (Path(scratch, end) for end in (name, "f16.gguf", "out.gguf"))
            short_row_models.write_random(folder, model, DEMO)
            planned = sizes_of(opened(folder))
            write_trellis(folder, base, "f16")
            files: dict[str, dict[str, int]] = {}
            for label in TRELLIS:
                write_trellis(folder, out, label)
                files[label] = {"planned": planned[label]["bytes"], "file": tensor_bytes(out)}
            # without an importance matrix it writes no IQ2_XXS
            for label in (*(label for label in STOCK if label not in WITH_STATISTICS), "ITQ3_S", "ITQ2_S"):
                quantize(base, out, label)
                known = planned[label if label in STOCK else label.lower()]
                files[f"llama-quantize {label}"] = {"planned": known["bytes"], "file": tensor_bytes(out)}
            found[name] = {"weights": model.weights, "files": files}
    return found


#
# speed
#


def timed_files(work: Path) -> dict[str, Path]:
    """The files that are timed, written where they are missing."""
    names = [re.sub(r"[^a-z0-9_]+", "-", label.lower()).strip("-") for label in TIMED]
    paths = {label: work / f"nemotron-part-{name}.gguf" for label, name in zip(TIMED, names, strict=True)}
    missing = [label for label, path in paths.items() if not path.exists()]
    if not missing:
        return paths
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        folder, base, one, unfinished = (Path(scratch, end) for end in ("part", "f16.gguf", "one.gguf", "partial.gguf"))
        say("writing random weights")
        short_row_models.write_random(folder, timed_model(DIFFERENT), DEMO)
        write_trellis(folder, base, "f16")
        for label in missing:
            if label in TRELLIS:
                write_trellis(folder, one, label)
            else:
                quantize(base, one, label)
            short_row_models.repeat_experts(one, unfinished, COPIES)
            unfinished.rename(paths[label])
    return paths


def speed_round(samples: results.Samples, paths: Mapping[str, Path], threads: int) -> None:
    """Time every file once with so many threads."""
    bench = native.tools_folder() / "llama-bench"
    for label, path in paths.items():
        command: list[str | Path] = [*(kernels.pin() if threads == 1 else []), bench]
        command += ["-o", "json", "-r", "1", "-t", str(threads), "-p", str(PROMPT), "-n", str(GENERATED)]
        command += ["-m", path]
        for result in json.loads(kernels.run(command)):
            work = "prompt" if result["n_prompt"] else "generation"
            samples[f"{work}, {threads}"][label].append(float(result["avg_ts"]))


def measure_speed(work: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second; the files are read once before, so that they are in memory."""
    paths = timed_files(work)
    for path in paths.values():
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    samples: results.Samples = defaultdict(lambda: defaultdict(list))
    cores, load = processor.cores(), os.getloadavg()[0]
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for threads in dict.fromkeys((cores, 1)):
            speed_round(samples, paths, threads)
    return {
        "state": results.state(), "weights": timed_model(DIFFERENT * COPIES).weights, "rounds": rounds,
        "processor": processor.this().name, "cores": cores, "load": load,
        "bytes": {label: tensor_bytes(path) for label, path in paths.items()},
        "medians": results.medians_of(samples), "samples": samples,
    }  # fmt: skip


#
# tables
#


def label_of(label: str) -> str:
    """What a file is called in a table."""
    return f"`{label}`" if label in TRELLIS else label


def sizes_table(found: Mapping[str, Any]) -> str:
    """The sizes of the whole models."""
    parts = []
    for name, entry in found.items():
        reference = entry["sizes"][REFERENCE]["bytes"]
        rows = []
        for label, size in entry["sizes"].items():
            most = next(iter(size["types"]))
            rows.append([
                label_of(label), f"{size['bytes'] / 2**20:.0f}", f"{size['bits']:.3f}",
                f"{size['bytes'] / reference:.3f}", f"{100 * size['short']:.1f}%", most,
            ])  # fmt: skip
        head = ["file", "MiB", "bits a weight", f"over {REFERENCE}", "weights in short rows", "most are in"]
        parts.append(f"{MODELS[name]}, {report.count(entry['weights'])} weights:\n\n{report.markdown(head, rows)}")
    return "\n".join(parts)


def files_sentence(found: Mapping[str, Any]) -> str:
    """How many files have the size that was said of them."""
    pairs = [sizes for entry in found.values() for sizes in entry["files"].values()]
    same = sum(sizes["planned"] == sizes["file"] for sizes in pairs)
    weights = " and ".join(report.count(entry["weights"]) for entry in found.values())
    return (
        f"{same} of {len(pairs)} files of models with two or three such layers ({weights} random weights), written by "
        "the converter and by `llama-quantize`, have the size to the byte that is said of them without weights.\n"
    )


def speed_table(found: Mapping[str, Any]) -> str:
    """Tokens a second, and over the reference in the same rounds."""
    rows = []
    for test, labels in found["samples"].items():
        work, _, threads = test.rpartition(", ")
        for label, values in labels.items():
            ratio = results.ratio_of(values, labels[REFERENCE])
            best = max(values) / max(labels[REFERENCE])
            rows.append([
                f"{work}, {threads} thread{'s' * (threads != '1')}", label_of(label),
                f"{found['medians'][test][label]:.2f}", f"{ratio:.2f}", f"{best:.2f}",
            ])  # fmt: skip
    sizes = ", ".join(f"{label_of(label)} {size / 2**20:.0f} MiB" for label, size in found["bytes"].items())
    head = (
        f"The first {TIMED_LAYERS} layers of Nemotron 3 Nano with random weights, {report.count(found['weights'])} in "
        f"all ({sizes}), on {found['processor']}, {found['cores']} cores with a load of "
        f"{found['load']:.1f} before the measurement: tokens a second, medians of {found['rounds']} rounds; the ratios "
        "are medians of those in the same round, and of the best:\n\n"
    )
    columns = ["work", "file", "tokens a second", f"over {REFERENCE}", "best over best"]
    return head + report.markdown(columns, rows, left=2)


def table(found: Mapping[str, Any]) -> str:
    """Everything that was measured."""
    makers = {"sizes": sizes_table, "files": files_sentence, "speed": speed_table}
    return "\n".join(make(found[part]) for part, make in makers.items() if part in found)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=positive, default=5, help="of speed (default: %(default)s)")
    parser.add_argument("--prepare", action="store_true", help="only write the files that are timed")
    parser.add_argument(
        "--work", type=Path, default=WORK, help="folder of the files that are timed, which stay "
        "(default: build/bench/short_rows); 7 GB, and 5 more while they are written",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, metavar="DOCS", help="update the results and the page in this folder")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    logging.disable(logging.WARNING)  # of upstream's conversion
    args.work.mkdir(parents=True, exist_ok=True)
    try:
        if args.prepare:
            timed_files(args.work)
            return 0
        measures: dict[str, Callable[[Path], dict[str, Any]]] = {
            "sizes": measure_sizes, "files": measure_files, "speed": partial(measure_speed, rounds=args.rounds),
        }  # fmt: skip
        measured: dict[str, Any] = {}
        for part in args.parts or PARTS:
            measured[part] = measures[part](args.work)
    except (results.BenchError, subprocess.SubprocessError) as error:
        raise UserError("short_rows.py", str(error), "see above") from error
    print(table(measured))
    if args.results:
        path = args.results / RESULTS
        old = json.loads(path.read_text()) if path.exists() else {}
        merged = {part: {**old, **measured}[part] for part in PARTS if part in old or part in measured}
        path.write_text(json.dumps(merged, indent=1) + "\n")
        report.replace_section(args.results / PAGE, "short rows", table(merged))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
