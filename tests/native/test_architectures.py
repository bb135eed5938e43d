"""Random models of many architectures give the F16 files of llama.cpp's own converter, and load in ITQ3_S."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.tables import architectures
from scripts.tables.random_models import MODELS
from selection import some

#: What upstream converts to files that llama.cpp does not load, or does not convert, with the Transformers in use.
REFUSED = {
    "GPTNeoXForCausalLM": "'rotary_pct' is missing",
    "MiMoV2FlashForCausalLM": "'partial_rotary_factor' is missing",
    "NemotronHForCausalLM": "llama.cpp cannot load it",
}


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


#: One of each kind of layer and of each way to store weights; make test-all has the others.
KINDS = {
    "LlamaForCausalLM", "GPT2LMHeadModel", "BertModel", "T5ForConditionalGeneration", "Gemma3ForCausalLM",
    "Mamba2ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM",
    "Phi3ForCausalLM", "Lfm2ForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize("name", some((n for n in MODELS if n not in REFUSED), lambda name: name in KINDS))
def test_the_f16_file_is_upstreams(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    row = architectures.compare(name, tmp_path, small_tokenizer)
    assert (row.upstream, row.ours, row.same, row.loads) == ("", "", True, True)
    assert row.share > 0.7


@pytest.mark.parametrize("name", some(REFUSED, lambda name: name == "GPTNeoXForCausalLM"))
def test_what_llama_cpp_cannot_load_is_refused(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    row = architectures.compare(name, tmp_path, small_tokenizer)
    assert REFUSED[name] in row.ours
    assert not row.arch


def test_there_are_at_least_fifty() -> None:
    assert set(MODELS) > KINDS
    assert len(MODELS) - len(REFUSED) >= 50
