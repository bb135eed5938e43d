"""The experts of a layer, as Transformers stacks them, with weights that stay packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from . import decode, grouped, packing, paths, products
from .decode import QType
from .packing import DEFAULT_TYPE

#: The second matrix of every expert; the first is called ``gate_up_proj``, or ``up_proj`` where there is no gate.
DOWN: Final = "down_proj"


@dataclass(frozen=True)
class Stack:
    """One of the two matrices of all experts.

    Attributes:
        rows: outputs of an expert's matrix.
        columns: its inputs.
        qtype: the type of the blocks, or None for floats. It becomes that of the columns, as in
            :class:`.linear.PackedLinear`: ITQ3_N for ITQ3_S where blocks of 256 do not fit them.
        transposed: whether floats are held as (experts, columns, rows); blocks never are.
    """

    rows: int
    columns: int
    qtype: QType | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.qtype is not None:
            object.__setattr__(self, "qtype", decode.layout_for(self.qtype, self.columns).qtype)

    def shape(self, experts: int) -> tuple[int, int, int]:
        """The shape of the parameter."""
        if self.qtype is not None:
            return experts, self.rows, decode.layout(self.qtype).row_bytes(self.columns)
        return self.float_shape(experts)

    def float_shape(self, experts: int) -> tuple[int, int, int]:
        """The shape of the floats."""
        return (experts, self.columns, self.rows) if self.transposed else (experts, self.rows, self.columns)


class PackedExperts(nn.Module):
    """Feed-forward networks among which a router chooses for every token: ``sum_e r_e W2_e gate(W1_e x)``.

    The parameters are named as in Transformers: ``gate_up_proj`` (or ``up_proj``) and ``down_proj``, each with
    ``*_bias`` beside it where there is a bias. A stack that is packed is uint8 (experts, rows, bytes of a row), a
    parameter without gradient; floats are as Transformers has them.

    The input is rotated once for all experts. Then one expert after the other is decoded, by slices within the
    product, as :class:`gguf_itq3s.torch.PackedLinear` does: the paths and their tolerances are the same.

    Attributes:
        stacks: what the two matrices are, by name.
        num_experts: how many.
        gate: (s, rows of the first matrix) -> (s, columns of the second), what lies between the two.
        path: ``reference``, ``triton``, or None for the device's own (:mod:`gguf_itq3s.torch.paths`).
    """

    def __init__(
        self, experts: int, stacks: Mapping[str, Stack], gate: Callable[[torch.Tensor], torch.Tensor], *,
        bias: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """A module of zeros, to load a state into; ``device="meta"`` allocates nothing.

        Args:
            experts: how many.
            stacks: the first matrix and the second one (``down_proj``), in this order.
            gate: what lies between them; no parameters of its own.
            bias: whether both products have one.
            device: where to.
            dtype: of what is not packed.

        Raises:
            ValueError: packed columns that are not whole blocks, or types that do not fit.
        """
        super().__init__()
        self.num_experts, self.gate = experts, gate
        self.stacks = dict(stacks)
        self.path: str | None = None
        for name, stack in self.stacks.items():
            packed = stack.qtype is not None
            kind = torch.uint8 if packed else dtype
            zeros = torch.zeros(stack.shape(experts), dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(zeros, requires_grad=not packed))
            zeros = torch.zeros(experts, stack.rows, device=device, dtype=dtype)
            self.register_parameter(f"{name}_bias", nn.Parameter(zeros) if bias else None)

    @classmethod
    def from_weights(
        cls, first: torch.Tensor, down: torch.Tensor, gate: Callable[[torch.Tensor], torch.Tensor], *,
        name: str = "gate_up_proj", qtype: QType = DEFAULT_TYPE, effort: str = "default", threads: int | None = None,
    ) -> PackedExperts:  # fmt: skip
        """Quantize two stacks of matrices: ``first``, of this ``name``, (experts, rows, columns), and ``down``.

        Options and errors are those of :func:`gguf_itq3s.torch.quantize`.
        """
        weights = {name: first, DOWN: down}
        if any(weight.ndim != 3 for weight in weights.values()):
            shapes = " and ".join(str(tuple(weight.shape)) for weight in weights.values())
            raise ValueError(f"stacks of matrices are needed; the shapes are {shapes}")
        stacks = {key: Stack(weight.shape[1], weight.shape[2], qtype) for key, weight in weights.items()}
        made = cls(len(first), stacks, gate, device="meta")
        for key, weight in weights.items():
            kind = stacks[key].qtype
            assert kind is not None
            rows = packing.quantize(weight.flatten(0, 1), kind, effort=effort, threads=threads)
            setattr(made, key, nn.Parameter(rows.unflatten(0, weight.shape[:2]), requires_grad=False))
        return made

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the chosen experts' outputs.

        Args:
            hidden_states: (..., columns of the first matrix) of a floating dtype.
            top_k_index: (tokens, k) the experts of every token; a number that is none is passed over.
            top_k_weights: (tokens, k) what their outputs are multiplied by.

        Returns:
            The shape and dtype of ``hidden_states``.

        Raises:
            ValueError: shapes that do not belong together, or there is no such path.
        """
        dtype = hidden_states.dtype
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        count = top_k_index.shape[-1]
        # Rows by expert; stable, so that sums do not depend on chance.
        chosen, order = top_k_index.reshape(-1).sort(stable=True)
        numbers = torch.arange(self.num_experts, device=chosen.device, dtype=chosen.dtype)
        ends = torch.searchsorted(chosen, numbers, right=True)
        first, second = self.stacks
        inner = self.gate(self._product(first, x, chosen, ends, order // count))
        out = self._product(second, inner, chosen, ends, None)
        weights = top_k_weights.reshape(-1)[order].masked_fill(chosen >= self.num_experts, 0)
        weighted = out * weights[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        total = weighted[back].view(-1, count, out.shape[-1]).sum(1)
        return total.to(dtype).view(hidden_states.shape[:-1] + out.shape[-1:])

    def _product(
        self, name: str, x: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor | None
    ) -> torch.Tensor:
        """``W[e] x[tokens]`` of rows sorted by expert, with the bias."""
        stack, weight = self.stacks[name], getattr(self, name)
        bias = getattr(self, f"{name}_bias")
        path = paths.choose(x.device, self.path)
        if stack.qtype is None:
            out = self._floats(name, x, ends, tokens)
        else:
            kind = decode.layout(stack.qtype)
            source = products.rotate(x, path, kind.block) if kind.rotated else x
            out = grouped.product(source, weight, stack.qtype, ends, tokens=tokens, path=path)
        if bias is not None:
            out = out + bias[chosen.clamp(max=self.num_experts - 1)].to(out.dtype)
        return out

    def _floats(self, name: str, x: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        """The same with matrices that are not packed, without the bias."""
        weight, transposed = getattr(self, name), self.stacks[name].transposed
        rows = x if tokens is None else x[tokens]
        products, end = [], 0
        for number, part in grouped.parts_of(ends):
            matrix = weight[number].to(x.dtype)
            products.append(rows[part] @ (matrix if transposed else matrix.t()))
            end = part.stop
        products.append(x.new_zeros(len(rows) - end, weight.shape[2 if transposed else 1]))
        return torch.cat(products)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def dequantize(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All matrices of a stack, in the shape of its floats, in ``dtype``."""
        stack, weight = self.stacks[name], getattr(self, name)
        if stack.qtype is None:
            return weight.to(dtype)
        out = torch.empty(stack.float_shape(self.num_experts), dtype=dtype, device=weight.device)
        for number in range(self.num_experts):
            matrix = products.dequantize(weight[number], stack.qtype, dtype=dtype)
            out[number] = matrix.t() if stack.transposed else matrix
        return out

    def extra_repr(self) -> str:
        kinds = {name: "floats" if stack.qtype is None else stack.qtype.name for name, stack in self.stacks.items()}
        parts = [f"{name}={stack.rows}x{stack.columns} {kinds[name]}" for name, stack in self.stacks.items()]
        return ", ".join([f"experts={self.num_experts}", *parts])
