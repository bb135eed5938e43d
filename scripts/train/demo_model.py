#!/usr/bin/env python3
"""Train the small Llama that is bundled under ``models/``, or another small model to check results on.

    scripts/train/demo_model.py --data DIR --work-dir RUN --out models/NAME --minutes 100
    scripts/train/demo_model.py --data DIR --work-dir RUN --out DIR2 --architecture qwen3 --layers 4 --steps 600

Reads every ``*.txt`` and ``*.txt.xz`` file below ``--data``, trains a SentencePiece BPE tokenizer in Llama
style on it, then a ``LlamaForCausalLM`` (hidden and feed-forward sizes multiples of 256, tied embeddings), or a
``Qwen3ForCausalLM`` of the same sizes, with its norms of queries and keys and an output matrix of its own.
Files of the WikiText test split are never read. The run can be interrupted at any time (Ctrl-C, or a killed
machine) and continues from the last checkpoint in ``--work-dir`` when the same command is given again.

The learning rate follows the share of the budget that is used up: of ``--minutes`` of training time
(checkpointed, so an interruption does not count) or of ``--steps``.

Matrices are trained with Muon (Jordan et al. 2024, ``torch.optim.Muon``), embeddings and gains with AdamW.
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
import math
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

log = logging.getLogger("train-demo-model")

BOS, EOS = 1, 2

#: Configuration, model, and whether the embedding is the output matrix too.
ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], bool]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, True),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, False),
}

# The model continues text and has never seen a conversation: a chat front end hands it the messages as they are.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; ``hidden`` and ``feed_forward`` must be multiples of 256 (one ITQ3_S block)."""

    vocab: int = 4096
    hidden: int = 256
    feed_forward: int = 768
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    context: int = 512
    architecture: str = "llama"

    def model(self) -> PreTrainedModel:
        config, model, tied = ARCHITECTURES[self.architecture]
        sizes = config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context,
            head_dim=self.hidden // self.heads,
            tie_word_embeddings=tied,
            bos_token_id=BOS,
            eos_token_id=EOS,
            rms_norm_eps=1e-5,
            use_cache=False,
        )
        return model(sizes)


# ---------------------------------------------------------------------------------------------------- text


def is_test_split(path: Path) -> bool:
    """The evaluation text must never reach the optimiser."""
    return "test" in path.name.lower()


def clean_wikitext(text: str) -> str:
    """Take the tokenisation marks of WikiText's ``.tokens`` form out; its spaced punctuation stays."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = text.replace("<unk>", "")
    return re.sub(r"[ \t]+\n", "\n", re.sub(r"[ \t]{2,}", " ", text))


def read_texts(folder: Path) -> list[tuple[str, str]]:
    """(file name, text) of every training file below ``folder``, in name order."""
    paths = sorted(p for pattern in ("*.txt", "*.txt.xz") for p in folder.rglob(pattern))
    paths = [p for p in paths if p.is_file() and not is_test_split(p)]
    if not paths:
        raise SystemExit(f"error: {folder}: no *.txt or *.txt.xz file to train on")
    texts = []
    for path in paths:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
        texts.append((path.name, clean_wikitext(text) if path.name.startswith("wiki.") else text))
    return texts


def train_tokenizer(texts: list[tuple[str, str]], vocab: int, prefix: Path) -> None:
    """SentencePiece BPE as Llama's: byte fallback, digits split, identity normalisation, dummy prefix."""
    sample = prefix.with_suffix(".sample.txt")
    rng = np.random.default_rng(0)
    with sample.open("w", encoding="utf-8") as out:
        for _, text in texts:
            lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 20]
            for i in rng.permutation(len(lines))[:6000]:
                out.write(lines[i][:2000] + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(sample), model_prefix=str(prefix), model_type="bpe", vocab_size=vocab, byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.9999, unk_id=0, bos_id=BOS, eos_id=EOS, pad_id=-1,
        max_sentence_length=16384, num_threads=2, minloglevel=1,
    )  # fmt: skip
    sample.unlink()


def tokenize(texts: list[tuple[str, str]], tokenizer: Path, repeats: dict[str, int]) -> np.ndarray:
    """All texts as one uint16 array; a file named in ``repeats`` is taken that many times.

    Repeated files come first: the end of the stream is held out, and must not stand elsewhere in it.
    """
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    newline = sp.piece_to_id("<0x0A>")
    parts: list[np.ndarray] = []
    for name, text in sorted(texts, key=lambda item: -repeats.get(item[0], 1)):
        lines = text.splitlines()
        ids: list[int] = []
        for start in tqdm(range(0, len(lines), 2000), desc=f"tokenize {name}", unit="k lines", leave=False):
            for line in sp.encode(lines[start : start + 2000], num_threads=2):
                ids.extend(line)
                ids.append(newline)
        array = np.array(ids, dtype=np.uint16)
        log.info("%s: %d tokens, taken %d times", name, array.size, repeats.get(name, 1))
        parts += [array] * repeats.get(name, 1)
    return np.concatenate(parts)


# ------------------------------------------------------------------------------------------------ training


class Windows:
    """Random non-overlapping windows of the token stream: every window once an epoch, then shuffled anew."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = tokens, length - 1  # the first position of a window is BOS
        self.count = tokens.size // self.length - 1

    def batch(self, step: int, size: int) -> torch.Tensor:
        """int64 (size, length); a pure function of ``step``, so a resumed run reads the same data."""
        rows = np.empty((size, self.length + 1), dtype=np.int64)
        for row in range(size):
            epoch, index = divmod(step * size + row, self.count)
            rng = np.random.default_rng((1, epoch))
            if getattr(self, "_epoch", None) != epoch:
                self._epoch, self._order, self._shift = epoch, rng.permutation(self.count), rng.integers(self.length)
            start = int(self._order[index]) * self.length + int(self._shift)
            rows[row, 0] = BOS
            rows[row, 1:] = self.tokens[start : start + self.length]
        return torch.from_numpy(rows)


def optimizers(model: PreTrainedModel, lr_muon: float, lr_adam: float) -> list[torch.optim.Optimizer]:
    inner = {n: p.ndim == 2 and "embed" not in n and "lm_head" not in n for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if inner[n]]
    others = [p for n, p in model.named_parameters() if not inner[n]]
    return [
        torch.optim.Muon(matrices, lr=lr_muon, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr_adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(share: float) -> float:
    """Learning-rate factor: 1% warm-up, flat to 30% of the budget, then linear to zero."""
    return min(share / 0.01 + 0.01, 1.0) * min((1.0 - share) / 0.7, 1.0)


def loss_of(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    device = next(model.parameters()).device
    batch = batch.to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(input_ids=batch).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def export(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    """Write the Hugging Face folder: config, F16 safetensors, SentencePiece model and tokenizer config."""
    out.mkdir(parents=True, exist_ok=True)
    half = type(model)(model.config).half()
    half.load_state_dict(model.state_dict())
    half.config.use_cache = True
    half.save_pretrained(out)
    shutil.copyfile(tokenizer, out / "tokenizer.model")
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
                "legacy": True, "sp_model_kwargs": {}, "model_max_length": model.config.max_position_embeddings,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )  # fmt: skip


def train(args: argparse.Namespace) -> None:
    work: Path = args.work_dir
    work.mkdir(parents=True, exist_ok=True)
    shape = Shape(layers=args.layers, architecture=args.architecture)
    repeats = {name: int(times) for name, _, times in (item.partition("=") for item in args.repeat)}
    tokenizer, stream = work / "tokenizer.model", work / "tokens.npy"
    if not stream.exists():
        texts = read_texts(args.data)
        if not tokenizer.exists():
            log.info("training the tokenizer on %s", ", ".join(name for name, _ in texts))
            train_tokenizer(texts, shape.vocab, tokenizer.with_suffix(""))
        np.save(stream, tokenize(texts, tokenizer, repeats))
    tokens = np.load(stream, mmap_mode="r")
    holdout = args.batch * 2 * shape.context
    windows, held = Windows(tokens[:-holdout], shape.context), Windows(tokens[-holdout:], shape.context)

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = shape.model().to(device)
    opts = optimizers(model, args.lr, args.lr)
    step, spent, log_rows = 0, 0.0, []
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        step, spent, log_rows = state["step"], state["spent"], state["log"]
        log.info("resumed at step %d after %.1f minutes", step, spent / 60)

    def save() -> None:
        save_checkpoint(
            checkpoint,
            {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts], "step": step, "spent": spent,
             "log": log_rows},
        )  # fmt: skip

    # Ctrl-C and a polite kill both end with a checkpoint, also where a shell started the run with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    model.train()
    per_step = args.batch * shape.context
    bar = tqdm(total=round(args.minutes * 60), unit="s", initial=round(spent), disable=not sys.stderr.isatty())
    saved_at = reported = time.monotonic()
    try:
        while True:
            share = step / args.steps if args.steps else spent / (args.minutes * 60)
            if share >= 1:
                break
            started = time.monotonic()
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = args.lr * schedule(share)
            loss = loss_of(model, windows.batch(step, args.batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            value = loss.item()
            if not math.isfinite(value):
                raise SystemExit(f"error: the loss is {value} at step {step}; lower --lr")
            step += 1
            now = time.monotonic()
            spent += now - started
            bar.update(now - started)
            if step % 100 == 0:
                model.eval()
                with torch.no_grad():
                    held_out = np.mean([loss_of(model, held.batch(i, args.batch // 2)).item() for i in range(2)])
                model.train()
                log_rows.append([step, round(spent, 1), round(value, 4), round(float(held_out), 4)])
                rate = 100 * per_step / (now - reported)
                log.info("step %d, %.1f min, %.1f M tokens, loss %.3f, held out %.3f, %.0f tokens/s",
                         step, spent / 60, step * per_step / 1e6, value, held_out, rate)  # fmt: skip
                reported = now
            if now - saved_at > 60 * args.checkpoint_minutes:
                save()
                saved_at = now
    except KeyboardInterrupt:
        save()
        raise SystemExit(f"interrupted at step {step}; the same command continues from {checkpoint}") from None
    save()
    export(model, tokenizer, args.out)
    summary = {
        "shape": asdict(shape), "parameters": sum(p.numel() for p in model.parameters()), "steps": step,
        "tokens": step * per_step, "stream_tokens": int(tokens.size), "minutes": round(spent / 60, 1),
        "device": str(device), "repeats": repeats, "log": log_rows,
    }  # fmt: skip
    (args.out / "training_log.json").write_text(json.dumps(summary) + "\n")
    log.info("wrote %s: %d steps, %.1f M tokens, %.1f minutes", args.out, step, step * per_step / 1e6, spent / 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.txt and *.txt.xz files")
    parser.add_argument("--work-dir", type=Path, required=True, help="tokenizer, token stream and checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="Hugging Face folder to write at the end")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the start weights (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=100, help="training time (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="fixed number of steps instead of --minutes")
    parser.add_argument("--batch", type=int, default=16, help="windows per step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--repeat", action="append", default=[], metavar="FILE=N", help="take a file N times an epoch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint-minutes", type=float, default=5)
    parser.add_argument("--export-only", action="store_true", help="write --out from the last checkpoint and stop")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if args.export_only:
        state = torch.load(args.work_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
        model = Shape(layers=args.layers, architecture=args.architecture).model()
        model.load_state_dict(state["model"])
        export(model, args.work_dir / "tokenizer.model", args.out)
        return
    train(args)


if __name__ == "__main__":
    main()
