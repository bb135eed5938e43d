"""Random models of many architectures give the F16 files of llama.cpp's own converter, and load in ITQ3_S."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.tables import architectures
from scripts.tables.random_models import MODELS

#: What upstream converts to files that llama.cpp does not load, or does not convert, with the Transformers in use.
REFUSED = {
    "GPTNeoXForCausalLM": "'rotary_pct' is missing",
    "MiMoV2FlashForCausalLM": "'partial_rotary_factor' is missing",
    "NemotronHForCausalLM": "llama.cpp cannot load it",
}


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_the_f16_file_is_upstreams(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    row = architectures.compare(name, tmp_path, small_tokenizer)
    assert (row.upstream, row.ours, row.same, row.loads) == ("", "", True, True)
    assert row.share > 0.7


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_cannot_load_is_refused(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    row = architectures.compare(name, tmp_path, small_tokenizer)
    assert REFUSED[name] in row.ours
    assert not row.arch


def test_there_are_at_least_fifty() -> None:
    assert len(MODELS) - len(REFUSED) >= 50
