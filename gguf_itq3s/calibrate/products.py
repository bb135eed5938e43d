"""What multiplies matrices while a model is calibrated, and where bfloat16 is quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def quick_products() -> Iterator[None]:
    """Let oneDNN multiply float32 matrices in place of MKL, which uses AVX-512 on Intel's processors alone.

    PyTorch hands float32 products to oneDNN where they may be less precise than float32. oneDNN makes them less precise
    where the processor has tiles for bfloat16 (AMX), so nothing is changed there; elsewhere they are in float32, on
    Zen 5 in half of MKL's time.
    """
    import torch

    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if has_tiles is None or has_tiles() or not hasattr(matmul, "fp32_precision"):
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def quick_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 matrices quicker than float32 ones.

    Of CPUs, those with tiles for it (AMX) or with AVX512-BF16; others convert every number. Of other devices than GPUs
    with CUDA or ROCm nothing is known.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    checks = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return device.type == "cpu" and any(check is not None and check() for check in checks)
