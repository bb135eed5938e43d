"""The evaluation: reading llama-perplexity, rows, what is remembered, tables, texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_itq3s
import llama
from gguf_itq3s.base import journal, report
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.cli import main
from gguf_itq3s.evaluate import command, engine, tables, tools, wikitext
from gguf_itq3s.evaluate.rows import Row, kv_rows, weight_rows

PRINTED = """
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS
   1     133.4400 ±    9.1210      -0.01270 ±    0.01840       0.07000 ±    0.00096     3.561 ±  0.123 %
   2     135.7887 ±    6.8310       0.05222 ±    0.01290       0.07260 ±    0.00067     3.601 ±  0.091 %

====== Perplexity statistics ======
Mean PPL(Q)                   : 135.788740 ±   4.830178
Mean PPL(base)                : 128.882474 ±   4.616139

====== KL divergence statistics ======
Mean    KLD:   0.072599 ±   0.000671
Maximum KLD:   1.032125
99.9%   KLD:   0.510132
99.0%   KLD:   0.303486
95.0%   KLD:   0.186819

====== Token probability statistics ======
Same top p: 78.591 ± 0.454 %
"""


def test_parse_divergence() -> None:
    found = tools.parse_divergence(PRINTED)
    assert found["perplexity"] == 135.78874 and found["perplexity_error"] == 4.830178
    assert found["mean_kld"] == 0.072599 and found["mean_kld_error"] == 0.000671
    assert found["windows"] == [0.07, 0.0752]
    assert found["same_top"] == pytest.approx(0.78591) and found["same_top_error"] == pytest.approx(0.00454)


@pytest.mark.parametrize("line", ["Mean    KLD", "Same top p", "Mean PPL(Q)", "   ", "   1"])
def test_missing_figures_are_errors(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(row for row in PRINTED.splitlines() if not row.startswith(line))
    monkeypatch.setattr(tools.Tools, "run", lambda *_: text)
    with pytest.raises(UserError, match=rf"{tmp_path}.*printed (no|window)"):
        tools.Tools(tmp_path, 1).divergence(tmp_path, tmp_path, 512, tmp_path)


def test_ratio_of_paired_windows() -> None:
    """What both rows share cancels; the error is that of resampling the windows."""
    rng = np.random.default_rng(1)
    hard = rng.gamma(4, 0.02, 400)
    above, below = 0.7 * hard * rng.normal(1, 0.05, 400), hard * rng.normal(1, 0.05, 400)
    found, error = tables.paired(above.tolist(), below.tolist())
    assert found == pytest.approx(above.sum() / below.sum())
    picks = rng.integers(400, size=(4000, 400))
    assert error == pytest.approx(np.std(above[picks].sum(1) / below[picks].sum(1)), rel=0.1)
    assert error < 0.2 * found * np.std(hard) / np.mean(hard) / np.sqrt(400) * np.sqrt(2)  # were they not paired
    assert tables.paired([2.0, 4.0], [1.0, 2.0]) == (2.0, 0.0)
    for bad in (([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])):
        with pytest.raises(ValueError, match=r"paired|zero"):
            tables.paired(*bad)


def test_what_a_program_took(tmp_path: Path) -> None:
    """Its own memory, not what it inherits of this process; a failure is its last line."""
    kept = np.ones(40 << 17)  # 40 MiB
    found = tools.run_program([sys.executable, "-S", "-c", "print(1)"], tmp_path / "log")
    assert 0 < found["memory"] < kept.nbytes and found["seconds"] >= 0
    with pytest.raises(UserError, match=r"log: sh ended with code 3: no such thing; the file holds all"):
        tools.run_program(["sh", "-c", "echo error: no such thing; exit 3"], tmp_path / "log")


def test_incomplete_log_probabilities(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    head = b"_logits_" + np.array([512, 5, 2], dtype="<i4").tobytes()
    path.write_bytes(head + bytes(4 * 2 * 512 + 2 * 255 * 2 * (6 + 4)))
    assert tools.base_chunks(path) == 2
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="no complete file"):
        tools.base_chunks(path)


# ------------------------------------------------------------------------------------------------------------- rows


def test_rows_are_distinct_and_complete() -> None:
    rows = {row.key: row for row in (*weight_rows(), *kv_rows())}
    assert len(rows) == len(weight_rows()) + len(kv_rows())
    assert {row.type for row in rows.values()} >= {"F16", "Q8_0", "Q4_K_M", "IQ2_XXS", "ITQ3_S", "ITQ2_S", "TQ1_0"}
    assert set(command.QUICK) <= set(rows)
    # Nobody makes them without an importance matrix.
    assert "iq3_xxs-imatrix" in rows and not {"iq3_xxs", "iq2_xxs", "iq2_xxs-pure", "q8_0-imatrix"} & set(rows)
    assert rows["iq3_s-pure-imatrix"].command == ("llama-quantize", "--pure", "--imatrix", "{imatrix}", "IQ3_S")
    assert rows["convert-pure-fisher"].command == (
        "convert", "--outtype", "itq3_s", "--fold-norms", "--pure", "--layerwise", "{text}", "--tokens", "{tokens}",
        "--fisher",
    )  # fmt: skip


def test_unknown_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(llama.MODEL), "--rows", "q9_z"]) == 1
    assert "no row is called q9_z; take some of: f16" in capsys.readouterr().err


def test_matplotlib_is_asked_for_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plain install lacks it: the command says so at once, and says what to install."""
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "evaluate", lambda *_: pytest.fail("the work began"))
    assert main(["eval", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: matplotlib: is not installed; pip install 'gguf-itq3s[eval]'\n"


# ------------------------------------------------------------------------------------------------- what is remembered


def evaluation_of(settings: engine.Settings) -> engine.Evaluation:
    """One that has neither tools nor a model."""
    evaluation = object.__new__(engine.Evaluation)
    evaluation.settings, evaluation.work = settings, settings.work
    evaluation.model, evaluation.sources = "tensors and build", "package"
    return evaluation


@pytest.mark.parametrize(
    ("changes", "row", "same"),
    [
        ({"calibration_tokens": 7}, Row("a", "X", "", ("convert", "--statistics", "{statistics}")), False),
        ({"imatrix_tokens": 7}, Row("a", "X", "", ("llama-quantize", "--imatrix", "{imatrix}", "X")), False),
        ({"training": "other"}, Row("a", "X", "", ("convert", "--layerwise", "{text}")), False),
        ({"calibration_tokens": 7, "training": "other"}, Row("a", "X", "", ("llama-quantize", "X")), True),
        ({"keep": True}, Row("a", "X", "", ("convert", "--statistics", "{statistics}")), True),
    ],
)
def test_results_are_named_by_what_decides_them(changes: dict[str, Any], row: Row, same: bool, tmp_path: Path) -> None:
    def making(settings: engine.Settings, row: Row = row) -> str:
        return evaluation_of(settings).making(row)

    plain = engine.Settings(tmp_path, tmp_path, training="a text")
    assert (making(plain) == making(replace(plain, **changes))) is same
    assert making(plain) != making(plain, replace(row, command=(*row.command, "--more")))
    assert making(plain) == making(plain, replace(row, key="b", how="otherwise"))


def test_sizes_of_one_model_share_what_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics and scores are made once, by a dry run; each file begins with a copy that it may take away."""
    runs: list[list[str]] = []

    def run(command: Sequence[object], _: str) -> dict[str, float]:
        runs.append(list(map(str, command)))
        folder = Path(f"{command[1]}.calibrating")
        if command[-1] == "--dry-run":
            for name in ("held.safetensors", "scores.jsonl"):
                (folder / name).write_text("first")
        return {"seconds": 5.0, "memory": 7}

    evaluation = evaluation_of(engine.Settings(tmp_path, tmp_path, training="a text"))
    monkeypatch.setattr(evaluation, "_run", run)
    row = Row("a", "X", "", ("convert", "--target-size", "{size}"))
    for name in ("a.gguf", "b.gguf"):
        assert evaluation._begin_size(row, ["convert", tmp_path / name], tmp_path / name)["seconds"] == 5
        begun = tmp_path / f"{name}.calibrating"
        (begun / "scores.jsonl").write_text("other")
        assert (begun / "held.safetensors").read_text() == "first"
    assert len(runs) == 1 and runs[0][-1] == "--dry-run"
    assert [path.read_text() for path in tmp_path.glob("size-*/*/scores.jsonl")] == ["first"]
    # Another state of a room that no file depends on: the converter would begin again, and each file with it.
    monkeypatch.setattr(engine, "sources", lambda *without: evaluation.sources if without else "another")
    evaluation._begin_size(row, ["convert", tmp_path / "c.gguf"], tmp_path / "c.gguf")
    assert len(runs) == 2


def test_every_module_that_can_change_a_file_decides_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of the package but the rooms above the converter, which it may not import."""
    package = Path(gguf_itq3s.__file__).parent
    for path in package.rglob("*.py"):
        target = tmp_path / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    monkeypatch.setattr(journal, "__file__", str(tmp_path / "base" / "journal.py"))

    def digest() -> str:
        return journal.sources.__wrapped__(*engine.ABOVE)  # not the one that is kept

    before = digest()
    (tmp_path / "evaluate" / "tables.py").write_text("# other\n")
    assert digest() == before
    rooms = {path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"}
    for room in sorted(rooms - set(engine.ABOVE)):
        (tmp_path / room / "new.py").write_text("# new\n")
        assert digest() != before, room
        before = digest()


# ------------------------------------------------------------------------------------------------------------ tables


def result(key: str, kld: float, *, how: str = "layers, imatrix", sources: str = "now") -> dict[str, Any]:
    figures = {"mean_kld": kld, "mean_kld_error": kld / 50, "same_top": 0.8, "perplexity": 12.0,
               "windows": [kld, 1.1 * kld]}  # fmt: skip
    made = {"bytes": 3 << 20, "weights": 5, "tensor_bits": 4.5, "layer_bits": 3.125, "processor": 90, "memory": 1 << 30}
    return {"key": key, "type": "ITQ3_S", "how": how, "command": "convert --pure", "sources": sources, "made": made,
            "texts": {"wiki": figures, "code": {**figures, "mean_kld": kld / 2}}}  # fmt: skip


def test_tables(tmp_path: Path) -> None:
    rows = [result("a", 0.1), result("b", 0.2, sources="before"), result("mix", 0.05, how="mix")]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in tables.quality(rows, lambda row: row["sources"] != "now").splitlines()
    ]
    assert [line[-1] for line in lines[2:5]] == ["`mix`", "`b`", "`a`"]
    assert lines[4] == ["**ITQ3_S**, layers, imatrix", "3.125", "3.0", "0.1000 ± 0.0020", "0.0500 ± 0.0020", "80.0",
                        "80.0", "12.00", "12.00", "1.5", "1.00", "`a`"]  # fmt: skip
    assert lines[3][0].endswith("imatrix†") and "† made by an earlier state" in tables.quality(
        rows, lambda row: row["sources"] != "now"
    )
    assert "†" not in tables.quality(rows)
    found = tables.ratios([("a / b", "a", "b"), ("a / none", "a", "none")], rows)
    assert found.count("0.500 ± 0.000") == 2 and "none" not in found
    tables.picture({"layers": rows[:2], "nothing": []}, "Fake", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(rows)) == rows


def test_pareto_front() -> None:
    points = [(3.0, 5.0), (2.0, 9.0), (4.0, 5.5), (3.5, 4.0), (2.0, 10.0)]
    assert tables.pareto_front(points) == [(2.0, 9.0), (3.0, 5.0), (3.5, 4.0)]


def test_sections_are_replaced_in_place(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("head\n<!-- begin a -->\nold\n<!-- end a -->\ntail\n")
    report.replace_section(page, "a", "new\n")
    report.replace_section(page, "a", "newer\n")
    assert page.read_text() == "head\n<!-- begin a -->\n\nnewer\n\n<!-- end a -->\ntail\n"
    with pytest.raises(UserError, match="begin b"):
        report.replace_section(page, "b", "x")


# ------------------------------------------------------------------------------------------------------------- texts


def test_text_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "wiki.test.raw"
    path.write_bytes(b" = A = \r\n some <unk> text\r\n")
    monkeypatch.setenv("WIKITEXT2", str(path))
    assert wikitext.read(wikitext.test_path()) == " = A = \n some text\n"
    monkeypatch.setenv("WIKITEXT2", str(tmp_path))
    assert wikitext.test_path() == path
    monkeypatch.setenv("WIKITEXT2", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"no such file.*give WIKITEXT2 the path"):
        wikitext.test_path()


def test_any_text_is_read_as_it_is(tmp_path: Path) -> None:
    """Of WikiText's files alone the marks are no text."""
    path = tmp_path / "page.txt"
    path.write_bytes("\ufeffa <unk> mark\r\nund Umlaute: äöü\n".encode())
    assert wikitext.read(path) == "a <unk> mark\nund Umlaute: äöü\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("grün".encode("latin-1"), r"page\.txt: is no text in UTF-8 \(byte 2\); save it in UTF-8"),
        (b"\x00\xff\xfe\x80", "is no text in UTF-8"),
        (b" \n\n", "is empty; give a text file of some pages"),
        (None, "cannot be read: No such file or directory; give a text file"),
    ],
)
def test_what_is_no_text(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        wikitext.read(path)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        wikitext.read(tmp_path)


def test_no_text_names_the_three_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIKITEXT2", raising=False)
    monkeypatch.setenv("GGUF_ITQ3S_CACHE", str(tmp_path))

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(UserError, match=r"no route.*set WIKITEXT2.*--text.*Hugging Face Hub"):
        wikitext.test_path()


def test_download_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIKITEXT2", raising=False)
    monkeypatch.setenv("GGUF_ITQ3S_CACHE", str(tmp_path))
    (tmp_path / "other.zip").write_bytes(b"not the archive")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "other.zip"))
    with pytest.raises(UserError, match="sha256"):
        wikitext.test_path()
