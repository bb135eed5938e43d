"""A Hugging Face checkpoint as a stream of GGUF tensors, read through llama.cpp's ``conversion`` package.

The package maps names, permutes, stacks experts and writes metadata for every architecture it knows. It runs here as
for an F16 file, but the conversion of the weights is held back (:mod:`gguf_itq3s.checkpoint.converter`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf

from .. import upstream
from ..base.errors import UserError
from . import converter, patches
from .request import Request
from .source import Checkpoint, SourceTensor, model_facts
from .validation import check_counts_by_shapes, check_folder, check_weights
from .weights import Weights


def open_checkpoint(
    folder: Path,
    *,
    model_name: str | None = None,
    verbose: bool = False,
    trust_remote_code: bool = False,
    request: Request = Request(),  # noqa: B008 (frozen)
) -> Checkpoint:
    """Read everything of a checkpoint but its weights.

    Args:
        folder: a local Hugging Face folder.
        model_name: ``general.name`` instead of the folder's or the model card's.
        verbose: let the libraries log.
        trust_remote_code: Python code of the folder may run.
        request: what of it is wanted.

    Raises:
        UserError: the folder is not a complete checkpoint of a supported architecture, or its code would have to run.
    """
    config = check_folder(folder)
    request.check(folder)
    if request.target_model_dir is not None:
        check_folder(request.target_model_dir)
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
        files = [] if request.vocab_only else check_weights(folder, config)
        with converter.reading(folder), request.set_on(model_class, folder):
            made = converter.working(
                model_class(folder, request.ftype, Path("model.gguf"), model_name=model_name, **request.arguments())
            )
            made.remote_hf_model_id = None if model_name else request.repository
            tensors = [] if request.vocab_only else converter.collect(made)
            made.prepare_metadata(vocab_only=request.vocab_only)
    if request.quantized_by is not None:
        made.gguf_writer.add_quantized_by(request.quantized_by)
    return _checkpoint(folder, made, tensors, files, empty=request.vocab_only)


def open_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, trust_remote_code: bool = False) -> Checkpoint:
    """What :func:`open_checkpoint` would give of a checkpoint whose weights, and tokenizer, are not there.

    Args:
        folder: with ``config.json``.
        shapes: of the checkpoint's tensors, numpy order, by their names in it.
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

    def index_tensors(self: Any, remote_hf_model_id: str | None = None) -> dict[str, Callable[[], Any]]:
        found = (self.filter_tensors((name, partial(tensor, name, shape))) for name, shape in shapes.items())
        return dict(item for item in found if item is not None)

    patched = patches.patched(folder, trust_remote_code, quantize=converter.HeldBack)
    with patched, torch.inference_mode(), converter.reading(folder):
        model_class = converter.model_class(conversion, folder)
        # In the base class: some architectures do something of their own before they call it.
        with patches.replaced_in(conversion.ModelBase, "index_tensors", index_tensors):
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
    weights = Weights(folder, made.model_tensors)
    return Checkpoint(folder, tensors, facts, writer, files, made.ftype, made.metadata, weights)
