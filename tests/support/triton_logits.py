"""Logits of a model whose linear layers are packed, by the Triton kernels in Triton's interpreter.

    triton_logits.py MODEL_DIR TOKENS.npy OUT.npy

A program of its own: see ``triton_cases.py``.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import numpy as np
import torch
import transformers

from gguf_itq3s.torch import replace_linears, use_path

if __name__ == "__main__":
    model_dir, tokens, out = sys.argv[1:]
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    replace_linears(model, threads=1)
    with torch.no_grad(), use_path("triton"):
        logits = model(torch.from_numpy(np.load(tokens))[None]).logits[0]
    np.save(out, logits.numpy())
