#!/usr/bin/env python3
"""Fuzz the decoders, kernels, encoders and readers of tests/fuzz for some seconds, and say how many cases were tried.

    scripts/check/fuzz.py --seconds 120        build the fuzzers, run each for its share of the time
    scripts/check/fuzz.py --update-docs        put docs/results/fuzz.json into docs/reliability.md

Needs clang with its sanitizers (on Debian: apt-get install clang libclang-rt-dev); without them the exit code is 77.
The build and the inputs that reached something new are kept in the cache. An input that fails is written to
tests/fuzz/found/NAME, where the tests replay it from then on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s import upstream  # noqa: E402

FUZZ = ROOT / "tests" / "fuzz"
RESULTS = ROOT / "docs" / "results" / "fuzz.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- begin fuzz -->\n", "<!-- end fuzz -->\n"
SKIPPED = 77
COMPILERS = ["clang", *(f"clang-{version}" for version in range(22, 13, -1))]
#: Builds of other versions of the sources that stay in the cache.
KEPT = 2


@dataclass(frozen=True)
class Part:
    """Something that is fuzzed: a program of tests/fuzz, or a kind of input of tests/fuzz/damage.py."""

    name: str
    what: str
    #: What it counts, and what each count is called in the table; the first is the number of cases.
    counts: dict[str, str]
    share: int = 1
    native: bool = True
    options: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> str:
        """The folder of its inputs; two programs may share a source."""
        return self.name.removesuffix("-vectors")


ENCODED = {
    "blocks": "blocks",
    "blocks-with-importance": "blocks with importance",
    "blocks-with-feedback": "blocks with the feedback of a calibration",
    "refused": "of these refused",
}
PARTS = [
    Part(
        "decode", "decoding any bytes as the trellis types, TQ1_0, TQ2_0, against the format's text",
        {"blocks": "blocks"},
    ),
    Part("encode", "the encoders, on any float32", ENCODED),
    Part("encode-vectors", "the same in vectors, as they are for use: address sanitizer alone", ENCODED, share=2),
    Part("grid", "rounding to the grids of ggml's types with feedback, on any float32, against plain loops",
         {"blocks": "blocks", "blocks-with-others-before": "of these with blocks before them"}),
    Part(
        "header", "damaged GGUF headers with our types, through ggml's reader and llama.cpp's loader",
        {"files": "files", "read": "readings that ggml took", "loaded": "models that llama.cpp loaded",
         "stopped": "stopped by an assertion of llama.cpp"},
        share=2, options=["-rss_limit_mb=4000", "-malloc_limit_mb=1100"],
    ),
    Part(
        "gguf", "damaged GGUF files, through `inspect` and `verify`",
        {"cases": "commands", "refused": "of these refused in one line"}, native=False,
    ),
    Part(
        "checkpoint", "damaged checkpoints, through `convert --dry-run`, `plan` and `verify`",
        {"cases": "commands", "refused": "of these refused in one line"}, native=False,
    ),
    Part(
        "calibration", "damaged statistics, through `convert --calibration`",
        {"cases": "commands", "refused": "of these refused in one line"}, native=False,
    ),
]  # fmt: skip


class SkippedError(RuntimeError):
    """A tool is missing; the message says which."""


def find_compiler() -> tuple[str, str]:
    """clang and clang++ that link a fuzzer.

    Raises:
        SkippedError: there is none.
    """
    if not (shutil.which("cmake") and shutil.which("ninja")):
        raise SkippedError("cmake or ninja not found")
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }\n')
        for c in COMPILERS:
            cxx = c.replace("clang", "clang++")
            if not (shutil.which(c) and shutil.which(cxx)):
                continue
            command = [cxx, "-fsanitize=fuzzer,address,undefined", str(probe), "-o", str(probe.with_suffix(""))]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return c, cxx
    raise SkippedError("no clang with libFuzzer and its sanitizers found; on Debian: apt-get install clang and "
                       "libclang-rt-dev (libclang-rt-19-dev for clang-19)")  # fmt: skip


def sources() -> dict[str, Path]:
    """The files of a native fuzzer, by their name in the cache."""
    return {path.name: path for path in sorted(FUZZ.iterdir()) if path.suffix in (".c", ".cpp", ".h", ".txt")}


def key(compiler: str) -> str:
    """What the programs are made of: our sources, llama.cpp's, the compiler and the processor."""
    done = subprocess.run([compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull],
                          capture_output=True, check=True)  # fmt: skip
    digest = hashlib.sha256(done.stdout + str(upstream.fetch_source()).encode())
    patch = ROOT / "ggml-patch"
    ours = [path for folder in ("patches", "src/format", "src/cpu") for path in (patch / folder).rglob("*")]
    for path in [*sorted(ours), *sources().values()]:
        if path.is_file() and "cuda" not in path.relative_to(ROOT).as_posix():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(cache: Path) -> Path:
    """The folder with the fuzzers of these sources, built if it is not there.

    Raises:
        SkippedError: no compiler.
        RuntimeError: the build failed; the message has its end.
    """
    c, cxx = find_compiler()
    result = cache / f"bin-{key(c)}"
    with locked(cache / "lock"):
        if not result.is_dir():
            _build(cache, c, cxx, result)
        os.utime(result)
        others = sorted((path for path in cache.glob("bin-*") if path != result), key=lambda path: path.stat().st_mtime)
        for path in others[: max(0, len(others) - KEPT)]:
            shutil.rmtree(path)
    return result


def _build(cache: Path, c: str, cxx: str, result: Path) -> None:
    print("building the fuzzers and llama.cpp under the sanitizers (minutes, once)", flush=True)
    tree, harness, work = cache / "tree", cache / "harness", cache / "work"
    harness.mkdir(exist_ok=True)
    for name, path in sources().items():  # in one place for all clones; ninja looks at the time of a file
        if not (harness / name).exists() or (harness / name).read_bytes() != path.read_bytes():
            shutil.copyfile(path, harness / name)
    script = ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    programs = [f"fuzz-{part.name}" for part in PARTS if part.native]
    for command in (
        ["cmake", f"-DTREE={tree}", f"-DPython3_EXECUTABLE={sys.executable}", "-P", str(script)],
        ["cmake", "-S", str(harness), "-B", str(work), "-G", "Ninja", f"-DTREE={tree}",
         f"-DCMAKE_C_COMPILER={c}", f"-DCMAKE_CXX_COMPILER={cxx}"],
        ["ninja", "-C", str(work), "-j", jobs, *programs],
    ):  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stdout[-4000:]}")
    partial = result.with_name(f"{result.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for program in programs:
        shutil.copy2(work / program, partial / program)
    partial.rename(result)


def environment(counts: Path) -> dict[str, str]:
    """Of a fuzzer: where it writes its counts, and what makes names of addresses."""
    names = ["llvm-symbolizer", *(f"llvm-symbolizer-{version}" for version in range(22, 13, -1))]
    found = next((path for name in names if (path := shutil.which(name))), None)
    # the sanitizers take a symbolizer of this very name only
    symbolizer = {"ASAN_SYMBOLIZER_PATH": found} if found and Path(found).name == "llvm-symbolizer" else {}
    return {**os.environ, **symbolizer, "ITQ3S_FUZZ_COUNTS": str(counts), "PYTHONPATH": str(ROOT)}


def command(part: Part, seconds: int, seed: int, programs: Path | None, grown: Path, found: Path) -> list[str]:
    """What fuzzes a part for some seconds."""
    if not part.native:
        return [sys.executable, str(FUZZ / "damage.py"), part.name, "--seconds", str(seconds), "--seed", str(seed),
                "--found", str(found)]  # fmt: skip
    assert programs is not None
    grown.mkdir(parents=True, exist_ok=True)
    seeds = [path for path in (FUZZ / "corpus" / part.inputs, FUZZ / "found" / part.inputs) if path.is_dir()]
    return [str(programs / f"fuzz-{part.name}"), str(grown), *map(str, seeds), f"-max_total_time={seconds}",
            f"-seed={seed}", "-timeout=30", "-detect_leaks=0", "-print_funcs=0", f"-artifact_prefix={found}/",
            *part.options]  # fmt: skip


def read_counts(path: Path, part: Part) -> dict[str, int]:
    """What a fuzzer counted."""
    lines = path.read_text().split("\n") if path.exists() else []
    counted = {name: int(number) for name, number in (line.split() for line in lines if line)}
    return {name: counted.get(name, 0) for name in part.counts}


def fuzz(part: Part, seconds: int, seed: int, programs: Path | None, cache: Path) -> tuple[dict[str, int], str]:
    """Counts, and what went wrong: the end of the output, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        counts, found = Path(folder) / "counts", Path(folder) / "found"
        found.mkdir()
        run = command(part, seconds, seed, programs, cache / "grown" / part.name, found)
        with (Path(folder) / "output").open("w+b") as output:
            # three times as long and a minute: a hang of the fuzzer itself
            try:
                code = subprocess.run(run, stdout=output, stderr=output, env=environment(counts), cwd=folder,
                                      timeout=3 * seconds + 300, check=False).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = -1
            output.seek(0)
            text = output.read().decode(errors="replace")
        inputs = sorted(found.iterdir())
        for path in inputs:
            (FUZZ / "found" / part.inputs).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, FUZZ / "found" / part.inputs / path.name)
        # libFuzzer's own input of the failure, then the report
        said = [line for line in text.splitlines() if not line.startswith(("#", "==", "INFO", "ggml_validate"))]
        return read_counts(counts, part), "\n".join(said[-40:]) if code or inputs else ""


def merge(part: Part, counted: dict[str, int], seconds: int, failed: bool) -> None:
    """Add a run to docs/results/fuzz.json."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    entry = results.setdefault(part.name, {"seconds": 0, "failures": 0, "counts": {}})
    entry["seconds"] += seconds
    entry["failures"] += int(failed)
    for name, number in counted.items():
        entry["counts"][name] = entry["counts"].get(name, 0) + number
    ordered = {p.name: results[p.name] for p in PARTS if p.name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def table(results: dict[str, dict]) -> str:
    """The table of docs/reliability.md."""
    lines = ["| fuzzer | what | cases | failures | minutes |", "| --- | --- | ---: | ---: | ---: |"]
    for part in PARTS:
        if entry := results.get(part.name):
            counts = "; ".join(f"{entry['counts'].get(name, 0):,} {text}" for name, text in part.counts.items())
            minutes = entry["seconds"] / 60
            lines.append(f"| `{part.name}` | {part.what} | {counts} | {entry['failures']} | {minutes:.0f} |")
    return "\n".join(lines) + "\n"


def update_docs() -> None:
    """Put the table into docs/reliability.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + table(json.loads(RESULTS.read_text())) + END + after)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=int, metavar="N", default=120, help="in all, split among the fuzzers")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="NAME", help="of these")
    parser.add_argument("--seed", type=int, metavar="N", help="default: another one every time")
    parser.add_argument("--record", action="store_true", help=f"add the counts to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--update-docs", action="store_true", help=f"write the table of {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    if args.update_docs:
        update_docs()
        return 0

    parts = [part for part in PARTS if not args.only or part.name in args.only]
    cache = upstream.cache_dir() / "fuzz"
    programs = None
    try:
        if platform.system() != "Linux":
            raise SkippedError("the fuzzers are for Linux")
        if any(part.native for part in parts):
            programs = build(cache)
    except SkippedError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    # libFuzzer takes 0 for a seed of its own
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(3), "big") + 1
    shares = sum(part.share for part in parts)
    failed = False
    for part in parts:
        seconds = max(1, args.seconds * part.share // shares)
        counted, report = fuzz(part, seconds, seed, programs, cache)
        text = ", ".join(f"{number:,} {part.counts[name]}" for name, number in counted.items())
        print(f"{part.name}: {text} in {seconds} s: {'FAILED' if report else 'ok'}", flush=True)
        if report:
            failed = True
            print(f"{report}\n(seed {seed}; the input is in tests/fuzz/found/{part.inputs})", flush=True)
        if args.record:
            with locked(cache / "record.lock"):
                merge(part, counted, seconds, bool(report))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
