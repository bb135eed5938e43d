"""llama-quantize's options in the converter: the same types and metadata as by llama-quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

import llama
from checkpoints import NOVEL
from gguf_files import metadata, tensors, types
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec import native
from selection import some

Make = Callable[[str], Path]

#: Options that both take.
OPTIONS: dict[str, list[str]] = {
    "one": ["--tensor-type", "attn_q=q8_0"],
    "first counts": ["--tensor-type", r"blk\.0\.attn_(q|k)=Q4_K", "--tensor-type", "attn_=q5_k"],
    "anchors": ["--tensor-type", r"^blk\.[1-9]\.ffn_down\.weight$=q6_k", "--tensor-type", "^attn=q4_0"],
    "capitals": ["--tensor-type", "ATTN_V=iq4_xs", "--tensor-type", "OUTPUT=bf16"],
    "output": ["--output-tensor-type", "q8_0"],
    "embedding": ["--token-embedding-type", "Q4_K"],
    "both": ["--output-tensor-type", "q5_k", "--token-embedding-type", "q4_0"],
    "output and a pattern": ["--output-tensor-type", "q5_k", "--tensor-type", "token_embd|output=q4_1"],
    "embedding and a pattern": ["--token-embedding-type", "q5_k", "--tensor-type", "token_embd|output=f16"],
    "left": ["--leave-output-tensor"],
    "left and named": ["--leave-output-tensor", "--output-tensor-type", "q8_0", "--tensor-type", "output=q4_0"],
    "left, pure": ["--leave-output-tensor", "--pure"],
    "output, pure": ["--output-tensor-type", "q8_0", "--pure"],
    "patterns, pure": ["--tensor-type", "ffn_up=f32", "--tensor-type", "norm=q8_0", "--pure"],
    "back to the type": ["--tensor-type", "attn_v=itq3_s", "--tensor-type", "output=itq3_s"],
}


SOME = ("first counts", "both", "output and a pattern", "left")
CASES = [
    *((name, "ITQ3_S", option) for name in ("llama", "llama-tied") for option in OPTIONS),
    *((name, "ITQ3_S", option) for name in ("llama-gqa", "llama-odd", "mixtral", "ernie-moe") for option in SOME),
    *(("llama", "TQ2_0", option) for option in SOME),
]


@pytest.mark.parametrize(
    "name,outtype,option", some(CASES, lambda name, outtype, option: name == "llama" or option == "both")
)
def test_types_are_those_of_llama_quantize(
    name: str, outtype: str, option: str, checkpoint: Make, f16: Make, tmp_path: Path, library: native.NativeLibrary
) -> None:
    words = OPTIONS[option]
    ours = ["--outtype", outtype.lower(), "--effort", "fast", "--ternary", "off"]
    assert convert_main([str(checkpoint(name)), str(tmp_path / "ours.gguf"), *ours, *words]) == 0
    llama.run("llama-quantize", *words, f16(name), tmp_path / "theirs.gguf", outtype, "2")
    theirs = types(tmp_path / "theirs.gguf")
    assert types(tmp_path / "ours.gguf") == theirs
    if name == "llama":  # the option says something
        assert convert_main([str(checkpoint(name)), str(tmp_path / "plain.gguf"), *ours]) == 0
        assert types(tmp_path / "plain.gguf") != theirs


def test_metadata_are_those_of_llama_quantize(
    checkpoint: Make, f16: Make, tmp_path: Path, library: native.NativeLibrary
) -> None:
    """What is noted of an importance matrix."""
    matrix = tmp_path / "imatrix.gguf"
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    llama.run("llama-imatrix", "-m", f16("llama"), "-f", text, "-c", "128", "--chunks", "3", "-o", matrix, "-t", "1")
    words = ["--imatrix", str(matrix)]
    for more in ([], ["--include-weights", "attn"], ["--exclude-weights", "ffn", "--exclude-weights", "blk.0"]):
        assert convert_main([str(checkpoint("llama")), str(tmp_path / "ours.gguf"), *words, *more]) == 0
        llama.run("llama-quantize", *words, *more, f16("llama"), tmp_path / "theirs.gguf", "ITQ3_S", "2")
        fields = [gguf.GGUFReader(tmp_path / f"{name}.gguf").fields for name in ("ours", "theirs")]
        keys = {name for name in fields[1] if name.startswith("quantize.")}
        keys |= {"general.quantization_version", "general.file_type"}
        assert len(keys) == 6
        for key in keys:
            ours, theirs = (f[key] for f in fields)
            assert (ours.types, ours.contents()) == (theirs.types, theirs.contents()), key
        entries = fields[0]["quantize.imatrix.entries_count"].contents()
        assert entries == {0: 14, 2: 8, 4: 4}[len(more)]
        shares: Any = [f["itq3s.calibrated_share"].contents() for f in fields]
        assert shares[0] == pytest.approx(shares[1])


def test_what_other_commands_do_on_the_file(tmp_path: Path) -> None:
    """The commands that the converter names in place of its own options: split, and other metadata."""
    whole, other = tmp_path / "whole.gguf", tmp_path / "other.gguf"
    assert convert_main([str(llama.MODEL), str(whole), "--effort", "fast"]) == 0
    llama.run("llama-quantize", "--override-kv", "llama.context_length=int:77", whole, other, "COPY")
    assert metadata(other)["llama.context_length"] == 77
    ours, theirs = tensors(whole), tensors(other)
    assert set(ours) == set(theirs) and all((ours[name].data == theirs[name].data).all() for name in ours)
    llama.run("llama-gguf-split", "--split", "--split-max-size", "1M", whole, tmp_path / "x")
    prompt = ["-p", "The old house", "-n", "24", "--temp", "0", "-no-cnv", "--no-warmup", "-t", "1"]
    first = min(tmp_path.glob("x-*.gguf"))
    assert len(list(tmp_path.glob("x-*.gguf"))) > 2
    runs = [llama.run("llama-completion", "-m", path, *prompt).stdout for path in (whole, first)]
    assert runs[0] == runs[1]
