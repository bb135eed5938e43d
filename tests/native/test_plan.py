"""Memory planning by the converter's own policy, where the file may hold every type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import LlamaFileType

from checkpoints import ARCHITECTURES
from gguf_itq3s.checkpoint import reading
from gguf_itq3s.checkpoint.policy import choose
from gguf_itq3s.checkpoint.reading import open_shapes
from gguf_itq3s.checkpoint.stock import f16_file
from gguf_itq3s.codec import native
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.inspect import plan

MIXES = ("q3_k_m", "q4_k_m", "q2_k", "iq4_xs")


def written(model: Path, outtype: str, pure: bool) -> int:
    """Bytes of the tensors that a conversion writes."""
    options = ConvertOptions.of(model, Path("unused.gguf"), outtype=outtype, pure=pure, ternary="off", dry_run=True)
    return sum(row.bytes for row in convert(options).rows)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_plan_is_what_is_written(
    name: str, checkpoint: Callable[[str], Path], library: native.NativeLibrary
) -> None:
    """Grouped-query attention, ternary mixes, experts, odd rows, extra tensors: one policy."""
    outtypes = ("itq3_s", "tq1_0", "tq2_0", "f16", *MIXES)
    types = plan.plan(checkpoint(name), 128, None, outtypes=outtypes)["types"]
    assert list(types) == [outtype.upper() for outtype in outtypes]
    for outtype in outtypes:
        for pure, key in ((False, "bytes"), (True, "pure_bytes")):
            assert types[outtype.upper()][key] == written(checkpoint(name), outtype, pure), (outtype, key)


@pytest.mark.parametrize("kind", ["Q3_K_S", "IQ3_S", "ITQ3_S", "ITQ2_S"])
def test_what_llama_quantize_writes_in_short_rows(
    kind: str, checkpoint: Callable[[str], Path], library: native.NativeLibrary
) -> None:
    """In place of a type that does not fit a row stands its fallback, which the dry run of the tool says too."""
    folder = checkpoint("llama-odd")
    opened = open_shapes(folder, reading.read_shapes(folder)[0])
    file, file_type = f16_file(opened), LlamaFileType[f"MOSTLY_{kind}"]
    mixed, theirs = file.mixed_types(file_type), file.mixed_types(file_type, fitted=True)
    assert mixed["blk.1.ffn_down.weight"] != theirs["blk.1.ffn_down.weight"]
    assert mixed["blk.0.ffn_up.weight"] == theirs["blk.0.ffn_up.weight"]
    for tensor in opened.tensors:
        ours = choose(tensor.name, tensor.shape, tensor.stored, mixed["blk.0.ffn_up.weight"], opened.model, mixed=mixed)
        assert theirs[tensor.name] == ours.type, tensor.name
