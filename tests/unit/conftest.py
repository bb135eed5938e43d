"""The tests of this folder need no build, and use none that happens to be there."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_itq3s.codec import native, scale
from gguf_itq3s.codec.formats import Format
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert


@pytest.fixture(scope="module", autouse=True)
def no_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The C library is looked for where there is nothing, here and in the programs that a test starts."""
    nothing = tmp_path_factory.getbasetemp() / "no-build" / native.library_name()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.LIBRARY_VARIABLE, str(nothing))
        forget_library()
        yield nothing
    forget_library()


@pytest.fixture(scope="session", autouse=True)
def searched_once() -> Iterator[None]:
    """Blocks that were searched in one test are not searched again: the small models are the same in hundreds."""
    own = scale.solve
    known: dict[object, scale.Path] = {}

    def solve(x: np.ndarray, effort: str, fmt: Format) -> scale.Path:
        if x.size > 1 << 18:
            return own(x, effort, fmt)
        key = hashlib.sha256(x.tobytes()).digest(), x.shape, effort, fmt
        if key not in known:
            known[key] = own(x, effort, fmt)
        return deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "solve", solve)
        yield


@pytest.fixture(scope="module")
def converted(uneven: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``converted(name)``: the file that the converter writes of an uneven model, every matrix in the type."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, **options: Any) -> Path:
        key = name, repr(options)
        if key not in made:
            out = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
            convert(
                ConvertOptions.of(uneven(name), out, effort="fast", **{"pure": True, **options}),
                io.StringIO(),
            )
            made[key] = out
        return made[key]

    return make


def forget_library() -> None:
    """Let the library be looked for again."""
    native.load.cache_clear()
    native._usable.cache_clear()
