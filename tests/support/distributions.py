"""Weight distributions that the quantizer tests share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


def smooth(count: int, seed: int = 0) -> dict[str, Rows]:
    """The three distributions of the acceptance limits: name -> float32 (count / 4096, 4096)."""
    rng = np.random.default_rng(seed)
    draws: dict[str, Callable[[int], np.ndarray]] = {
        "gaussian": rng.standard_normal,
        "laplace": lambda n: rng.laplace(size=n),
        "student-t4": lambda n: rng.standard_t(4, n),
    }
    return {name: draw(count).astype(np.float32).reshape(-1, 4096) for name, draw in draws.items()}


def all_rows(blocks: int = 80, seed: int = 1) -> dict[str, Rows]:
    """Ordinary and adversarial rows of 512 weights: name -> float32 (blocks / 2, 512)."""
    rng = np.random.default_rng(seed)
    shape = (blocks // 2, 512)
    rows = {
        "gaussian": rng.standard_normal(shape) * 0.02,
        "laplace": rng.laplace(size=shape) * 0.02,
        "student-t4": rng.standard_t(4, shape) * 0.02,
        "constant": np.broadcast_to(rng.standard_normal((shape[0], 1)), shape),
        "spike": np.eye(*shape) * 3.0,
        "denormal-scale": rng.standard_normal(shape) * 2e-7,
        "below-f16": rng.standard_normal(shape) * 1e-12,
        "float32-denormal": rng.standard_normal(shape) * 1e-41,
        "huge": rng.standard_normal(shape) * 1e9,
        "zero": np.zeros(shape),
        "zero-and-gaussian": rng.standard_normal(shape) * (np.arange(shape[0]) % 2)[:, None],
        "small-integers": rng.integers(-2, 3, shape),
        "mixed-scales": rng.standard_normal(shape) * np.exp(rng.uniform(-12, 6, (shape[0], 1))),
    }
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in rows.items()}


def at_the_limit(block: int = 256) -> tuple[Rows, Rows]:
    """Blocks of finite weights as large as the encoders take, and of larger ones: float32 (m, block) each.

    A rotated weight is at most the sum of the magnitudes over the root of their number and has to stay below 2**56.
    """
    rng, root = np.random.default_rng(6), np.sqrt(block)
    below = np.nextafter(np.float32(2.0**56 / root), np.float32(0))
    signs = rng.choice(np.array([-1, 1], dtype=np.float32), (8, block))
    one = np.zeros((2, block), dtype=np.float32)
    one[0, 7], one[1, 0] = np.nextafter(np.float32(2.0**56 * root), np.float32(0)), -(2.0**55) * root
    taken = [np.full((1, block), below), below * signs, below * rng.random((8, block), dtype=np.float32), one]
    largest = np.finfo(np.float32).max
    refused = [np.full((1, block), 2.0**56 / root), np.full((1, block), largest), largest * signs, 2 * one]
    return np.concatenate(taken).astype(np.float32), np.concatenate(refused).astype(np.float32)
