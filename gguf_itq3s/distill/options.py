"""What a distillation is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType as Type

from ..calibrate.options import RunOptions
from ..codec.family import DEFAULT, FAMILY
from ..codec.formats import EFFORTS

#: Types that matrices can be trained for, by name.
TYPES: Final = {row.identifier: row.type for row in FAMILY.values()} | {"tq2_0": Type.TQ2_0}
LOSSES: Final = ("kl", "reverse-kl", "cakld")
#: Where the optimizer's two moments are: beside the weights, there in 8 bits, or in memory of the CPU.
OPTIMIZER_STATES: Final = ("float32", "8bit", "cpu")
PRECISIONS: Final = ("float32", "bfloat16")

#: What does not change the result and may differ when a run goes on.
NEUTRAL: Final = frozenset({"out", "threads", "checkpoint_minutes", "trust_remote_code"})


@dataclass(frozen=True)
class DistillOptions(RunOptions):
    """What to train and how; the fields are the options of the command.

    The weights of the model are floats, a batch is the windows of a step, and tokens are read again when a step has
    come to their end.

    Attributes:
        out: the folder to write.
        start: a GGUF file of the model in ``type``; its codes are the start. None: the nearest codes.
        type: of the matrices, one of :data:`TYPES`.
        loss: one of :data:`LOSSES`.
        steps: of the optimizer.
        micro_batch: windows that are run together, None for all of a step.
        lr: learning rate of weights, in shares of their matrix's root mean square.
        scale_lr: learning rate of the scales of blocks, which are about 1.
        norm_lr: learning rate of norm gains, in shares of their root mean square; 0 leaves them as they are.
        embedding_lr: learning rate of the token embedding and the output matrix, in shares of theirs; 0 leaves them.
        every: steps between two encodings of the weights.
        effort: of these encodings, as the converter's.
        optimizer_state: one of :data:`OPTIMIZER_STATES`.
        gradient_checkpointing: activations within a layer are computed again for the gradient instead of kept.
        precision: of the products, one of :data:`PRECISIONS`; weights and sums are float32.
        threads: that encode, and that torch uses on the CPU.
        seed: of the order of the windows.
        checkpoint_minutes: between two checkpoints.

    Raises:
        UserError: a number is out of its range.
    """

    tokens: int = 1 << 20
    out: Path = Path()
    start: Path | None = None
    type: str = DEFAULT.identifier
    loss: str = "kl"
    steps: int = 400
    micro_batch: int | None = None
    lr: float = 3e-3
    scale_lr: float = 1e-3
    norm_lr: float = 2e-3
    embedding_lr: float = 0.0
    every: int = 10
    effort: str = "default"
    optimizer_state: str = "float32"
    gradient_checkpointing: bool = False
    precision: str = "float32"
    threads: int = 1
    seed: int = 0
    checkpoint_minutes: float = 10.0

    purpose = "distilled"
    counts = ("steps", "batch", "micro_batch", "tokens", "every", "threads", "context")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "scale_lr", "norm_lr", "embedding_lr"):
            if not 0 <= getattr(self, name) < 1:
                raise self.refused(name, "give 0, or a number between 0 and 1")
        choices = (("type", TYPES), ("loss", LOSSES), ("optimizer_state", OPTIMIZER_STATES), ("effort", EFFORTS),
                   ("precision", PRECISIONS))  # fmt: skip
        for name, known in choices:
            if getattr(self, name) not in known:
                raise self.refused(name, f"give one of {', '.join(known)}")
