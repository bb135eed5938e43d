"""Models of many kinds that run layer by layer: they compute what the model does; their matrices are found."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from calibrating import options
from damaged import edit_json
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import backward, gradients
from gguf_itq3s.calibrate.activations import activations
from gguf_itq3s.calibrate.backward import OutputFisher
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.checkpoint.request import Request
from gguf_itq3s.checkpoint.row_order import row_order
from scripts.tables.architectures import one_tokenizer
from scripts.tables.random_models import WITHOUT_MTP, make
from selection import some

#: Model -> tensors of which no matrix is known, without the number of the layer, that a file would quantize.
KINDS = {
    "GPT2LMHeadModel": set(),  # matrices the other way round, positions from a table
    "Qwen3NextForCausalLM": set(),  # one matrix whose rows are dealt out to two tensors
    "GptOssForCausalLM": set(),  # experts with biases, the other way round, gate and up in turns
    "BambaForCausalLM": set(),  # layers that put out two things
    "DeepseekV3ForCausalLM": set(),  # a matrix for each head
    "Gemma4ForCausalLM": set(),  # an input of its own for each layer and token, keys of other layers
    "NemotronHForCausalLM": set(),  # experts without a gate, layers of one part
    "Qwen3_5ForCausalLM": set(),  # columns in another order
    "Llama4ForCausalLM": {"ffn_down_exps.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight"},
    "FalconForCausalLM": set(),  # both parts of a layer read the same stream
}


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> dict[str, LayeredModel]:
    class Models(dict[str, LayeredModel]):
        def __missing__(self, name: str) -> LayeredModel:
            folder = make(name, tmp_path_factory.mktemp(name), tokenizer)
            request = Request(no_nextn=name in WITHOUT_MTP)
            with one_tokenizer(folder):
                self[name] = LayeredModel(options(folder), open_checkpoint(folder, request=request))
            return self[name]

    return Models()


@pytest.mark.parametrize(
    "name", some(KINDS, lambda name: name in ("GPT2LMHeadModel", "Qwen3NextForCausalLM", "GptOssForCausalLM"))
)
def test_layer_by_layer_a_model_computes_the_same(name: str, layered: dict[str, LayeredModel], tmp_path: Path) -> None:
    model = layered[name]
    text = windows(options(model.folder), model.context)[:6]
    batches = [np.arange(4), np.arange(4, 6)]
    keywords = model.start(tmp_path, text, batches, 0)
    hidden = np.array(activations(tmp_path, 0, (*text.shape, model.hidden), "r")[:])
    tensors = {tensor.name: tensor for tensor in model.checkpoint.tensors}
    for number in range(model.layers):
        layer = model.load(number)
        for group in model.layout.groups(number, layer):
            for reader in group.readers:
                tensor = tensors[reader.name]
                rows = reader.rows_of(reader.matrix(layer)).numpy()
                rows = rows if reader.columns is None else rows[:, reader.columns]
                found = tensor.whole() if reader.expert is None else tensor.whole()[reader.expert]
                np.testing.assert_array_equal(reader.in_order(rows), found.reshape(-1, found.shape[-1]))
        for batch in batches:
            with keywords[number].of(batch, tmp_path) as given:
                hidden[batch] = model.step(layer, hidden[batch], given)
        model.unload(number)
    with torch.no_grad(), model.head() as head:
        found = head(torch.from_numpy(hidden)).numpy()
    whole = transformers.AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = whole(input_ids=torch.from_numpy(text), use_cache=False).logits.numpy()
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())
    quantized = {name for name in model.layout.left_alone if not name.endswith(("gate_inp.weight", "norm.weight"))}
    assert {name.split(".", 2)[2] for name in quantized} == KINDS[name]


@pytest.mark.parametrize(
    ("name", "module", "matrix"),
    [
        # Behind the first layer's attention are the experts of two layers.
        ("GptOssForCausalLM", "layers.0.self_attn.o_proj", "blk.0.attn_output.weight"),
        # The third layer reads the keys of the first.
        ("Gemma4ForCausalLM", "layers.0.self_attn.k_proj", "blk.0.attn_k.weight"),
    ],
)
def test_gradients_go_through_experts_with_biases_and_shared_keys(
    name: str, module: str, matrix: str, layered: dict[str, LayeredModel], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(backward, "sampled", lambda logits, chances: (chances * 200).long())
    monkeypatch.setattr(gradients.GradientSums, "shrink_to_identity", lambda _: None)
    model = layered[name]
    text = windows(options(model.folder), model.context)
    fisher = OutputFisher(tmp_path / "fisher", full=1 << 20, block=1)
    fisher.collect(model, text, 4, "key", io.StringIO())
    (reader,) = [r for g in model.layout.groups(0, model.blocks[0]) for r in g.readers if r.name == matrix]
    whole = transformers.AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    outputs: list[torch.Tensor] = []
    whole.model.get_submodule(module).register_forward_hook(lambda _, __, out: outputs.append(out))
    logits = whole(input_ids=torch.from_numpy(text), use_cache=False).logits.flatten(0, 1)
    labels = (backward._chances(text, 4).flatten() * 200).long()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, outputs)
    rows = gradient.flatten(0, 1).double().numpy()
    wanted = rows.T @ rows / text.size
    np.testing.assert_allclose(fisher.blocks(reader, 0)[0], wanted, atol=1e-3 * np.abs(wanted).max())


def test_rows_are_found_among_others() -> None:
    """In any order and some of them, those that are the same too; a row that is another is not."""
    rng = np.random.default_rng(0)
    model = rng.standard_normal((64, 32)).astype(np.float32)
    model[[3, 9, 20]] = 0
    model[5] = -model[3]
    order = rng.permutation(64)[:40]
    found = row_order(model, model[order])
    np.testing.assert_array_equal(model[found], model[order])
    assert len(set(found)) == 40 and np.array_equal(row_order(model, model), np.arange(64))
    other = model[order].copy()
    other[7, 31] = np.nextafter(other[7, 31], 2, dtype=np.float32)
    for wrong in (other, model[[3, 9, 20, 3, 5, 9]], np.concatenate([model, model]), model[:, :16]):
        with pytest.raises(ValueError, match="in GGUF"):
            row_order(model, wrong)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "BertModel",
            {},
            r"is no language model that goes from left to right \(bert\), and cannot be calibrated; use an",
        ),
    ],
)
def test_models_that_do_not_run_a_layer_at_a_time_are_refused(
    name: str, changes: dict[str, Any], said: str, tokenizer: Path, tmp_path: Path
) -> None:
    folder = make(name, tmp_path, tokenizer)
    edit_json(folder / "config.json", **changes)
    with one_tokenizer(folder):
        opened = open_checkpoint(folder)
    with pytest.raises(UserError, match=said):
        LayeredModel(options(folder), opened)
