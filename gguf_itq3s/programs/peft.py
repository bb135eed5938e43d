"""A LoRA adapter as PEFT saves it, ``adapter_config.json`` and ``adapter_model.safetensors``, checked before its use.

llama.cpp knows one kind: ``W + alpha / rank * B A`` for each matrix, with one alpha. What would be read as that and is
something else is refused here, because upstream's converter would go on and write another model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..base.errors import UserError
from ..checkpoint.rescaling import EQUALIZED_TAG, FOLDED_TAG, is_id
from ..checkpoint.shards import stored_tensors
from ..checkpoint.validation import ADAPTER, read_json

WEIGHTS: Final = "adapter_model.safetensors"

_MERGE: Final = "merge it into the model (merge_and_unload of PEFT) and convert that"
# Initialisations that change the model's own weights beside the adapter, so that it fits no other copy of them.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Options of PEFT that are more than W + B A, and what each is called.
_MORE: Final = {
    "use_dora": "is DoRA, which has a magnitude beside its matrices",
    "lora_bias": "has biases beside its matrices",
    "modules_to_save": "replaces whole modules of the model",
    "target_parameters": "is for parameters that are no modules",
    "layer_replication": "is for a model whose layers are repeated",
    "trainable_token_indices": "replaces single tokens of the embedding",
    "alora_offset": "is of a form of aLoRA that is no longer in use",
}
_HALF: Final = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
# Longest of a file that is read beside the weights, and of an invocation sequence.
_MOST_BYTES: Final = 1 << 22
_MOST_TOKENS: Final = 1 << 12


@dataclass(frozen=True)
class Adapter:
    """An adapter that is what llama.cpp runs.

    Attributes:
        folder: where it is.
        weights: its safetensors file.
        alpha: what the product of its matrices is scaled with, times the rank.
        invocation: tokens that switch an activated LoRA on; empty for an ordinary one.
        beside_folded: whether its model card says that it was trained beside a packed model with folded norms.
        beside: the id of the equalization of the packed model that it was trained beside, by its card; else empty.
    """

    folder: Path
    weights: Path
    alpha: float
    invocation: tuple[int, ...] = ()
    beside_folded: bool = False
    beside: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """What upstream's converter reads of ``adapter_config.json``."""
        return {"lora_alpha": self.alpha} | ({"alora_invocation_tokens": self.invocation} if self.invocation else {})


def read_adapter(folder: Path) -> Adapter:
    """Check an adapter's folder; no weights are read.

    Raises:
        UserError: it is not a LoRA adapter in safetensors, or one that llama.cpp cannot run as it is.
    """
    config, weights = folder / ADAPTER, folder / WEIGHTS
    if not folder.is_dir():
        raise UserError(folder, "is not a folder", f"give the folder of an adapter with its {ADAPTER}")
    if not config.is_file():
        raise UserError(config, "no such file", "give the folder of an adapter as PEFT saves it")
    if not weights.is_file():
        remedy = "save it as safetensors"
        what = "holds a pickle, which is not read" if (folder / "adapter_model.bin").is_file() else "no such file"
        raise UserError(weights if what == "no such file" else folder, what, remedy)
    if config.stat().st_size > _MOST_BYTES:
        raise UserError(config, f"has more than {_MOST_BYTES >> 20} MiB", "take the file of the adapter")
    options = read_json(config)
    _check_kind(config, options)
    ranks = _ranks(weights)
    alpha, invocation = _alpha(config, options, ranks), _invocation(config, options)
    tags = _tags(folder)
    ids = [tag.removeprefix(EQUALIZED_TAG) for tag in tags if tag.startswith(EQUALIZED_TAG)]
    return Adapter(folder, weights, alpha, invocation, FOLDED_TAG in tags, next(filter(is_id, ids), ""))


def small_file(folder: Path, name: str) -> Path | None:
    """A file of the adapter that upstream reads for its metadata, if it is there and small."""
    path = folder / name
    return path if path.is_file() and path.stat().st_size <= _MOST_BYTES else None


def _check_kind(path: Path, options: Mapping[str, Any]) -> None:
    kind = options.get("peft_type", "LORA")
    if kind != "LORA":
        raise UserError(path, f"is of the kind {kind!r:.40}, not LORA", _MERGE)
    for name, what in _MORE.items():
        if options.get(name):
            raise UserError(path, f"{what} ({name})", _MERGE)
    start = options.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        what = f"was started from a changed model (init_lora_weights {start!r:.40})"
        raise UserError(
            path, what, "save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )
    if options.get("invocation_string") and not options.get("alora_invocation_tokens"):
        what = "has an invocation_string, whose tokens are not known"
        raise UserError(path, what, "add them as alora_invocation_tokens")


def _ranks(path: Path) -> set[int]:
    """The ranks of all pairs of matrices."""
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (_, shape) in stored_tensors([path]).items():
        if match := _HALF.fullmatch(name):
            halves.setdefault(match[1], {})[match[2]] = shape
        # Upstream leaves out the first; llama.cpp's loader, the norms that mergekit adds.
        elif not re.search(r"\.base_layer\.weight$|_layernorm|\.norm", name):
            raise UserError(path, "is no matrix of a LoRA", _MERGE, name)
    ranks = set()
    for name, pair in halves.items():
        if len(pair) < 2:
            missing = "lora_B" if "A" in pair else "lora_A"
            raise UserError(path, f"has no {missing}", "download the adapter again", name)
        a, b = pair["A"], pair["B"]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not all((*a, *b)):
            raise UserError(path, f"has lora_A of {a} and lora_B of {b}, which are no pair of matrices", _MERGE, name)
        ranks.add(a[0])
    if not ranks:
        raise UserError(path, "holds no LoRA matrices", "give the folder of an adapter as PEFT saves it")
    return ranks


def _alpha(path: Path, options: Mapping[str, Any], ranks: set[int]) -> float:
    """The alpha that llama.cpp divides by the rank."""
    alpha = options.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha) or not alpha:
        raise UserError(path, f"has lora_alpha {alpha!r:.40}, which is no number to scale with", "repair the file")
    pattern = options.get("alpha_pattern") or {}
    others = pattern.values() if isinstance(pattern, Mapping) else [pattern]
    if any(value != alpha for value in others):
        raise UserError(path, "has another alpha for some matrices (alpha_pattern); llama.cpp has one", _MERGE)
    if not options.get("use_rslora"):
        return float(alpha)
    # Rank-stabilised (arXiv 2312.03732): alpha over the root of the rank.
    if len(ranks) > 1:
        raise UserError(path, "is rank-stabilised (use_rslora) with matrices of several ranks", _MERGE)
    return float(alpha) * math.sqrt(next(iter(ranks)))


def _tags(folder: Path) -> list[str]:
    """The tags of the model, which PEFT writes into the head of the card, a line for each."""
    card = small_file(folder, "README.md")
    text = card.read_text(encoding="utf-8", errors="replace") if card else ""
    head = text.split("\n---", 1)[0] if text.startswith("---") else ""
    return [line.removeprefix("- ") for line in head.splitlines() if line.startswith("- ")]


def _invocation(path: Path, options: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = options.get("alora_invocation_tokens") or []
    if (
        not isinstance(tokens, list)
        or len(tokens) > _MOST_TOKENS
        or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens)
    ):
        raise UserError(path, "has alora_invocation_tokens that are no tokens", "take the file of the adapter")
    return tuple(tokens)
