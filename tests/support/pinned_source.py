"""Fetches the pinned llama.cpp source when imported: the package takes gguf-py from it, so it comes before gguf."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FETCH = Path(__file__).resolve().parents[2] / "scripts" / "fetch_llama_cpp.py"

subprocess.run([sys.executable, str(FETCH)], check=True, stdout=subprocess.DEVNULL)
