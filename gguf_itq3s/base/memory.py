"""Memory that was freed and is still the process's."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Let the C library give the system what it keeps for later, where it can (glibc).

    It keeps freed arrays of up to 32 MiB: what a layer's activations took stays beside the sums that were made of them.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
