"""The tests of this folder need no build, and use none that happens to be there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_itq3s.codec import native


@pytest.fixture(scope="module", autouse=True)
def no_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The C library is looked for where there is nothing, here and in the programs that a test starts."""
    nothing = tmp_path_factory.getbasetemp() / "no-build" / native.library_name()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.LIBRARY_VARIABLE, str(nothing))
        forget_library()
        yield nothing
    forget_library()


def forget_library() -> None:
    """Let the library be looked for again."""
    native.load.cache_clear()
    native._usable.cache_clear()
