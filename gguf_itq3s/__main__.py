"""``python -m gguf_itq3s``, which torchrun's ``-m`` takes: the command ``gguf-itq3s``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
