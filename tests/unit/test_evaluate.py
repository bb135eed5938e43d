"""The evaluation: reading llama-perplexity, rows, caching, report; and two rows on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llama
from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.cli import main
from gguf_itq3s.evaluate import command, plots, ratio, runner, tools, wikitext
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
    found = tools.parse_divergence(PRINTED, 8160)
    assert found["perplexity"] == 135.78874 and found["perplexity_error"] == 4.830178
    assert found["mean_kld"] == 0.072599 and found["mean_kld_error"] == 0.000671
    assert found["windows"] == [0.07, 0.0752]
    assert found["kld_99"] == 0.303486
    assert found["same_top"] == pytest.approx(0.78591) and found["same_top_error"] == pytest.approx(0.00454)
    # sqrt(0.99 * 0.01 / 8160) / f, f = 0.01 / ((0.510132 - 0.186819) / ln 50)
    assert found["kld_99_error"] == pytest.approx(0.00910, abs=1e-4)


@pytest.mark.parametrize("line", ["Mean    KLD", "Same top p", "99.0%   KLD", "Mean PPL(Q)", "   "])
def test_missing_figures_are_errors(line: str) -> None:
    text = "\n".join(row for row in PRINTED.splitlines() if not row.startswith(line))
    with pytest.raises(ValueError, match="printed no"):
        tools.parse_divergence(text, 100)


def test_a_missing_window_is_an_error() -> None:
    text = "\n".join(row for row in PRINTED.splitlines() if not row.startswith("   1"))
    with pytest.raises(ValueError, match="printed window 2 where 1 was to come"):
        tools.parse_divergence(text, 100)


def test_ratio_of_paired_windows() -> None:
    """What both rows share cancels; the error is that of resampling the windows."""
    rng = np.random.default_rng(1)
    hard = rng.gamma(4, 0.02, 400)
    above, below = 0.7 * hard * rng.normal(1, 0.05, 400), hard * rng.normal(1, 0.05, 400)
    found, error = ratio.paired(above.tolist(), below.tolist())
    assert found == pytest.approx(above.sum() / below.sum())
    picks = rng.integers(400, size=(4000, 400))
    assert error == pytest.approx(np.std(above[picks].sum(1) / below[picks].sum(1)), rel=0.1)
    assert error < 0.2 * found * np.std(hard) / np.mean(hard) / np.sqrt(400) * np.sqrt(2)  # were they not paired
    assert ratio.paired([2.0, 4.0], [1.0, 2.0]) == (2.0, 0.0)
    for bad in (([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])):
        with pytest.raises(ValueError, match=r"paired|zero"):
            ratio.paired(*bad)


def test_table_of_ratios() -> None:
    rows = {
        key: {"windows": windows, "mean_kld": float(np.mean(windows))}
        for key, windows in {"a": [0.1, 0.3], "b": [0.2, 0.6], "c": [0.4, 0.8]}.items()
    }
    lines = [("a / best", "a", ("b", "c")), ("a / none", "a", ("d",))]
    text = ratio.markdown(lines, {"one": rows, "two": {"a": rows["a"]}})
    assert "0.500 ± 0.000" in text and text.count("| -") == 0 and "a / none" not in text
    assert [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")] == ["a / best", "0.500 ± 0.000", "-"]


def test_missing_figures_name_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [PRINTED, "[1]91.3,"]
    monkeypatch.setattr(tools.Tools, "run", lambda *_: answers.pop(0))
    found = tools.Tools(tmp_path, 1)
    assert found.divergence(tmp_path, tmp_path, 100, 512, tmp_path)["mean_kld"] == 0.072599
    with pytest.raises(UserError, match=f"{tmp_path}.*printed no perplexity"):
        found.divergence(tmp_path, tmp_path, 100, 512, tmp_path)


def test_incomplete_log_probabilities(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    head = b"_logits_" + np.array([512, 5, 2], dtype="<i4").tobytes()
    path.write_bytes(head + bytes(4 * 2 * 512 + 2 * 255 * 2 * (6 + 4)))
    assert tools.base_chunks(path) == 2
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="no complete file"):
        tools.base_chunks(path)


def test_rows_are_distinct_and_complete() -> None:
    weights, caches = weight_rows(), kv_rows()
    rows = [*weights, *caches]
    assert len({row.key for row in rows}) == len(rows)
    types = {row.label for row in weights}
    assert types >= {
        "F16",
        "Q8_0",
        "Q4_K_M",
        "IQ4_XS",
        "Q3_K_S",
        "Q3_K_M",
        "IQ3_S",
        "IQ3_XXS",
        "Q2_K",
        "IQ2_XXS",
        "ITQ3_S",
        "ITQ2_S",
        "TQ1_0",
        "TQ2_0",
    }
    for name in ("q4_k_m", "iq4_xs", "q3_k_s", "q3_k_m", "iq3_s"):
        assert {name, f"{name}-imatrix"} <= {row.key for row in weights}
    keys = {row.key for row in weights}
    assert {"iq3_s-pure", "iq3_xxs-imatrix", "iq3_xxs-pure", "q3_k-pure", "itq3_s-pure", "itq3_s-pure-imatrix"} <= keys
    assert {"convert", "convert-pure-fast", "convert-pure-ternary", "convert-calibrated"} <= keys
    assert {"iq2_xxs-imatrix", "iq2_xxs-pure-imatrix", "q2_k", "q2_k-pure-imatrix"} <= keys
    assert not {"iq2_xxs", "iq2_xxs-pure"} & keys  # nobody makes it without
    assert {"itq2_s", "itq2_s-pure-imatrix", "convert-itq2_s-pure-fisher", "convert-bpw-2.7-fisher"} <= keys
    assert {"kv-itq3_s-q8_0", "kv-itq3_s-q4_0"} <= {row.key for row in caches}


def test_pareto_front() -> None:
    points = [(3.0, 5.0), (2.0, 9.0), (4.0, 5.5), (3.5, 4.0), (2.0, 10.0)]
    assert plots.pareto_front(points) == [(2.0, 9.0), (3.0, 5.0), (3.5, 4.0)]


def test_sections_are_replaced_in_place(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("head\n<!-- begin a -->\nold\n<!-- end a -->\ntail\n")
    report.replace_section(page, "a", "new\n")
    report.replace_section(page, "a", "newer\n")
    assert page.read_text() == "head\n<!-- begin a -->\n\nnewer\n\n<!-- end a -->\ntail\n"
    with pytest.raises(UserError, match="begin b"):
        report.replace_section(page, "b", "x")


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


def test_no_error_names_a_folder_that_nobody_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the variable names and the cache are looked at; the message names those, and the ways out."""
    monkeypatch.delenv("WIKITEXT2", raising=False)
    monkeypatch.setenv("GGUF_ITQ3S_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: 1 / 0)
    looked: list[Path] = []
    is_file = Path.is_file

    def noted(path: Path) -> bool:
        looked.append(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", noted)
    for find in (wikitext.test_path, wikitext.training_path):
        with pytest.raises(UserError) as raised:
            find()
        assert str(raised.value).startswith(str(tmp_path / "cache")) and "shared" not in str(raised.value)
    assert looked and all(path.is_relative_to(tmp_path) for path in looked)


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


@pytest.mark.parametrize(
    ("changes", "row", "same"),
    [
        ({"calibration_tokens": 7}, Row("a", "X", "", "package", calibrated=True), False),
        ({"imatrix_tokens": 7}, Row("a", "X", "", "llama-quantize", ("X",), imatrix=True), False),
        ({"calibration_tokens": 7}, Row("a", "X", "", "llama-quantize", ("X",)), True),
        ({"keep": True}, Row("a", "X", "", "package", calibrated=True), True),
    ],
)
def test_results_are_cached_by_what_decides_them(changes: dict[str, Any], row: Row, same: bool, tmp_path: Path) -> None:
    def path(settings: runner.Settings, digest: str = "text") -> Path:
        evaluation = object.__new__(runner.Evaluation)
        evaluation.settings, evaluation.work, evaluation.common = settings, tmp_path, "model, text, tools, windows"
        evaluation.model = "model, tools"
        evaluation.__dict__["training"] = tmp_path, digest
        return evaluation._row_path(row)

    plain = runner.Settings(tmp_path, tmp_path)
    assert (path(plain) == path(replace(plain, **changes))) is same
    assert (path(plain) == path(plain, "another training text")) is not (row.imatrix or row.calibrated)
