"""Run a build with its output in a file, and one line that says how far it is:

    progress.py LOG OURS COMMAND...

Upstream's files and the compiler's own headers give hundreds of warnings; a reader of the screen is helped by none.
The warnings of our files, whose names match the regular expression OURS, are printed, and are an error where the
environment variable CI is set. Where the build fails, the end of its output is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

#: Ninja's progress, and make's.
STEP = re.compile(r"\[ *(\d+/\d+|\d+%)\]")
#: A compiler's message: file, line, kind.
MESSAGE = re.compile(r"(?P<file>[^\s:]+):\d+:(?:\d+:)? (?:warning|error): ")
#: Lines of a failed build that are printed.
SHOWN = 60


def main() -> int:
    log, ours, command = sys.argv[1], re.compile(sys.argv[2]), sys.argv[3:]
    terminal, started = sys.stdout.isatty(), time.monotonic()
    lines: list[str] = []
    warnings: list[str] = []
    objects = 0
    with (
        open(log, "w", buffering=1, encoding="utf-8", errors="replace") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            lines = [*lines[1 - SHOWN :], line]
            message, step = MESSAGE.match(line), STEP.match(line)
            if message and "warning: " in line and ours.search(os.path.basename(message["file"])):
                warnings.append(line)
            if step:
                objects += bool(re.search(r"Building \w+ object", line))
                if terminal:
                    print(f"\r-- compiling: {step[1]}", end="", flush=True)
    seconds = time.monotonic() - started
    if terminal:
        print("\r\033[K", end="")
    if process.returncode:
        print("".join(lines), end="", file=sys.stderr)
        print(f"-- the whole output: {log}", file=sys.stderr)
        return 1
    print(f"-- compiled {objects} objects in {seconds:.0f} s", flush=True)
    print("".join(warnings), end="", file=sys.stderr)
    return int(bool(warnings) and bool(os.environ.get("CI")))


if __name__ == "__main__":
    raise SystemExit(main())
