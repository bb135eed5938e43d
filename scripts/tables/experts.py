#!/usr/bin/env python3
"""What ``--fisher`` is worth in a mixture of experts.

    scripts/tables/experts.py models/demo-llama --work DIR                        print the table
    scripts/tables/experts.py models/demo-llama --work DIR --update docs/calibration.md

The mixture is made of the bundled model: eight experts a layer, each with 512 of the 768 neurons of the feed-forward
network, drawn anew for each, two of them for a token; then everything is trained for some minutes on the bundled text
for calibration and a split of WikiText-2 that is not the test split (as in Komatsuzaki et al. 2022, "Sparse
upcycling"). Files are read by PyTorch, whose layers stay packed; the divergence is over windows of the test split.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import sentencepiece
import torch
import transformers

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import positive, report_errors  # noqa: E402
from gguf_itq3s.calibrate.backward import OutputFisher  # noqa: E402
from gguf_itq3s.calibrate.groups import Reader  # noqa: E402
from gguf_itq3s.calibrate.options import BUNDLED  # noqa: E402
from gguf_itq3s.calibrate.text import read_text  # noqa: E402
from gguf_itq3s.convert.options import ConvertOptions  # noqa: E402
from gguf_itq3s.convert.pipeline import convert  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from gguf_itq3s.transformers import load_gguf  # noqa: E402

EXPERTS: Final = 8
#: Of the bundled model's neurons, how many an expert has; what they put out is scaled up for those it lacks.
NEURONS: Final = 512
SCALE: Final = 1.4
BATCH: Final = 8
CONTEXT: Final = 256


@dataclass(frozen=True)
class Row:
    """A way to convert.

    Attributes:
        title: in the table.
        options: of the conversion.
        experts: whether experts get feedback across rows.
    """

    title: str
    options: dict[str, Any]
    experts: bool = True


ROWS: Final = {
    "nearest": Row("nearest codes", {}),
    "calibrate": Row("`--calibrate`", {"calibrate": ()}),
    "attention": Row("... `--fisher` but for experts", {"calibrate": (), "fisher": True}, experts=False),
    "fisher": Row("... `--fisher`", {"calibrate": (), "fisher": True}),
}


def tokens_of(model: Path, text: str) -> np.ndarray:
    """The tokens of a text, int64."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    return np.array(pieces.encode(text), dtype=np.int64)


def mixture(source: Path) -> Any:
    """The mixture before it is trained, in float32."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    given = dense.config.to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id",
            "eos_token_id")  # fmt: skip
    config = transformers.MixtralConfig(
        **{name: given[name] for name in kept}, intermediate_size=NEURONS, num_local_experts=EXPERTS,
        num_experts_per_tok=2, sliding_window=None, router_aux_loss_coef=0.02, output_router_logits=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        own, given_weights = model.state_dict(), dense.state_dict()
        for name, weight in given_weights.items():
            if name in own and own[name].shape == weight.shape:
                own[name].copy_(weight)
        for layer, before in zip(model.model.layers, dense.model.layers, strict=True):
            experts = layer.mlp.experts
            for number in range(EXPERTS):
                chosen = torch.randperm(before.mlp.up_proj.out_features)[:NEURONS]
                first = torch.cat([before.mlp.gate_proj.weight[chosen], before.mlp.up_proj.weight[chosen]])
                experts.gate_up_proj[number].copy_(first)
                experts.down_proj[number].copy_(before.mlp.down_proj.weight[:, chosen] * SCALE)
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.05)
    return model


def train(model: Any, ids: np.ndarray, steps: int) -> None:
    """Train everything with AdamW, products in bfloat16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    rng = np.random.default_rng(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, step / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        starts = rng.integers(0, (len(ids) - 1) // CONTEXT, BATCH) * CONTEXT
        batch = torch.from_numpy(np.stack([ids[start : start + CONTEXT] for start in starts]))
        batch[:, 0] = model.config.bos_token_id
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", file=sys.stderr)


def make(source: Path, folder: Path, steps: int) -> None:
    """The trained mixture in float16, in a folder."""
    model = mixture(source)
    text = read_text(BUNDLED) + wikitext.read(wikitext.training_path())
    train(model, tokens_of(source, text), steps)
    model.config.output_router_logits = False
    model.half().save_pretrained(folder)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


@contextlib.contextmanager
def feedback(experts: bool) -> Iterator[None]:
    """Within it, whether experts get feedback across rows."""
    own = OutputFisher.blocks

    def blocks(self: OutputFisher, reader: Reader, number: int) -> list[np.ndarray]:
        return [] if reader.expert is not None else own(self, reader, number)

    with contextlib.nullcontext() if experts else mock.patch.object(OutputFisher, "blocks", blocks):
        yield


class Divergence:
    """Mean KL divergence from a model, window by window.

    Args:
        model: a folder.
        windows: of the test split.
    """

    def __init__(self, model: Path, windows: int) -> None:
        ids = tokens_of(model, wikitext.read(wikitext.test_path()))
        spread = np.linspace(0, len(ids) - CONTEXT, windows).astype(int)
        rows = np.stack([ids[start : start + CONTEXT] for start in spread])
        rows[:, 0] = 1
        self._ids = torch.from_numpy(rows)
        whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._wanted = list(self._predictions(whole))
        after = torch.cat([part[:, :-1] for part in self._wanted])
        self.loss = float(-after.gather(-1, self._ids[:, 1:, None]).mean())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _predictions(self, model: Any) -> Iterator[torch.Tensor]:
        for part in self._ids.split(BATCH):
            yield torch.log_softmax(model(part).logits, -1)

    def of(self, path: Path) -> torch.Tensor:
        """Of a file, (windows,)."""
        model = load_gguf(path, dtype=torch.float32)
        found = [
            (p.exp() * (p - q)).sum(-1).mean(1)
            for p, q in zip(self._wanted, self._predictions(model), strict=True)
        ]  # fmt: skip
        return torch.cat(found)


def table(found: dict[str, torch.Tensor]) -> str:
    """A row for each way, the ratio to the calibrated one with its paired standard error."""
    base = found["calibrate"]

    def ratio(values: torch.Tensor) -> str:
        error = float((values - base).std() / len(base) ** 0.5 / base.mean())
        return f"{float(values.mean() / base.mean()):.3f} ± {error:.3f}"

    rows = [
        [ROWS[key].title, f"{float(values.mean()):.5f} ± {float(values.std() / len(values) ** 0.5):.5f}", ratio(values)]
        for key, values in found.items()
    ]
    return report.markdown(["", "mean KLD", "over `--calibrate`"], rows)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description="Feedback across rows in a mixture of experts.")
    parser.add_argument("model", type=Path, help="the bundled model, of which the mixture is made")
    parser.add_argument(
        "--work", type=Path, required=True, help="where the mixture and the files are made, and found again"
    )
    parser.add_argument("--steps", type=positive, default=150, help="of training")
    parser.add_argument("--tokens", type=positive, default=32768, help="of calibration")
    parser.add_argument("--windows", type=positive, default=96, help="of the test split")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--update", type=Path, metavar="PAGE", help="the page whose section to rewrite")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.work / "mixture"
    if not (folder / "config.json").is_file():
        make(args.model, folder, args.steps)
    divergence = Divergence(folder, args.windows)
    found, notes = {}, set()
    for key, row in ROWS.items():
        out = args.work / f"{key}-{args.tokens}.gguf"
        options = {"pure": True, "token_embedding_type": "f16", "threads": args.threads, **row.options}
        if "calibrate" in options:
            options |= {"tokens": args.tokens, "context": CONTEXT}
        messages = io.StringIO()
        if not out.exists():
            with feedback(row.experts):
                convert(ConvertOptions.of(folder, out, **options), messages)
        notes |= {line for line in messages.getvalue().splitlines() if "matrices of experts" in line}
        found[key] = divergence.of(out)
        print(f"{key}: {float(found[key].mean()):.5f}", file=sys.stderr)
    print("\n".join(sorted(notes)), file=sys.stderr)
    text = (
        f"{table(found)}\nA Mixtral with {EXPERTS} experts of {NEURONS} neurons a layer, made of the bundled model and "
        f"trained for {args.steps} steps; {args.tokens}\ntokens of the bundled text for calibration, {args.windows} "
        f"windows of {CONTEXT} tokens of WikiText-2's test split, where the mixture\nhas a loss of "
        f"{divergence.loss:.2f}.\n"
    )
    if args.update:
        report.replace_section(args.update, "experts", text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
