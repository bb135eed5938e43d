"""Which implementation of a product runs: ``reference`` or ``triton``.

``reference`` decodes a slice of the weights at a time with PyTorch's own operators and runs everywhere; ``triton``
decodes inside one fused kernel, on a GPU (or, with ``TRITON_INTERPRET=1`` in the environment, in Triton's interpreter
on the CPU).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Final

import torch

PATHS: Final = ("reference", "triton")

# Looked up once, where torch.compile does not have to follow.
_HAS_TRITON: Final = importlib.util.find_spec("triton") is not None
_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"

#: What :func:`use_path` has set, in this process; the last one counts.
_forced: list[str] = []


def check(path: str) -> str:
    """The path itself.

    Raises:
        ValueError: there is no such path.
    """
    if path not in PATHS:
        raise ValueError(f"unknown path {path!r}; use one of {', '.join(PATHS)}")
    return path


@contextlib.contextmanager
def use_path(path: str) -> Iterator[None]:
    """Within the context every layer of this process takes ``path``, whatever its own attribute says.

    Raises:
        ValueError: there is no such path.
    """
    _forced.append(check(path))
    try:
        yield
    finally:
        _forced.pop()


def choose(device: torch.device, path: str | None = None) -> str:
    """The path of a product on a device: that of :func:`use_path`, else ``path``, else the device's own.

    That is ``triton`` on a GPU where Triton is installed, ``reference`` elsewhere.

    Raises:
        ValueError: there is no such path.
        RuntimeError: ``triton`` was asked for and cannot run here.
    """
    asked = _forced[-1] if _forced else path
    if asked is None:
        return "triton" if device.type == "cuda" and _HAS_TRITON else "reference"
    if check(asked) == "triton":
        if not _HAS_TRITON:
            raise RuntimeError("the path triton needs Triton: pip install 'gguf-itq3s[torch-gpu]'")
        if device.type == "cpu" and not _INTERPRETED:
            raise RuntimeError("the path triton needs a GPU, or TRITON_INTERPRET=1 for its interpreter")
    return asked
