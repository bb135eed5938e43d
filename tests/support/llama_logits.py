"""Logits of llama.cpp, by llama-cpp-python on the built libraries: a program of its own.

    llama_logits.py MODEL.gguf PROMPT.npy COUNT OUT.npz

The cache is float32 and attention plain, so that what differs from PyTorch is the order of sums. Writes ``logits`` of
the prompt (tokens, vocabulary) and the ``tokens`` that greedy decoding adds.
"""

from __future__ import annotations

import sys

import numpy as np
from llama_cpp import Llama  # type: ignore[import-not-found]  # from the pinned source, by PYTHONPATH

F32 = 0


def main(model: str, prompt: str, count: str, out: str) -> None:
    tokens = np.load(prompt).tolist()
    llama = Llama(
        model, n_ctx=len(tokens) + int(count), n_batch=512, n_threads=1, n_threads_batch=1, logits_all=True,
        type_k=F32, type_v=F32, flash_attn=False, verbose=False,
    )  # fmt: skip
    llama.eval(tokens)
    logits = llama.scores[: len(tokens)].copy()
    added = []
    for _ in range(int(count)):
        added.append(int(llama.scores[llama.n_tokens - 1].argmax()))
        llama.eval(added[-1:])
    np.savez(out, logits=logits, tokens=np.array(added))


if __name__ == "__main__":
    main(*sys.argv[1:])
