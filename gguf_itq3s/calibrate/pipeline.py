"""A calibration: run a model's layers one after the other and write the second moments of their inputs.

The activations between layers are files in the output folder, which is also where an interrupted run continues.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from tqdm import tqdm

from ..base.errors import UserError, output_error
from ..base.journal import key_of, save_arrays, sources
from ..checkpoint.channels import ARCHITECTURES
from ..checkpoint.files import check_output
from ..checkpoint.reading import open_checkpoint
from ..rounding import hessian
from . import ends, expert_collector
from .activations import Activations, activation_path, activations
from .collector import Collector
from .folders import keep_own, leave_own
from .joining import own_batch
from .layers import LayeredModel
from .options import CalibrationOptions
from .products import quick_products
from .ranks import ALONE, Ranks, of_all
from .store import MANIFEST, Entry, Manifest, model_hash, read_manifest
from .text import windows

#: Folder for statistics that are being written.
_PARTIAL: Final = "partial"
#: In the folder of one of several processes.
_ACTIVATIONS: Final = "activations"


@quick_products()
def calibrate(options: CalibrationOptions, out: Path, messages: TextIO | None = None, ranks: Ranks = ALONE) -> Manifest:
    """Run the model and write the statistics.

    Args:
        options: model and text.
        out: the folder to write.
        messages: where progress goes; None for stderr.
        ranks: the processes that share the text; the first of them writes.

    Returns:
        The manifest of the finished folder; on a rank that does not write, without its entries.

    Raises:
        UserError: the model, the text or the folder cannot be used.
        KeyboardInterrupt: interrupted; the same call continues.
    """
    if ranks.first:
        check_output(out, (options.model, *options.text), folder=True)
    checkpoint = open_checkpoint(options.model, trust_remote_code=options.trust_remote_code, messages=messages)
    if checkpoint.model.arch not in ARCHITECTURES:
        what = f"its architecture, {checkpoint.model.arch}, cannot be calibrated"
        raise UserError(options.model, what, "use an importance matrix of llama-imatrix (convert --imatrix)")
    model = LayeredModel(options, checkpoint, ranks)
    inputs = windows(options, model.context, messages)
    if len(inputs) < ranks.size:
        what = f"cannot be calibrated by {ranks.size} processes with {len(inputs)} windows of text"
        raise of_all(UserError(options.model, what, "give more --tokens, or start fewer"))
    manifest = Manifest(
        model=model_hash(checkpoint.files),
        arch=checkpoint.model.arch,
        text=hashlib.sha256(inputs.tobytes()).hexdigest(),
        tokens=int(inputs.size),
        options={"context": int(inputs.shape[1]), "hessian": options.hessian or "auto", **model.form},
        code=sources(),
    )
    ranks.agree(
        out, checkpoint=manifest.model, text=manifest.text,
        options=repr((manifest.options, options.batch, options.widest)),
    )  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        if ranks.first and (out / MANIFEST).exists():
            found = read_manifest(out)
            if not found.same_run(manifest):
                what = "holds a calibration of another model, text or other options"
                raise UserError(out, what, "choose another folder")
            if not found.complete and found.code != manifest.code:
                what = "holds the beginning of a calibration by another version of this program"
                raise UserError(out, what, "remove it, or choose another folder")
            manifest = found
        if not ranks.tell(manifest.complete):
            key = key_of(manifest.model, manifest.text, options.batch, model.form)
            own = keep_own(out, key, ranks, "activations", (_ACTIVATIONS,))
            own = own if ranks.alone else own / _ACTIVATIONS
            _run(options, out, own, model, inputs, manifest, messages, ranks)
        leave_own(out, ranks)
        # Also of runs that were killed, the last of them when it was done.
        for path in out.glob("activations-*") if ranks.first else ():
            path.unlink()
        if ranks.first:
            shutil.rmtree(out / _PARTIAL, ignore_errors=True)
    except OSError as error:
        raise output_error(out, error) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command continues from {out}") from None
    if ranks.first and not manifest.entries:
        what = "has no matrix with statistics: rows have to be a multiple of 64 long"
        raise UserError(options.model, what, "convert it without a calibration")
    return manifest


def _run(
    options: CalibrationOptions, out: Path, own: Path, model: LayeredModel, text: np.ndarray, manifest: Manifest,
    messages: TextIO | None, ranks: Ranks,
) -> None:  # fmt: skip
    """All layers that are not done yet; those are run again that another number of processes has done.

    Args:
        options: of the run.
        out: folder of the statistics.
        own: folder of this rank's activations.
        model: the model.
        text: int64 (windows, context), of all ranks.
        manifest: of what is done, on the first rank.
        messages: where progress goes.
        ranks: those that share the text.
    """
    inputs = text[ranks.part(len(text))]
    batch = own_batch(options.batch, options.device)
    batches = [slice(i, i + batch) for i in range(0, len(inputs), batch)]
    experts = (out / _PARTIAL if ranks.alone else own) / "experts"
    done = ranks.tell(_layers_done(out, manifest))
    begin = done if ranks.all(activation_path(own, done, model.dtype).exists()) else 0
    with tqdm(total=model.layers * len(batches), unit="batch", initial=begin * len(batches), file=messages) as bar:
        keywords = model.start(own, inputs, batches, begin)
        for number in range(begin, model.layers):
            bar.set_postfix_str(f"layer {number}", refresh=False)
            shape = (*inputs.shape, model.hidden)
            source = activations(own, number, shape, "r", model.dtype)
            target = activations(own, number + 1, shape, "w+", model.dtype, partial=True)
            large = expert_collector.find(model, number, options)
            collects = number >= done
            if large is None:
                parts = _collected(
                    options, model, number, source, target, batches, keywords[number], bar.update, ranks, collects
                )
            else:
                parts = expert_collector.collect(
                    large, options, experts, source, target, batches, keywords[number], bar.update, ranks,
                    collects=collects,
                )  # fmt: skip
            for file, statistics, entries in parts:
                _keep(options, out, file, number, statistics, entries, manifest)
            shutil.rmtree(experts, ignore_errors=True)
            target.flush()
            del source, target
            activation_path(own, number + 1, model.dtype, partial=True).replace(
                activation_path(own, number + 1, model.dtype)
            )
            if number >= done:
                if number + 1 == model.layers:
                    found = ends.collect(model, own, text, batches, full=options.full(model.hidden), ranks=ranks)
                    if ranks.first:
                        save_arrays(found, out / ends.ENDS, out / _PARTIAL)
                manifest.complete = number + 1 == model.layers
                if ranks.first:
                    manifest.write(out)
                ranks.meet()  # until then the inputs of the layer may be asked for again
            activation_path(own, number, model.dtype).unlink()


def _collected(
    options: CalibrationOptions, model: LayeredModel, number: int, source: Activations, target: Activations,
    batches: Sequence[slice], keywords: Mapping[int, dict[str, Any]], done: Callable[[], Any], ranks: Ranks,
    collects: bool,
) -> Iterator[expert_collector.Part]:  # fmt: skip
    """Run a layer on all windows and take its statistics, as :func:`.expert_collector.collect` in one part."""
    layer = model.load(number)
    collector = Collector(model, number, layer, options) if collects else None
    for batch in batches:
        hidden = source[batch]
        target[batch] = model.step(layer, hidden, keywords[len(hidden)])
        done()
    if collector is not None:
        collector.close()
        collector.add_up(ranks)
        if ranks.first:
            yield f"layer-{number:04d}.safetensors", collector.statistics(), collector.entries()
    model.unload(number)


def _keep(
    options: CalibrationOptions, out: Path, file: str, number: int, statistics: dict[str, np.ndarray],
    entries: Mapping[str, tuple[str, int, str | None]], manifest: Manifest,
) -> None:  # fmt: skip
    """Write statistics of a layer, and note them."""
    flat = {key for key, value in statistics.items() if hessian.is_flat(value)}
    for key, value in statistics.items():
        if not np.isfinite(value).all():
            what = f"gives inputs of layer {number} that are NaN or infinite"
            raise UserError(options.model, what, "repair the checkpoint or download it again", key)
        # An expert may have seen no token; a matrix that all tokens pass cannot.
        if key in flat and not key.endswith("]"):
            what = f"gives inputs of layer {number} that tell no column from another"
            raise UserError(options.model, what, "repair the checkpoint or download it again", key)
    # Not beside the finished ones: safetensors writes under a name of its own, which a kill would leave.
    partial = out / _PARTIAL
    partial.mkdir(exist_ok=True)
    save_arrays(statistics, out / file, partial)
    for name, (key, tokens, norm) in entries.items():
        manifest.entries[name] = Entry(file, key, 0 if key in flat else tokens, norm)


def _layers_done(folder: Path, manifest: Manifest) -> int:
    """How many layers are finished."""
    files = {entry.file for entry in manifest.entries.values()}
    done = 0
    while f"layer-{done:04d}.safetensors" in files and (folder / f"layer-{done:04d}.safetensors").exists():
        done += 1
    return done
