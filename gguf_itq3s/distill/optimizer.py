"""Adam whose moments may be kept in 8 bits, or in memory of the CPU.

In 8 bits a block of 256 values has one float32 scale, its largest magnitude. The first moment is coded as the signed
square root of its share of it, the second as its fourth root, so that small values keep their size: a linear code would
round them to zero, and a second moment of zero makes a step of any length. (Dettmers et al. 2022, arXiv 2110.02861, use
blocks of 2048 and a dynamic tree for the same.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

BLOCK: Final = 256
BETAS: Final = (0.9, 0.99)
EPSILON: Final = 1e-12


def encode_moment(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes and scales of a moment.

    Args:
        values: float32, any shape; not negative unless ``signed``.
        signed: whether it is the first moment.

    Returns:
        int8 or uint8 (blocks, 256), the last block filled with zeros; float32 (blocks, 1).
    """
    import torch

    flat = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1, keepdim=True)
    share = flat / scale.clamp_min(torch.finfo(torch.float32).tiny)
    if signed:
        return (share.sign() * share.abs().sqrt() * 127).round().to(torch.int8), scale
    # Upwards: a second moment that is too large makes a step shorter, one that is too small makes it longer.
    return (share.sqrt().sqrt() * 255).ceil().to(torch.uint8), scale


def decode_moment(codes: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`encode_moment`, float32 in the shape of ``like``."""
    import torch

    if codes.dtype == torch.int8:
        share = codes.float() / 127
        share = share * share.abs()
    else:
        share = (codes.float() / 255).square().square()
    return (share * scale).reshape(-1)[: like.numel()].view_as(like)


@dataclass
class Group:
    """Parameters with one learning rate.

    Attributes:
        parameters: by name.
        lr: in shares of each parameter's root mean square at the start.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    lr: float
    units: dict[str, float] = field(default_factory=dict)


class Adam:
    """Adam with bias correction, no weight decay, and steps in units of each parameter's size.

    Args:
        groups: what is trained.
        state: ``float32``, ``8bit`` or ``cpu``.
    """

    def __init__(self, groups: Sequence[Group], state: str) -> None:
        self.groups, self.state, self.count = groups, state, 0
        self._moments: dict[str, list[torch.Tensor]] = {}
        for group in groups:
            for name, parameter in group.parameters.items():
                group.units[name] = float(parameter.detach().float().square().mean().sqrt()) or 1.0
                self._moments[name] = self._zeros(parameter)

    def _zeros(self, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        import torch

        zeros = torch.zeros(parameter.shape, device="cpu" if self.state == "cpu" else parameter.device)
        if self.state != "8bit":
            return [zeros, zeros.clone()]
        return [*encode_moment(zeros, True), *encode_moment(zeros, False)]

    def step(self, factor: float) -> None:
        """Change every parameter by its gradient, which is then forgotten.

        Args:
            factor: of the learning rates.
        """
        import torch

        self.count += 1
        first, second = (1 - beta**self.count for beta in BETAS)
        with torch.no_grad():
            for group in self.groups:
                for name, parameter in group.parameters.items():
                    if parameter.grad is None:
                        continue
                    state = self._moments[name]
                    gradient = parameter.grad.float().to(state[0].device)
                    parameter.grad = None
                    if self.state == "8bit":
                        mean = decode_moment(state[0], state[1], gradient)
                        square = decode_moment(state[2], state[3], gradient)
                    else:
                        mean, square = state
                    mean.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
                    square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
                    change = mean / (square / second).sqrt_().add_(EPSILON)
                    length = factor * group.lr * group.units[name] / first
                    parameter.add_(change.to(parameter.device, parameter.dtype), alpha=-length)
                    if self.state == "8bit":
                        self._moments[name] = [*encode_moment(mean, True), *encode_moment(square, False)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments, for a checkpoint; they are not copies."""
        return {
            f"{name}/{place}": tensor for name, state in self._moments.items() for place, tensor in enumerate(state)
        }

    def load(self, tensors: Mapping[str, torch.Tensor], count: int) -> None:
        """Go on with moments that :meth:`tensors` gave, after so many steps."""
        for name, own in self.tensors().items():
            own.copy_(tensors[name])
        self.count = count

    @property
    def bytes(self) -> int:
        """Memory of the moments."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())
