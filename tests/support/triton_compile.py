"""Compiles the Triton kernels for GPUs that need not be here, and prints the size of what came out, as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gguf_itq3s.torch import decode, kernels

#: Ampere, Hopper, and AMD's CDNA 3.
TARGETS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
#: Instructions of the tensor cores, in PTX and in AMD's assembly.
MATRIX = re.compile(r"\bw?gmma\.|\bmma\.sync|\bv_mfma_")
SIZES = ("m", "n", "blocks", "bucket")


def compile_kernel(kernel: Any, target: GPUTarget, signature: dict[str, str], **constants: Any) -> dict[str, int]:
    source = ASTSource(kernel, signature={**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    made = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2})
    binary = made.asm["hsaco" if target.backend == "hip" else "cubin"]
    text = made.asm["amdgcn" if target.backend == "hip" else "ptx"]
    return {"bytes": len(binary), "matrix instructions": len(MATRIX.findall(text))}


def main() -> None:
    found = {}
    for target in TARGETS:
        signature = {"x": "*fp16", "out": "*fp16", "blocks": "i32"}
        for block in {kind.block for kind in decode.LAYOUTS.values() if kind.rotated}:
            found[f"{target.arch} rotate {block}"] = compile_kernel(
                kernels._rotate_kernel, target, signature, **kernels.rotation_options(block)
            )
        signature = {"partial": "*fp32", "out": "*fp16", "count": "i32", "split": "i32"}
        found[f"{target.arch} sum"] = compile_kernel(kernels._sum_kernel, target, signature, SIZE=1024)
        for kind in decode.LAYOUTS.values():
            units, options = kernels.unit_options(kind)
            pointers = {"x": "*fp16", "packed": units, "levels": "*fp16", "out": "*fp32"}
            numbers = dict.fromkeys(SIZES, "i32")
            for name, kernel, more in (
                ("product", kernels._product_kernel, {"split": "i32"}),
                ("transposed", kernels._transposed_kernel, {}),
            ):
                found[f"{target.arch} {name} {kind.qtype.name}"] = compile_kernel(
                    kernel, target, {**pointers, **numbers, **more}, **options, BLOCK_M=16, BLOCK_N=32
                )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
