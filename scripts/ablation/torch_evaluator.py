"""Perplexity and KL divergence of a Hugging Face model with changed weights, in torch (float32).

The figures are those of ``llama-perplexity --kl-divergence``: the text is cut into windows of ``context`` tokens, the
first token of each is replaced by BOS, and the second half of each window is scored. Used by the ablations, whose
variants have no file format.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_itq3s.checkpoint import channels


@dataclass(frozen=True)
class Divergence:
    """What changed weights cost; each mean with its standard error over scored tokens.

    Attributes:
        perplexity: of the changed model.
        mean_kld: mean KL divergence of the original's next-token distribution from the changed one's, in nats.
        kld_99: its 99th percentile.
        same_top: share of tokens whose most likely successor is the original's.
        tokens: scored tokens.
    """

    perplexity: float
    perplexity_error: float
    mean_kld: float
    mean_kld_error: float
    kld_99: float
    same_top: float
    same_top_error: float
    tokens: int

    def to_json(self) -> dict[str, float]:
        return asdict(self)


class Reference:
    """A model, the windows it is scored on, and its log-probabilities there.

    Args:
        model_dir: Hugging Face folder.
        text: the text.
        chunks: how many windows of it to take; all of it when it has fewer.
        context: tokens of a window.
        batch: windows in a forward pass.
    """

    def __init__(self, model_dir: Path, text: str, chunks: int, context: int = 512, batch: int = 8) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        ids = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        count = min(chunks, len(ids) // context)
        self.windows = torch.tensor(ids[: count * context], dtype=torch.int64).reshape(count, context)
        if tokenizer.bos_token_id is not None:
            self.windows[:, 0] = tokenizer.bos_token_id
        self.vocabulary: int = self.model.config.vocab_size
        self.batch = batch
        self._log_probs: list[torch.Tensor] = [self._forward(part) for part in self.windows.split(batch)]
        self.original = self.divergence()

    def matrices(self) -> dict[str, npt.NDArray[np.float32]]:
        """The weights of the linear layers within the blocks (not embedding and output head), by module name."""
        return {
            name: module.weight.detach().numpy().copy()
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not self.model.get_output_embeddings()
        }

    def set_matrices(self, matrices: dict[str, npt.NDArray[np.float32]]) -> None:
        """Replace weights by module name; shapes as :meth:`matrices` returns them."""
        with torch.no_grad():
            for name, weight in matrices.items():
                self.model.get_submodule(name).weight.copy_(torch.from_numpy(weight))

    def norm_gains(self) -> dict[str, npt.NDArray[np.float32]]:
        """The RMSNorm gain in front of each matrix that reads a norm, by module name (models with Llama's names)."""
        weights = dict(self.model.named_parameters())
        readers = channels.readers_in_checkpoint(weights, self.model.config.num_hidden_layers)
        head = "lm_head.weight"  # not a matrix of the blocks
        return {
            matrix.removesuffix(".weight"): weights[norm].detach().numpy().copy()
            for norm, matrices in readers.items()
            for matrix in matrices
            if matrix != head
        }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Log-probabilities for the scored half: float32 (windows, context - 1 - context // 2, vocabulary)."""
        first = windows.shape[1] // 2
        hidden = self.model.base_model(input_ids=windows, use_cache=False).last_hidden_state[:, first:-1]
        return torch.log_softmax(self.model.get_output_embeddings()(hidden).float(), dim=-1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def divergence(self, other: Reference | None = None) -> Divergence:
        """Score the weights that are set now, or those of ``other``, against this model's original ones."""
        nll, kld, same = [], [], []
        for windows, base in zip(self.windows.split(self.batch), self._log_probs, strict=True):
            now = (other or self)._forward(windows)
            targets = windows[:, windows.shape[1] // 2 + 1 :]
            nll.append(-now.gather(-1, targets[..., None]).flatten())
            kld.append((base.exp() * (base - now)).sum(-1).flatten())
            same.append((base.argmax(-1) == now.argmax(-1)).flatten())
        losses, divergences = torch.cat(nll).double().numpy(), torch.cat(kld).double().numpy()
        agreement = torch.cat(same).double().numpy()
        root = np.sqrt(losses.size - 1)
        perplexity = float(np.exp(losses.mean()))
        return Divergence(
            perplexity, perplexity * float(losses.std() / root), float(divergences.mean()),
            float(divergences.std() / root), float(np.percentile(divergences, 99)), float(agreement.mean()),
            float(agreement.std() / root), losses.size,
        )  # fmt: skip
