"""The best factors of channels, and that a model with any factors is the model it was."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from checkpoints import ARCHITECTURES, FAMILIES, MIXTURES, ONE_OF_A_KIND, SIZES, save_model
from gguf_files import arrays, metadata, rewritten, tensors
from gguf_itq3s import upstream
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate.energies import MeasuredEnergies
from gguf_itq3s.calibrate.inputs import Layout
from gguf_itq3s.calibrate.layers import blocks_of
from gguf_itq3s.calibrate.store import open_calibration
from gguf_itq3s.checkpoint import rescaling
from gguf_itq3s.checkpoint.channels import plan
from gguf_itq3s.checkpoint.gguf_file import open_gguf
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.checkpoint.rescaling import LARGEST, Equalization
from gguf_itq3s.checkpoint.source import Checkpoint
from gguf_itq3s.checkpoint.weights import Parameters
from gguf_itq3s.codec import blocks
from gguf_itq3s.convert import equalize as best_factors
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.inspect import verify
from gguf_itq3s.rounding import equalize, hessian
from gguf_itq3s.rounding.factors import HessianFactors, Inputs
from importance import write
from scripts.tables.architectures import random_factors
from selection import some

#: Architectures whose channels are rescaled, beside those of other tests.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "granite": ("GraniteConfig", {}),
    "smollm3": ("SmolLM3Config", {"pad_token_id": 0}),
    "llama-short": ARCHITECTURES["llama-short"],
}
EXACT = [name for name in (*FAMILIES, *MIXTURES, *OTHERS) if name not in ("ernie-moe", "granite-moe", "llama-tied")]


@pytest.fixture(autouse=True)
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small tokenizer is none of those that upstream knows by their hash."""
    monkeypatch.setattr(upstream.load_conversion().base.TextModel, "get_vocab_base_pre", lambda *_: "default")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, changes = {**FAMILIES, **MIXTURES, **OTHERS}[name]
            torch.manual_seed(0)
            config = getattr(transformers, kind)(**{**SIZES, **changes}, initializer_range=0.05)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.4)
            made[name] = save_model(model.float(), tmp_path_factory.mktemp(name) / name, tokenizer)
        return made[name]

    return make


def any_factors(checkpoint: Checkpoint, seed: int = 0) -> Equalization:
    """Random exponents for every channel of a model."""
    return random_factors(rescaling.plan_tensors(checkpoint).channels.values(), np.random.default_rng(seed))


def put_back(model: Any, checkpoint: Checkpoint, found: Equalization) -> set[str]:
    """Rescale the weights of a model of Transformers; returns the tensors that this was done to."""
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    blocks, prefix = blocks_of(model, checkpoint.folder)
    layout = Layout(checkpoint.model.arch, prefix, len(blocks), tensors, Parameters(checkpoint.weights, model))
    done = set()

    def times(name: str, weights: torch.Tensor, expert: int | None = None) -> None:
        for factors, shape in ((found.columns(name, expert), (1, -1)), (found.rows(name, expert), (-1, 1))):
            if factors is not None:
                by = torch.from_numpy(factors.astype(np.float64))
                weights.mul_(by if weights.ndim == 1 else by.reshape(shape))
                done.add(name)

    for number, layer in enumerate(blocks):
        for name, path in layout.modules(number, layer).items():
            module = layer.get_submodule(path)
            if len(tensors[name].shape) == 1:  # where a norm adds one to its weight, the gain is what is scaled
                more = torch.from_numpy(tensors[name].vector().astype(np.float64)) - module.weight
                gain = module.weight + more
                times(name, gain)
                module.weight.copy_(gain - more)
            else:
                times(name, module.weight)
            if (bias := getattr(module, "bias", None)) is not None:
                times(name.replace(".weight", ".bias"), bias)
        for group in layout.groups(number, layer):
            for reader in group.readers:
                if reader.expert is not None:
                    times(reader.name, reader.rows_of(reader.matrix(layer)), reader.expert)
    return done


@pytest.mark.parametrize("name", some(EXACT, lambda name: name in (*ONE_OF_A_KIND, "llama-short"), pytest.mark.slow))
def test_logits_are_those_of_the_model(name: str, model_of: Callable[[str], Path]) -> None:
    """In float64, with factors of 2^-2.5 to 2^2.5 on every channel that can be rescaled."""
    checkpoint = open_checkpoint(model_of(name))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_of(name), dtype=torch.float64, experts_implementation="eager"
    )
    tokens = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(1))
    found = any_factors(checkpoint)
    with torch.no_grad():
        before = model(tokens).logits
        done = put_back(model, checkpoint, found)
        after = model(tokens).logits
    touched = {tensor.name for tensor in checkpoint.tensors if found.touches(tensor.name)}
    parts = {tensor.split(".")[2] for tensor in touched}
    assert done == touched and {"attn_norm", "ffn_norm", "attn_output"} <= parts
    assert any(part.startswith("ffn_down") for part in parts)
    assert ("attn_v" if name != "phi3" else "attn_qkv") in parts
    difference = float((after - before).abs().max() / before.abs().max())
    print(f"{name}: {len(touched)} tensors, {difference:.1e}")
    assert difference < 2e-6  # norms compute in float32


# ---------------------------------------------------------------------------------------------------- the best factors


@pytest.mark.parametrize(("head", "repeats", "columns"), [(128, 6, 1536), (32, 2, 192)])
def test_shared_factors_are_the_best(head: int, repeats: int, columns: int) -> None:
    """No step away from them, along any of many directions, costs less; in blocks of 64 too."""
    rng = np.random.default_rng(1)
    heads = columns // head // repeats
    channel = np.broadcast_to(
        np.arange(heads * head).reshape(heads, 1, head), (heads, repeats, head)
    ).reshape(-1)  # fmt: skip
    w, a = np.exp(rng.standard_normal((2, channel.size)) * 1.5)
    w, a = w / w.mean(), a / a.mean()
    found = equalize.logarithms(w, a, channel)

    def cost(u: np.ndarray) -> float:
        t = np.exp(2 * u[channel])
        return equalize.cost(w / t, a * t)

    lowest = cost(found)
    assert lowest < 0.95 * equalize.cost(w, a)
    for _ in range(200):
        step = rng.standard_normal(found.size)
        assert cost(found + 1e-3 * step) > lowest * (1 - 1e-7)
        assert cost(found + 0.1 * step) > lowest


# ------------------------------------------------------------------------------------------------- planned and left


LAYER = {
    "attn_norm": (256,), "attn_q": (512, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 512),
    "ffn_norm": (256,), "ffn_gate": (768, 256), "ffn_up": (768, 256), "ffn_down": (256, 768),
}  # fmt: skip


def planned(changes: dict[str, tuple[int, ...] | None], arch: str = "llama", heads: int = 8, **options: Any) -> Any:
    shapes = {f"blk.0.{part}.weight": shape for part, shape in {**LAYER, **changes}.items() if shape is not None}
    return plan(arch, shapes, heads, **options)


@pytest.mark.parametrize(
    ("changes", "options", "gone", "said"),
    [
        ({}, {}, set(), ""),
        ({"ffn_gate": None}, {}, {"ffn_up"}, "columns of blk.0.ffn_down.weight: the feed-forward network is not gated"),
        ({"attn_sub_norm": (512,)}, {}, {"attn_v"}, "blk.0.attn_output.weight: a norm stands between it and v"),
        ({"attn_v": None}, {}, {"attn_v"}, "there is no v"),
        ({}, {"heads": 7}, {"attn_v"}, "512 columns and 128 rows of blk.0.attn_v.weight are not heads of 7"),
        ({}, {"heads": 0}, {"attn_v"}, "are not heads of 0"),
        ({}, {"clamped": True}, {"attn_v"}, "values of v are clamped"),
        ({}, {"fixed": {"blk.0.ffn_down.weight"}.__contains__}, {"ffn_up"}, "is quantized or ternary already"),
        ({}, {"fixed": {"blk.0.ffn_up.weight"}.__contains__}, {"ffn_up", "ffn_norm"}, "blk.0.ffn_norm.weight"),
        ({"attn_v_norm": (64,)}, {}, {"attn_norm", "ffn_norm", "attn_v", "ffn_up"}, "not known, attn_v_norm"),
        ({}, {"arch": "falcon"}, {"attn_norm", "ffn_norm", "attn_v", "ffn_up"}, "architecture falcon"),
        ({"ffn_up": (512, 256)}, {}, {"ffn_up"}, "has the shape (512, 256), and not 768 rows"),
        ({"attn_q": (512, 512)}, {}, {"attn_norm"}, "blk.0.attn_q.weight has 512 columns, not 256"),
    ],
)
def test_what_cannot_be_rescaled_is_left_and_said(
    changes: dict[str, Any], options: dict[str, Any], gone: set[str], said: str
) -> None:
    found = planned(changes, **options)
    sources = {source.split(".")[2] for source in found.channels}
    assert sources == {"attn_norm", "ffn_norm", "attn_v", "ffn_up"} - gone
    assert any(said in line for line in found.left_alone) if said else not found.left_alone


# ----------------------------------------------------------------------------------------------------------- in a file


@pytest.fixture(scope="module")
def equalized(tmp_path_factory: pytest.TempPathFactory, model_of: Callable[[str], Path]) -> Path:
    """An equalized F16 file."""
    out = tmp_path_factory.mktemp("equalized") / "m.gguf"
    convert(
        ConvertOptions.of(model_of("qwen2"), out, outtype="f16", equalize=True, context=64, tokens=512), io.StringIO()
    )
    return out


def of(path: Path) -> rescaling.Rescaling:
    return rescaling.rescaling_of(open_gguf(path), lambda _: np.zeros(0, np.float32))


def test_a_file_says_what_its_tensors_are_multiplied_by(
    equalized: Path, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    found = of(equalized)
    assert isinstance(found, Equalization) and len(found.channels) == 8
    convert(ConvertOptions.of(model_of("qwen2"), tmp_path / "plain.gguf", outtype="f32"), io.StringIO())
    before, after = arrays(tmp_path / "plain.gguf"), arrays(equalized)
    touched = 0
    for name, weights in before.items():
        expected = found.scale(name, weights)
        touched += not np.array_equal(expected, weights)
        np.testing.assert_array_equal(after[name], expected.astype(after[name].dtype), err_msg=name)
    # Two layers: two norms, their five matrices, two more, biases of v.
    assert touched == 2 * (2 + 5 + 2 + 1)
    marks = metadata(equalized)
    assert marks[rescaling.ID] == found.id and rescaling.NORMS_FOLDED not in marks
    exponents = np.concatenate([values.ravel() for values in found.exponents.values()])
    assert len(np.unique(exponents)) > 20 and np.abs(exponents).max() <= LARGEST


def damaged(source: Path, out: Path, changes: dict[str, Any]) -> Path:
    """A copy of the file with other metadata; None takes a key out."""
    kinds = gguf.GGUFValueType

    def change(fields: dict[str, Any], _: dict[str, Any]) -> None:
        for key, value in changes.items():
            if value is None:
                del fields[key]
            else:
                types = {list: [kinds.ARRAY, kinds.STRING], str: [kinds.STRING], int: [kinds.UINT32]}
                fields[key] = value, types[type(value)]

    return rewritten(source, out, change)


@pytest.mark.slow
def test_descriptions_that_do_not_fit_are_refused(equalized: Path, tmp_path: Path) -> None:
    fields = metadata(equalized)
    sources, exponents = list(fields[rescaling.SOURCES]), str(fields[rescaling.EXPONENTS])  # type: ignore[call-overload]
    packed = base64.b64decode(exponents)
    huge = base64.b64encode(bytes([127]) + packed[1:]).decode()
    for changes, said in (
        ({rescaling.ID: "0" * 16}, "is not that of its exponents"),
        ({rescaling.ID: None}, "is not that of its exponents"),
        ({rescaling.EXPONENTS: exponents[:-8]}, "are not"),
        ({rescaling.EXPONENTS: "!" + exponents[1:]}, "are not"),
        ({rescaling.EXPONENTS: None}, "are not"),
        ({rescaling.EXPONENTS: huge}, f"numbers up to {LARGEST}"),
        ({rescaling.SOURCES: [*sources[:-1], "blk.0.attn_q.weight"]}, "'blk.0.attn_q.weight': is said to be rescaled"),
        ({rescaling.SOURCES: [*sources[:-1], sources[0]]}, "twice"),
        ({rescaling.SOURCES: [*sources[:-1], "blk.7.attn_norm.weight"]}, "and cannot be"),
        ({rescaling.SOURCES: "all"}, "are no names"),
        ({"qwen2.attention.head_count": 3}, "and cannot be"),
    ):
        path = damaged(equalized, tmp_path / "damaged.gguf", changes)
        with pytest.raises(UserError) as caught:
            of(path)
        assert said in str(caught.value) and "\n" not in str(caught.value), (changes, caught.value)
    assert of(damaged(equalized, tmp_path / "same.gguf", {})).key == of(equalized).key


@pytest.mark.slow
def test_verify_compares_with_the_rescaled_checkpoint(
    equalized: Path, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    results = {row["name"]: row for row in verify.compare(equalized, model_of("qwen2"))}
    assert all(row["error"] < 1e-6 for row in results.values())
    assert results["blk.0.ffn_down.weight"]["note"] == results["blk.1.attn_v.bias"]["note"] == "rescaled"
    assert results["output.weight"]["note"] == ""
    convert(ConvertOptions.of(model_of("qwen2"), tmp_path / "plain.gguf", outtype="f16"), io.StringIO())
    assert all(row["error"] < 1e-6 for row in verify.compare(equalized, tmp_path / "plain.gguf"))
    assert all(row["error"] == 0 and not row["note"] for row in verify.compare(equalized, equalized))
    with pytest.raises(UserError, match=r"m\.gguf: is rescaled otherwise than plain\.gguf"):
        verify.compare(tmp_path / "plain.gguf", equalized)


# -------------------------------------------------------------------------------------------------------- with options


@pytest.mark.slow
def test_statistics_are_brought_to_the_basis_of_the_file(calibrated: Callable[[str], tuple[Path, Path]]) -> None:
    """A Hessian of the file's inputs is one of the inputs divided by what the columns are multiplied by."""
    model, folder = calibrated("qwen2")
    checkpoint = open_checkpoint(model)
    statistics = open_calibration(folder, checkpoint.files)
    gain = rescaling.gains(checkpoint.tensors, checkpoint.folder)
    for found in (any_factors(checkpoint), rescaling.fold(checkpoint), rescaling.Rescaling()):
        factors = HessianFactors(statistics, Inputs(statistics, gain, found.columns))
        for name, norm in (("blk.0.attn_q.weight", "blk.0.attn_norm.weight"), ("blk.1.ffn_down.weight", None)):
            taken = statistics.hessian(name)
            assert taken is not None
            plain = hessian.rotate(taken)
            if norm is not None:
                plain = plain * gain(norm)[:, None] * gain(norm)
            columns = found.columns(name)
            if columns is not None:
                plain = plain / columns[:, None] / columns
            here = factors.rotated(name, len(plain), None)
            assert here is not None
            np.testing.assert_allclose(hessian.rotate(here), plain, rtol=1e-5, atol=1e-6 * np.abs(plain).max())
            sizes = Inputs(statistics, gain, found.columns).energies(name, len(plain), None)
            assert sizes is not None
            np.testing.assert_allclose(sizes, np.diagonal(plain), rtol=1e-4)


def importance(model: Path, path: Path) -> Path:
    """An importance matrix of all matrices of the layers, with sizes far apart."""
    rng = np.random.default_rng(0)
    shapes = {tensor.name: tensor.shape for tensor in open_checkpoint(model).tensors if "_norm" not in tensor.name}
    moments = {
        name: np.exp(rng.standard_normal((1, shape[-1])))
        for name, shape in shapes.items()
        if name.startswith("blk.") and len(shape) == 2
    }
    return write(path, moments)


#: What is converted how -> the sources of rescaled channels, and whether the codes are the nearest to the weights.
#: Statistics make a matrix be rounded with feedback, which takes seconds in numpy.
WAYS: dict[str, tuple[set[str], bool | None]] = {
    "none": (set(), None),
    "imatrix": ({"attn_norm", "ffn_up"}, False),
    "imatrix and not": (set(), None),
    "imatrix and folded": (set(), None),
    "stock": (set(), None),
    "calibrated": ({"attn_norm", "ffn_norm", "ffn_up"}, False),
    "asked": ({"attn_norm", "ffn_norm", "attn_v", "ffn_up"}, True),
}


@pytest.mark.parametrize(
    "way", some(WAYS, lambda way: not way.startswith(("imatrix", "calibrated")), mark=pytest.mark.slow)
)
def test_on_where_statistics_are_given(
    way: str, calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, folder = calibrated("llama")
    matrix = importance(model, tmp_path / "i.gguf")
    how: dict[str, dict[str, Any]] = {
        "none": {}, "imatrix": {"imatrix": matrix}, "imatrix and not": {"imatrix": matrix, "equalize": False},
        "imatrix and folded": {"imatrix": matrix, "fold_norms": True}, "stock": {"imatrix": matrix, "outtype": "q8_0"},
        "calibrated": {"calibration": folder}, "asked": {"equalize": True, "context": 64, "tokens": 512},
    }  # fmt: skip
    sources, nearest = WAYS[way]
    out = tmp_path / "m.gguf"
    convert(ConvertOptions.of(model, out, effort="fast", pure=True, **how[way]), io.StringIO())
    assert (rescaling.ID in metadata(out)) == bool(sources)
    assert bool(metadata(out).get(rescaling.NORMS_FOLDED)) == (way == "imatrix and folded")
    if not sources:
        return
    found = of(out)
    assert isinstance(found, Equalization)
    assert {source.split(".")[2] for source in found.channels} == sources
    # Asked for without statistics: the nearest codes of the rescaled weights. With them, others.
    weights = {tensor.name: tensor.vector().reshape(tensor.shape) for tensor in open_checkpoint(model).tensors}
    for tensor in ("blk.0.ffn_down.weight", "blk.1.attn_k.weight"):
        codes = blocks.quantize(found.scale(tensor, weights[tensor]), effort="fast")
        assert np.array_equal(tensors(out)[tensor].data, codes) == nearest, tensor


def test_options_that_contradict_equalization(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for how, said in (
        ({"fold_norms": True}, "give --fold-norms or --equalize"), ({"outtype": "tq2_0"}, "leave --equalize out"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "x.gguf", equalize=True, **how))  # type: ignore[arg-type]


def test_channels_without_statistics_are_left_and_said(model_of: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(model_of("qwen2"))
    known = MeasuredEnergies(checkpoint.folder, {"blk.0.ffn_down.weight": np.arange(1.0, 513)})
    said = io.StringIO()
    found = best_factors.equalize(
        rescaling.plan_tensors(checkpoint), {tensor.name: tensor for tensor in checkpoint.tensors},
        Inputs(known, rescaling.gains(checkpoint.tensors, checkpoint.folder)), best_factors.NEAREST, said,
    )  # fmt: skip
    assert list(found.channels) == ["blk.0.ffn_up.weight"]
    lines = said.getvalue()
    assert "equalized 1 sets of channels" in lines and "  blk.0.attn_norm.weight: nothing is known" in lines
    assert "  blk.1.ffn_up.weight: its readers have no statistics" in lines
    other = MeasuredEnergies(checkpoint.folder, {"blk.0.ffn_down.weight": np.ones(100)})
    with pytest.raises(UserError, match=r"statistics have 100 columns, the matrix 512; take statistics of this model"):
        best_factors.equalize(
            rescaling.plan_tensors(checkpoint), {tensor.name: tensor for tensor in checkpoint.tensors},
            Inputs(other, lambda _: np.ones(1, np.float32)), best_factors.NEAREST, said,
        )  # fmt: skip
