"""Types for a size: scores, budgets, what stays fixed, what is said, resuming."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from calibrating import options as calibration_options
from checkpoints import NOVEL
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import budget, ends, scores
from gguf_itq3s.calibrate.scores import Scores
from gguf_itq3s.calibrate.store import open_calibration
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.source import SourceTensor
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec.family import DEFAULT
from gguf_itq3s.codec.transform import BLOCK
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import Conversion, convert
from gguf_itq3s.rounding import hessian

SMALL: dict[str, Any] = {"tokens": 640, "context": 64, "batch": 4, "effort": "fast"}


def quietly(model: Path, out: Path, **changes: Any) -> Conversion:
    return convert(ConvertOptions.of(model, out, **{"effort": "fast", **changes}), io.StringIO())


def types(path: Path) -> dict[str, Type]:
    return {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}


def bits_of(path: Path) -> float:
    tensors = gguf.GGUFReader(path).tensors
    return float(8 * sum(t.n_bytes for t in tensors) / sum(t.n_elements for t in tensors))


@pytest.fixture(scope="module")
def made(calibrated: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    """A small Llama and its statistics."""
    return calibrated("llama")


# ------------------------------------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize("bpw", [2.3, 4.0, 7.9])
def test_the_file_has_the_bits_that_are_asked_for(bpw: float, made: tuple[Path, Path], tmp_path: Path) -> None:
    """At most these, and less by no more than the smallest step of a tensor would take."""
    out = tmp_path / "x.gguf"
    done = quietly(made[0], out, calibration=made[1], target_bpw=bpw)
    assert done.plan is not None
    weights = sum(row.weights for row in done.rows)
    left = bpw * weights / 8 - sum(row.bytes for row in done.rows)
    assert left >= 0 and bits_of(out) <= bpw
    step = max(row.weights for row in done.rows) * 1.94 / 8  # from Q6_K to Q8_0
    assert left < step
    assert done.plan.here[0] == pytest.approx(bits_of(out))
    found = types(out)
    counts = {qtype: sum(t.n_elements for t in gguf.GGUFReader(out).tensors if found[t.name] == qtype) for qtype in
              set(found.values()) - {Type.F32}}  # fmt: skip
    most = max(counts, key=lambda qtype: counts[qtype]).name
    field = gguf.GGUFReader(out).fields["general.file_type"].contents()
    assert LlamaFileType(field).name.startswith(f"MOSTLY_{most}")


def test_given_types_stay(made: tuple[Path, Path], tmp_path: Path) -> None:
    given: dict[str, Any] = {"token_embedding_type": "f16", "output_tensor_type": "q8_0",
                             "tensor_types": (("blk.0.attn_v", "q3_k"),)}  # fmt: skip
    quietly(made[0], tmp_path / "x.gguf", calibration=made[1], target_bpw=6.5, **given)
    found = types(tmp_path / "x.gguf")
    assert found["token_embd.weight"] == Type.F16
    assert found["output.weight"] == Type.Q8_0
    assert found["blk.0.attn_v.weight"] == Type.Q3_K
    assert set(found.values()) <= {Type.F32, Type.F16, Type.Q3_K, *budget.TYPES[BLOCK]}


def test_ternary_matrices_stay_ternary(
    made: tuple[Path, Path], checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gguf_itq3s.convert import ternaries as choosing

    own = choosing.find

    def some(checkpoint: Any, *rest: Any) -> Any:
        from dataclasses import replace

        return replace(own(checkpoint, *rest), forced=frozenset({"blk.1.ffn_up.weight"}))

    monkeypatch.setattr(choosing, "find", some)
    quietly(made[0], tmp_path / "x.gguf", calibration=made[1], target_bpw=4.5)
    found = types(tmp_path / "x.gguf")
    assert found["blk.1.ffn_up.weight"] == Type.TQ2_0
    assert found["blk.0.ffn_up.weight"] in budget.TYPES[BLOCK]


@pytest.mark.parametrize(
    "options,said",
    [
        (["--target-bpw", "2"], r"with 2 bits per weight: the least is 2\.\d+, the most 8\.\d+ bits per weight"),
        (["--target-bpw", "9"], "the most 8"),
        (["--target-size", "10KiB"], r"with 10240 bytes: the least is \d+ bytes, the most \d+ bytes"),
        (["--target-bpw", "4", "--pure"], "--pure has one type"),
        (["--target-bpw", "4", "--outtype", "tq2_0"], "--outtype tq2_0 names one"),
        (["--target-bpw", "4", "--calibrate", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    options: list[str], said: str, made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [] if {"--outtype", "--calibrate"} & set(options) else ["--calibration", str(made[1])]
    assert convert_main([str(made[0]), str(tmp_path / "x.gguf"), *arguments, *options]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and re.search(said, line)
    assert not list(tmp_path.iterdir())


def test_statistics_are_needed(made: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs to know the inputs"):
        quietly(made[0], tmp_path / "x.gguf", target_bpw=4)


def test_the_experts_of_a_layer_have_one_type(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, statistics = calibrated("mixtral")
    # The budget alone changes from file to file, and scores do not go by it.
    known: dict[tuple[str, tuple[Type, ...]], scores.Score] = {}
    measured = Scores.of

    def of(self: Scores, tensor: SourceTensor, candidates: Sequence[Type]) -> scores.Score:
        key = tensor.name, tuple(candidates)
        if key not in known:
            known[key] = measured(self, tensor, candidates)
        return known[key]

    monkeypatch.setattr(Scores, "of", of)
    kinds: dict[str, set[Type]] = {}
    for bpw in (2.4, 3.5, 5.0):
        quietly(model, tmp_path / "x.gguf", calibration=statistics, target_bpw=bpw, segment=4, lookahead=0)
        for name, qtype in types(tmp_path / "x.gguf").items():
            if "_exps" in name:
                kinds.setdefault(f"{bpw} {name.rpartition('.ffn')[0]}", set()).add(qtype)
        assert bits_of(tmp_path / "x.gguf") <= bpw
    assert len(kinds) == 6 and all(len(found) == 1 for found in kinds.values())
    assert len(set.union(*kinds.values())) > 1


# ------------------------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_the_whole_errors(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Against tr(E H E^T) / tr(W H W^T) computed at once, of the matrices as the file has them."""
    done = quietly(made[0], tmp_path / "x.gguf", calibration=made[1], target_bpw=4.5, fold_norms=True)
    assert done.plan is not None
    quietly(made[0], tmp_path / "w.gguf", fold_norms=True, outtype="f16")
    weights = {t.name: np.asarray(t.data, dtype=np.float32) for t in gguf.GGUFReader(tmp_path / "w.gguf").tensors}
    found = ends.read(made[1])
    assert found is not None and found.output is not None
    statistics = open_calibration(made[1], sorted(made[0].glob("*.safetensors")))
    wanted = {}
    for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors:
        if tensor.tensor_type == Type.F32:
            continue
        w = weights[tensor.name]
        e = gguf.quants.dequantize(tensor.data, tensor.tensor_type) - w
        h: Any = np.eye(w.shape[1]) if tensor.name == "token_embd.weight" else found.output
        if statistics.known(tensor.name):
            h = statistics.hessian(tensor.name)
        rows = np.ones(len(w))
        if tensor.name in ("token_embd.weight", "output.weight"):
            rows = np.zeros(len(w))
            rows[: len(found.frequency)] = found.frequency
        noise, signal = (hessian.rotate_rows(x) * np.sqrt(rows)[:, None] for x in (e, w))
        share = 1 / 4 if tensor.name.startswith("blk.") else 1  # two layers add to the stream twice each
        wanted[tensor.name] = share * np.vdot(noise @ h, noise) / np.vdot(signal @ h, signal)
    for name, _, _, score in done.plan.lines:
        assert float(score) == pytest.approx(wanted[name], rel=0.02), name
    assert done.plan.here[2] == pytest.approx(sum(wanted.values()), rel=0.02)


def test_the_ends_are_counted(made: tuple[Path, Path]) -> None:
    found = ends.read(made[1])
    assert found is not None and found.output is not None
    ids = windows(calibration_options(made[0]), 256)
    np.testing.assert_allclose(found.frequency * ids.size, np.bincount(ids.reshape(-1), minlength=512))
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float32)
    with torch.no_grad():
        x = model.model(torch.from_numpy(ids)).last_hidden_state.reshape(-1, 256).double().numpy()
    np.testing.assert_allclose(hessian.rotate(found.output), x.T @ x / len(x), atol=1e-3)


def test_damaged_ends_are_one_line(made: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(made[1], tmp_path / "copy"))
    (folder / ends.ENDS).write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match="cannot be read"):
        quietly(made[0], tmp_path / "x.gguf", calibration=folder, target_bpw=4)
    (folder / ends.ENDS).unlink()  # as a folder of an earlier version
    quietly(made[0], tmp_path / "x.gguf", calibration=folder, target_bpw=4)
    assert bits_of(tmp_path / "x.gguf") <= 4


# --------------------------------------------------------------------------------------------------------- calibrated


def test_an_interrupted_choice_goes_on(
    uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, gradients and scores are made once, and the bytes are those of a run without a break."""
    asked: dict[str, Any] = {"calibrate": (NOVEL,), "fisher": True, "target_bpw": 4.5, **SMALL}
    quietly(uneven("llama"), tmp_path / "whole.gguf", **asked)
    own, scored, out = Scores.of, list[str](), tmp_path / "broken.gguf"

    def of(self: Any, tensor: Any, kinds: Any) -> Any:
        scored.append(tensor.name)
        if len(scored) == 5:
            raise KeyboardInterrupt
        return own(self, tensor, kinds)

    monkeypatch.setattr(Scores, "of", of)
    with pytest.raises(KeyboardInterrupt, match="the same command continues from"):
        quietly(uneven("llama"), out, **asked)
    work = tmp_path / "broken.gguf.calibrating"
    stamps = {path: path.stat().st_mtime_ns for path in work.glob("*/*.safetensors")}
    assert len(stamps) == 10  # two layers and the ends, and of the tokens held out; two layers and both ends
    monkeypatch.setattr(budget, "calibrate", lambda _, out, *_again, held: _unchanged(out, stamps))
    quietly(uneven("llama"), out, **asked)
    assert len(scored) == len(set(scored)) + 1
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole.gguf", "broken.gguf"}


def test_costs_are_of_tokens_that_no_rounding_knows(
    uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On those that it knows a matrix costs less, the more so the fewer they are."""
    costs: list[list[tuple[float, ...]]] = []

    def both(checkpoint: Any, factors: Any, judges: Any, *rest: Any) -> Scores:
        assert (factors.source.path.name, judges.source.path.name) == ("statistics", "held")
        tokens = [of.source.tokens("blk.0.ffn_up.weight", None) for of in (factors, judges)]
        assert tokens == [9 * 64, 64]  # a window of ten
        tensors = [t for t in checkpoint.tensors if t.name.startswith("blk.") and len(t.shape) > 1]
        for of in (Scores(checkpoint, factors, judges, *rest), Scores(checkpoint, factors, None, *rest)):
            found = [of.of(tensor, [DEFAULT.type]) for tensor in tensors]
            costs.append([(*score.relative, *(score.fisher or ())) for score in found])
        return Scores(checkpoint, factors, judges, *rest)

    monkeypatch.setattr(budget, "Scores", both)
    asked: dict[str, Any] = {"calibrate": (NOVEL,), "fisher": True, "target_bpw": 4.5, "dry_run": True, **SMALL}
    quietly(uneven("llama"), tmp_path / "x.gguf", **asked)
    held, known = (np.sum(found, axis=0) for found in costs)
    assert held.shape == (2,) and (held > 1.2 * known).all()


def _unchanged(folder: Path, stamps: dict[Path, int]) -> None:
    assert {path: path.stat().st_mtime_ns for path in folder.parent.glob("*/*.safetensors")} == stamps
