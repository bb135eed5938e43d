"""Questions to the built llama.cpp about a GGUF file, which may be yet to be written; :mod:`.loader` asks them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..codec import native
from . import loader

#: What an answer may take: far more than any vocabulary and list of tensors need.
_SECONDS: Final = 120


@dataclass(frozen=True)
class Answer:
    """What the library says of a file.

    Attributes:
        error: why it refuses; empty where it does not.
        log: all that it says, where types are asked for.
    """

    error: str
    log: str = ""


@contextlib.contextmanager
def hole(head: bytes, size: int) -> Iterator[str | None]:
    """The path of a file of that head and zeros up to a size, which take no space; None where there can be none."""
    try:
        with contextlib.ExitStack() as stack:
            if hasattr(os, "memfd_create"):
                handle = os.memfd_create("head.gguf", 0)
                stack.callback(os.close, handle)
                path = f"/proc/{os.getpid()}/fd/{handle}"
            else:
                file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".gguf"))
                handle, path = file.fileno(), file.name
            os.write(handle, head)
            os.truncate(handle, max(size, len(head)))
            yield path
    except OSError:  # a limit on the size of files
        yield None


def ask(path: str | None, question: Mapping[str, Any] | None = None) -> Answer | None:
    """What the library answers; None where there is none, or another than the pinned one.

    Args:
        path: of the file; None where there is none.
        question: arguments of :func:`.loader.quantize`; None asks whether the file can be loaded.
    """
    base = native.library_path()
    library = base.with_name(base.name.replace("ggml-base", "llama")) if base else None
    if path is None or library is None or not library.exists():
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", loader.__file__, str(library), path], input=json.dumps(question or {}),
            capture_output=True, text=True, errors="replace", timeout=_SECONDS,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return None
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"ready"')]
    if not answers or not answers[0]["ready"]:
        return None
    if len(answers) > 1:
        return Answer(answers[1]["error"], answers[1]["log"])
    said = (line for line in done.stderr.splitlines() if line.strip())
    return Answer(next(said, f"ends with code {done.returncode}"))
