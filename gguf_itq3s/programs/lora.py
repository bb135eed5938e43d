"""A LoRA adapter to GGUF by llama.cpp's ``convert_lora_to_gguf.py``, scaled for a model whose channels are rescaled.

A rescaled model has ``diag(r) W diag(c)`` where the adapter was trained beside ``W``: the update ``B A`` has to become
``diag(r) B A diag(c)``, the columns of ``lora_a`` times c and the rows of ``lora_b`` times r, exactly as the matrix
itself. What c and r are the model's file says. An adapter that was trained beside a rescaled model, as PyTorch holds it
packed, is for one already: it is only marked.

Upstream's script runs as it is, from the pinned source, on a copy of the adapter's folder that holds what was checked.
Between it and the model's class of the ``conversion`` package stands a class that scales what the latter has mapped,
split and stacked: names and shapes are then those of the GGUF file, and the type is still to be chosen.
"""

from __future__ import annotations

import argparse
import json
import logging
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from ..base import report
from ..base.errors import UserError, output_error
from ..checkpoint import converter, rescaling, trust
from ..checkpoint.files import check_output
from ..checkpoint.gguf_file import GGUFFile, contents_of, open_gguf
from ..checkpoint.hub import download
from ..checkpoint.patches import patched, replaced_in
from ..checkpoint.reading import open_checkpoint, open_without_weights
from ..checkpoint.rescaling import ID, NORMS_FOLDED, Rescaling
from ..checkpoint.validation import ADAPTER, check_counts, read_json
from .peft import WEIGHTS, Adapter, read_adapter, small_file
from .run import as_program

OUTTYPES: Final = ("f32", "f16", "bf16", "q8_0")
_SCRIPT: Final = "convert_lora_to_gguf.py"
#: Loggers of upstream's, and the script's own.
_LOGGERS: Final = ("hf-to-gguf", "gguf", "metadata", "lora-to-gguf")


@dataclass(frozen=True)
class LoraOptions:
    """What to convert and how: the options of the command, which :func:`add_parser` explains.

    Without ``trained_folded``, the adapter's model card and the ``config.json`` of ``base`` say whether it was trained
    beside what :func:`gguf_itq3s.transformers.load_gguf` gave of a folded file, or of which equalized one.
    """

    adapter: Path
    out: Path
    base: Path
    outtype: str = "f32"
    model: Path | None = None
    trained_folded: bool | None = None
    verbose: bool = False
    trust_remote_code: bool = False


@dataclass
class Converted:
    """GGUF names of the matrices that were written, those of them that were scaled, and others that were left out.

    ``marks`` are what the file says of the model that it is for.
    """

    matrices: list[str] = field(default_factory=list)
    scaled: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    marks: Mapping[str, bool | str] = field(default_factory=dict)


def convert_lora(options: LoraOptions, messages: TextIO | None = None) -> Converted:
    """Convert an adapter and say what was written; notes go to ``messages``, by default stderr.

    Raises:
        UserError: adapter or model cannot be read, do not fit, or the file cannot be written; nothing is left then.
    """
    check_output(options.out, (options.adapter, options.base, options.model))
    adapter = read_adapter(options.adapter)
    config = options.base / "config.json"
    if not config.is_file():
        raise UserError(config, "no such file", "give the Hugging Face folder of the adapter's model")
    fields = read_json(config)
    check_counts(config, fields)
    found, marks = _rescaling(options, adapter, fields)
    done = Converted(marks=marks)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{options.out.name}.", dir=options.out.parent) as scratch:
            written = Path(scratch) / "adapter.gguf"
            _run(options, _stage(adapter, Path(scratch)), written, _subclass(options, found, done))
            ends = [name for name in done.matrices if name in ("token_embd.weight", "output.weight")]
            if ends and not _has_output(options):
                raise _tied(options, ends[0])
            written.replace(options.out)
    except OSError as error:
        raise output_error(options.out, error) from error
    if done.left_out:
        what = f"{len(done.left_out)} matrices are no part of the text model and are left out"
        print(f"note: {options.adapter}: {what}: {done.left_out[0]}", file=messages or sys.stderr)
    return done


def _rescaling(
    options: LoraOptions, adapter: Adapter, config: Mapping[str, Any]
) -> tuple[Rescaling, Mapping[str, bool | str]]:
    """What the adapter has to be multiplied by, and what it then says of the model that it is for."""
    beside = adapter.beside or rescaling.id_packed(config)
    folded = options.trained_folded
    if folded is None:
        folded = adapter.beside_folded or rescaling.is_folded_packed(config)
    elif not folded:
        beside = ""
    marks: dict[str, bool | str] = {ID: beside} if beside else {NORMS_FOLDED: True} if folded else {}
    if options.model is None:
        return Rescaling(), marks
    file = open_gguf(options.model)
    is_folded, own = contents_of(file, NORMS_FOLDED) is True, contents_of(file, ID)
    if (folded and not is_folded) or (beside and beside != own):
        what, remedy = f"was trained beside a model that is not {options.model.name}", "give the file that it was"
        raise UserError(options.adapter, what, f"{remedy} as --model")
    return (Rescaling(), marks) if marks else _of_model(options, file, own is not None or is_folded)


def _of_model(options: LoraOptions, file: GGUFFile, rescaled: bool) -> tuple[Rescaling, Mapping[str, bool | str]]:
    """What a GGUF file says of itself."""
    assert options.model is not None
    if not rescaled:  # then config.json is enough of the base
        return Rescaling(), {}
    base = open_checkpoint(options.base, verbose=options.verbose, trust_remote_code=options.trust_remote_code)
    gain = rescaling.gains(base.tensors, base.folder)
    names = {tensor.name for tensor in base.tensors}
    norms = [tensor.name for tensor in file.tensors if tensor.name.endswith("_norm.weight")]
    if missing := [norm for norm in norms if norm not in names]:
        raise UserError(options.model, "is of another model than --base", "give the checkpoint of the file", missing[0])
    found = rescaling.rescaling_of(file, gain)
    return found, found.marks()


def _stage(adapter: Adapter, scratch: Path) -> Path:
    """A folder of the adapter's name with what was checked of it, for upstream's script."""
    folder = scratch / (adapter.folder.resolve().name or "adapter")
    folder.mkdir()
    (folder / ADAPTER).write_text(json.dumps(adapter.config))
    links = {WEIGHTS: adapter.weights}
    for name in ("README.md", "config.json", "generation_config.json"):  # name, licence, base model
        if path := small_file(adapter.folder, name):
            links[name] = path
    for name, path in links.items():
        (folder / name).symlink_to(path.resolve())
    return folder


def _subclass(options: LoraOptions, found: Rescaling, done: Converted) -> Callable[[Any], Any]:
    """Makes of a class of the ``conversion`` package one that rescales LoRA matrices and marks the file."""
    import torch

    def times(name: str, matrix: Any, factors: Sequence[np.ndarray | None], axis: int, what: str) -> Any:
        """A matrix, or each of a stack, times a factor for each of its columns (axis -1) or rows (-2)."""
        wide = matrix.to(torch.float32).clone()
        for part, factor in zip(wide if matrix.ndim == 3 else [wide], factors, strict=True):
            if factor is None:
                continue
            if factor.size != part.shape[axis]:
                problem = f"has {part.shape[axis]} {what}, and the model {factor.size}"
                remedy = "give the model that the adapter was trained on"
                raise UserError(options.adapter / WEIGHTS, problem, remedy, name)
            by = torch.from_numpy(factor)
            part.mul_(by if axis == -1 else by[:, None])
        return wide

    def scaled(self: Any, name: str, value: Any) -> Any:
        if not hasattr(value, "get_lora_A_B"):
            return value
        a, b = value.get_lora_A_B()
        for half, matrix in (("lora_A", a), ("lora_B", b)):
            if not torch.isfinite(matrix).all():
                what = f"has weights in {half} that are NaN or infinite"
                raise UserError(options.adapter / WEIGHTS, what, "download the adapter again", name)
        done.matrices.append(name)
        if not found.touches(name):
            return value
        experts = [*range(a.shape[0])] if a.ndim == 3 else [None]
        done.scaled.append(name)
        return type(value)(
            times(name, a, [found.columns(name, expert) for expert in experts], -1, "columns"),
            times(name, b, [found.rows(name, expert) for expert in experts], -2, "rows"),
        )

    def subclass(model_class: Any) -> Any:
        def filter_tensors(cls: Any, item: tuple[str, Any]) -> tuple[str, Any] | None:
            found: tuple[str, Any] | None = model_class.filter_tensors.__func__(cls, item)
            if found is None and item[0].endswith("lm_head.weight"):
                raise _tied(options, item[0])
            if found is None and item[0] not in done.left_out:
                done.left_out.append(item[0])
            return found

        def modify_tensors(self: Any, data: Any, name: str, bid: int | None) -> Iterator[tuple[str, Any]]:
            for new_name, value in model_class.modify_tensors(self, data, name, bid):
                yield new_name, scaled(self, new_name, value)

        def prepare_metadata(self: Any, vocab_only: bool) -> None:
            model_class.prepare_metadata(self, vocab_only)
            for key, value in done.marks.items():
                if isinstance(value, bool):
                    self.gguf_writer.add_bool(key, value)
                else:
                    self.gguf_writer.add_string(key, value)

        members = {
            "model_arch": model_class.model_arch,
            "filter_tensors": classmethod(filter_tensors),
            "modify_tensors": modify_tensors,
            "prepare_metadata": prepare_metadata,
            # Upstream asks for the model's config alone; its weights are none of this.
            "index_tensors": lambda _self, remote_hf_model_id=None: {},
            "dequant_model": lambda _self: None,
        }
        return type(model_class.__name__, (model_class,), members)

    return subclass


def _has_output(options: LoraOptions) -> bool:
    """Whether the model has an output matrix beside its embedding."""
    if options.model is not None:
        return any(tensor.name == "output.weight" for tensor in open_gguf(options.model).tensors)
    return not open_without_weights(options.base, trust_remote_code=options.trust_remote_code).model.tied


def _tied(options: LoraOptions, name: str) -> UserError:
    what = "is of the embedding or the output matrix; they are one in the model, and llama.cpp runs no such adapter"
    remedy = "train it without this module, or merge it into the model (merge_and_unload of PEFT) and convert that"
    return UserError(options.adapter / WEIGHTS, what, remedy, name)


def _run(options: LoraOptions, folder: Path, out: Path, subclass: Callable[[Any], Any]) -> None:
    """Run upstream's script in this process, where every class it takes for a model is replaced."""
    conversion, script = converter.upstreams(_SCRIPT)
    own = conversion.get_model_class

    def get_model_class(*args: Any, **keywords: Any) -> Any:
        return subclass(own(*args, **keywords))

    # Eager: an adapter is small, and its values are looked at.
    arguments = [folder, "--base", options.base, "--outfile", out, "--outtype", options.outtype, "--no-lazy"]
    shown = logging.INFO if options.verbose else logging.CRITICAL
    what, remedy = "cannot be converted", "check that --base is the adapter's model; --verbose shows more"
    with (
        patched(options.base, options.trust_remote_code),
        as_program([str(script), *map(str, arguments)], _LOGGERS, shown, options.adapter, what, remedy),
        replaced_in(conversion, "get_model_class", get_model_class),
    ):
        runpy.run_path(str(script), run_name="__main__")


# ------------------------------------------------------------------------------------------------------- the command


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``convert-lora``."""
    description = (
        "Convert a LoRA adapter of PEFT to GGUF, as llama.cpp's own converter writes it, or with --model for a file "
        "whose channels are rescaled (converted with statistics, --equalize or --fold-norms)."
    )
    parser = subparsers.add_parser("convert-lora", help="LoRA adapter to GGUF", description=description)
    parser.add_argument("adapter", type=Path, help="folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("out", metavar="out.gguf", type=Path, help="file to write; {ftype} becomes the output type")
    parser.add_argument(
        "--base", required=True, metavar="model_dir",
        help="the model that the adapter was trained on: a Hugging Face folder, or hf:organisation/name to download; "
        "for a file that is not rescaled, config.json is enough",
    )  # fmt: skip
    parser.add_argument(
        "--outtype", choices=OUTTYPES, default=LoraOptions.outtype, help="type of the matrices (default: %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="FILE.gguf",
        help="the converted model, which says how it is rescaled; llama.cpp refuses an adapter that does not fit",
    )  # fmt: skip
    parser.add_argument(
        "--trained-folded", action=argparse.BooleanOptionalAction, default=None,
        help="it was trained beside a model whose norms are folded, as gguf_itq3s.transformers can load it (default: "
        "as the adapter's model card and the config.json of --base say)",
    )  # fmt: skip
    trust.add_argument(parser)
    parser.add_argument("--verbose", action="store_true", help="show what llama.cpp's converter logs")
    parser.set_defaults(run=run, needs_source=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    values = {key: value for key, value in vars(args).items() if key in LoraOptions.__dataclass_fields__}
    values["base"] = Path(args.base)
    if args.base.startswith("hf:"):
        values["base"] = download(args.base.removeprefix("hf:"), trust_remote_code=args.trust_remote_code)
    values["out"] = args.out.with_name(args.out.name.replace("{ftype}", args.outtype.upper()))
    done = convert_lora(LoraOptions(**values))
    scaled = f"{len(done.scaled)} scaled" if done.scaled else "trained beside one"
    kind = "with folded norms" if NORMS_FOLDED in done.marks else "that is rescaled"
    how = f"for a model {kind}, {scaled}" if done.marks else "for a model as it was"
    print(f"wrote {values['out']}: {len(done.matrices)} matrices, {how}, {report.size(values['out'].stat().st_size)}")
    return 0
