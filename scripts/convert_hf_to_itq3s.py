#!/usr/bin/env python3
"""Convert a Hugging Face checkpoint to GGUF; the same as the installed command ``convert-hf-to-itq3s``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gguf_itq3s.cli import convert_main

if __name__ == "__main__":
    raise SystemExit(convert_main())
