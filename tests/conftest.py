"""Which tests run, and fixtures that several test files share: small checkpoints in Hugging Face form."""

from __future__ import annotations

import one_thread  # noqa: F401
import pinned_source  # noqa: F401
import uncollected  # noqa: F401

# isort: split
import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers

import upstream_files
from calibrating import options
from checkpoints import ARCHITECTURES, FAMILIES, MIXTURES, NOVEL, SIZES, save_model
from gguf_itq3s.calibrate import experts
from gguf_itq3s.calibrate.statistics import calibrate

transformers.utils.logging.disable_progress_bar()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too, as make test does")
    parser.addoption("--rounds", type=int, metavar="N", help="how often tests/faults kills a process of each kind")
    parser.addoption("--record", metavar="FILE", help="where tests/faults writes its counts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests by their folder, and leave slow and long ones out unless they are asked for in some way."""
    for item in items:
        tier = item.path.relative_to(Path(__file__).parent).parts[0]
        if tier in ("native", "cuda"):
            item.add_marker(tier)
        elif tier == "faults":
            item.add_marker("long")
    if config.getoption("-m") or any("::" in arg for arg in config.args):
        return
    left_out = ["long"] if config.getoption("--slow") else ["long", "slow"]
    out = {item for item in items if any(item.get_closest_marker(name) for name in left_out)}
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


def pytest_collection_finish() -> None:
    """What the imports have made stays: the garbage collector need not look at it, a tenth of the time of a run."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """What is left at the end is freed as ever; some libraries report what is not."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SentencePiece tokenizer of 512 pieces in Llama style."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(NOVEL), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=512, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[str], Path]:
    """``checkpoint(name)``: a folder with random weights of that architecture, made once; not to be changed."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, changes = ARCHITECTURES[name]
            torch.manual_seed(0)
            config = getattr(transformers, kind)(**{**SIZES, **changes}, initializer_range=0.1)
            model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            made[name] = save_model(model, tmp_path_factory.mktemp(name) / name, tokenizer)
        return made[name]

    return make


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[str], Path]:
    """``uneven(name)``: a small random model whose norm gains are far from one, in float16."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, changes = {**ARCHITECTURES, **FAMILIES, **MIXTURES}[name]
            torch.manual_seed(0)
            config = getattr(transformers, kind)(**{**SIZES, **changes}, initializer_range=0.05)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "norm" in parameter_name and parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.4)
            made[name] = save_model(model.half(), tmp_path_factory.mktemp(f"uneven-{name}") / name, tokenizer)
        return made[name]

    return make


@pytest.fixture(scope="session")
def calibrated(
    tmp_path_factory: pytest.TempPathFactory, uneven: Callable[[str], Path]
) -> Callable[[str], tuple[Path, Path]]:
    """``calibrated(name)``: a model with uneven gains and its statistics."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            out = tmp_path_factory.mktemp("hessians") / name
            calibrate(options(uneven(name)), out)
            made[name] = uneven(name), out
        return made[name]

    return make


@pytest.fixture(scope="session")
def f16(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``f16(name)``: the F16 file that upstream's converter writes."""
    folder = tmp_path_factory.mktemp("upstream")

    def make(name: str) -> Path:
        out = folder / f"{name}.gguf"
        return out if out.exists() else upstream_files.write(checkpoint(name), out)

    return make


@pytest.fixture
def llama_copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the small Llama that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``few(size)``: that many experts of a layer are in memory together."""

    def set_to(size: int) -> None:
        monkeypatch.setattr(
            experts.LayerExperts,
            "groups",
            lambda self, _: [range(i, min(i + size, self.count)) for i in range(0, self.count, size)],
        )

    return set_to
