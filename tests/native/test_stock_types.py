"""Files in llama.cpp's own types: types and bytes as llama-quantize's, rounded with statistics, read by anybody."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import llama
from checkpoints import NOVEL
from gguf_files import types
from gguf_itq3s import upstream
from gguf_itq3s.checkpoint.stock import STOCK_TYPES
from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.convert.options import STOCK_OUTTYPES, ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from selection import crossed, some

Make = Callable[[str], Path]
# q8_0 is upstream's converter's own type without statistics.
MIXES = [outtype for outtype in STOCK_OUTTYPES if outtype != "q8_0"]


def contents(path: Path) -> tuple[dict[str, bytes], int]:
    """The bytes of every tensor, and the file's type."""
    reader = gguf.GGUFReader(path)
    kind = reader.get_field("general.file_type")
    assert kind is not None
    return {tensor.name: tensor.data.tobytes() for tensor in reader.tensors}, kind.contents()


@pytest.mark.parametrize(
    ("outtype", "name"),
    crossed(
        ["q4_k_m", *(outtype for outtype in MIXES if outtype != "q4_k_m")],
        ["llama", "llama-gqa", "llama-odd", "llama-tied", "llama-deep", "mixtral", "gemma"],
    ),
)
def test_types_are_those_of_llama_quantize(
    name: str, outtype: str, checkpoint: Make, f16: Make, tmp_path: Path
) -> None:
    convert(ConvertOptions.of(checkpoint(name), tmp_path / "ours.gguf", outtype=outtype))
    llama.run("llama-quantize", f16(name), tmp_path / "theirs.gguf", outtype.upper(), "2")
    assert types(tmp_path / "ours.gguf") == types(tmp_path / "theirs.gguf")


@pytest.mark.parametrize(
    ("outtype", "pure"), some(product(MIXES, [False, True]), lambda outtype, pure: pure or outtype == "q4_k_m")
)
def test_without_statistics_bytes_are_those_of_llama_quantize(
    outtype: str, pure: bool, uneven: Make, tmp_path: Path
) -> None:
    convert(ConvertOptions.of(uneven("llama"), tmp_path / "f16.gguf", outtype="f16"))
    convert(ConvertOptions.of(uneven("llama"), tmp_path / "ours.gguf", outtype=outtype, pure=pure))
    flags = ["--pure"] if pure else []
    llama.run("llama-quantize", *flags, tmp_path / "f16.gguf", tmp_path / "theirs.gguf", outtype.upper(), "2")
    assert contents(tmp_path / "ours.gguf") == contents(tmp_path / "theirs.gguf")


@pytest.fixture(scope="module")
def importance(checkpoint: Make, f16: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An importance matrix of the deep Llama."""
    matrix = tmp_path_factory.mktemp("importance") / "imatrix.gguf"
    llama.run(
        "llama-imatrix", "-m", f16("llama-deep"), "-f", NOVEL, "-c", "64", "--chunks", "2", "-o", matrix, "-t", "1"
    )
    return matrix


@pytest.mark.parametrize("outtype", some(["q4_0", "iq4_xs", "q4_k_m", "q3_k_m"], lambda outtype: outtype != "q3_k_m"))
def test_types_by_statistics_and_patterns(
    outtype: str, importance: Path, checkpoint: Make, f16: Make, tmp_path: Path
) -> None:
    """What changes llama-quantize's rules, or its counts of the matrices that a rule has seen."""
    words = ["--imatrix", str(importance), "--output-tensor-type", "q5_k",
             "--tensor-type", r"blk\.(0|2|11)\.(attn_v|ffn_down)=q8_0"]  # fmt: skip
    llama.run("llama-quantize", *words, f16("llama-deep"), tmp_path / "theirs.gguf", outtype.upper(), "2")

    def chosen(**options: Any) -> dict[str, Type]:
        asked = ConvertOptions.of(
            checkpoint("llama-deep"), tmp_path / "ours.gguf", outtype=outtype,
            output_tensor_type="q5_k", dry_run=True, **options,
        )  # fmt: skip
        return {row.name: Type[row.type] for row in convert(asked).rows}

    ours = chosen(imatrix=importance, tensor_types=((r"blk\.(0|2|11)\.(attn_v|ffn_down)", "q8_0"),))
    assert ours == types(tmp_path / "theirs.gguf")
    plain = chosen()
    assert {name for name in ours if ours[name] not in (plain[name], Type.Q8_0)}, "nothing is moved but what is named"


@pytest.mark.parametrize("outtype", ["q4_k_m", "q4_k_s", "iq4_xs", "q4_0", "q8_0"])
def test_statistics_change_codes_and_the_file_runs(
    outtype: str, calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, statistics = calibrated("llama")
    plain, ours = tmp_path / "plain.gguf", tmp_path / "ours.gguf"
    convert(ConvertOptions.of(model, plain, outtype=outtype))
    convert(ConvertOptions.of(model, ours, outtype=outtype, calibration=statistics))
    before, after = contents(plain), contents(ours)
    assert after[1] == STOCK_TYPES[outtype][1] == before[1]
    assert before[0]["blk.0.attn_q.weight"] != after[0]["blk.0.attn_q.weight"]
    assert before[0]["token_embd.weight"] == after[0]["token_embd.weight"]
    logits = llama.run("llama-completion", "-m", ours, "-n", "4", "-no-cnv", "-p", "The old house")
    assert logits


def test_layer_by_layer_without_statistics_in_the_way(uneven: Make, tmp_path: Path) -> None:
    """Every matrix of the layers in Q4_K; the codes are those of the grid, and both processors' paths agree."""
    text = tmp_path / "text.txt"
    text.write_text("The old house stood on a hill and nobody lived there. " * 200)
    files = []
    for native in (True, False):
        out = tmp_path / f"{native}.gguf"
        convert(
            ConvertOptions.of(
                uneven("llama"), out, outtype="q4_k", pure=True, calibrate=(text,), tokens=2000, context=128,
                native=native, fisher=True,
            )
        )  # fmt: skip
        files.append(contents(out))
    assert files[0] == files[1]
    kinds = types(out)
    assert kinds["blk.1.ffn_down.weight"] == Type.Q4_K
    plain = convert(ConvertOptions.of(uneven("llama"), tmp_path / "plain.gguf", outtype="q4_k", pure=True))
    assert plain.rows
    assert not np.array_equal(
        np.frombuffer(contents(tmp_path / "plain.gguf")[0]["blk.1.ffn_down.weight"], np.uint8),
        np.frombuffer(files[0][0]["blk.1.ffn_down.weight"], np.uint8),
    )


def test_a_llama_cpp_without_the_patch_refuses_our_types_and_has_the_ternary_ones() -> None:
    """Its loader takes numbers below GGML_TYPE_COUNT alone."""
    source = upstream.fetch_source() / "ggml"
    numbers = re.findall(r"^\s*GGML_TYPE_(\w+)\s*=\s*(\d+)", (source / "include" / "ggml.h").read_text(), re.MULTILINE)
    known = {name: int(number) for name, number in numbers}
    assert known["TQ1_0"] == gguf.GGMLQuantizationType.TQ1_0 and known["TQ2_0"] == gguf.GGMLQuantizationType.TQ2_0
    assert all(known["COUNT"] <= row.type for row in FAMILY.values())
    assert "type >= GGML_TYPE_COUNT) {" in (source / "src" / "gguf.cpp").read_text()
