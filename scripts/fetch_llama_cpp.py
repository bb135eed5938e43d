#!/usr/bin/env python3
"""Fetch the pinned llama.cpp source into the cache if it is not there, and print its folder.

Runs before anything is installed: only the standard library and pip are needed.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    # Loaded by path: importing the package would need its dependencies.
    path = Path(__file__).resolve().parents[1] / "gguf_itq3s" / "upstream" / "__init__.py"
    spec = importlib.util.spec_from_file_location("upstream", path)
    assert spec is not None and spec.loader is not None
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    try:
        print(upstream.fetch_source(whole=True))
    except upstream.FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
