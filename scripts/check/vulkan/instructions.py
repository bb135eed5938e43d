#!/usr/bin/env python3
"""Instructions a weight of the mat-vec shaders, ours beside llama.cpp's own: one row, one column, after spirv-opt -O.

    scripts/check/vulkan/instructions.py [--tree FOLDER] [--update docs/vulkan.md]

Counted is the body of the loop over blocks once it is unrolled, without what a block with a zero-point takes. Addresses
of buffers, accesses to memory and moves between registers stand in columns of their own: what they cost depends on the
device. Needs glslc, spirv-opt and spirv-dis, and the patched source of llama.cpp, which is made in build/vulkan-check
without --tree.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from scripts.check import cuda as cuda_check  # noqa: E402

FLOAT: Final = ("D_TYPE=float", "FLOAT_TYPE=float", "FLOAT_TYPEV2=vec2")
COLUMNS: Final = ("B_TYPE=float", "B_TYPEV2=vec2", "B_TYPEV4=vec4")
MEMORY: Final = {"Load", "AccessChain", "InBoundsAccessChain", "Store", "Variable", "ControlBarrier"}
CONTROL: Final = {
    "Branch", "BranchConditional", "LoopMerge", "SelectionMerge", "Phi", "Label", "Return", "ReturnValue",
    "Unreachable",
}  # fmt: skip
BOUNDS: Final = {"ULessThan", "UGreaterThanEqual"}
MOVES: Final = {
    "CompositeConstruct", "CompositeExtract", "CompositeInsert", "Bitcast", "VectorShuffle", "CopyObject",
    "CopyLogical",
}  # fmt: skip


@dataclass(frozen=True)
class Shader:
    """A shader to count.

    Attributes:
        label: for the table.
        file: its source.
        define: type of the weights, as the source asks for it.
        weights: of the loop's body, once it is unrolled.
    """

    label: str
    file: str
    define: str
    weights: int


INTEGERS: Final = tuple(
    Shader(label, "mul_mat_vecq.comp", define, 64)
    for label, define in (
        ("**ITQ3_S**", "ITQ3_S"), ("**ITQ2_S**", "ITQ2_S"), ("**ITQ3_N**", "ITQ3_N"), ("**ITQ2_N**", "ITQ2_N"),
        ("**TQ2_0**", "TQ2_0"), ("**TQ1_0**", "TQ1_0"), ("Q4_K", "Q4_K"),
    )
)  # fmt: skip
FLOATS: Final = (
    Shader("**ITQ3_S**", "mul_mat_vec_itq.comp", "ITQ3_S", 64),
    Shader("**ITQ2_S**", "mul_mat_vec_itq.comp", "ITQ2_S", 64),
    Shader("**ITQ3_N**", "mul_mat_vec_itq.comp", "ITQ3_N", 64),
    Shader("**ITQ2_N**", "mul_mat_vec_itq.comp", "ITQ2_N", 64),
    Shader("TQ2_0", "mul_mat_vec_tq2_0.comp", "TQ2_0", 16),
    Shader("**TQ1_0**", "mul_mat_vec_tq.comp", "TQ1_0", 64),
    Shader("Q4_K", "mul_mat_vec_q4_k.comp", "Q4_K", 16),
    Shader("IQ3_S", "mul_mat_vec_iq3_s.comp", "IQ3_S", 32),
)


@dataclass(frozen=True)
class Instruction:
    """A line of SPIR-V: what it defines, its name without Op, the numbers it reads, and all behind the name."""

    result: str | None
    name: str
    operands: tuple[str, ...]
    text: str


def disassembled(folder: Path, shader: Shader, glslc: Path | str) -> str:
    """The optimized shader for one row and one column, as text.

    Raises:
        subprocess.CalledProcessError: it does not compile, or one of the tools is missing.
    """
    defines = (*FLOAT, "ACC_TYPE=float") if shader.file == "mul_mat_vecq.comp" else (*FLOAT, *COLUMNS)
    with tempfile.TemporaryDirectory() as scratch:
        made, small = Path(scratch) / "made.spv", Path(scratch) / "small.spv"
        options = ["-fshader-stage=compute", "--target-env=vulkan1.2", "-O", f"-DDATA_A_{shader.define}=1"]
        command = [glslc, *options, *(f"-D{d}" for d in defines), folder / shader.file, "-o", made]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ITQ3S_GLSLC")}
        subprocess.run(command, check=True, env={**environment, "ITQ3S_GLSLC_DOT": "1"})
        frozen = [
            "--set-spec-const-default-value=0:32 1:1 2:1",
            "--freeze-spec-const",
            "--fold-spec-const-op-composite",
        ]
        subprocess.run(["spirv-opt", *frozen, "-O", "--loop-unroll", "-O", made, "-o", small], check=True)
        shown = subprocess.run(
            ["spirv-dis", "--no-color", "--raw-id", small], check=True, stdout=subprocess.PIPE, text=True
        )
    return shown.stdout


def parsed(text: str) -> tuple[dict[str, list[Instruction]], dict[str, Instruction]]:
    """The instructions of every block, in order, and those that define something."""
    blocks: dict[str, list[Instruction]] = {}
    made: dict[str, Instruction] = {}
    block = None
    for line in text.splitlines():
        if (match := re.match(r"\s*(?:(%\d+) = )?Op(\w+)\s*(.*)", line)) is None:
            continue
        one = Instruction(match[1], match[2], tuple(re.findall(r"%\d+", match[3])), match[3])
        if one.result:
            made[one.result] = one
        if one.name == "Label":
            block = blocks.setdefault(str(one.result), [])
        elif block is not None:
            block.append(one)
    return blocks, made


def counted(text: str) -> collections.Counter[str]:
    """Instructions of the largest loop: "arithmetic", "addresses", "memory", "moves"."""
    blocks, made = parsed(text)
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for one in (one for block in blocks.values() for one in block):
        for operand in one.operands[1 if one.result else 0 :]:
            users[operand].append(one)
    buffers = {
        key for key, one in made.items() if one.name == "Variable" and re.search("StorageBuffer|PushConstant", one.text)
    }
    known: dict[str, bool] = {}

    def is_address(one: Instruction) -> bool:
        """Whether nothing but indices of buffers, and bounds of loops, comes of it."""
        if one.result is None:
            return False
        if one.result not in known:
            known[one.result] = True  # in a circle: what stands outside it decides
            known[one.result] = bool(users[one.result]) and all(is_index(user) for user in users[one.result])
        return known[one.result]

    def is_index(user: Instruction) -> bool:
        if "AccessChain" in user.name:
            return user.operands[1] in buffers  # of a table it is data
        return user.name in BOUNDS or (user.name not in CONTROL - {"Phi"} and is_address(user))

    order = list(blocks)
    most: collections.Counter[str] = collections.Counter()
    for number, name in enumerate(order):
        for one in blocks[name]:
            if one.name != "LoopMerge" or one.operands[0] not in blocks:
                continue
            body = order[number : order.index(one.operands[0])]
            found: collections.Counter[str] = collections.Counter()
            for inner in (i for b in body if b not in zero_points(blocks, made, body) for i in blocks[b]):
                kind = (
                    "control" if inner.name in CONTROL else "memory" if inner.name in MEMORY
                    else "addresses" if is_address(inner) else "moves" if inner.name in MOVES else "arithmetic"
                )  # fmt: skip
                found[kind] += 1
            most = max(most, found, key=lambda c: c["arithmetic"])
    return most


def zero_points(blocks: dict[str, list[Instruction]], made: dict[str, Instruction], body: list[str]) -> set[str]:
    """Blocks of a loop that only a zero-point other than 0 leads to."""
    found: set[str] = set()
    for name in body:
        merge = [one for one in blocks[name] if one.name == "SelectionMerge"]
        branch = [one for one in blocks[name] if one.name == "BranchConditional"]
        if merge and branch and made[branch[0].operands[0]].name in ("FUnordNotEqual", "FOrdNotEqual"):
            found |= set(body[body.index(branch[0].operands[1]) : body.index(merge[0].operands[0])])
    return found


def table(folder: Path, glslc: Path | str) -> str:
    """The table of docs/vulkan.md."""
    rows = []
    for kind, shaders in (("integers (q8_1)", INTEGERS), ("floating point", FLOATS)):
        for shader in shaders:
            found = counted(disassembled(folder, shader, glslc))
            values = [f"{found[k] / shader.weights:.2f}" for k in ("arithmetic", "addresses", "memory", "moves")]
            rows.append([f"{shader.label}, {kind}", *values])
    return report.markdown(["instructions a weight", "arithmetic", "addresses", "memory", "moves"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="the patched source of llama.cpp")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="the page whose table is replaced")
    args = parser.parse_args()
    work = ROOT / "build" / "vulkan-check"
    work.mkdir(parents=True, exist_ok=True)
    tree = args.tree or cuda_check.prepare_tree(work)
    text = table(tree / "ggml" / "src" / "ggml-vulkan" / "vulkan-shaders", Path(__file__).with_name("glslc"))
    print(text)
    if args.update:
        report.replace_section(args.update, "instructions", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
