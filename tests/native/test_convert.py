"""The converter on small checkpoints of several architectures: types, bytes, metadata, memory, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

import llama
from checkpoints import ARCHITECTURES
from gguf_files import types
from gguf_itq3s.codec import native
from gguf_itq3s.convert.options import TRELLIS_OUTTYPES, ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from selection import crossed

Make = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "pure", "outtype"), crossed(ARCHITECTURES, [False, True], [*TRELLIS_OUTTYPES, "tq1_0", "tq2_0"])
)
def test_types_are_those_of_llama_quantize(
    name: str, pure: bool, outtype: str, checkpoint: Make, f16: Make, tmp_path: Path, library: native.NativeLibrary
) -> None:
    convert(ConvertOptions.of(checkpoint(name), tmp_path / "ours.gguf", outtype=outtype, pure=pure, effort="fast"))
    flags = ["--pure"] if pure else []
    llama.run("llama-quantize", *flags, f16(name), tmp_path / "theirs.gguf", outtype.upper(), "2")
    theirs = types(tmp_path / "theirs.gguf")
    if outtype not in TRELLIS_OUTTYPES:
        # The one rule that differs: Q4_0 cannot hold {-a, 0, a}.
        theirs = {key: Type.Q8_0 if value == Type.Q4_0 else value for key, value in theirs.items()}
    assert types(tmp_path / "ours.gguf") == theirs


@pytest.mark.parametrize("outtype", [*TRELLIS_OUTTYPES, "tq1_0", "tq2_0"])
def test_native_and_numpy_write_the_same_file(
    outtype: str, checkpoint: Make, tmp_path: Path, library: native.NativeLibrary
) -> None:
    for number, use in enumerate((True, False)):
        options = ConvertOptions.of(
            checkpoint("llama-odd"), tmp_path / f"{number}.gguf", outtype=outtype, native=use, threads=2
        )
        convert(options)
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()


def test_rows_that_are_not_whole_blocks_get_one_warning(
    checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], library: native.NativeLibrary
) -> None:
    convert(ConvertOptions.of(checkpoint("llama-odd"), tmp_path / "out.gguf", fallback="iq4_nl"))
    odd = [f"blk.{layer}.ffn_down.weight" for layer in range(2)]
    made = types(tmp_path / "out.gguf")
    assert [made[name] for name in odd] == [Type.IQ4_NL] * 2
    message = capsys.readouterr().err
    assert message.count("warning") == 1
    for name in odd:
        assert f"{name}: 320 columns, ITQ3_S -> IQ4_NL" in message
