"""Keys and values that layers hand to later ones (Gemma 4), in files of the stream that the layers run on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .activations import reserve

#: What layers are given them by.
KEYWORD: Final = "shared_kv_states"


class SharedStates(dict[str, tuple[torch.Tensor, ...]]):
    """What a layer puts in is kept by :meth:`keep`; what it asks for and has not put in comes from the files.

    Args:
        windows: of the stream, how many there are.
        batch: the numbers of those that are run.
        dtype: of what is read; files are float32.

    Attributes:
        read: by kind, what was asked for, leaves that may need gradients.
    """

    def __init__(self, folder: Path, windows: int, batch: np.ndarray, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._folder, self._windows, self._batch, self._device, self._dtype = folder, windows, batch, device, dtype
        self.read: dict[str, tuple[torch.Tensor, ...]] = {}

    def __missing__(self, kind: str) -> tuple[torch.Tensor, ...]:
        paths = sorted(self._folder.glob(f"{_stem(kind)}-?.npy"))
        parts = [np.load(path, mmap_mode="r")[self._batch] for path in paths]
        tensors = (torch.from_numpy(part).to(self._device, self._dtype) for part in parts)
        self.read[kind] = tuple(tensor.requires_grad_(torch.is_grad_enabled()) for tensor in tensors)
        return self.read[kind]

    def keep(self) -> None:
        """Write what was put in."""
        for kind, parts in self.items():
            for place, part in enumerate(parts):
                self._write(self._folder / f"{_stem(kind)}-{place}.npy", part)

    def gradients_of(self, folder: Path, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What was put in, and the gradients that all later layers have kept of it; none that no layer read."""
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for kind, parts in self.items():
            for place, part in enumerate(parts):
                if (gradient := self._later(folder, kind, place, number)) is not None:
                    found[0].append(part)
                    found[1].append(gradient.to(part))
        return found

    def keep_gradients(self, folder: Path, number: int) -> None:
        """Write the gradients of what layer ``number`` has read, with those of the layers behind it."""
        for kind, parts in self.read.items():
            for place, part in enumerate(parts):
                own = torch.zeros_like(part) if part.grad is None else part.grad
                later = self._later(folder, kind, place, number)
                self._write(_gradient(folder, kind, place, number), own if later is None else own + later.to(own))

    def _later(self, folder: Path, kind: str, place: int, number: int) -> torch.Tensor | None:
        """The gradients kept by the next layer behind ``number`` that has read a part."""
        own = _gradient(folder, kind, place, number).name
        behind = sorted(path for path in folder.glob(f"{_stem(kind)}-{place}-*.npy") if path.name > own)
        return torch.from_numpy(np.load(behind[0], mmap_mode="r")[self._batch]) if behind else None

    def _write(self, path: Path, values: torch.Tensor) -> None:
        shape = (self._windows, *values.shape[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists() and np.load(path, mmap_mode="r").shape == shape
        file = np.lib.format.open_memmap(path, "r+" if there else "w+", np.float32, shape)
        if not there:
            reserve(path, path.stat().st_size)
        file[self._batch] = values.detach().float().cpu().numpy()


def _stem(kind: str) -> str:
    """The kind is a word of the model's config: in hexadecimal digits it names nothing but a file of the folder."""
    return f"shared-{kind.encode().hex()}"


def _gradient(folder: Path, kind: str, place: int, number: int) -> Path:
    return folder / f"{_stem(kind)}-{place}-{number:05d}.npy"


def shared_of(keywords: Mapping[str, Any]) -> SharedStates | None:
    """Those among the keywords of a layer."""
    found = keywords.get(KEYWORD)
    return found if isinstance(found, SharedStates) else None
