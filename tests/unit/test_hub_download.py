"""What ``hf:`` fetches of a repository, and that it can be converted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from fake_hub import TOKEN, fake_hub

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
#: Beside the files that are read: the same weights in other forms, pictures, code.
OTHERS = (
    "consolidated.safetensors", "consolidated.safetensors.index.json", "original/consolidated.00.pth",
    "original/params.json", "original/model.safetensors", "onnx/model.onnx", "fp16/model.safetensors",
    "pytorch_model.bin", "model.gguf", "picture.png", "modeling_own.py",
)  # fmt: skip


@pytest.mark.slow
def test_what_is_downloaded_can_be_converted(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in checkpoint("llama").iterdir()}
    files |= {"chat_template.jinja": TEMPLATE.encode(), "2_Dense/model.safetensors": b"a dense layer"}
    out = tmp_path / "model.gguf"
    command = [sys.executable, "-m", "gguf_itq3s.cli", "convert", "hf:someone/small", str(out), "--effort", "fast"]
    with fake_hub() as hub:
        hub.repositories["someone/small"] = (False, {**files, **dict.fromkeys(OTHERS, b"not to be fetched")})
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert sorted(set(hub.fetched)) == sorted(files)
        missing = subprocess.run([*command[:4], "hf:someone/other", *command[5:]], env=environment, capture_output=True)
    assert missing.returncode == 1 and missing.stderr.count(b"\n") == 1
    template = gguf.GGUFReader(out).fields["tokenizer.chat_template"].contents()
    assert template == TEMPLATE
