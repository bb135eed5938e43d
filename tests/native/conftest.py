"""What the tests of the built llama.cpp share."""

from __future__ import annotations

import pytest

from gguf_itq3s.codec import native


@pytest.fixture(scope="session")
def library() -> native.NativeLibrary:
    """The built C library."""
    loaded = native.load()
    assert loaded is not None, "make build first"
    return loaded


@pytest.fixture(scope="session")
def variants(library: native.NativeLibrary) -> list[native.NativeLibrary]:
    """The same with each of the calibrated encoders that run on this processor."""
    return [native.NativeLibrary(library.path, variant) for variant in library.variants]
