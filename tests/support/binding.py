"""The Python files of llama-cpp-python, from the source distribution that is pinned."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from gguf_itq3s import upstream


def folder() -> Path:
    """The folder that holds the package ``llama_cpp``, for ``PYTHONPATH``; it finds its library by a variable.

    A cache that an earlier version filled lacks it: it is fetched once more then, and the test is skipped where there
    is no network for that, but for continuous integration.
    """
    release = upstream.Release(upstream.VERSION, upstream.SHA256, upstream.TREE_SHA256)
    place = upstream.cache_dir() / release.name
    if not (place / "llama_cpp" / "__init__.py").is_file():
        try:
            with tempfile.TemporaryDirectory(dir=upstream.cache_dir()) as scratch:
                archive = upstream._download(Path(scratch), release)
                upstream._unpack(archive, Path(scratch) / "unpacked")
                (Path(scratch) / "unpacked" / release.name / "llama_cpp").rename(place / "llama_cpp")
        except upstream.FetchError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"the cache has no llama-cpp-python: {error}")
    return place
