"""A Hugging Face checkpoint as a stream of GGUF tensors, read through llama.cpp's ``conversion`` package.

The package maps names, permutes, stacks experts and writes metadata for every architecture it knows. It runs here as
for an F16 file, but the conversion of the weights is held back (:mod:`gguf_itq3s.checkpoint.converter`).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import gguf
import numpy as np

from .. import upstream
from ..base.errors import UserError
from . import converter, lazy, patches, quantization, shards, tokens
from .request import Request
from .source import Checkpoint, SourceTensor, model_facts
from .validation import check_counts_by_shapes, check_folder, read_json
from .weights import Weights

#: The output matrix in checkpoints of any model.
_HEAD: Final = re.compile(r"(model\.|language_model\.)*lm_head\.weight")

#: Layers of the model of each of these architectures whose queries llama.cpp scales by the width of a head's share of
#: the model, in place of the head's own.
SCALED_BY_WIDTH: Final = {"gemma2": 46, "gemma3": 62}


def open_checkpoint(
    folder: Path,
    *,
    model_name: str | None = None,
    verbose: bool = False,
    trust_remote_code: bool = False,
    request: Request = Request(),  # noqa: B008 (frozen)
    messages: TextIO | None = None,
) -> Checkpoint:
    """Read everything of a checkpoint but its weights.

    Args:
        folder: a local Hugging Face folder.
        model_name: ``general.name`` instead of the folder's or the model card's.
        verbose: let the libraries log.
        trust_remote_code: Python code of the folder may run.
        request: what of it is wanted.
        messages: where notes go; None for stderr.

    Raises:
        UserError: the folder is not a complete checkpoint of a supported architecture, or its code would have to run.
    """
    config = check_folder(folder)
    request.check(folder)
    if request.target_model_dir is not None:
        # Upstream chooses of these files in an order of its own.
        target = shards.find(request.target_model_dir, check_folder(request.target_model_dir))
        if others := [path.name for path in target.unread if path.suffix == ".safetensors"]:
            what = f"holds {others[0]} beside the model's weights"
            raise UserError(request.target_model_dir, what, "leave one set of weights there")
    conversion = upstream.load_conversion()
    import torch

    logging.basicConfig(format="%(message)s")
    for name in ("hf-to-gguf", "gguf"):
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.ERROR)

    patched = patches.patched(folder, trust_remote_code, reads=True, quantize=converter.HeldBack)
    with patched as transformers, torch.inference_mode():
        if not verbose:
            transformers.logging.set_verbosity_error()
        model_class = converter.model_class(conversion, folder, mmproj=request.mmproj)
        found = shards.find(folder, config) if request.vocab_only else shards.check(folder, config)
        files = [path for path in found.files if path.is_file()]  # a vocabulary needs none
        notes = [] if request.vocab_only else [found.note()]
        with converter.reading(folder), request.set_on(model_class, folder), ExitStack() as stack:
            stored = [*shards.tensors(files, conversion, lazy=not request.no_lazy)]
            stack.enter_context(converter.indexing(conversion, stored))
            made = converter.working(
                model_class(folder, request.ftype, Path("model.gguf"), model_name=model_name, **request.arguments())
            )
            made.remote_hf_model_id = None if model_name else request.repository
            tensors = [] if request.vocab_only else converter.collect(made)
            made.prepare_metadata(vocab_only=request.vocab_only)
        # Embeddings have no output, and a draft may have its target's.
        pooled = f"{made.gguf_writer.arch}.pooling_type" in made.gguf_writer.kv_data[0]
        if not pooled and request.target_model_dir is None:
            _check_head(folder, dict(stored), {tensor.name: tensor for tensor in tensors})
    for note in filter(None, [*notes, _without_rows(folder, made), _carry_settings(made)]):
        print(f"note: {folder}: {note}", file=messages or sys.stderr)
    if request.quantized_by is not None:
        made.gguf_writer.add_quantized_by(request.quantized_by)
    return _checkpoint(folder, made, tensors, files, empty=request.vocab_only)


def _without_rows(folder: Path, made: Any) -> str:
    """Which tokens upstream has left out, a sentence; empty where there are none."""
    entry = made.gguf_writer.kv_data[0].get(gguf.Keys.Tokenizer.LIST)
    left = {} if entry is None else tokens.beyond(folder, len(entry.value))
    what = "its tokenizer has tokens that the model has no row for, which are left out"
    return f"{what}: {tokens.named(left)}" if left else ""


def _carry_settings(made: Any) -> str:
    """Add what llama.cpp reads for any architecture and upstream's class of this one leaves out of the metadata.

    Returns:
        What no key can hold, a sentence; empty where nothing is lost.
    """
    writer = made.gguf_writer
    fields, key = writer.kv_data[0], gguf.Keys.Rope.FREQ_BASE.format(arch=writer.arch)
    rope = getattr(made, "rope_parameters", {})
    base = rope.get("full_attention", rope).get("rope_theta")
    fixed = writer.arch == "chatglm" and "rope_ratio" not in made.hparams  # upstream writes 10000 whatever it is
    if isinstance(base, (int, float)) and base != 10000 and (fixed or key not in fields):
        fields[key] = gguf.GGUFValue(float(base), gguf.GGUFValueType.FLOAT32)
    scale, head = made.hparams.get("query_pre_attn_scalar"), made.hparams.get("head_dim")
    if (layers := SCALED_BY_WIDTH.get(writer.arch)) is None or not scale or not head:
        return ""
    if made.hparams.get("num_hidden_layers") == layers:
        head = made.hparams["hidden_size"] // made.hparams["num_attention_heads"]
    what = f"llama.cpp scales the queries of {writer.arch} by {head}, query_pre_attn_scalar {scale} is lost"
    return what if scale != head else ""


def _check_head(folder: Path, stored: Mapping[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    """Refuse an output matrix that upstream leaves out for the embedding, unless it is the same.

    Raises:
        UserError: it is another.
    """
    name = next((name for name in stored if _HEAD.fullmatch(name)), None)
    embedding = tensors.get("token_embd.weight")
    if name is None or embedding is None or "output.weight" in tensors:
        return
    head, row = lazy.value(stored[name]()), 0
    for part in embedding.load():
        rows = head[row : row + len(part)].float().numpy()
        row += len(part)
        there = part[: len(rows)]
        # As far as the rounding of one of them to bfloat16 goes.
        if rows.shape != there.shape or not np.allclose(rows, there, rtol=2**-7, atol=1e-6):
            what = "is another matrix than the embedding, which is the output in llama.cpp's files of this architecture"
            raise UserError(folder, what, "tie them, and train that, or take a model that does", name)


def read_shapes(
    folder: Path, *, trust_remote_code: bool = False
) -> tuple[dict[str, tuple[int, ...]], tuple[Path, ...]]:
    """Shape of every tensor by name, no weights read, and the safetensors files if all of them are there.

    Raises:
        UserError: neither safetensors files nor an index with a config that transformers knows.
    """
    config = folder / "config.json"
    found = shards.find(folder, read_json(config) if config.is_file() else {})
    if found.files and all(file.is_file() and file.suffix == ".safetensors" for file in found.files):
        return {name: shape for name, (_, shape) in shards.stored_tensors(found.files).items()}, found.files
    return _meta_shapes(folder, list(found.weight_map) or None, trust_remote_code), ()


def open_without_weights(folder: Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """The model of a folder by headers or by its config; errors are those of :func:`read_shapes`."""
    shapes, files = read_shapes(folder, trust_remote_code=trust_remote_code)
    return open_shapes(folder, shapes, files, trust_remote_code=trust_remote_code)


def _meta_shapes(folder: Path, names: Sequence[str] | None, trusted: bool) -> dict[str, tuple[int, ...]]:
    import torch

    try:
        with patches.patched(folder, trusted) as transformers, torch.device("meta"):
            transformers.logging.set_verbosity_error()
            config = transformers.AutoConfig.from_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_config(config)
    except UserError:
        raise
    except Exception as error:  # a config can be wrong in many ways
        remedy = "download the safetensors files, or use a transformers that knows the architecture"
        raise UserError(folder / "config.json", f"gives no shapes ({error})", remedy) from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    if names is None:
        tied = model.get_output_embeddings() is not None and getattr(config, "tie_word_embeddings", False)
        return {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}
    names = [name for name in map(quantization.plain_name, names) if name]
    if unknown := sorted(set(names) - set(shapes) - {n for n in names if n.endswith(".inv_freq")}):
        raise UserError(folder, "is in the index but not in the model of config.json", "download its files", unknown[0])
    return {name: shapes[name] for name in names if name in shapes}


def open_shapes(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], files: Sequence[Path] = (), *, trust_remote_code: bool = False
) -> Checkpoint:
    """What :func:`open_checkpoint` would give of a checkpoint whose weights, and tokenizer, are not there.

    Args:
        folder: with ``config.json``.
        shapes: of the checkpoint's tensors, numpy order, by their names in it.
        files: the weight files where they are there after all: what a quantized one means is in more than shapes.
        trust_remote_code: Python code of the folder may run.

    Returns:
        Tensors that cannot be loaded, and a writer without a tokenizer.

    Raises:
        UserError: the architecture is not supported, or its conversion asks for values of weights.
    """
    check_counts_by_shapes(folder / "config.json", check_folder(folder), shapes)
    conversion = upstream.load_conversion()
    import torch

    def tensor(name: str, shape: tuple[int, ...]) -> Any:
        def load() -> Any:
            raise UserError(folder, "is needed to know the tensors of this architecture", "download the weights", name)

        meta = torch.empty(shape, dtype=torch.float16, device="meta")
        return conversion.base.LazyTorchTensor(meta=meta, args=(), func=load)

    stored = [(name, partial(tensor, name, shape)) for name, shape in shapes.items()]
    if files:
        stored = [*shards.tensors(files, conversion, lazy=True)]
    patched = patches.patched(folder, trust_remote_code, reads=bool(files), quantize=converter.HeldBack)
    with patched, torch.inference_mode(), converter.reading(folder):
        model_class = converter.model_class(conversion, folder)
        with converter.indexing(conversion, stored):
            made = converter.working(model_class(folder, gguf.LlamaFileType.MOSTLY_F16, Path("model.gguf")))
        made.set_vocab = lambda: None
        tensors = converter.collect(made)
        made.prepare_metadata(vocab_only=False)
    return _checkpoint(folder, made, tensors, [])


def _checkpoint(
    folder: Path, made: Any, tensors: list[SourceTensor], files: list[Path], *, empty: bool = False
) -> Checkpoint:
    if not tensors and not empty:
        raise UserError(folder, "holds no tensor that the architecture uses", "check that the download is complete")
    for tensor in tensors:
        if not tensor.shape or not tensor.size:
            what = f"has the shape {tensor.shape}, and no weights"
            raise UserError(folder, what, "repair the checkpoint or download it again", tensor.label)
    writer = made.gguf_writer
    writer.tensors = [{}]
    facts = model_facts(folder, writer, tensors)
    weights = Weights(folder, made.model_tensors, made.names_of_files)
    return Checkpoint(folder, tensors, facts, writer, files, made.ftype, made.metadata, weights)
