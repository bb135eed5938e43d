"""Second moments of the inputs of a layer's matrices, collected while the layer runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from ..checkpoint import fold
from ..codec.transform import BLOCK, hadamard_matrix
from ..errors import UserError
from ..rounding.factors import tensor_entry
from .layers import LayeredModel
from .options import CalibrationOptions

if TYPE_CHECKING:
    import torch


@dataclass
class SecondMoment:
    """Running second moment of rotated activations.

    Attributes:
        columns: n, a multiple of 256.
        full: (n, n), or the diagonal blocks (n / 256, 256, 256).
        total: float64 sum of the outer products.
        tokens: how many.
    """

    columns: int
    full: bool
    total: torch.Tensor | None = None
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Add activations (..., n), not rotated."""
        import torch

        rows = x.reshape(-1, self.columns // BLOCK, BLOCK).float()
        rows = rows @ torch.from_numpy(hadamard_matrix()).to(rows)
        if self.full:
            flat = rows.reshape(-1, self.columns)
            product = flat.T @ flat
        else:
            blocks = rows.transpose(0, 1)
            product = blocks.transpose(1, 2) @ blocks
        self.total = product.double() if self.total is None else self.total.add_(product)
        self.tokens += rows.shape[0]

    def mean(self) -> np.ndarray:
        """float32 second moment; zeros where nothing was added."""
        if self.total is None:
            shape = (self.columns, self.columns) if self.full else (self.columns // BLOCK, BLOCK, BLOCK)
            return np.zeros(shape, dtype=np.float32)
        return (self.total / self.tokens).float().cpu().numpy()


@dataclass
class _Group:
    """Matrices that read the same input."""

    moment: SecondMoment
    members: list[str] = field(default_factory=list)
    norm: str | None = None


class Collector:
    """Hooks on the matrices of one layer that add up their inputs.

    Matrices that read one of the two norms share its statistics, and where the norm can be folded, those are of the
    normalised input without the gain. Experts have their own.
    """

    def __init__(self, model: LayeredModel, number: int, layer: torch.nn.Module, options: CalibrationOptions) -> None:
        import torch

        self._options = options
        self._folder = model.folder
        self._groups: dict[str, _Group] = {}
        self._handles: list[Any] = []
        self._plain: dict[str, torch.Tensor] = {}  # norm -> its last output without the gain
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == model.arch)
        self._names = gguf.get_tensor_name_map(arch, model.layers)
        self._tensors = {tensor.name: tensor for tensor in model.checkpoint.tensors}
        self._folding = fold.plan(model.arch, self._tensors)
        for path, module in layer.named_modules():
            name = self._gguf_name(f"{model.prefix}.{number}.{path}")
            if name in self._folding.norms:
                self._watch_norm(name, module)
            elif isinstance(module, torch.nn.Linear) and (expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", path)):
                self._watch_linear(self._expert_name(number, expert[3]), module, int(expert[2]))
            elif isinstance(module, torch.nn.Linear) and name in self._tensors:
                self._watch_linear(name, module, None)
            elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
                self._watch_experts(number, module)

    def statistics(self) -> dict[str, np.ndarray]:
        """The second moments by key."""
        return {key: group.moment.mean() for key, group in self._groups.items()}

    def entries(self) -> dict[str, tuple[str, int, str | None]]:
        """Matrix -> key, tokens, and the norm whose gain is left out."""
        return {
            name: (key, group.moment.tokens, group.norm)
            for key, group in self._groups.items()
            for name in group.members
        }

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _gguf_name(self, module: str) -> str:
        short = self._names.get_name(module.replace("language_model.", ""))
        return f"{short}.weight" if short else ""

    @staticmethod
    def _expert_name(number: int, part: str) -> str:
        parts = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
        return f"blk.{number}.ffn_{parts[part]}_exps.weight"

    def _group(self, name: str, columns: int, expert: int | None, norm: str | None) -> _Group:
        """The group of a matrix, made when its first member comes."""
        member = tensor_entry(name, expert)
        shared = re.sub(r"ffn_(gate|up)", "ffn_gate_up", member) if norm is None else norm
        key = f"{shared}[{expert}]" if norm and expert is not None else shared
        group = self._groups.setdefault(key, _Group(SecondMoment(columns, self._options.full(columns)), norm=norm))
        group.members.append(member)
        return group

    def _watch_norm(self, name: str, module: torch.nn.Module) -> None:
        import torch

        gain = next(iter(self._tensors[name].load()))
        effective = torch.from_numpy(gain.astype("float32")).reshape(-1)

        def normalised(norm: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            x = args[0].float()
            epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-6)
            plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
            if not torch.allclose(plain * effective.to(plain), out.float(), rtol=1e-3, atol=1e-4):
                what = "is not an RMSNorm with the gain that the checkpoint has"
                raise UserError(self._folder, what, "use an importance matrix of llama-imatrix (--imatrix)", name)
            self._plain[name] = plain.reshape(-1, plain.shape[-1])

        self._handles.append(module.register_forward_hook(normalised))

    def _watch_linear(self, name: str, module: torch.nn.Module, expert: int | None) -> None:
        columns = module.in_features
        if columns % BLOCK or name not in self._tensors:
            return
        norm = self._folding.norm_of(name)
        group = self._group(name, columns, expert, norm if expert is None else None)
        if len(group.members) > 1:
            return
        if norm is not None and expert is not None:
            # Of an expert alone the rows are not known here; the gain is divided out again.
            group.norm = norm
            factor = self._inverse_gain(norm)
            self._handles.append(
                module.register_forward_pre_hook(lambda _, args: group.moment.add(args[0] * factor.to(args[0])))
            )
        elif norm is not None:
            self._handles.append(module.register_forward_pre_hook(lambda _, args: group.moment.add(self._plain[norm])))
        else:
            self._handles.append(module.register_forward_pre_hook(lambda _, args: group.moment.add(args[0])))

    def _inverse_gain(self, norm: str) -> torch.Tensor:
        """1 / gain; a channel with gain 0 counts as never seen."""
        import torch

        gain = torch.from_numpy(next(iter(self._tensors[norm].load())).astype("float32")).reshape(-1)
        return torch.where(gain == 0, 0.0, 1 / torch.where(gain == 0, 1.0, gain))

    def _watch_experts(self, number: int, module: Any) -> None:
        """Experts that transformers keeps as stacked parameters: (hidden, chosen experts, weights) come in."""
        import torch

        count, width = module.down_proj.shape[0], module.down_proj.shape[2]
        hidden = module.gate_up_proj.shape[2]
        gate, up, down = (self._expert_name(number, part) for part in ("gate_proj", "up_proj", "down_proj"))
        norm = self._folding.norm_of(gate)
        inputs, inner = [], []
        for expert in range(count):
            if hidden % BLOCK == 0:
                group = self._group(gate, hidden, expert, norm)
                self._group(up, hidden, expert, norm)
                inputs.append(group.moment)
            if width % BLOCK == 0:
                inner.append(self._group(down, width, expert, None).moment)

        def routed(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = (args[0] if args else keywords["hidden_states"]).reshape(-1, hidden)
            chosen = (args[1] if len(args) > 1 else keywords["top_k_index"]).reshape(states.shape[0], -1)
            plain = states if norm is None else self._plain[norm]
            for expert in range(count):
                rows = torch.where((chosen == expert).any(-1))[0]
                if not rows.numel():
                    continue
                if inputs:
                    inputs[expert].add(plain[rows])
                if inner:
                    gates, ups = (states[rows] @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                    inner[expert].add(module.act_fn(gates) * ups)

        self._handles.append(module.register_forward_pre_hook(routed, with_kwargs=True))
