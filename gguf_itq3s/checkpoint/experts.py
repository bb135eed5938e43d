"""What the matrices of experts are called: in checkpoints, in Transformers and in GGUF files.

=========== ========== =========== =========================== ====================
matrix      one expert in Mixtral  all of a layer, stacked     all of a layer, GGUF
=========== ========== =========== =========================== ====================
gate        gate_proj  w1          gate_up_proj, rows above    ffn_gate_exps
up          up_proj    w3          gate_up_proj, rows below    ffn_up_exps
down        down_proj  w2          down_proj                   ffn_down_exps
=========== ========== =========== =========================== ====================

Transformers 5 stacks them, whatever a checkpoint does. Experts without a gate have ``up_proj`` stacked, and a GGUF file
may have gate and up in one as well, ``ffn_gate_up_exps``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

#: Matrix -> module of a single expert, and what Mixtral calls that.
MODULES: Final = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
#: The two parameters of experts with a gate.
GATE_UP: Final = "gate_up_proj"
DOWN: Final = "down_proj"
#: Parameter that stacks the experts of a layer -> the matrices in it, one above the other.
STACKS: Final = {GATE_UP: ("gate", "up"), "up_proj": ("up",), DOWN: ("down",)}

_STACK: Final = re.compile(rf"(.*\.layers\.(\d+)\..*experts)\.({'|'.join(STACKS)})")


@dataclass(frozen=True)
class Stack:
    """A parameter of Transformers that stacks the experts of a layer, (experts, rows, columns).

    Attributes:
        module: that holds it.
        layer: its number.
        matrices: in it, one above the other.
    """

    module: str
    layer: int
    matrices: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """GGUF names of its matrices."""
        return tuple(tensor(self.layer, matrix) for matrix in self.matrices)

    @property
    def whole(self) -> str:
        """GGUF name of the one tensor that holds all of it."""
        return tensor(self.layer, "_".join(self.matrices))

    def singles(self, expert: int) -> list[str]:
        """Names of an expert's matrices in a checkpoint that has them one by one."""
        return [f"{self.module}.{expert}.{MODULES[matrix][0]}.weight" for matrix in self.matrices]


def tensor(layer: int, matrix: str) -> str:
    """GGUF name of the tensor that holds a matrix of all experts of a layer."""
    return f"blk.{layer}.ffn_{matrix}_exps.weight"


def gate_and_up(name: str) -> str:
    """GGUF name of gate and up together, out of that of either; other names as they are."""
    return re.sub(r"ffn_(gate|up)", "ffn_gate_up", name)


def stack(name: str) -> Stack | None:
    """The stack that a parameter of a model is by its name, None where it is none."""
    found = _STACK.fullmatch(name)
    return Stack(found[1], int(found[2]), STACKS[found[3]]) if found else None


def in_mixtral(name: str) -> str:
    """What a tensor of the feed-forward network is called in a checkpoint of Mixtral's."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for module, theirs in MODULES.values():
        name = name.replace(f".{module}.weight", f".{theirs}.weight")
    return name
