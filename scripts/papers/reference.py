"""Perplexity and KL divergence of a Hugging Face model with changed weights, in torch (float32).

The figures are those of ``llama-perplexity --kl-divergence``: the text is cut into windows of ``context`` tokens, the
first token of each is replaced by BOS, and the second half of each window is scored. For what has no file format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_itq3s.base.journal import key_of, sources, write_text
from gguf_itq3s.checkpoint import channels
from gguf_itq3s.codec.transform import FloatArray
from gguf_itq3s.evaluate import wikitext


def test_text() -> str:
    """WikiText-2's test split."""
    return wikitext.read(wikitext.test_path())


test_text.__test__ = False  # type: ignore[attr-defined]  # pytest


def remembered(folder: Path, make: Callable[[], Any], *parts: object) -> Any:
    """What ``make`` gives, as JSON, kept under the hash of ``parts``, of the package and of these scripts."""
    scripts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    path = folder / f"{key_of(sources(), *scripts, *parts)[:24]}.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(make()))
    return json.loads(path.read_text())


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
        self.batch = batch
        self._log_probs: list[torch.Tensor] = [self._forward(part) for part in self.windows.split(batch)]

    def matrices(self) -> dict[str, FloatArray]:
        """The weights of the linear layers within the blocks (not embedding and output head), by module name."""
        return {
            name: module.weight.detach().numpy().copy()
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not self.model.get_output_embeddings()
        }

    def set_matrices(self, matrices: dict[str, FloatArray]) -> None:
        """Replace weights by module name; shapes as :meth:`matrices` returns them."""
        with torch.no_grad():
            for name, weight in matrices.items():
                self.model.get_submodule(name).weight.copy_(torch.from_numpy(weight))

    def norm_gains(self) -> dict[str, FloatArray]:
        """The RMSNorm gain in front of each matrix that reads a norm, by module name (models with Llama's names)."""
        weights = dict(self.model.named_parameters())
        readers = channels.readers_in_checkpoint(weights, self.model.config.num_hidden_layers)
        return {
            matrix.removesuffix(".weight"): weights[norm].detach().numpy().copy()
            for norm, matrices in readers.items()
            for matrix in matrices
            if matrix != "lm_head.weight"  # not a matrix of the blocks
        }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Log-probabilities for the scored half: float32 (windows, context - 1 - context // 2, vocabulary)."""
        first = windows.shape[1] // 2
        hidden = self.model.base_model(input_ids=windows, use_cache=False).last_hidden_state[:, first:-1]
        return torch.log_softmax(self.model.get_output_embeddings()(hidden).float(), dim=-1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def divergence(self, other: Reference | None = None) -> dict[str, float]:
        """Score the weights that are set now, or those of ``other``, against this model's original ones.

        Returns:
            ``perplexity``; ``mean_kld`` in nats and ``same_top``, a share, each with ``_error``; ``tokens``.
        """
        nll, kld, same = [], [], []
        for windows, base in zip(self.windows.split(self.batch), self._log_probs, strict=True):
            now = (other or self)._forward(windows)
            targets = windows[:, windows.shape[1] // 2 + 1 :]
            nll.append(-now.gather(-1, targets[..., None]).flatten())
            kld.append((base.exp() * (base - now)).sum(-1).flatten())
            same.append((base.argmax(-1) == now.argmax(-1)).flatten())
        figures: dict[str, float] = {"perplexity": float(torch.cat(nll).double().mean().exp()), "tokens": 0}
        for name, parts in (("mean_kld", kld), ("same_top", same)):
            values = torch.cat(parts).double()
            figures |= {name: float(values.mean()), "tokens": len(values)}
            figures[f"{name}_error"] = float(values.std() / len(values) ** 0.5)
        return figures
