"""A calibration: run a model's layers one after the other and write the second moments of their inputs.

The activations between layers are files in the output folder, which is also where an interrupted run continues.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

import numpy as np
from tqdm import tqdm

from ..base.errors import UserError, output_error
from ..base.journal import save_arrays
from ..checkpoint.channels import ARCHITECTURES
from ..checkpoint.files import check_output
from ..checkpoint.reading import open_checkpoint
from ..rounding import hessian
from . import ends
from .activations import activation_path, activations
from .collector import Collector
from .layers import LayeredModel
from .options import CalibrationOptions
from .products import quick_products
from .store import MANIFEST, Entry, Manifest, model_hash, read_manifest
from .text import windows

#: Folder for statistics that are being written.
_PARTIAL: Final = "partial"


@quick_products()
def calibrate(options: CalibrationOptions, out: Path) -> Manifest:
    """Run the model and write the statistics.

    Args:
        options: model and text.
        out: the folder to write.

    Returns:
        The manifest of the finished folder.

    Raises:
        UserError: the model, the text or the folder cannot be used.
        KeyboardInterrupt: interrupted; the same call continues.
    """
    check_output(out, (options.model, *options.text), folder=True)
    checkpoint = open_checkpoint(options.model, trust_remote_code=options.trust_remote_code)
    if checkpoint.model.arch not in ARCHITECTURES:
        what = f"its architecture, {checkpoint.model.arch}, cannot be calibrated"
        raise UserError(options.model, what, "use an importance matrix of llama-imatrix (convert --imatrix)")
    model = LayeredModel(options, checkpoint)
    inputs = windows(options, model.context)
    manifest = Manifest(
        model=model_hash(checkpoint.files),
        arch=checkpoint.model.arch,
        text=hashlib.sha256(inputs.tobytes()).hexdigest(),
        tokens=int(inputs.size),
        options={"context": int(inputs.shape[1]), "hessian": options.hessian or "auto"},
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / MANIFEST).exists():
            found = read_manifest(out)
            if not found.same_run(manifest):
                what = "holds a calibration of another model, text or other options"
                raise UserError(out, what, "choose another folder")
            manifest = found
        if not manifest.complete:
            _run(options, out, model, inputs, manifest)
        # Also of runs that were killed, the last of them when it was done.
        for path in out.glob("activations-*"):
            path.unlink()
        shutil.rmtree(out / _PARTIAL, ignore_errors=True)
    except OSError as error:
        raise output_error(out, error) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command continues from {out}") from None
    if not manifest.entries:
        what = "has no matrix with statistics: rows have to be a multiple of 256 long"
        raise UserError(options.model, what, "convert it without a calibration")
    return manifest


def _run(options: CalibrationOptions, out: Path, model: LayeredModel, inputs: np.ndarray, manifest: Manifest) -> None:
    """All layers that are not done yet."""

    batches = [slice(i, i + options.batch) for i in range(0, len(inputs), options.batch)]
    done = _layers_done(out, manifest)
    with tqdm(total=model.layers * len(batches), unit="batch", initial=done * len(batches)) as bar:
        keywords = model.start(out, inputs, batches, done)
        for number in range(done, model.layers):
            bar.set_postfix_str(f"layer {number}", refresh=False)
            layer = model.load(number)
            collector = Collector(model, number, layer, options)
            source = activations(out, number, (*inputs.shape, model.hidden), "r")
            target = activations(out, number + 1, (*inputs.shape, model.hidden), "w+", partial=True)
            for batch in batches:
                target[batch] = model.step(layer, source[batch], keywords[number][len(target[batch])])
                bar.update()
            collector.close()
            file = f"layer-{number:04d}.safetensors"
            statistics = collector.statistics()
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
            target.flush()
            del source, target
            activation_path(out, number + 1, partial=True).replace(activation_path(out, number + 1))
            for name, (key, tokens, norm) in collector.entries().items():
                manifest.entries[name] = Entry(file, key, 0 if key in flat else tokens, norm)
            if number + 1 == model.layers:
                found = ends.collect(model, out, inputs, batches, full=options.full(model.hidden))
                save_arrays(found, out / ends.ENDS, partial)
            manifest.complete = number + 1 == model.layers
            manifest.write(out)
            activation_path(out, number).unlink()
            model.unload(number)


def _layers_done(folder: Path, manifest: Manifest) -> int:
    """How many layers are finished, with the activations behind the last one at hand."""
    files = {entry.file for entry in manifest.entries.values()}
    done = 0
    while f"layer-{done:04d}.safetensors" in files and (folder / f"layer-{done:04d}.safetensors").exists():
        done += 1
    while done and not activation_path(folder, done).exists():
        done -= 1
    return done
