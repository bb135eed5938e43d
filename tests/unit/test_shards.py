"""Which of a folder's files hold the weights: the choice of Transformers, for every command."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import shards
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.cli import main

NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
INDEX = "model.safetensors.index.json"


def save(weights: dict[str, torch.Tensor], path: Path) -> Path:
    """A file of weights in the form of its name, times two: none of the model's."""
    weights = {name: tensor * 2 for name, tensor in weights.items()}
    if path.suffix == ".safetensors":
        save_file(weights, path, metadata={"format": "pt"})
    else:
        torch.save(weights, path)
    return path


def save_shards(weights: dict[str, torch.Tensor], folder: Path, form: str, count: int, index: str = "") -> list[Path]:
    """The same in numbered files (``form`` with their number), with an index if it has a name."""
    places: dict[str, str] = {}
    files = []
    for number in range(count):
        part = dict(itertools.islice(sorted(weights.items()), number, None, count))
        files.append(save(part, folder / form.format(number + 1)))
        places |= dict.fromkeys(part, files[-1].name)
    if index:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return files


def read(folder: Path) -> tuple[dict[str, np.ndarray], str]:
    """The norm and a matrix as a file gets them, and what is said."""
    messages = io.StringIO()
    tensors = {tensor.name: tensor for tensor in open_checkpoint(folder, messages=messages).tensors}
    return {
        name: tensors[name].whole() for name in ("output_norm.weight", "blk.1.ffn_down.weight")
    }, messages.getvalue()


def test_the_choice_is_that_of_transformers(tmp_path: Path) -> None:
    """Of every set of the names that it knows, each beside files of other names."""
    names = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    compared = 0
    for chosen in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, 5)):
        folder = tmp_path / str(compared)
        folder.mkdir()
        for name in ("model-old.safetensors", "model2.safetensors", "pytorch_model_old.bin"):
            save(weights, folder / name)
        for name in chosen:
            if name.endswith(".json"):
                stem, suffix = name.removesuffix(".index.json").rsplit(".", 1)
                save_shards(weights, folder, f"{stem}-0000{{}}-of-00002.{suffix}", 2, name)
            else:
                save(weights, folder / name)
        theirs, _ = modeling_utils._get_resolved_checkpoint_files(folder, None, None, None, None, False)
        assert [str(path) for path in shards.check(folder, {}).files] == theirs, chosen
        compared += 1
    assert compared == 15
    own = {"transformers_weights": "model2.safetensors"}
    theirs, _ = modeling_utils._get_resolved_checkpoint_files(folder, None, None, None, None, False, *own.values())
    assert [str(path) for path in shards.check(folder, own).files] == theirs == [str(folder / "model2.safetensors")]


@pytest.mark.parametrize(
    "other",
    ["model_old.safetensors", "model2.safetensors", "model_ema.safetensors", "model-old.safetensors",
     "model.fp16.safetensors", "pytorch_model.bin", "shards", "shards of pickles"],
)  # fmt: skip
def test_weights_beside_the_models_are_not_read_and_named(
    other: str, checkpoint: Callable[[str], Path], llama_copy: Path
) -> None:
    weights, wanted = load_file(llama_copy / "model.safetensors"), read(checkpoint("llama"))[0]
    if other == "shards":
        path = save_shards(weights, llama_copy, "model-0000{}-of-00002.safetensors", 2, INDEX)[0]
    elif other == "shards of pickles":
        path = save_shards(weights, llama_copy, "pytorch_model-0000{}-of-00002.bin", 2, "pytorch_model.bin.index.json")[
            0
        ]
    else:
        path = save(weights, llama_copy / other)
    found, said = read(llama_copy)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor, name)
    kept = "model.safetensors, which is read"
    assert said == f"note: {llama_copy}: lm_head.weight is in {kept}, and in {path.name}, which is not\n"
    assert read(checkpoint("llama"))[1] == ""


def test_pickles_beside_the_models(llama_copy: Path) -> None:
    """The same of pickles, and of a file that cannot be read or has other tensors."""
    weights = load_file(llama_copy / "model.safetensors")
    (llama_copy / "model.safetensors").unlink()
    save(weights, llama_copy / "pytorch_model.bin")
    (llama_copy / "pytorch_model_1.bin").write_bytes(b"damaged")
    save({"other": torch.ones(1)}, llama_copy / "pytorch_model_2.bin")
    found, said = read(llama_copy)
    np.testing.assert_array_equal(found["output_norm.weight"], weights[NORM].float().numpy() * 2)
    assert said == f"note: {llama_copy}: pytorch_model_1.bin is not read, pytorch_model.bin is\n"
    save(weights, llama_copy / "pytorch_model_old.bin")
    assert "lm_head.weight is in pytorch_model.bin, which is read, and in pytorch_model_old.bin" in read(llama_copy)[1]


def test_a_link_to_nothing(llama_copy: Path, tmp_path: Path) -> None:
    (llama_copy / "model.safetensors").unlink()
    (llama_copy / "model.safetensors").symlink_to(tmp_path / "none")
    with pytest.raises(UserError, match=r"model\.safetensors: is a link to a file that is not there; download it"):
        shards.check(llama_copy, {})


def test_a_folder_of_a_files_name(llama_copy: Path) -> None:
    (llama_copy / "model.safetensors").rename(llama_copy / "model-00001-of-00001.safetensors")
    (llama_copy / "model.safetensors").mkdir()
    assert [path.name for path in shards.check(llama_copy, {}).files] == ["model-00001-of-00001.safetensors"]


def test_an_adapter_is_named(llama_copy: Path) -> None:
    """Beside weights, where Transformers loads it with those of its base, and alone."""
    (llama_copy / "adapter_config.json").write_text("{}")
    assert "the adapter in it, which Transformers would load, is left out" in read(llama_copy)[1]
    for name in ("model.safetensors", "config.json"):
        (llama_copy / name).unlink()
        with pytest.raises(UserError, match=r"holds an adapter, no model; make a file of it by gguf-itq3s convert-l"):
            open_checkpoint(llama_copy)


def test_a_whole_file_beside_an_index_of_missing_shards(llama_copy: Path) -> None:
    index = {"weight_map": {NORM: "model-00001-of-00002.safetensors", DOWN: "model-00002-of-00002.safetensors"}}
    (llama_copy / INDEX).write_text(json.dumps(index))
    found, said = read(llama_copy)
    norm = load_file(llama_copy / "model.safetensors")[NORM].float().numpy()
    np.testing.assert_array_equal(found["output_norm.weight"], norm)
    assert said == ""


def test_shards_of_two_runs(llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without an index a mixture; with one, its shards."""
    weights = load_file(llama_copy / "model.safetensors")
    (llama_copy / "model.safetensors").unlink()
    save_shards(weights, llama_copy, "model-0000{}-of-00002.safetensors", 2)
    halves = {name: tensor / 2 for name, tensor in weights.items()}
    save_shards(halves, llama_copy, "model-0000{}-of-00003.safetensors", 3, INDEX)
    found, said = read(llama_copy)
    np.testing.assert_array_equal(found["output_norm.weight"], weights[NORM].float().numpy())
    assert "of-00003.safetensors, which is read, and in model-00001-of-00002.safetensors, which is not" in said
    (llama_copy / INDEX).unlink()
    capfd.readouterr()
    assert main(["convert", str(llama_copy), str(tmp_path / "out.gguf"), "--dry-run"]) == 1
    line = capfd.readouterr().err
    assert line.startswith(f"error: {llama_copy}/model-00001-of-00003.safetensors: lm_head.weight: is in ") and (
        "model-00001-of-00002.safetensors too, and nothing says which is the model's; keep the files" in line
    )


def test_shards_without_an_index_are_one_model(llama_copy: Path) -> None:
    """Under any name: numbered, or of a variant."""
    weights = load_file(llama_copy / "model.safetensors")
    for form in ("model-0000{}-of-00002.safetensors", "model.fp16-0000{}-of-00002.safetensors", "pytorch_model_{}.bin"):
        for path in shards.find(llama_copy, {}).files:
            path.unlink()
        files = save_shards(weights, llama_copy, form, 2)
        assert list(shards.check(llama_copy, {}).files) == files
        found, said = read(llama_copy)
        np.testing.assert_array_equal(found["output_norm.weight"], weights[NORM].float().numpy() * 2)
        assert said == ""


def test_a_file_that_the_config_names_has_to_be_there(llama_copy: Path) -> None:
    config = {"transformers_weights": "other.safetensors"}
    with pytest.raises(UserError, match=r"other\.safetensors: is named in config\.json but not there; download it"):
        shards.check(llama_copy, config)


@pytest.mark.parametrize("head", ["another", "the embedding", "the embedding in half precision", "more rows"])
def test_an_output_matrix_that_upstream_leaves_out(head: str, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma's output is its embedding in llama.cpp's files, whatever the checkpoint holds."""
    folder = shutil.copytree(uneven("gemma"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = {
        "another": torch.randn_like(embedding), "the embedding": embedding.clone(),
        "the embedding in half precision": embedding.bfloat16(), "more rows": torch.cat([embedding, embedding[:1]]),
    }[head]  # fmt: skip
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if head == "another":
        with pytest.raises(UserError, match=r"model: lm_head\.weight: is another matrix than the embedding, which is"):
            open_checkpoint(folder)
    else:
        assert not any(tensor.name == "output.weight" for tensor in open_checkpoint(folder).tensors)
