#!/usr/bin/env python3
"""Train the small Llama that is bundled under ``models/``.

    scripts/train/demo_model.py --data DIR --work-dir RUN --out models/NAME --minutes 100

Reads every ``*.txt`` and ``*.txt.xz`` file below ``--data``, trains a SentencePiece BPE tokenizer in Llama style on it,
then a ``LlamaForCausalLM`` (hidden and feed-forward sizes multiples of 256, tied embeddings). Files of a test split are
never read. An interrupted run continues from the last checkpoint in ``--work-dir``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.train import loop

EOS, VOCABULARY, CONTEXT = 2, 4096, 512

# The model continues text and has never seen a conversation: a chat front end hands it the messages as they are.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def small_llama(layers: int) -> LlamaForCausalLM:
    """The model, with random weights."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, head_dim=64, tie_word_embeddings=True,
        bos_token_id=loop.BOS, eos_token_id=EOS, rms_norm_eps=1e-5, use_cache=False,
    ))  # fmt: skip


def train_tokenizer(texts: list[tuple[str, str]], prefix: Path) -> None:
    """SentencePiece BPE as Llama's: byte fallback, digits split, identity normalisation, dummy prefix."""
    sample = prefix.with_suffix(".sample.txt")
    rng = np.random.default_rng(0)
    with sample.open("w", encoding="utf-8") as out:
        for _, text in texts:
            lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 20]
            for i in rng.permutation(len(lines))[:6000]:
                out.write(lines[i][:2000] + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(sample), model_prefix=str(prefix), model_type="bpe", vocab_size=VOCABULARY, byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.9999, unk_id=0, bos_id=loop.BOS, eos_id=EOS, pad_id=-1,
        max_sentence_length=16384, num_threads=2, minloglevel=1,
    )  # fmt: skip
    sample.unlink()


def tokenize(texts: list[tuple[str, str]], tokenizer: Path, repeats: dict[str, int]) -> np.ndarray:
    """All texts as one uint16 array; a file named in ``repeats`` is taken that many times."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    newline = sp.piece_to_id("<0x0A>")
    parts: list[np.ndarray] = []
    for name, text in sorted(texts, key=lambda item: -repeats.get(item[0], 1)):
        ids = [
            token for line in tqdm(text.splitlines(), desc=name, leave=False) for token in (*sp.encode(line), newline)
        ]
        parts += [np.array(ids, dtype=np.uint16)] * repeats.get(name, 1)
    return np.concatenate(parts)


def export(model: LlamaForCausalLM, tokenizer: Path, out: Path) -> None:
    """Write the Hugging Face folder: config, F16 safetensors, SentencePiece model and tokenizer config."""
    model.config.use_cache = True
    model.half().save_pretrained(out)
    shutil.copyfile(tokenizer, out / "tokenizer.model")
    settings = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False, "legacy": True,
        "sp_model_kwargs": {}, "model_max_length": CONTEXT, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    loop.add_arguments(parser)
    parser.add_argument("--work-dir", type=Path, required=True, help="tokenizer, token stream and checkpoints")
    args = parser.parse_args()
    work: Path = args.work_dir
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, stream = work / "tokenizer.model", work / "tokens.npy"
    if not stream.exists():
        texts = loop.read_texts(args.data)
        if not tokenizer.exists():
            train_tokenizer(texts, tokenizer.with_suffix(""))
        np.save(stream, tokenize(texts, tokenizer, loop.repeats_of(args)))
    torch.manual_seed(0)
    model = small_llama(args.layers).to(args.device)
    windows = loop.Windows(np.load(stream, mmap_mode="r"), CONTEXT)
    rows = loop.train(model, windows, loop.cross_entropy, args, work / "checkpoint.pt")
    args.out.mkdir(parents=True, exist_ok=True)
    export(model, tokenizer, args.out)
    loop.write_log(args.out, rows, args.batch * CONTEXT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
