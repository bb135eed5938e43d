"""What the matrices of experts are called: in Transformers and in GGUF files.

=========== =========================== ====================
matrix      all of a layer, stacked     all of a layer, GGUF
=========== =========================== ====================
gate        gate_up_proj, rows above    ffn_gate_exps
up          gate_up_proj, rows below    ffn_up_exps
down        down_proj                   ffn_down_exps
=========== =========================== ====================

Transformers 5 stacks them, whatever a checkpoint does. Experts without a gate have ``up_proj`` stacked, and a GGUF file
may have gate and up in one as well, ``ffn_gate_up_exps``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

#: Parameter that stacks the experts of a layer -> the matrices in it, one above the other.
STACKS: Final = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}

_STACK: Final = re.compile(rf".*\.layers\.(\d+)\..*experts\.({'|'.join(STACKS)})")


@dataclass(frozen=True)
class Stack:
    """A parameter of Transformers that stacks the experts of a layer, (experts, rows, columns).

    Attributes:
        layer: its number.
        matrices: in it, one above the other.
    """

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


def tensor(layer: int, matrix: str) -> str:
    """GGUF name of the tensor that holds a matrix of all experts of a layer."""
    return f"blk.{layer}.ffn_{matrix}_exps.weight"


def gate_and_up(name: str) -> str:
    """GGUF name of gate and up together, out of that of either; other names as they are."""
    return re.sub(r"ffn_(gate|up)", "ffn_gate_up", name)


def stack(name: str) -> Stack | None:
    """The stack that a parameter of a model is by its name, None where it is none."""
    found = _STACK.fullmatch(name)
    return Stack(int(found[1]), STACKS[found[2]]) if found else None
