"""Whether llama.cpp can load a file, before it is written: every tensor its graph needs is there and has its shape.

The judge is llama.cpp's own loader (:mod:`.loader`) on the finished head, with a hole in place of the weights. Where no
build is there, names and shapes are compared with what the metadata say, for the architectures whose layers are known.
Two things no loader asks for are checked in any case, because the model would load and write nonsense: a bias that one
layer lacks, and an output matrix that is neither there nor tied to the embedding.
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

import gguf
from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS

from ..base.errors import UserError
from ..codec import native
from . import loader
from .channels import ARCHITECTURES
from .validation import read_json

#: Which check was made.
BY_LOADER: Final = "llama.cpp's loader takes the tensors and the metadata"
_ADDS: Final = f"{native.build_command()} adds"
BY_TABLES: Final = f"names and shapes agree with the metadata; llama.cpp's loader was not asked ({_ADDS} it)"
BY_NOBODY: Final = f"not compared with the architecture, whose tensors are not known here ({_ADDS} llama.cpp's)"

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
    _check_alike(shapes)
    with hole(head, size) as path:
        found = _ask_loader(path)
    if found is None:
        found = check_tables(shapes, metadata)
    if not tied and "output.weight" not in shapes and "token_embd.weight" in shapes:
        raise NotLoadableError("is not there, and config.json does not tie it to the embedding", "output.weight")
    return found


def check_file(path: Path, shapes: Shapes, metadata: Mapping[str, Any]) -> str:
    """Check a file that is there; arguments, result and errors as of :func:`check_head`."""
    _check_alike(shapes)
    return _ask_loader(str(path)) or check_tables(shapes, metadata)


def may_be_tied(folder: Path, arch: str) -> bool:
    """Whether a checkpoint's output matrix may be its embedding: unless config.json says it is another.

    A folder of sentence-transformers has a text model without its head, whatever its config.json says.

    Raises:
        UserError: config.json cannot be read.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    tied = (
        {**config, **text}.get("tie_word_embeddings") if isinstance(text, dict) else config.get("tie_word_embeddings")
    )
    architectures = config.get("architectures")
    causal = isinstance(architectures, list) and any(str(name).endswith("ForCausalLM") for name in architectures)
    has_output = MODEL_TENSOR.OUTPUT in MODEL_TENSORS[_ARCHS[arch]]
    return tied is not False or not causal or not has_output or (folder / "modules.json").is_file()


def user_error(problem: NotLoadableError, file: Path, remedy: str, label: str | None = None) -> UserError:
    """The error for the user: ``label`` is the tensor's name with the checkpoint's own beside it."""
    return UserError(file, str(problem), remedy, label or problem.tensor)


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


# ------------------------------------------------------------------------------------------------- names and shapes


def _layers(shapes: Shapes) -> dict[int, dict[str, tuple[int, ...]]]:
    """Layer -> what it has, by the name within the layer -> shape."""
    layers: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])][match[2]] = shape
    return dict(sorted(layers.items()))


def _check_alike(shapes: Shapes) -> None:
    """A matrix that has a bias in one layer has it in every layer: to the loader a bias is never needed."""
    layers = _layers(shapes)
    biases = {part for parts in layers.values() for part in parts if part.endswith(".bias")}
    for number, parts in layers.items():
        for bias in sorted(biases):
            if bias not in parts and bias.removesuffix("bias") + "weight" in parts:
                other = next(layer for layer, its in layers.items() if bias in its)
                raise NotLoadableError(f"is not there, unlike that of layer {other}", f"blk.{number}.{bias}")


def check_tables(shapes: Shapes, metadata: Mapping[str, Any]) -> str:
    """Compare names and shapes with what the metadata say, as far as this package knows the architecture.

    Args:
        shapes: of all tensors.
        metadata: key -> value.

    Returns:
        :data:`BY_TABLES`, or :data:`BY_NOBODY` where the architecture, or its sizes, are not known.

    Raises:
        NotLoadableError: a tensor is missing, or has another shape.
    """
    arch = metadata.get("general.architecture")

    def number(key: str) -> int | None:
        value = metadata.get(f"{arch}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    width, count = number("embedding_length"), number("block_count")
    if arch not in _ARCHS or width is None or count is None:
        return BY_NOBODY
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    columns = len(vocabulary) if isinstance(vocabulary, list) else number("vocab_size")
    if MODEL_TENSOR.TOKEN_EMBD in MODEL_TENSORS[_ARCHS[arch]]:
        _expect(shapes, "token_embd.weight", (columns, width))
    layers = _layers(shapes)
    if beyond := [layer for layer in layers if layer >= count + (number("nextn_predict_layers") or 0)]:
        first = next(iter(layers[beyond[0]]))
        raise NotLoadableError(f"is of a layer beyond the {count} of the metadata", f"blk.{beyond[0]}.{first}")
    if arch not in ARCHITECTURES:
        for layer in range(count):
            if layer not in layers:
                raise NotLoadableError(f"layer {layer} of {count} has no tensor", f"blk.{layer}")
        return BY_NOBODY
    _expect(shapes, "output_norm.weight", (width,))
    if "output.weight" in shapes:
        _expect(shapes, "output.weight", (columns, width))
    heads = number("attention.head_count")
    kv_heads = number("attention.head_count_kv") or heads
    key = number("attention.key_length") or (width // heads if heads else None)
    value = number("attention.value_length") or (width // heads if heads else None)
    inner = number("feed_forward_length")
    up = inner and inner * (2 if arch == "phi3" else 1)  # Phi-3's gate is in ffn_up
    _check_layers(arch, layers, count, {
        "E": width, "F": inner, "U": up, "X": number("expert_count"),
        "Q": heads * key if heads and key else None, "K": kv_heads * key if kv_heads and key else None,
        "V": kv_heads * value if kv_heads and value else None, "O": heads * value if heads and value else None,
    })  # fmt: skip
    return BY_TABLES


#: Part of a layer of :data:`ARCHITECTURES` -> its shape in the sizes of a model, ``?`` for one that is not known here.
_PARTS: Final = {
    "attn_norm.weight": "E", "ffn_norm.weight": "E", "attn_q.weight": "QE", "attn_k.weight": "KE",
    "attn_v.weight": "VE", "attn_qkv.weight": "?E", "attn_output.weight": "EO", "ffn_gate.weight": "FE",
    "ffn_up.weight": "UE", "ffn_down.weight": "EF", "ffn_gate_inp.weight": "XE", "ffn_gate_exps.weight": "X?E",
    "ffn_up_exps.weight": "X?E", "ffn_down_exps.weight": "XE?", "attn_q.bias": "Q", "attn_k.bias": "K",
    "attn_v.bias": "V", "attn_output.bias": "E", "ffn_down.bias": "E",
}  # fmt: skip


def _check_layers(arch: str, layers: Mapping[int, Shapes], count: int, sizes: Mapping[str, int | None]) -> None:
    everywhere = {part for parts in layers.values() for part in parts if part.startswith(("attn_", "post_"))}
    for layer in range(count):
        parts = layers.get(layer, {})
        fused, experts = "attn_qkv.weight" in parts, "ffn_gate_inp.weight" in parts or "ffn_down_exps.weight" in parts
        needed = ["attn_norm", "ffn_norm", *(["attn_qkv"] if fused else ["attn_q", "attn_k", "attn_v"]), "attn_output"]
        if experts:
            needed += ["ffn_gate_inp", "ffn_down_exps"]
            needed += [] if "ffn_gate_up_exps.weight" in parts else ["ffn_gate_exps", "ffn_up_exps"]
        else:
            needed += ["ffn_up", "ffn_down", *([] if arch == "phi3" else ["ffn_gate"])]
        wanted = {f"{part}.weight" for part in needed} | everywhere
        for part in sorted(wanted):
            shape = tuple(sizes.get(size) for size in _PARTS.get(part, ""))
            _expect(parts, part, shape or None, f"blk.{layer}.{part}")


def _expect(shapes: Shapes, name: str, shape: tuple[int | None, ...] | None, shown: str | None = None) -> None:
    """Raise unless a tensor is there, and has a shape; None in it is any number, and for it any shape."""
    found = shapes.get(name)
    if found is None:
        raise NotLoadableError("is not there", shown or name)
    fits = shape is None or (
        len(found) == len(shape) and all(want in (None, size) for want, size in zip(shape, found, strict=True))
    )
    if not fits:
        assert shape is not None
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise NotLoadableError(f"has the shape {found}, the metadata say ({wanted})", shown or name)


def metadata_of_writer(writer: gguf.GGUFWriter) -> dict[str, Any]:
    """Key -> value of a writer."""
    return {key: entry.value for part in writer.kv_data for key, entry in part.items()}
