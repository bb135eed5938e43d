"""llama-quantize's options in the converter: the same types, layers and metadata as by llama-quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
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


def test_a_file_of_patterns(checkpoint: Make, f16: Make, tmp_path: Path, library: native.NativeLibrary) -> None:
    (tmp_path / "types.txt").write_text("attn_q=q8_0 attn_k=q4_k\n\nblk\\.1\\..*=q5_0\n")
    words = ["--tensor-type", "attn_k=q6_k", "--tensor-type-file", str(tmp_path / "types.txt")]
    assert convert_main([str(checkpoint("llama")), str(tmp_path / "ours.gguf"), "--effort", "fast", *words]) == 0
    llama.run("llama-quantize", *words, f16("llama"), tmp_path / "theirs.gguf", "ITQ3_S", "2")
    assert types(tmp_path / "ours.gguf") == types(tmp_path / "theirs.gguf")


def deep(folder: Path, tokenizer: Path) -> Path:
    import torch
    import transformers

    from checkpoints import SIZES, save_model

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 5})
    return save_model(transformers.LlamaForCausalLM(config).half(), folder, tokenizer)


@pytest.mark.parametrize("layers", some(["1,3", "0", "4", "2,0"], lambda layers: layers == "1,3"))
def test_pruned_layers_are_those_of_llama_quantize(
    layers: str, tokenizer: Path, tmp_path: Path, library: native.NativeLibrary
) -> None:
    """Names, bytes and metadata, with an importance matrix, which has the numbers of before."""
    model, f16, matrix = deep(tmp_path / "model", tokenizer), tmp_path / "f16.gguf", tmp_path / "imatrix.gguf"
    assert convert_main([str(model), str(f16), "--outtype", "f16"]) == 0
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    llama.run("llama-imatrix", "-m", f16, "-f", text, "-c", "128", "--chunks", "3", "-o", matrix, "-t", "1")
    words = ["--prune-layers", layers, "--imatrix", str(matrix), "--pure"]
    assert convert_main([str(model), str(tmp_path / "ours.gguf"), *words, "--no-equalize"]) == 0
    llama.run("llama-quantize", *words, f16, tmp_path / "theirs.gguf", "ITQ3_S", "2")
    ours, theirs = tensors(tmp_path / "ours.gguf"), tensors(tmp_path / "theirs.gguf")
    assert set(ours) == set(theirs) and len({name.split(".")[1] for name in ours if "blk" in name}) in (3, 4)
    plain = tmp_path / "plain.gguf"
    assert convert_main([str(model), str(plain), "--pure", "--prune-layers", layers, "--no-fold-norms"]) == 0
    differ = 0
    for name, tensor in ours.items():
        assert tensor.tensor_type == theirs[name].tensor_type
        weights = [gguf.quants.dequantize(t.data, t.tensor_type) for t in (tensor, theirs[name])]
        difference = np.square(weights[0] - weights[1]).sum() / np.square(weights[0]).sum()
        assert difference < 0.03, name  # the same weights, rounded
        differ += not np.array_equal(tensor.data, tensors(plain)[name].data)
    assert differ >= 7 * 3  # the statistics are found by the names of before
    facts, others = metadata(tmp_path / "ours.gguf"), metadata(tmp_path / "theirs.gguf")
    assert facts["llama.block_count"] == others["llama.block_count"]
    done = llama.run("llama-completion", "-m", tmp_path / "ours.gguf", "-p", "a", "-n", "1", "-no-cnv")
    assert done.returncode == 0


def test_metadata_are_those_of_llama_quantize(
    checkpoint: Make, f16: Make, tmp_path: Path, library: native.NativeLibrary
) -> None:
    """--override-kv, and what is noted of an importance matrix."""
    matrix = tmp_path / "imatrix.gguf"
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    llama.run("llama-imatrix", "-m", f16("llama"), "-f", text, "-c", "128", "--chunks", "3", "-o", matrix, "-t", "1")
    overrides = ["general.description=str:a text", "llama.rope.freq_base=float:5e5", "llama.context_length=int:77",
                 "tokenizer.ggml.add_bos_token=bool:false", "my.new.key=int:3"]  # fmt: skip
    words = [word for text_ in overrides for word in ("--override-kv", text_)] + ["--imatrix", str(matrix)]
    for more in ([], ["--include-weights", "attn"], ["--exclude-weights", "ffn", "--exclude-weights", "blk.0"]):
        assert convert_main([str(checkpoint("llama")), str(tmp_path / "ours.gguf"), *words, *more]) == 0
        llama.run("llama-quantize", *words, *more, f16("llama"), tmp_path / "theirs.gguf", "ITQ3_S", "2")
        fields = [gguf.GGUFReader(tmp_path / f"{name}.gguf").fields for name in ("ours", "theirs")]
        keys = {name for name in fields[1] if name.startswith(("quantize.", "my."))}
        keys |= {text_.partition("=")[0] for text_ in overrides} | {"general.quantization_version", "general.file_type"}
        assert len(keys) == 11
        for key in keys:
            ours, theirs = (f[key] for f in fields)
            assert (ours.types, ours.contents()) == (theirs.types, theirs.contents()), key
        entries = fields[0]["quantize.imatrix.entries_count"].contents()
        assert entries == {0: 14, 2: 8, 4: 4}[len(more)]
        shares: Any = [f["itq3s.calibrated_share"].contents() for f in fields]
        assert shares[0] == pytest.approx(shares[1])


def test_the_older_form_of_an_importance_matrix(
    checkpoint: Make, f16: Make, tmp_path: Path, library: native.NativeLibrary
) -> None:
    """llama-imatrix writes it still: the file has the same bytes by either form but for the counts of experts."""
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    for name in ("llama", "mixtral"):
        made = {}
        for form, flags in (("gguf", []), ("dat", ["--output-format", "dat"])):
            matrix = tmp_path / f"{name}.{form}"
            words: list[str | Path] = [
                "-m",
                f16(name),
                "-f",
                text,
                "-c",
                "128",
                "--chunks",
                "3",
                "-t",
                "1",
                "-o",
                matrix,
            ]
            llama.run("llama-imatrix", *words, *flags)
            out = tmp_path / f"{name}-{form}.gguf"
            assert convert_main([str(checkpoint(name)), str(out), "--imatrix", str(matrix), "--effort", "fast"]) == 0
            made[form] = out
            assert (matrix.read_bytes()[:4] == b"GGUF") == (form == "gguf")
        ours, others = metadata(made["gguf"]), metadata(made["dat"])
        for key in ("dataset", "entries_count", "chunks_count"):
            assert ours[f"quantize.imatrix.{key}"] == others[f"quantize.imatrix.{key}"], key
        assert ours["itq3s.calibrated_share"] == pytest.approx(others["itq3s.calibrated_share"])
        both = [tensors(made[form]) for form in ("gguf", "dat")]
        alike = [
            np.mean(both[0][n].data == both[1][n].data) for n in both[0] if both[0][n].tensor_type.name == "ITQ3_S"
        ]
        assert min(alike) > 0.98, name  # means that were multiplied and divided again


def test_a_split_file_is_loaded(tmp_path: Path) -> None:
    """llama.cpp takes the first part, and writes as from the whole file."""
    prompt = ["-p", "The old house", "-n", "24", "--temp", "0", "-no-cnv", "--no-warmup", "-t", "1"]
    assert convert_main([str(llama.MODEL), str(tmp_path / "whole.gguf")]) == 0
    expected = llama.run("llama-completion", "-m", tmp_path / "whole.gguf", *prompt).stdout
    for words in (["--split-max-size", "500K"], ["--split-max-tensors", "9", "--no-tensor-first-split"]):
        folder = tmp_path / words[0].strip("-")
        folder.mkdir()
        assert convert_main([str(llama.MODEL), str(folder / "x.gguf"), *words]) == 0
        first = min(folder.iterdir())
        assert len(list(folder.iterdir())) > 2
        assert llama.run("llama-completion", "-m", first, *prompt).stdout == expected
        if (llama.BIN / "llama-gguf-split").exists():
            llama.run("llama-gguf-split", "--merge", first, folder / "merged.gguf")
            merged, whole = tensors(folder / "merged.gguf"), tensors(tmp_path / "whole.gguf")
            assert list(merged) == list(whole)
            assert all((merged[name].data == whole[name].data).all() for name in whole)
