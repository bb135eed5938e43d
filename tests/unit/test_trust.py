"""Code that a model folder brings along runs only if the user says so; pickles never run any."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import gguf_itq3s
from checkpoints import NOVEL
from damaged import edit_json
from gguf_files import LLAMA, write_gguf
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import hub, reading, trust
from gguf_itq3s.checkpoint.patches import patched
from gguf_itq3s.cli import main
from selection import some

PLANTED = "planted.py"
MODELS = {
    name: f"planted.{name.replace('Auto', 'Planted')}" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
}
TOKENIZER = {"AutoTokenizer": ["planted.PlantedTokenizer", None]}


class Payload:
    """Unpickled without care, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


def plant(folder: Path, marker: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """Python that makes the marker wherever it is imported, and the names that lead to it."""
    classes = "".join(f"class {name.rpartition('.')[2]}: pass\n" for name in [*MODELS.values(), "PlantedTokenizer"])
    (folder / PLANTED).write_text(f"import pathlib\npathlib.Path({str(marker)!r}).mkdir(exist_ok=True)\n{classes}")
    edit_json(folder / "config.json", **config)
    edit_json(folder / "tokenizer_config.json", **tokenizer)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-has-run"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A GGUF file to verify."""
    norm = np.ones(256, dtype=np.float32)
    return write_gguf(tmp_path / "small.gguf", LLAMA, {"output_norm.weight": (norm, None)})


def command(name: str, folder: Path, small: Path, out: Path) -> list[str]:
    return {
        "convert": ["convert", str(folder), str(out), "--dry-run"],
        "verify": ["verify", str(small), "--against", str(folder)],
        "ternary": ["ternary", str(folder)],
        "plan": ["plan", str(folder)],
        "calibrate": ["calibrate", str(folder), "--text", str(NOVEL), "-o", str(out), "--tokens", "64", "--context",
                      "32"],
    }[name]  # fmt: skip


HUNYUAN = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 64}
#: Where the names stand (config.json, tokenizer_config.json), and the commands that cannot do without the code.
PLANTS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "a tokenizer that upstream wants to run": (
        HUNYUAN, {"auto_map": TOKENIZER, "tokenizer_class": "PlantedTokenizer"}, {"convert", "verify", "ternary"},
    ),
    "the same beside a class that transformers has": (HUNYUAN, {"auto_map": TOKENIZER},
                                                      {"convert", "verify", "ternary"}),
    "the same in the old form": (HUNYUAN, {"auto_map": TOKENIZER["AutoTokenizer"]}, {"convert", "verify", "ternary"}),
    "an unknown type": ({"model_type": "planted", "auto_map": {**MODELS, **TOKENIZER}}, {}, {"calibrate", "plan"}),
    "an unknown type with a tokenizer of upstream's wish": (
        {**HUNYUAN, "model_type": "planted", "auto_map": MODELS}, {"auto_map": TOKENIZER},
        {"convert", "verify", "ternary", "plan"},
    ),
    "a known type": ({"auto_map": {**MODELS, **TOKENIZER}}, {"auto_map": TOKENIZER}, {"calibrate"}),
    "code of another repository": (
        {"model_type": "planted", "auto_map": {"AutoConfig": "no/body--planted.PlantedConfig"}}, {},
        {"calibrate", "plan"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_code_of_a_model_does_not_run(
    name: str, llama_copy: Path, small: Path, marker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question on the terminal"))
    config, tokenizer, needing = PLANTS[name]
    plant(llama_copy, marker, config, tokenizer)
    before = dict(sys.modules)
    for number, program in enumerate(("convert", "verify", "ternary", "calibrate", "plan")):
        if program == "plan":  # the model's class gives the shapes only where the weights do not
            (llama_copy / "model.safetensors").unlink()
        capfd.readouterr()
        code = main(command(program, llama_copy, small, tmp_path / f"out-{number}"))
        assert not marker.exists(), f"{program} has run code of the model"
        if program in needing:
            lines = capfd.readouterr().err.strip().splitlines()
            assert code == 1 and len(lines) == 1, (program, lines)
            assert lines[0].startswith(f"error: {llama_copy}"), lines
            assert "needs Python code of the model to run (" in lines[0] and "--trust-remote-code" in lines[0], lines
    assert not [module for module in set(sys.modules) - set(before) if module.startswith("transformers_modules.")]


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["convert", pytest.param("verify", marks=SLOW), pytest.param("ternary", marks=SLOW)]
)
def test_with_trust_the_tokenizers_code_runs(
    program: str, llama_copy: Path, small: Path, marker: Path, tmp_path: Path
) -> None:
    config, tokenizer, _ = PLANTS["a tokenizer that upstream wants to run"]
    plant(llama_copy, marker, config, tokenizer)
    arguments = [*command(program, llama_copy, small, tmp_path / "out"), "--trust-remote-code"]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    run = [sys.executable, "-m", "gguf_itq3s.cli", *arguments]
    subprocess.run(run, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert marker.exists()


# ------------------------------------------------------------------------------------------------------------ pickles


def pickled(marker: Path, path: Path, *, zipped: bool) -> None:
    torch.save({"model.norm.weight": Payload(marker)}, path, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("zipped", some([True, False], bool, pytest.mark.slow))
def test_a_pickle_of_weights_runs_nothing(
    zipped: bool, llama_copy: Path, small: Path, marker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (llama_copy / "model.safetensors").unlink()
    pickled(marker, llama_copy / "pytorch_model.bin", zipped=zipped)
    for number, program in enumerate(("convert", "verify", "ternary", "calibrate")):
        for trusted in ([], ["--trust-remote-code"]):
            capfd.readouterr()
            assert main([*command(program, llama_copy, small, tmp_path / f"out-{number}"), *trusted]) == 1
            lines = capfd.readouterr().err.strip().splitlines()
            assert len(lines) == 1 and "pytorch_model.bin: " in lines[0], lines
            assert not marker.exists()
    torch.load(llama_copy / "pytorch_model.bin", weights_only=False)
    assert marker.exists(), "the payload would have run"


@pytest.mark.parametrize(
    "name",
    some(
        ["tokenizer.model", "tokenizer.json", "vocab.json", "vocab.pkl", "added_tokens.json"],
        lambda name: name == "vocab.pkl", pytest.mark.slow,
    ),
)  # fmt: skip
def test_a_pickle_among_the_tokenizers_files_runs_nothing(
    name: str, llama_copy: Path, small: Path, marker: Path, tmp_path: Path
) -> None:
    (llama_copy / "tokenizer.model").unlink()
    (llama_copy / name).write_bytes(pickle.dumps(Payload(marker)))
    for program in ("convert", "verify", "calibrate"):
        assert main(command(program, llama_copy, small, tmp_path / "out")) == 1
        assert not marker.exists()


def test_torch_never_runs_a_pickle_within_the_gate(marker: Path, tmp_path: Path) -> None:
    pickled(marker, tmp_path / "mask_embedding.pt", zipped=True)
    own = torch.load
    for trusted in (False, True):
        with patched(tmp_path, trusted):
            for options in ({}, {"weights_only": False}, {"weights_only": None}, {"pickle_module": pickle}):
                with pytest.raises((pickle.UnpicklingError, RuntimeError)):
                    torch.load(tmp_path / "mask_embedding.pt", **options)
    assert not marker.exists() and torch.load is own


# ----------------------------------------------------------------------------------------------------------- the gate


def test_every_way_to_running_code_is_shut(llama_copy: Path, marker: Path) -> None:
    plant(llama_copy, marker, {}, {})
    utilities: Any = importlib.import_module("transformers.dynamic_module_utils")
    generation: Any = importlib.import_module("transformers.generation.utils")
    own = {name: getattr(utilities, name) for name in ("resolve_trust_remote_code", *trust._LOADERS)}
    with patched(llama_copy, False):
        for module in (utilities, generation):
            for name in set(own) & set(vars(module)) - {"resolve_trust_remote_code"}:
                with pytest.raises(UserError, match="--trust-remote-code"):
                    getattr(module, name)("planted.PlantedConfig", llama_copy)
        # A module that is imported meanwhile gets the shut ones, and the own ones back.
        sys.modules.pop("transformers.models.auto.video_processing_auto", None)
        late: Any = importlib.import_module("transformers.models.auto.video_processing_auto")
        assert late.get_class_from_dynamic_module is not own["get_class_from_dynamic_module"]
    assert late.get_class_from_dynamic_module is own["get_class_from_dynamic_module"]
    for name, function in own.items():
        assert getattr(utilities, name) is function
    assert generation.get_class_in_module is own["get_class_in_module"]
    assert not marker.exists()


@pytest.mark.parametrize("name", ["resolve_trust_remote_code", *trust._LOADERS])
def test_a_version_of_transformers_without_the_functions_is_refused(
    name: str, llama_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module("transformers.dynamic_module_utils"), name)
    with pytest.raises(UserError, match=f"transformers {transformers.__version__} may run its code"):
        reading.open_checkpoint(llama_copy)


def test_kernels_of_a_hub_are_not_loaded(llama_copy: Path) -> None:
    hub: Any = importlib.import_module("transformers.integrations.hub_kernels")
    with patched(llama_copy, False), pytest.raises(FileNotFoundError, match="no/body"):
        hub.get_kernel("no/body")


def test_the_package_uses_transformers_through_the_gate_alone() -> None:
    package = Path(gguf_itq3s.__file__).parent
    users = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                users.add(path.relative_to(package).as_posix())
    # What is in the room torch is called by Transformers itself; its own reading of a file is tested beside it.
    own = {user for user in users if not user.startswith("torch/")} - {"transformers.py"}
    assert own == {"checkpoint/patches.py"}


@pytest.mark.parametrize("trusted", [False, True])
def test_python_files_are_downloaded_only_with_trust(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot(_: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    hub.download("some/model", trust_remote_code=trusted)
    assert "*.safetensors" in asked
    assert any(pattern.endswith("py") for pattern in asked) == trusted
