"""Whether llama.cpp can load a file, before it is written: every tensor its graph needs is there and has its shape.

The judge is llama.cpp's own loader (:mod:`.loader`) on the finished head, with a hole in place of the weights. Looked
at in any case, because no loader asks and the model would write nonsense, or because there is no build: a bias that
one layer lacks, layers beyond those of the metadata or without a tensor, an output that is neither there nor tied.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS

from ..codec import native
from . import loader
from .validation import read_json

#: Which check was made.
BY_LOADER: Final = "llama.cpp's loader takes the tensors and the metadata"
BY_NOBODY: Final = f"llama.cpp's loader was not asked ({native.build_command()} adds it)"

#: What the loader may take: far more than any vocabulary and list of tensors need.
_SECONDS: Final = 120

_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_QUOTED: Final = re.compile(r"tensor '([^']+)'")
_ARCHS: Final = {name: key for key, name in MODEL_ARCH_NAMES.items()}
# What says more of the library than of the file: an older llama.cpp, or one without the architecture.
_UNKNOWN: Final = ("unknown model architecture", "unknown architecture", "bad allocation", "std::bad_alloc")

#: GGUF name -> shape, rows last.
Shapes = Mapping[str, tuple[int, ...]]


class NotLoadableError(ValueError):
    """llama.cpp would not load the file, or not as it was meant.

    Attributes:
        tensor: the tensor at fault, by its GGUF name, if it is one.
    """

    def __init__(self, what: str, tensor: str | None = None) -> None:
        self.tensor = tensor
        super().__init__(what)


def check_head(head: bytes, size: int, shapes: Shapes, metadata: Mapping[str, Any], *, tied: bool = True) -> str:
    """Check a file that is yet to be written.

    Args:
        head: GGUF header, metadata and tensor infos.
        size: bytes the whole file will have.
        shapes: of all tensors.
        metadata: key -> value, of the same.
        tied: whether the output matrix may be the embedding.

    Returns:
        Which check was made, a sentence for the user.

    Raises:
        NotLoadableError: it would not be loaded.
    """
    check_names(shapes, metadata)
    with hole(head, size) as path:
        found = _ask_loader(path) or BY_NOBODY
    if not tied and "output.weight" not in shapes and "token_embd.weight" in shapes:
        raise NotLoadableError("is not there, and config.json does not tie it to the embedding", "output.weight")
    return found


def check_file(path: Path, shapes: Shapes, metadata: Mapping[str, Any]) -> str:
    """Check a file that is there; arguments, result and errors as of :func:`check_head`."""
    check_names(shapes, metadata)
    return _ask_loader(str(path)) or BY_NOBODY


def may_be_tied(folder: Path, arch: str) -> bool:
    """Whether a checkpoint's output matrix may be its embedding: unless config.json says it is another.

    A folder of sentence-transformers has a text model without its head, whatever its config.json says.

    Raises:
        UserError: config.json cannot be read.
    """
    config = read_json(folder / "config.json")
    architectures, text = config.get("architectures"), config.get("text_config")
    tied = {**config, **(text if isinstance(text, dict) else {})}.get("tie_word_embeddings")
    causal = isinstance(architectures, list) and any(str(name).endswith("ForCausalLM") for name in architectures)
    has_output = MODEL_TENSOR.OUTPUT in MODEL_TENSORS[_ARCHS[arch]]
    return tied is not False or not causal or not has_output or (folder / "modules.json").is_file()


# ------------------------------------------------------------------------------------------------- llama.cpp's loader


@contextlib.contextmanager
def hole(head: bytes, size: int) -> Iterator[str | None]:
    """The path of a file of that head and zeros up to a size, which take no space; None where there can be none."""
    try:
        with contextlib.ExitStack() as stack:
            if hasattr(os, "memfd_create"):
                handle = os.memfd_create("head.gguf", 0)
                stack.callback(os.close, handle)
                path = f"/proc/{os.getpid()}/fd/{handle}"
            else:
                file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".gguf"))
                handle, path = file.fileno(), file.name
            os.write(handle, head)
            os.truncate(handle, max(size, len(head)))
            yield path
    except OSError:  # a limit on the size of files
        yield None


def _ask_loader(path: str | None) -> str | None:
    """What :data:`BY_LOADER` says, None where there is no loader to ask.

    Raises:
        NotLoadableError: it refuses the file.
    """
    base = native.library_path()
    library = base.with_name(base.name.replace("ggml-base", "llama")) if base else None
    if path is None or library is None or not library.exists():
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", loader.__file__, str(library), path], capture_output=True, text=True,
            errors="replace", timeout=_SECONDS, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return None
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"ready"')]
    if not answers or not answers[0]["ready"]:
        return None
    error = answers[-1].get("error")
    if error is None:
        error = next((line for line in done.stderr.splitlines() if line.strip()), f"ends with code {done.returncode}")
    if not error:
        return BY_LOADER
    if any(text in error for text in _UNKNOWN):
        return None
    tensor = _QUOTED.search(error)
    what = " ".join((error.replace(f"tensor '{tensor[1]}' ", "") if tensor else error).split())
    raise NotLoadableError(f"llama.cpp cannot load it: {what}", tensor[1] if tensor else None)


# ------------------------------------------------------------------------------------------------- names


def check_names(shapes: Shapes, metadata: Mapping[str, Any]) -> None:
    """Compare the layers of a model with each other and with the metadata, by the names of their tensors.

    Args:
        shapes: of all tensors.
        metadata: key -> value.

    Raises:
        NotLoadableError: a matrix has a bias in some layers alone, which no loader asks for, or there are more layers
            or fewer than the metadata say.
    """
    layers: dict[int, set[str]] = defaultdict(set)
    for name in shapes:
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])].add(match[2])
    biases = sorted({part for parts in layers.values() for part in parts if part.endswith(".bias")})
    for number, parts in sorted(layers.items()):
        for bias in biases:
            if bias not in parts and bias.removesuffix("bias") + "weight" in parts:
                other = min(layer for layer, its in layers.items() if bias in its)
                raise NotLoadableError(f"is not there, unlike that of layer {other}", f"blk.{number}.{bias}")
    arch = metadata.get("general.architecture")
    count, more = (metadata.get(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if type(count) is not int:
        return
    predicting = more if type(more) is int else 0  # layers that a checkpoint may lack; some architectures count them
    if beyond := [layer for layer in layers if layer >= count + predicting]:
        first = next(name for name in shapes if name.startswith(f"blk.{min(beyond)}."))
        raise NotLoadableError(f"is of a layer beyond the {count} of the metadata", first)
    if layers and (missing := [layer for layer in range(count - predicting) if layer not in layers]):
        raise NotLoadableError(f"layer {missing[0]} of {count} has no tensor", f"blk.{missing[0]}")
