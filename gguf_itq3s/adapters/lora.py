"""A LoRA adapter to GGUF by llama.cpp's ``convert_lora_to_gguf.py``, scaled for a model whose norms are folded.

A folded model has ``W diag(g)`` where the adapter was trained beside ``W`` on inputs with the gain ``g``: the update
``B A`` has to become ``B A diag(g)``, the columns of ``lora_a`` times the gain, exactly as the matrix itself. An
adapter that was trained beside a folded model, as PyTorch holds it packed, is for one already: it is only marked.

Upstream's script runs as it is, from the pinned source, on a copy of the adapter's folder that holds what was checked.
Between it and the model's class of the ``conversion`` package stands a class that scales what the latter has mapped,
split and stacked: names and shapes are then those of the GGUF file, and the type is still to be chosen.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from gguf import GGMLQuantizationType

from .. import upstream
from ..checkpoint import fold, trust
from ..checkpoint.files import check_output
from ..checkpoint.fold import NORMS_FOLDED, Folding
from ..checkpoint.reader import check_counts, open_checkpoint, read_json
from ..convert import ternary
from ..errors import UserError, output_error
from ..programs import as_program
from .peft import CONFIG, WEIGHTS, Adapter, read_adapter, small_file

OUTTYPES: Final = ("f32", "f16", "bf16", "q8_0")
_SCRIPT: Final = "convert_lora_to_gguf.py"
#: Loggers of upstream's, and the script's own.
_LOGGERS: Final = ("hf-to-gguf", "gguf", "metadata", "lora-to-gguf")


@dataclass(frozen=True)
class LoraOptions:
    """What to convert and how; the fields are the options of the command.

    Attributes:
        adapter: folder of the adapter, as PEFT saves it.
        out: the GGUF file to write.
        base: Hugging Face folder of the model it was trained on.
        outtype: one of :data:`OUTTYPES`.
        fold_norms: for a model whose norms are folded.
        ternary: as in the conversion of the model: norms that ternary matrices read are not folded.
        trained_folded: whether it was trained beside a model whose norms are folded; None to take it from the adapter's
            model card and the ``config.json`` of ``base``, which say so where :mod:`gguf_itq3s.transformers` folded.
        verbose: show what llama.cpp's converter logs.
        trust_remote_code: Python code of the model folder may run.
    """

    adapter: Path
    out: Path
    base: Path
    outtype: str = "f32"
    fold_norms: bool = False
    ternary: str = "auto"
    trained_folded: bool | None = None
    verbose: bool = False
    trust_remote_code: bool = False


@dataclass
class Converted:
    """What was written.

    Attributes:
        matrices: GGUF names of the matrices that the adapter changes.
        scaled: those of them whose ``lora_a`` has the gain of a norm.
        folded: whether the file is marked as one for folded norms.
    """

    matrices: list[str] = field(default_factory=list)
    scaled: list[str] = field(default_factory=list)
    folded: bool = False


def convert_lora(options: LoraOptions, messages: TextIO | None = None) -> Converted:
    """Convert an adapter.

    Args:
        options: what and how.
        messages: where notes go; None for stderr.

    Returns:
        What was written.

    Raises:
        UserError: adapter or model cannot be read, do not fit, or the file cannot be written; nothing is left then.
    """
    messages = messages or sys.stderr
    check_output(options.out, (options.adapter, options.base))
    adapter = read_adapter(options.adapter)
    config = options.base / "config.json"
    if not config.is_file():
        raise UserError(config, "no such file", "give the Hugging Face folder of the adapter's model")
    fields = read_json(config)
    check_counts(config, fields)
    trained_folded = options.trained_folded
    if trained_folded is None:
        trained_folded = adapter.beside_folded or fold.is_folded_packed(fields)
    if trained_folded and not options.fold_norms:
        what = "was trained beside a model whose norms are folded, and fits no file whose norms are not"
        raise UserError(options.adapter, what, "leave out --no-fold-norms")
    folding, gain = _folding(options, messages, trained_folded)
    done = Converted(folded=trained_folded or bool(folding.norms))
    try:
        with tempfile.TemporaryDirectory(prefix=f".{options.out.name}.", dir=options.out.parent) as scratch:
            written = Path(scratch) / "adapter.gguf"
            _run(options, _stage(adapter, Path(scratch)), written, _subclass(options, folding, gain, done))
            written.replace(options.out)
    except OSError as error:
        raise output_error(options.out, error) from error
    return done


def _folding(
    options: LoraOptions, messages: TextIO, trained_folded: bool
) -> tuple[Folding, Callable[[str], np.ndarray]]:
    """The norms whose gains have to be multiplied into the adapter, and the gains."""
    if trained_folded or not options.fold_norms:
        return Folding(), lambda _: np.empty(0, np.float32)
    base = open_checkpoint(options.base, verbose=options.verbose, trust_remote_code=options.trust_remote_code)
    kept = ternary.find(base, options.ternary, GGMLQuantizationType.TQ2_0, "absmean", messages).norms
    folding = fold.plan_tensors(base.model.arch, base.tensors, kept)
    if folding.note:
        print(folding.note, file=messages)
    return folding, fold.gains(base.tensors, str(base.folder))


def _stage(adapter: Adapter, scratch: Path) -> Path:
    """A folder of the adapter's name with what was checked of it, for upstream's script."""
    folder = scratch / (adapter.folder.resolve().name or "adapter")
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(adapter.config))
    links = {WEIGHTS: adapter.weights}
    for name in ("README.md", "config.json", "generation_config.json"):  # name, licence, base model
        if path := small_file(adapter.folder, name):
            links[name] = path
    for name, path in links.items():
        (folder / name).symlink_to(path.resolve())
    return folder


def _subclass(
    options: LoraOptions, folding: Folding, gain: Callable[[str], np.ndarray], done: Converted
) -> Callable[[Any], Any]:
    """Makes of a class of the ``conversion`` package one that scales LoRA matrices by the gains and marks the file."""
    import torch

    def scaled(self: Any, name: str, value: Any) -> Any:
        if not hasattr(value, "get_lora_A_B"):
            return value
        a, b = value.get_lora_A_B()
        for half, matrix in (("lora_A", a), ("lora_B", b)):
            if not torch.isfinite(matrix).all():
                what = f"has weights in {half} that are NaN or infinite"
                raise UserError(options.adapter / WEIGHTS, what, "download the adapter again", name)
        done.matrices.append(name)
        norm = folding.norm_of(name)
        if norm is None:
            return value
        factor = gain(norm)
        if factor.size != a.shape[-1]:
            what = f"has {a.shape[-1]} columns, but the norm {norm} has {factor.size} gains"
            raise UserError(options.adapter / WEIGHTS, what, "give the model that the adapter was trained on", name)
        done.scaled.append(name)
        return type(value)(a.to(torch.float32) * torch.from_numpy(factor), b.to(torch.float32))

    def subclass(model_class: Any) -> Any:
        def modify_tensors(self: Any, data: Any, name: str, bid: int | None) -> Iterator[tuple[str, Any]]:
            for new_name, value in model_class.modify_tensors(self, data, name, bid):
                yield new_name, scaled(self, new_name, value)

        def prepare_metadata(self: Any, vocab_only: bool) -> None:
            model_class.prepare_metadata(self, vocab_only)
            if done.folded:
                self.gguf_writer.add_bool(NORMS_FOLDED, True)

        members = {
            "model_arch": model_class.model_arch,
            "modify_tensors": modify_tensors,
            "prepare_metadata": prepare_metadata,
            # Upstream asks for the model's config alone; its weights are none of this.
            "index_tensors": lambda _self, remote_hf_model_id=None: {},
            "dequant_model": lambda _self: None,
        }
        return type(model_class.__name__, (model_class,), members)

    return subclass


def _run(options: LoraOptions, folder: Path, out: Path, subclass: Callable[[Any], Any]) -> None:
    """Run upstream's script in this process, where every class it takes for a model is replaced."""
    conversion: Any = upstream.load_conversion()
    script = upstream.fetch_source(whole=True) / _SCRIPT  # what runs is compared with its hash
    own = conversion.get_model_class
    # Eager: an adapter is small, and its values are looked at.
    arguments = [folder, "--base", options.base, "--outfile", out, "--outtype", options.outtype, "--no-lazy"]
    shown = logging.INFO if options.verbose else logging.CRITICAL
    what, remedy = "cannot be converted", "check that --base is the adapter's model; --verbose shows more"
    with (
        trust.transformers_for(options.base, options.trust_remote_code),
        as_program([str(script), *map(str, arguments)], _LOGGERS, shown, options.adapter, what, remedy),
    ):
        conversion.get_model_class = lambda *args, **keywords: subclass(own(*args, **keywords))
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            conversion.get_model_class = own
