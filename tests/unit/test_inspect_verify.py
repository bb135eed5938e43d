"""``inspect`` and ``verify``."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import LLAMA, write_gguf
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint.rescaling import NORMS_FOLDED
from gguf_itq3s.cli import convert_main, main
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.formats import ITQ3_S_LEVELS as LEVELS
from gguf_itq3s.codec.types import ITQ2_S, ITQ3_N, ITQ3_S
from gguf_itq3s.inspect import contents, verify
from selection import some

Q = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("files") / "model.gguf"
    assert convert_main([str(model), str(out), "--effort", "fast"]) == 0
    return out


def test_inspect_facts(file: Path) -> None:
    facts = contents.inspect_file(file)
    assert facts["bytes"] == file.stat().st_size
    assert facts["metadata"]["itq3s.codec"] == "trellis"
    tensor = next(t for t in facts["tensors"] if t["name"] == "blk.0.ffn_up.weight")
    assert (tensor["type"], tensor["shape"], tensor["bits_per_weight"]) == ("ITQ3_S", [256, 512], 3.125)
    assert sum(tensor["levels"].values()) == pytest.approx(1)
    assert list(tensor["levels"]) == [str(v) for v in LEVELS]
    data = next(t for t in gguf.GGUFReader(file).tensors if t.name == tensor["name"]).data
    d = blocks.unpack(np.asarray(data).reshape(-1, 100))[0].d
    assert tensor["scales"] == [float(d.min()), float(d.max())]
    facts["metadata"] = {"itq3s.short": "a" * 100, "itq3s.long": "b" * 101}
    lines = contents.text(facts).splitlines()
    assert f"itq3s.short = {'a' * 100}" in lines
    assert f"itq3s.long = {'b' * 100}... (101 characters)" in lines


def test_inspect_counts_levels(tmp_path: Path) -> None:
    """A file of known blocks: TQ2_0 with a quarter zeros, and ITQ3_S blocks that are all zero."""
    weights = np.tile(np.array([0, 0.5, -0.5, 0.5], dtype=np.float32), (2, 64))
    made = {
        "t": (gguf.quants.quantize(weights, Q.TQ2_0), Q.TQ2_0), "z": (blocks.quantize(np.zeros((2, 256))), ITQ3_S),
    }  # fmt: skip
    write_gguf(tmp_path / "x.gguf", LLAMA, made)
    ternary, zero = contents.inspect_file(tmp_path / "x.gguf")["tensors"]
    assert ternary["levels"] == {"-1": 0.25, "0": 0.25, "1": 0.5}
    assert ternary["scales"] == [0.5, 0.5] and ternary["zero_blocks"] == 0
    assert zero["scales"] == [0, 0] and zero["zero_blocks"] == 2


def test_verify_against_checkpoint_and_f16(file: Path, model: Path, tmp_path: Path) -> None:
    f16 = tmp_path / "f16.gguf"
    assert convert_main([str(model), str(f16), "--outtype", "f16"]) == 0
    results = verify.compare(file, model)
    assert results == sorted(results, key=lambda r: -r["error"])
    by_name = {r["name"]: r for r in results}
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    exact = {t.name: t for t in gguf.GGUFReader(f16).tensors}
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        w = exact[name].data.astype(np.float64)  # random BF16 weights are exact in F16
        error = ((blocks.dequantize(tensors[name].data) - w) ** 2).sum() / (w**2).sum()
        assert by_name[name]["error"] == pytest.approx(error, rel=1e-6)
        assert 0.015 < error < 0.025
    assert by_name["blk.0.attn_norm.weight"]["error"] == 0
    same = {r["name"]: r["error"] for r in verify.compare(file, f16)}
    assert same == pytest.approx({r["name"]: r["error"] for r in results}, rel=1e-6)


@pytest.mark.slow
def test_verify_finds_a_damaged_tensor(
    file: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.attn_v.weight")
    with damaged.open("r+b") as out:
        out.seek(int(tensor.data_offset))
        out.write(b"\xa5" * 64)
    assert main(["verify", str(damaged), "--against", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "blk.1.attn_v.weight"


def test_verify_undoes_norm_folding(model: Path, tmp_path: Path) -> None:
    """A file with gains of one and the old gains in the columns is compared with the folded checkpoint."""
    f16 = tmp_path / "f16.gguf"
    assert convert_main([str(model), str(f16), "--outtype", "f16"]) == 0
    reader = gguf.GGUFReader(f16)
    source, folded = tmp_path / "source.gguf", tmp_path / "folded.gguf"
    gain = np.random.default_rng(0).uniform(0.5, 2, 256).astype(np.float32)
    for path in (source, folded):
        made = {}
        for t in reader.tensors:
            data = np.asarray(t.data, dtype=np.float32)
            if t.name == "blk.0.attn_norm.weight":
                data = gain if path == source else np.ones_like(gain)
            elif t.name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight") and path == folded:
                data = data * gain
            made[t.name] = data, None
        write_gguf(path, LLAMA | {NORMS_FOLDED: (path == folded, [gguf.GGUFValueType.BOOL])}, made)
    results = {r["name"]: r for r in verify.compare(folded, source)}
    assert all(r["error"] == 0 for r in results.values())
    assert results["blk.0.attn_q.weight"]["note"] == "rescaled"


@pytest.mark.parametrize("command", [["inspect"], ["verify", "--against", "x"]])
def test_bad_files(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf: no such file; give a GGUF file" in capsys.readouterr().err
    (tmp_path / "bad.gguf").write_bytes(b"not gguf at all, only some text" * 10)
    assert main([*command, str(tmp_path / "bad.gguf")]) == 1
    assert "is not a complete GGUF file" in capsys.readouterr().err


#: Where the float16 of a block are, by the block structures of ggml-common.h.
FLOATS = {
    Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q2_K: [80, 82], Q.Q3_K: [108],
    Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.IQ4_XS: [0], Q.IQ3_S: [0], Q.TQ1_0: [52],
    Q.TQ2_0: [64], ITQ3_S: [96, 98], ITQ2_S: [64], Q.F16: [0, 2], Q.F32: [2, 6], Q.BF16: [0, 2],
}  # fmt: skip
SOME = (ITQ3_S, ITQ2_S, Q.TQ2_0, Q.Q8_0, Q.F16, Q.F32, Q.BF16)


def typed_file(path: Path, qtype: gguf.GGMLQuantizationType, data: np.ndarray) -> Path:
    good = np.ones(256, dtype=np.float32)
    return write_gguf(path, LLAMA, {"good.weight": (good, None), "blk.0.ffn_up.weight": (data, qtype)})


@pytest.mark.parametrize(
    "bits", some([0x7E00, 0x7C00, 0xFC00, 0x7F80, 0xFFC0], lambda bits: bits == 0x7E00, pytest.mark.slow)
)
@pytest.mark.parametrize("qtype", some(FLOATS, lambda q: q in SOME, pytest.mark.slow), ids=lambda q: str(q.name))
def test_a_value_that_is_not_finite_is_an_error(
    qtype: gguf.GGMLQuantizationType, bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each float16 of a block in turn (the upper half of a float32, BF16) set to NaN or an infinity."""
    of_bf16 = bits in (0x7F80, 0xFFC0)
    if of_bf16 and qtype not in (Q.F32, Q.BF16):
        bits = 0xFE01
    elif not of_bf16 and qtype in (Q.F32, Q.BF16):
        bits = 0x7FC1
    size = gguf.GGML_QUANT_SIZES[qtype][1]
    raw = np.random.default_rng(0).integers(0, 32, (4, 256 // gguf.GGML_QUANT_SIZES[qtype][0] * size), dtype=np.uint8)
    good = typed_file(tmp_path / "good.gguf", qtype, raw)
    assert main(["inspect", str(good)]) == main(["verify", str(good), "--against", str(good)]) == 0
    for offset in FLOATS[qtype]:
        damaged = raw.copy()
        damaged[2, offset : offset + 2] = np.frombuffer(np.uint16(bits).tobytes(), dtype=np.uint8)
        path = typed_file(tmp_path / f"{offset}.gguf", qtype, damaged)
        with np.errstate(invalid="ignore"):
            values = gguf.quants.dequantize(damaged, qtype) if qtype.name[0] != "F" else None
        count = 1 if values is None else int((~np.isfinite(values)).sum())
        assert count > 0
        capsys.readouterr()
        assert main(["inspect", str(path), "--json"]) == 1
        facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["tensors"]
        assert {t["name"]: t["not_finite"] for t in facts} == {"good.weight": 0, "blk.0.ffn_up.weight": 1}
        assert main(["inspect", str(path)]) == 1
        assert "NOT FINITE: blk.0.ffn_up.weight: 1 " in capsys.readouterr().out
        for against in (good, path):
            assert main(["verify", str(path), "--against", str(against), "--json"]) == 1
            first = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[0]
            assert first["name"] == "blk.0.ffn_up.weight" and first["error"] is None
            assert first["note"] == f"{count} of 1024 values are NaN or infinite"
        assert main(["verify", str(good), "--against", str(path), "--json"]) == 1
        assert "in the checkpoint" in json.loads(capsys.readouterr().out)[0]["note"]


def test_a_missing_tensor_and_another_shape_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = typed_file(tmp_path / "one.gguf", Q.F32, np.ones((4, 256), dtype=np.float32))
    other = typed_file(tmp_path / "other.gguf", Q.F32, np.ones((8, 128), dtype=np.float32))
    assert main(["verify", str(one), "--against", str(other)]) == 1
    assert "blk.0.ffn_up.weight: has shape (4, 256), the checkpoint (8, 128); " in capsys.readouterr().err
    made = {"blk.0.ffn_up.weight": (np.ones((4, 256), dtype=np.float32), None)}
    write_gguf(tmp_path / "short.gguf", LLAMA, made)
    assert main(["verify", str(tmp_path / "short.gguf"), "--against", str(one)]) == 1
    assert main(["verify", str(one), "--against", str(tmp_path / "short.gguf")]) == 1


@pytest.mark.parametrize(
    ("version", "row", "said"),
    [
        (4, ITQ3_S, "has itq3s.version 4, this program reads 3; take a newer one"),
        (0, ITQ3_S, "has itq3s.version 0, this program reads 3"),
        ("3", ITQ3_S, "has itq3s.version '3', this program reads 3"),
        (1, ITQ3_S, "has itq3s.version 1, whose code is no longer read; make it anew: convert the checkpoint"),
        (3, ITQ3_N, ""), (None, ITQ3_N, ""),
    ],
)  # fmt: skip
def test_a_version_that_does_not_fit_is_refused(
    version: int | str | None, row: gguf.GGMLQuantizationType, said: str, tmp_path: Path
) -> None:
    kind = gguf.GGUFValueType.STRING if isinstance(version, str) else gguf.GGUFValueType.UINT32
    fields = LLAMA if version is None else {**LLAMA, "itq3s.version": (version, [kind])}
    made = {"t": (blocks.quantize(np.zeros((2, 256)), FAMILY[row].format), row)}
    path = write_gguf(tmp_path / "x.gguf", fields, made)
    if said:
        for read in (contents.inspect_file, lambda path: verify.compare(path, path)):
            with pytest.raises(UserError, match=said):
                read(path)
    else:
        assert contents.inspect_file(path)["tensors"][0]["type"] == row.name


def test_a_file_in_the_former_code_is_named(tmp_path: Path) -> None:
    made = {"t": (blocks.quantize(np.zeros((2, 256)), FAMILY[ITQ3_N].format), ITQ3_N)}
    path = write_gguf(tmp_path / "x.gguf", LLAMA, made)
    new, old = (struct.pack("<IQQI", 2, 256, 2, number) for number in (ITQ3_N, 503))
    assert path.read_bytes().count(new) == 1
    path.write_bytes(path.read_bytes().replace(new, old))
    said = r"is in the former code of ITQ3_N \(itq3s.version 1 or 2\), which is no longer read; make it anew: convert"
    for read in (contents.inspect_file, lambda path: verify.compare(path, path)):
        with pytest.raises(UserError, match=said):
            read(path)
