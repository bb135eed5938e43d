#!/usr/bin/env python3
"""Try the patches on the newest releases of llama-cpp-python, whose source distributions carry llama.cpp.

    scripts/check/releases.py                             which patches apply
    scripts/check/releases.py --build                     and does a CPU build of each run the demo (minutes each)
    scripts/check/releases.py --update docs/platforms.md  put the table between the marks in the file

The sources are fetched by their hashes, as the pinned one. Exit code 1 when a required patch does not apply or a build
fails, 77, as for a skipped test, where a source cannot be fetched (in CI, which sets CI, that is an error). --build and
--update keep the results in docs/results/releases.json, with the hash of ggml-patch/ that the demo was run with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from gguf_itq3s import upstream
from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, report_errors
from gguf_itq3s.upstream import Release

ROOT: Final = Path(__file__).resolve().parents[2]
PATCHES: Final = ROOT / "ggml-patch" / "patches"
RESULTS: Final = ROOT / "docs" / "results" / "releases.json"
SKIPPED: Final = 77
#: No speed is asked of these builds, and no tests of them.
QUICK: Final = (
    "-DCMAKE_C_FLAGS_RELEASE='-O1 -DNDEBUG' -DCMAKE_CXX_FLAGS_RELEASE='-O0 -DNDEBUG' "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
)

RELEASES: Final = (
    Release(
        "0.3.34",
        "d849d286d808284f1d3ec1bd6875572430d29d1f9574a010232caa4e9cef0e35",
        "5940792a728afa175305a0ba9e416e28c764ac7087b1fbffe924e4fb796f65e0",
    ),
    Release(
        "0.3.35",
        "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12",
        "129e6b7fd9e1c8aeb3a4baabf9de379f8417eb64e228f61059ec3a85ec89020d",
    ),
    Release(upstream.VERSION, upstream.SHA256, upstream.TREE_SHA256),
)


@dataclass
class Outcome:
    """What became of the patches on a release.

    Attributes:
        left_out: name of each optional patch that does not apply -> what is missing without it.
        failed: what a required patch says that does not apply; empty where all do.
        demo: what the demo of a CPU build printed last; empty where it was not tried.
        patch: hash of ggml-patch/ that the demo was run with.
    """

    left_out: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    demo: str = ""
    patch: str = ""


def optional_patches() -> list[str]:
    """Names of the optional patches, in their order."""
    return sorted(path.name.removesuffix(".patch") for path in (PATCHES / "optional").iterdir())


def apply(source: Path, folder: Path) -> Outcome:
    """Patch a copy of a source, as a build does."""
    env = {**os.environ, "LLAMA_CPP_DIR": str(source)}
    script = ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
    command = ["cmake", f"-DTREE={folder / 'tree'}", "-P", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    outcome = Outcome()
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "does not apply" in line or line.startswith("error: ")]
        outcome.failed = "\n".join(lines) or done.stderr
    elif "left out:" in done.stderr:
        found = re.findall(r"^  (\S+): (Without it, .*)$", done.stderr, re.MULTILINE)
        outcome.left_out = dict(found)
    return outcome


def demo(release: Release, source: Path, work: Path) -> str:
    """Build the tools for this CPU and run the demo with them; returns its last line, the speed of a quick build.

    Raises:
        UserError: the build or the demo failed.
    """
    out = work / release.version
    env = {**os.environ, "GGUF_ITQ3S_OUT": str(out)}
    if release.version != upstream.VERSION:  # the pinned one is built as always, and may be in the cache
        env |= {"LLAMA_CPP_DIR": str(source), "GGML_OPTIONS": QUICK}
    print(f"{release.version}: building (log: {out}.log)", file=sys.stderr, flush=True)
    begin = time.monotonic()
    with Path(f"{out}.log").open("w") as log:
        for command in (
            ["cmake", "-S", str(ROOT / "ggml-patch"), "-B", str(out / "cmake"), "-DCMAKE_BUILD_TYPE=Release"],
            ["cmake", "--build", str(out / "cmake")],
        ):
            if subprocess.run(command, env=env, stdout=log, stderr=log).returncode:
                raise UserError(Path(f"{out}.log"), "llama.cpp did not build", "see the end of that file")
    print(f"{release.version}: built in {time.monotonic() - begin:.0f} seconds", file=sys.stderr)
    env.pop("LLAMA_CPP_DIR", None)  # the conversion is the pinned one
    env["GGUF_ITQ3S_LIBRARY"] = ""
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "demo.py")], env=env, capture_output=True, text=True)
    if done.returncode:
        raise UserError(out, f"the demo failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}", "see above")
    return done.stdout.strip().splitlines()[-1]


def table(outcomes: dict[str, Outcome]) -> str:
    """The table: a row for each patch, a column for each release."""
    required = ", ".join(path.stem for path in sorted(PATCHES.glob("*.patch")))
    rows = [[f"required: {required}", *("no" if outcome.failed else "yes" for outcome in outcomes.values())]]
    rows += [
        [name, *("-" if name in outcome.left_out else "yes" for outcome in outcomes.values())]
        for name in optional_patches()
    ]
    if all(outcome.demo for outcome in outcomes.values()):
        rows.append(["CPU build, `make demo`", *("runs" for _ in outcomes)])
    return report.markdown(["patch", *outcomes], rows)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="build each release for this CPU and run the demo")
    parser.add_argument("--work", type=Path, help="folder of the builds (default: one that is taken away)")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks in the file")
    args = parser.parse_args()

    now = upstream.tree_hash(ROOT / "ggml-patch", ("patches", "src", "cmake"))
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for release in RELEASES:
            try:
                source = upstream.fetch_release(release)
            except upstream.FetchError as error:
                print(f"{release.version}: {error}", file=sys.stderr)
                return 1 if os.environ.get("CI") else SKIPPED
            outcome = apply(source, Path(scratch) / release.version)
            outcomes[release.version] = outcome
            print(f"{release.version}: {outcome.failed or 'the required patches apply'}")
            for name, reason in outcome.left_out.items():
                print(f"  left out: {name}. {reason}")
            before = recorded.get(release.version, {})
            outcome.demo, outcome.patch = before.get("demo", ""), before.get("patch", "")
            if args.build and not outcome.failed:
                outcome.demo, outcome.patch = demo(release, source, work), now
                print(f"  {outcome.demo}")
    if args.build or args.update:
        RESULTS.write_text(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1) + "\n")
    if args.update:
        report.replace_section(args.update, "releases", table(outcomes))
    return int(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
