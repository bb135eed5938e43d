"""Calibration: statistics against a direct computation, resuming, and conversion with them."""

from __future__ import annotations

import io
import json
import re
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from transformers.models.mixtral import modeling_mixtral

from calibrating import options
from checkpoints import NOVEL, SIZES, save_model
from gguf_files import metadata
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import statistics, store, text
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.moments import Moment
from gguf_itq3s.calibrate.options import BUNDLED, CalibrationOptions, text_of
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.calibrate.store import open_calibration, read_manifest
from gguf_itq3s.cli import main
from gguf_itq3s.codec.transform import hadamard_matrix, rotation_block
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from selection import some

Make = Callable[[str], Path]


def inputs_of(
    model: Path, windows: np.ndarray, kind: Any = transformers.AutoModelForCausalLM
) -> dict[str, list[torch.Tensor]]:
    """Inputs of every module of the whole model in float32, by module name."""
    whole = kind.from_pretrained(model, dtype=torch.float32).eval()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in whole.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0].detach()) if args else None
        )
    with torch.no_grad():
        whole(input_ids=torch.from_numpy(windows))
    return seen


def second_moment(x: torch.Tensor) -> np.ndarray:
    flat = x.reshape(-1, x.shape[-1]).double().numpy()
    block = rotation_block(flat.shape[1])
    rotated = flat @ np.kron(np.eye(flat.shape[1] // block), hadamard_matrix(block))
    return np.asarray(rotated.T @ rotated / len(rotated))


@pytest.mark.parametrize("name", some(["llama-short", "gemma"], lambda name: name == "gemma", pytest.mark.slow))
def test_statistics_equal_a_direct_computation(name: str, calibrated: Callable[[str], tuple[Path, Path]]) -> None:
    model, out = calibrated(name)
    manifest = read_manifest(out)
    opened = store.Calibration(out, manifest)
    windows = text.windows(options(model), 256)
    assert windows.shape == (10, 64) and manifest.tokens == 640
    seen = inputs_of(model, windows)
    for layer in range(2):
        modules = f"model.layers.{layer}"
        for norm, readers in (
            ("input_layernorm", ("attn_q", "attn_k", "attn_v")),
            ("post_attention_layernorm", ("ffn_gate", "ffn_up")),
        ):
            (x,) = seen[f"{modules}.{norm}"]
            plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            for reader in readers:
                found = opened.hessian(f"blk.{layer}.{reader}.weight")
                assert found is not None
                np.testing.assert_allclose(found, second_moment(plain), rtol=2e-3, atol=2e-4)
                assert manifest.entries[f"blk.{layer}.{reader}.weight"].norm is not None
        for module, reader in (("self_attn.o_proj", "attn_output"), ("mlp.down_proj", "ffn_down")):
            found, expected = (
                opened.hessian(f"blk.{layer}.{reader}.weight"),
                second_moment(seen[f"{modules}.{module}"][0]),
            )
            assert found is not None
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4 * expected.max())
    files = load_file(out / "layer-0000.safetensors")
    assert len(files) == 4, "matrices that read the same input share statistics"


class Clamped(modeling_mixtral.MixtralExperts):
    """Experts with another gate than ``act(gate) * up``, and what has come between the matrices of each."""

    def _apply_gate(self, first: torch.Tensor) -> torch.Tensor:
        gate, up = first.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=0.1) * (up + 1)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        self.between = []
        for expert, down in enumerate(self.down_proj):
            tokens, places = torch.where(chosen == expert)
            self.between.append(self._apply_gate(hidden[tokens] @ self.gate_up_proj[expert].T))
            total.index_add_(0, tokens, self.between[-1] @ down.T * weights[tokens, places, None])
        return total


class Doubled(Clamped):
    """Experts that compute what nobody knows."""

    def forward(self, *args: Any) -> torch.Tensor:
        return 2 * super().forward(*args)


def test_experts_have_the_gate_of_their_class(
    uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What lies between their matrices is not taken for ``act(gate) * up``; what computes otherwise is left alone."""
    model = uneven("mixtral-few")
    monkeypatch.setattr(modeling_mixtral, "MixtralExperts", Clamped)
    calibrate(options(model), tmp_path / "clamped")
    opened = store.Calibration(tmp_path / "clamped", read_manifest(tmp_path / "clamped"))
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        whole(input_ids=torch.from_numpy(text.windows(options(model), 256)))
    for expert, between in enumerate(whole.model.layers[0].mlp.experts.between):
        entry = opened.entries[f"blk.0.ffn_down_exps.weight[{expert}]"]
        assert entry.tokens == len(between) > 0
        found, expected = opened.hessian("blk.0.ffn_down_exps.weight", expert), second_moment(between)
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4 * expected.max())
    monkeypatch.setattr(modeling_mixtral, "MixtralExperts", Doubled)
    calibrate(options(model), tmp_path / "doubled")
    said = "note: not calibrated: ffn_down_exps, ffn_gate_exps, ffn_up_exps (Doubled: its class computes in a way that"
    assert said in capfd.readouterr().err
    entries = read_manifest(tmp_path / "doubled").entries
    assert "blk.0.attn_q.weight" in entries and not any("exps" in name for name in entries)


def multimodal(name: str, tokenizer: Path, folder: Path) -> Path:
    """A small random model with a vision tower."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    if name == "gemma3":
        config: Any = transformers.Gemma3Config(
            text_config={**SIZES, "head_dim": 64, "initializer_range": 0.05, "tie_word_embeddings": True},
            vision_config={**sizes, "model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
        )  # fmt: skip
    else:
        config = transformers.Mistral3Config(
            text_config={**SIZES, "model_type": "mistral", "head_dim": 64, "initializer_range": 0.05},
            vision_config={**sizes, "model_type": "pixtral", "head_dim": 32},
        )
    torch.manual_seed(0)
    return save_model(transformers.AutoModelForImageTextToText.from_config(config), folder, tokenizer)


@pytest.mark.parametrize(
    ("name", "form"),
    some(product(("gemma3", "mistral3"), ("hub", "transformers")), lambda _, form: form == "hub", pytest.mark.slow),
)
def test_the_text_model_of_a_multimodal_one_is_calibrated(
    name: str, form: str, tokenizer: Path, tmp_path: Path
) -> None:
    """A folder with a vision tower, under the names of the hub and of a model of Transformers 5."""
    model, folder = multimodal(name, tokenizer, tmp_path / "whole"), tmp_path / form
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    assert any(key.startswith("vision_tower.") for key in tensors)
    if form == "transformers":
        tensors = {f"model.{key.replace('language_model.model.', 'language_model.')}": tensors[key] for key in tensors}
        save_file(tensors, folder / "model.safetensors")
    calibrate(options(folder), tmp_path / "statistics")
    opened = store.Calibration(tmp_path / "statistics", read_manifest(tmp_path / "statistics"))
    assert len(opened.entries) == 14
    seen = inputs_of(model, text.windows(options(model), 256), transformers.AutoModelForImageTextToText)
    for layer in range(2):
        for module, reader in (("self_attn.o_proj", "attn_output"), ("mlp.down_proj", "ffn_down")):
            found = opened.hessian(f"blk.{layer}.{reader}.weight")
            expected = second_moment(seen[f"model.language_model.layers.{layer}.{module}"][0])
            assert found is not None
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4 * expected.max())


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = calibrated("llama")
    step, calls = LayeredModel.step, []

    def interrupted(self: object, *args: object) -> object:
        calls.append(1)
        if len(calls) == 5:  # three batches a layer: in the middle of the second
            raise KeyboardInterrupt
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LayeredModel, "step", interrupted)
    resumed = tmp_path / "resumed"
    with pytest.raises(KeyboardInterrupt, match="same command continues"):
        calibrate(options(model), resumed)
    assert not read_manifest(resumed).complete
    with monkeypatch.context() as patch, pytest.raises(UserError, match="by another version of this program; remove"):
        patch.setattr(statistics, "sources", lambda: "another")
        calibrate(options(model), resumed)
    with pytest.raises(UserError, match="did not finish"):
        open_calibration(resumed, sorted(model.glob("*.safetensors")))
    calls.clear()
    calls.extend([1] * 100)
    calibrate(options(model), resumed)
    assert len(calls) == 103, "the first layer is not run again"
    names = ["ends.safetensors", "layer-0000.safetensors", "layer-0001.safetensors", "manifest.json"]
    assert sorted(path.name for path in resumed.iterdir()) == sorted(path.name for path in out.iterdir()) == names
    for path in out.iterdir():
        assert (resumed / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list(resumed.glob("activations*"))


def test_a_manifest_of_another_model_is_refused(
    calibrated: Callable[[str], tuple[Path, Path]], uneven: Make, tmp_path: Path
) -> None:
    _, out = calibrated("llama")
    with pytest.raises(UserError, match="another model"):
        convert(ConvertOptions.of(uneven("llama-tied"), tmp_path / "x.gguf", calibration=out))
    with pytest.raises(UserError, match="another folder"):
        calibrate(options(uneven("llama-tied")), out)
    with pytest.raises(UserError, match="is not there"):
        convert(ConvertOptions.of(uneven("llama"), tmp_path / "x.gguf", calibration=tmp_path))


@pytest.mark.parametrize("change", ["", "\u3000"], ids=["as it is", "U+3000"])
@pytest.mark.parametrize("share", [1, 40], ids=["text enough", "too little text"])
def test_windows_are_disjoint_whatever_stands_between_words(
    change: str, share: int, tokenizer: Path, tmp_path: Path
) -> None:
    """Each is what the tokenizer makes of a place of its own, behind what it puts before a text."""
    path, said, folder = tmp_path / "text.txt", io.StringIO(), tmp_path / "model"
    shutil.copytree(tokenizer, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    prose = NOVEL.read_text()[: 24000 // share]
    path.write_text(prose.replace(" ", change) if change else prose)
    found = text.windows(CalibrationOptions(folder, (path,), 1280, 64), 256, said)
    whole = transformers.AutoTokenizer.from_pretrained(folder)(path.read_text(), add_special_tokens=False).input_ids
    assert (found[:, 0] == 1).all() and found.shape[1] == 64
    if share == 1:
        assert len(found) == 20 and not said.getvalue()
    else:  # a window less where places that begin a word would overlap
        assert len(found) == len(whole) // 63 < 20
        assert f"note: the text holds {len(found)} windows of 64 tokens" in said.getvalue()
    places = []
    for row in found[:, 1:].tolist():
        inner = row[3:-3]  # the first and last are others where a piece of a long text is cut
        places += [at for at in range(len(whole)) if whole[at : at + len(inner)] == inner]
    assert len(places) == len(found) and (np.diff(places) >= 63).all()


def test_a_text_that_is_given_twice_counts_once(uneven: Make, tmp_path: Path) -> None:
    copied = tmp_path / "copy.txt"
    copied.write_text(NOVEL.read_text())
    for tokens in (640, 704):  # dealt out evenly over two files and not
        once = text.windows(CalibrationOptions(uneven("llama"), (NOVEL,), tokens, 64), 256)
        for other in (NOVEL, copied):
            twice = text.windows(CalibrationOptions(uneven("llama"), (NOVEL, other), tokens, 64), 256)
            assert np.array_equal(twice, once)


@pytest.fixture
def chatting(uneven: Make, tmp_path: Path) -> Path:
    """A model with a chat template that writes control tokens."""
    folder = tmp_path / "chatting"
    shutil.copytree(uneven("llama"), folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def test_control_tokens_are_read_where_a_chat_template_writes_them(chatting: Path, tmp_path: Path) -> None:
    """A text that says them means the characters."""
    words = NOVEL.read_text().split()
    said = [" ".join(words[at : at + 12]) for at in range(0, 1200, 12)]
    chat, records, plain = tmp_path / "chat.jsonl", tmp_path / "texts.jsonl", tmp_path / "plain.txt"
    turns = [[{"role": "user", "content": line}, {"role": "assistant", "content": line[::-1]}] for line in said]
    chat.write_text("\n".join(json.dumps({"messages": turn}) for turn in turns))
    records.write_text("\n".join(json.dumps({"text": f"<s>{line}</s>"}) for line in said))
    plain.write_text("</s>".join(said))
    found = {path: text.windows(CalibrationOptions(chatting, (path,), 640, 64), 256) for path in (chat, records, plain)}
    tokenizer = transformers.AutoTokenizer.from_pretrained(chatting)
    whole = [tokenizer.apply_chat_template(turn, return_dict=False) for turn in turns]
    assert found[chat].shape == (10, 64)
    assert any(found[chat][0].tolist() == ids[:64] for ids in whole)  # from where one begins
    assert (found[chat] == tokenizer.eos_token_id).sum() >= 5
    assert all((found[path] != tokenizer.eos_token_id).all() for path in (records, plain))
    records.write_text('{"text": "a"}\n{"prompt": "b"}')
    with pytest.raises(UserError, match="line 2 cannot be read: there is neither a text nor messages"):
        text.windows(CalibrationOptions(chatting, (records,), 640, 64), 256)


@pytest.mark.parametrize("template", ["", "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}", "{{ 1 / 0 }}"])
def test_models_of_every_kind_read_the_bundled_text(template: str, chatting: Path) -> None:
    """Its conversations by their template; as text where they have none, or one that does not take them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(chatting)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(chatting)
    found = text.windows(CalibrationOptions(chatting, tokens=8192, context=256), 256)
    assert len(found) == 32
    assert (found == tokenizer.eos_token_id).any() == ("</s>" in template)
    assert "\n\n" in text.bundled_text()


def test_few_windows_of_the_bundled_text_have_its_shares() -> None:
    """However many of its records a calibration reads."""

    def kind(source: str) -> str:
        if source.startswith(("sayings", "proverbs")):
            return "sayings"
        if source.endswith("(Python)"):
            return "Python"
        return "code" if "(" in source and "Chinese" not in source else source

    whole = text.read_text(BUNDLED)
    kinds = {text._as_text(record): kind(record["source"]) for record in map(json.loads, whole.splitlines())}
    names = sorted(set(kinds.values()))

    def shares(size: int) -> np.ndarray:
        read = text._records(
            BUNDLED, whole, SimpleNamespace(chat_template=None),
            lambda said: [names.index(kinds[said])] * len(said.encode()), (), size,
        )  # fmt: skip
        found = np.bincount([number for ids in read for number in ids], minlength=len(names))
        return found / found.sum()

    of_all = shares(1 << 30)
    for size in (80_000, 160_000, 320_000):
        assert np.abs(shares(size) - of_all).max() < 0.04


def test_texts_have_the_shares_that_are_asked_for(uneven: Make, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(NOVEL.read_text()[ord(name) - 97 :: 3])
    arguments = [text_of(f"{tmp_path / 'a'}=0.5"), text_of(f"{tmp_path / 'b'}"), text_of(f"{tmp_path / 'c'}")]
    texts, shares = zip(*arguments, strict=True)
    found = text.read(CalibrationOptions(uneven("llama"), texts, 1280, 64, shares=shares), 256)
    assert np.bincount(found.of).tolist() == [10, 5, 5] and [path.name for path in found.files] == ["a", "b", "c"]
    assert text_of("bundled") == (BUNDLED, None)
    with pytest.raises(ArgumentTypeError, match="is no share"):
        text_of("a=2")
    with pytest.raises(UserError, match="b: the shares of the other texts leave nothing for it"):
        CalibrationOptions(uneven("llama"), texts, shares=(0.5, None, 0.5))


def test_bad_text_is_refused(uneven: Make, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    with pytest.raises(UserError, match="too short"):
        calibrate(CalibrationOptions(uneven("llama"), [short], tokens=640, context=64), tmp_path / "out")
    with pytest.raises(UserError, match="cannot be read as text"):
        calibrate(CalibrationOptions(uneven("llama"), [tmp_path / "none.txt"], context=64), tmp_path / "out")
    with pytest.raises(UserError, match="context"):
        calibrate(options(uneven("llama"), context=100000), tmp_path / "out")


def test_a_norm_that_is_none_is_the_models_fault(uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(norm, "forward", lambda self, x: self.weight * x)
    with pytest.raises(UserError, match=r"blk.0.attn_norm.weight: is not a norm with the gain") as caught:
        calibrate(options(uneven("llama")), tmp_path / "out")
    assert caught.value.tensor == "blk.0.attn_norm.weight" and "llama-imatrix" in caught.value.remedy


def test_the_hash_of_a_model_is_of_every_byte(checkpoint: Make, tmp_path: Path) -> None:
    """However its tensors are dealt out over files; a weight that is edited inside a tensor changes it."""
    path = checkpoint("llama") / "model.safetensors"
    raw = path.read_bytes()
    tensors = load_torch(path)
    names = sorted(tensors)
    parts = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for part, some_names in zip(parts, (names[::2], names[1::2]), strict=True):
        save_torch({name: tensors[name] for name in some_names}, part)
    assert store.model_hash(parts) == store.model_hash([path])
    tensors["model.embed_tokens.weight"][256, 128] += 1
    save_torch(tensors, tmp_path / "edited.safetensors")
    assert store.model_hash([tmp_path / "edited.safetensors"]) != store.model_hash([path])
    (path.parent / "damaged.safetensors").write_bytes(raw[:100])
    with pytest.raises(UserError, match="is not a safetensors file"):
        store.model_hash([path.parent / "damaged.safetensors"])
    (path.parent / "damaged.safetensors").unlink()


# ------------------------------------------------------------------------------------- calibrated in more than its name


@pytest.mark.parametrize(("option", "value"), [("--batch", "0"), ("--tokens", "-1"), ("--context", "half")])
def test_counts_that_are_not_positive_are_refused(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", str(tmp_path), "--text", str(NOVEL), "-o", str(tmp_path / "out"), f"{option}={value}"]
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2 and f"argument {option}: " in capsys.readouterr().err
    if value != "half":
        with pytest.raises(UserError, match=f"{option} {value}; give more than 0"):
            options(tmp_path, **{option.removeprefix("--"): int(value)})
    assert not (tmp_path / "out").exists()


def copied(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A calibration folder with another manifest."""
    shutil.copytree(folder, to)
    manifest = json.loads((to / "manifest.json").read_text())
    change(manifest)
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


Q_ENTRY = "blk.0.attn_q.weight"
BAD_MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "empty": (lambda m: m.update(entries={}), "has no statistics"),
    "no tokens at all": (lambda m: [e.update(tokens=0) for e in m["entries"].values()], "saw no token"),
    "no token of a matrix": (lambda m: m["entries"][Q_ENTRY].update(tokens=0), f"{Q_ENTRY}: has statistics that saw"),
    "negative tokens": (lambda m: m["entries"][Q_ENTRY].update(tokens=-5), f"{Q_ENTRY}: has -5 tokens"),
    "tokens in words": (lambda m: m["entries"][Q_ENTRY].update(tokens="all"), f"{Q_ENTRY}: has 'all' tokens"),
    "matrices of another model": (
        lambda m: m.update(entries={f"x.{name}": entry for name, entry in m["entries"].items()}),
        "has nothing on the matrices of this model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_a_manifest_without_statistics_is_refused(
    name: str, calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, out = calibrated("llama")
    change, expected = BAD_MANIFESTS[name]
    bad = copied(out, tmp_path / "bad", change)
    with pytest.raises(UserError, match=re.escape(expected)):
        convert(ConvertOptions.of(model, tmp_path / "x.gguf", calibration=bad, dry_run=True))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((5, 5), np.nan, "are not finite, or squares"),
        ((5, 5), -1.0, "are not finite, or squares"),
        (..., np.zeros((512, 512)), "tell no column from another"),
        (..., 2 * np.eye(512), "tell no column from another"),
    ],
)
def test_statistics_that_cannot_be_or_say_nothing_are_refused(
    place: Any, value: Any, said: str, calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, out = calibrated("llama")
    bad = copied(out, tmp_path / "bad", lambda _: None)
    entry = read_manifest(bad).entries["blk.0.ffn_down.weight"]
    values = dict(load_file(bad / entry.file))
    values[entry.key][place] = value
    save_file(values, bad / entry.file)
    # Enough damping would hide a square below 0.
    with pytest.raises(UserError, match=rf"blk\.0\.ffn_down\.weight: has statistics that {said}"):
        convert(ConvertOptions.of(model, tmp_path / "x.gguf", calibration=bad, effort="fast", damping=1000.0))
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(("value", "what"), [(0.0, "tell no column from another"), (np.inf, "are NaN or infinite")])
def test_activations_that_say_nothing_are_refused(
    value: float, what: str, uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moment, "mean", lambda self: np.full(self.shape, value, dtype=np.float32))
    with pytest.raises(UserError, match=f"inputs of layer 0 that {what}"):
        calibrate(options(uneven("llama")), tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow
def test_the_header_says_whether_a_matrix_was_rounded_with_statistics(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, out = calibrated("llama")

    def says(**changes: Any) -> object:
        convert(ConvertOptions.of(model, tmp_path / "x.gguf", effort="fast", **changes))
        return metadata(tmp_path / "x.gguf")["itq3s.calibrated"]

    def keep(*names: str) -> Callable[[dict[str, Any]], object]:
        return lambda m: m.update(entries={name: m["entries"][name] for name in names})

    assert says() is False
    one = copied(out, tmp_path / "one", keep(Q_ENTRY))
    assert says(calibration=one) is True
    # The only matrix with statistics has another type.
    other = copied(out, tmp_path / "other", lambda m: m.update(entries={"output.weight": m["entries"][Q_ENTRY]}))
    assert says(calibration=other) is False
