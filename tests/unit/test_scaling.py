"""The scaling laws: closed forms against what defines them, the range of the fit, the command, the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gguf_itq3s.base import report
from gguf_itq3s.checkpoint import reading
from gguf_itq3s.cli import main
from gguf_itq3s.inspect import scaling, scaling_plan
from gguf_itq3s.inspect.scaling import FLOAT, TERNARY, Law
from llama import MODEL
from scripts.tables import scaling as tables

ROOT = Path(__file__).resolve().parents[2]
LAWS = st.sampled_from([TERNARY, FLOAT])


def logarithmic(bounds: tuple[float, float]) -> st.SearchStrategy[float]:
    """Numbers of every order of magnitude within bounds, in which the laws' functions take their neighbours too."""
    return st.floats(math.log10(bounds[0]) + 0.5, math.log10(bounds[1]) - 0.5).map(lambda x: 10**x)


PARAMETERS, TOKENS = logarithmic(scaling.PARAMETERS), logarithmic(scaling.TOKENS)
BUDGETS = logarithmic(scaling.BUDGET)
STEPS = st.floats(1e-3, 1.0)


def test_the_laws_as_printed() -> None:
    """Worked by hand: 1.1 B parameters are N = 1100, 150 B tokens are D = 150."""
    assert TERNARY.loss(1.1e9, 150e9) == pytest.approx(2.19 + 4.73 / 1100**0.32 + 5.18 / 150**0.81, rel=1e-12)
    assert FLOAT.loss(1.1e9, 150e9) == pytest.approx(2.17 + 7.86 / 1100**0.56 + 3.42 / 150**0.53, rel=1e-12)
    assert TERNARY.loss(1e6, 1e9) == pytest.approx(2.19 + 4.73 + 5.18)


@given(LAWS, PARAMETERS, TOKENS, STEPS)
def test_more_of_either_is_never_worse(law: Law, parameters: float, tokens: float, step: float) -> None:
    loss = law.loss(parameters, tokens)
    assert law.floor <= law.loss(parameters * (1 + step), tokens) <= loss
    assert law.floor <= law.loss(parameters, tokens * (1 + step)) <= loss
    assert law.best_loss(parameters) <= loss


@given(LAWS, BUDGETS, STEPS)
def test_the_split_is_the_best(law: Law, flops: float, step: float) -> None:
    """It spends the budget, and every other split of it is worse."""
    parameters, tokens = law.optimum(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    best = law.loss(parameters, tokens)
    for factor in (1 + step, 1 / (1 + step)):
        assert law.loss(parameters * factor, tokens / factor) >= best - 1e-12 * best
    # Twice the parameters on half the text is worse by more than rounding.
    assert law.loss(parameters * 2, tokens / 2) > best


@given(LAWS, BUDGETS, st.floats(1.01, 2.0))
def test_a_larger_budget_grows_both(law: Law, flops: float, factor: float) -> None:
    (n, d), (more_n, more_d) = law.optimum(flops), law.optimum(flops * factor)
    assert more_n > n and more_d > d
    assert law.loss(more_n, more_d) < law.loss(n, d)


@given(LAWS, PARAMETERS, TOKENS)
def test_inverses(law: Law, parameters: float, tokens: float) -> None:
    loss = law.loss(parameters, tokens)
    for found, given_, other in (
        (law.tokens(loss, parameters), tokens, law.best_loss(parameters)),
        (law.parameters(loss, tokens), parameters, law.floor + law.of_tokens / (tokens / 1e9) ** law.b),
    ):
        assume(loss - other > 1e-6)  # else the other term has rounded it away
        assert found == pytest.approx(given_, rel=1e-6)


@pytest.mark.slow
@given(LAWS, PARAMETERS, st.floats(0, 1))
def test_no_number_of_tokens_gives_less_than_the_best(law: Law, parameters: float, below: float) -> None:
    assert law.tokens(law.best_loss(parameters) - below, parameters) is None
    assert law.parameters(law.floor - below, 1e9) is None


@given(PARAMETERS, TOKENS)
def test_a_match_has_the_loss_of_the_float_model(parameters: float, tokens: float) -> None:
    assume(parameters < scaling.PARAMETERS[1] / 100)
    loss = FLOAT.loss(parameters, tokens)
    rows = {row["how"]: row for row in scaling_plan.matches(parameters, tokens)}
    assert list(rows) == ["equal parameters", "equal bytes, TQ2_0", "equal bytes, TQ1_0", "equal tokens"]
    for how, row in rows.items():
        if row["bytes"] is None:
            assert row["fitted"] is None and row["floor"] >= loss - 1e-9
        else:
            n, d = row["parameters"], row["tokens"]
            floor = TERNARY.floor + scaling.TERNARY.of_tokens / (d / 1e9) ** TERNARY.b
            at = floor + TERNARY.of_parameters / (n / 1e6) ** TERNARY.a  # without the bounds of loss()
            assert at == pytest.approx(loss, rel=1e-6)
            assert row["fitted"] == scaling.fitted(n, d)
        if how.startswith("equal bytes") and row["bytes"]:
            assert row["bytes"][how.split()[-1]] == pytest.approx(1)


@pytest.mark.parametrize(
    ("parameters", "tokens", "within"),
    [
        (99e6, 150e9, True), (1.1e9, 150e9, True), (400e6, 1e9, True), (98e6, 150e9, False), (1.11e9, 10e9, False),
        (400e6, 151e9, False),
    ],
)  # fmt: skip
def test_range_of_the_fit(parameters: float, tokens: float, within: bool) -> None:
    assert scaling.fitted(parameters, tokens) is within
    text = scaling_plan.text(scaling_plan.consult(parameters, tokens, None))
    (line,) = [line for line in text.splitlines() if line.startswith("  ternary ")]
    assert line.endswith(scaling_plan.MARK) is not within


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1e9, 1.0, 1e300])
def test_numbers_that_are_none(bad: float) -> None:
    for call in (
        lambda: TERNARY.loss(bad, 1e9), lambda: TERNARY.loss(1e9, bad), lambda: TERNARY.optimum(bad),
        lambda: TERNARY.tokens(3.0, bad), lambda: TERNARY.parameters(3.0, bad), lambda: TERNARY.best_loss(bad),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="not a number from"):
            call()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.1B", 1.1e9), ("99M", 99e6), ("99 m", 99e6), ("1.2T", 1.2e12), ("3e9", 3e9), ("150G", 150e9), (".5k", 500),
     ("1e-3B", 1e6), ("7", 7)],
)  # fmt: skip
def test_parse_count(text: str, value: float) -> None:
    assert scaling_plan.parse_count(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "B", "nan", "inf", "-3B", "1.1.1B", "3x", "1e99999B", "0x10", "٣B ..", "1,5B"])
def test_parse_count_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number; write"):
        scaling_plan.parse_count(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scaling", "--params", "1B"], "--tokens: is not given; give two of"),
        (["--scaling", "--tokens", "1B"], "--params: is not given; give two of"),
        (["--scaling", "--params", "1B", "--tokens", "1B", "--flops", "1e20"], "contradicts --params and --tokens"),
        (["--scaling", "--params", "1k", "--flops", "1e28"], "1.66667e+24 tokens: not a number from 1000 to 1e+18"),
        (["--scaling", "--vram", "1GiB"], "--vram: is not for --scaling"),
        (["--scaling", str(MODEL), "--params", "1B"], "contradicts the folder"),
        (["--params", "1B"], "add --scaling"),
        ([], "MODEL: is not given"),
        pytest.param(
            ["--scaling", "--plot", "missing/folder/x.png"], "create the folder first", marks=pytest.mark.slow
        ),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("value", ["nan", "-1B", "0", "3", "1e15", "many"])
def test_arguments_that_are_no_count(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--scaling", f"--params={value}"])
    assert "argument --params" in capsys.readouterr().err


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", "--scaling", "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.slow
def test_json_of_a_folder_and_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """The parameters are those of the bundled model's matrices and norms, counted from its shapes; 6 N D = C."""
    result = run_json([str(MODEL), "--flops", "1e18"], capsys)
    shapes = reading.read_shapes(MODEL)
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    counted = sum(math.prod(shape) for name, shape in shapes.items() if name not in ends)
    assert result["parameters"] == counted
    assert result["tokens"] == pytest.approx(1e18 / 6 / counted)
    assert result["fitted_there"] is False
    assert result["optimum"]["ternary"]["loss"] <= result["losses"]["ternary"]


def test_tokens_and_a_budget_give_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(["--tokens", "50B", "--flops", "1e20"], capsys)
    assert result["parameters"] == pytest.approx(1e20 / 6 / 50e9)


def test_where_no_number_of_tokens_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--scaling", "--params", "70B", "--tokens", "15T"]) == 0
    lines = capsys.readouterr().out.splitlines()
    matches = {line[:18]: line for line in lines if line.startswith("equal ")}
    assert len(matches) == 4
    for how in ("equal parameters", "equal bytes, TQ2_0", "equal bytes, TQ1_0"):
        assert "none: not below 2." in matches[how.ljust(18)]
    assert "none" not in matches["equal tokens".ljust(18)]


@pytest.mark.slow
def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "b.png"):
        assert main(["plan", "--scaling", "--params", "1B", "--flops", "1e20", "--plot", str(tmp_path / name)]) == 0
    first = (tmp_path / "a.png").read_bytes()
    assert first == (tmp_path / "b.png").read_bytes() and first.startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["plan", "--scaling", "--plot", str(tmp_path / "x.unknown")]) == 1
    assert "give the picture a name that ends with .png" in capsys.readouterr().err
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert main(["plan", "--scaling", "--plot", str(tmp_path / "c.png")]) == 1
    assert "matplotlib: is not installed" in capsys.readouterr().err and not (tmp_path / "c.png").exists()


def test_the_page_shows_what_the_script_makes() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert tables.laws().rstrip() in page
    assert tables.speeds(json.loads(tables.BENCH.read_text())).rstrip() in page
    for law in (TERNARY, FLOAT):
        assert str(law).replace("/", " / ") in page
