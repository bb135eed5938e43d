"""Importance matrices as llama-imatrix writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def write(path: Path, moments: dict[str, np.ndarray], counts: float = 10.0) -> Path:
    """A file as llama-imatrix writes it, for mean squares (experts, n)."""
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_string("general.type", "imatrix")
    for name, value in moments.items():
        writer.add_tensor(f"{name}.in_sum2", (value * counts).astype(np.float32))
        writer.add_tensor(f"{name}.counts", np.full((len(value), 1), counts, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
