"""A model and text to a folder of statistics: the layers run one after the other, and the second moments of their
inputs are written.

The activations between layers are files in the output folder, which is also where an interrupted run continues.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import torch
from tqdm import tqdm

from ..base.errors import UserError, output_error
from ..base.journal import key_of, save_arrays, sources
from ..checkpoint.channels import ROUTERS
from ..checkpoint.files import check_output
from ..checkpoint.reading import open_checkpoint
from ..codec.transform import rotation_block
from ..rounding import hessian
from . import ends
from .activations import Array, activation_path, activations, complete
from .experts import LayerExperts, Routed
from .experts import find as find_experts
from .inputs import Group, Seen, Watch
from .layers import Keywords, LayeredModel, quick_products
from .moments import Moment, rotated
from .options import CalibrationOptions
from .ranks import ALONE, Ranks, keep_own, leave_own, of_all, own_batch
from .shares import Batch, parts
from .store import MANIFEST, Entry, Manifest, model_hash, read_manifest
from .text import windows

#: Folder for statistics that are being written.
_PARTIAL: Final = "partial"
#: In the folder of one of several processes.
_ACTIVATIONS: Final = "activations"


@quick_products()
def calibrate(
    options: CalibrationOptions, out: Path, messages: TextIO | None = None, ranks: Ranks = ALONE, *, held: bool | None =
    None,
) -> Manifest:  # fmt: skip
    """Run the model and write the statistics.

    Args:
        messages: where progress goes; None for stderr.
        held: whether the windows are those that a calibration layer by layer holds out, or the others; None for all.

    Returns:
        The manifest of the finished folder; on a rank that does not write, without its entries. Of fewer windows held
        out than there are processes nothing is written.

    Raises:
        UserError: the model, the text or the folder cannot be used.
        KeyboardInterrupt: interrupted; the same call continues.
    """
    if ranks.first:
        check_output(out, (options.model, *options.text), folder=True)
    checkpoint = open_checkpoint(options.model, trust_remote_code=options.trust_remote_code, messages=messages)
    model = LayeredModel(options, checkpoint, ranks)
    inputs = windows(options, model.context, messages)
    if held is not None:
        inputs = inputs[parts(len(inputs))[held]]
    if len(inputs) < ranks.size and not held:
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
    if len(inputs) < ranks.size:
        return manifest
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
        if not ranks.broadcast_object(manifest.complete):
            key = key_of(manifest.model, manifest.text, options.batch, model.form)
            own = keep_own(out, key, ranks, "activations", (_ACTIVATIONS,))
            own = own if ranks.alone else own / _ACTIVATIONS
            _run(options, out, own, model, inputs, manifest, messages, ranks)
            if ranks.first and (note := model.layout.note(lambda name: name.split(".")[2] not in ROUTERS)):
                print(f"note: {note}", file=messages or sys.stderr)
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
        text: int64 (windows, context), of all ranks.
        manifest: of what is done, on the first rank.
    """
    inputs = text[ranks.part(len(text))]
    batch = own_batch(options.batch, options.device)
    batches = [np.arange(i, min(i + batch, len(inputs))) for i in range(0, len(inputs), batch)]
    done = ranks.broadcast_object(_layers_done(out, manifest))
    begin = done if ranks.all(activation_path(own, done, model.dtype).exists()) else 0
    with tqdm(total=model.layers * len(batches), unit="batch", initial=begin * len(batches), file=messages) as bar:
        keywords = model.start(own, inputs, batches, begin)
        for number in range(begin, model.layers):
            bar.set_postfix_str(f"layer {number}", refresh=False)
            shape = (*inputs.shape, model.hidden)
            source = activations(own, number, shape, "r", model.dtype)
            target = activations(own, number + 1, shape, "w+", model.dtype, partial=True)
            moments: dict[str, Moment] = {}
            parts = 0

            def add(seen: Seen, moments: dict[str, Moment] = moments) -> None:
                for group in seen.groups:
                    rows = seen.rows(group)
                    if rows.shape[0]:
                        moments.setdefault(group.key, Moment(group.columns, options.full(group.columns))).add(
                            rotated(rows)
                        )

            def write(groups: Sequence[Group], number: int = number, moments: dict[str, Moment] = moments) -> None:
                nonlocal parts
                found = [moments.pop(g.key, Moment(g.columns, options.full(g.columns))) for g in groups]
                with torch.inference_mode():  # in which they were made
                    for moment, tokens in zip(found, ranks.sums(*(moment.tokens for moment in found)), strict=True):
                        moment.reduce(ranks, tokens, model.device, 0)
                if ranks.first:
                    inside = groups[0].expert is not None if groups else False
                    part = f"-experts-{parts:04d}" if inside else ""
                    _keep(options, out, f"layer-{number:04d}{part}.safetensors", number, groups, found, manifest)
                parts += 1

            run_layer(
                model, number, source, target, batches, keywords[number],
                out / _PARTIAL if ranks.alone else own,
                lambda found: bytes_of_expert(found, options), add if number >= done else None, write, bar.update,
            )  # fmt: skip
            complete(target, own, number + 1, model.dtype)
            del source, target
            if number >= done:
                if number + 1 == model.layers:
                    found = ends.collect(model, own, text, batches, full=options.full(model.hidden), ranks=ranks)
                    if ranks.first:
                        save_arrays(found, out / ends.ENDS, out / _PARTIAL)
                manifest.complete = number + 1 == model.layers
                if ranks.first:
                    manifest.write(out)
                ranks.barrier()  # until then the inputs of the layer may be asked for again
            activation_path(own, number, model.dtype).unlink()


def run_layer(
    model: LayeredModel, number: int, source: Array, target: Array, batches: Sequence[Batch],
    keywords: Keywords, folder: Path, bytes_of_expert: Callable[[LayerExperts], int],
    receive: Callable[[Seen], None] | None, end: Callable[[Sequence[Group]], None] = lambda _: None,
    done: Callable[[], Any] = lambda: None,
) -> None:  # fmt: skip
    """Run a layer on all windows and hand over the inputs of its matrices, its experts a group at a time.

    Args:
        source: its inputs, float32 (windows, context, hidden).
        target: its outputs, which are written here; may be ``source``.
        folder: of what the layers share and what is kept of experts; the same for all layers.
        bytes_of_expert: of its weights and sums, which say how many are in memory together.
        receive: is given every input; None where the outputs alone are wanted.
        end: is given the groups of matrices whose inputs have all been handed over.

    Raises:
        OSError: the folder cannot be written.
        UserError: the checkpoint lacks a matrix.
    """
    found = find_experts(model, number)
    groups = model.layout.groups(number, model.blocks[number]) if receive else []
    routed = None
    with ExitStack() as stack:
        layer = model.load(number) if found is None else stack.enter_context(found.left_out())
        if found is not None:
            mine = [group for group in groups if group.path == found.path]
            groups = [group for group in groups if group.path != found.path]
            size = bytes_of_expert(found)
            routed = run_experts(found, layer, source, batches, keywords, folder, size, mine, receive, end)
        with Watch(model, number, layer, groups, receive or (lambda _: None)):
            for batch in batches:
                if routed is not None:
                    routed.give(batch)
                with keywords.of(batch, folder) as given:
                    target[batch] = model.step(layer, source[batch], given)
                done()
        if routed is not None:
            routed.close()
    model.unload(number)
    if receive is not None:
        end(groups)


def run_experts(
    found: LayerExperts, layer: torch.nn.Module, source: Array, batches: Sequence[Batch],
    keywords: Keywords, folder: Path, size: int, groups: Sequence[Group] = (),
    receive: Callable[[Seen], None] | None = None, end: Callable[[Sequence[Group]], None] = lambda _: None,
) -> Routed:  # fmt: skip
    """Run a layer up to its experts and these outside it, arguments as :func:`run_layer`.

    Returns:
        What comes into the experts and what they put out.
    """
    routed = Routed(layer, found, folder / "experts", *source.shape[:2])
    for batch in batches:
        seen: list[Seen] = []
        with Watch(found.model, found.number, layer, groups, seen.append), keywords.of(batch, folder) as given:
            routed.keep(batch, lambda batch=batch, given=given: found.model.step(layer, source[batch], given))  # type: ignore[misc]
        if seen and seen[0].plain is not seen[0].raw:
            routed.put("plain", batch, seen[0].plain)
    for members in found.groups(size):
        loaded = found.load(members)
        here = [group for group in groups if group.expert in members]
        for batch in batches if receive is not None else ():
            plain = routed.get("plain" if routed.has("plain") else "hidden", batch)
            with torch.inference_mode():
                receive(Seen(here, routed.get("hidden", batch), plain, routed.chosen(batch), loaded.inner))  # type: ignore[misc]
        routed.run(batches, loaded)
        del loaded
        if receive is not None:
            end(here)
    return routed


def bytes_of_expert(found: LayerExperts, options: CalibrationOptions) -> int:
    """Bytes of one expert while statistics are taken: its weights, and the sums of both of its inputs."""
    sums = (columns * (columns if options.full(columns) else rotation_block(columns)) for columns in found.columns)
    return 4 * found.weights + 8 * sum(sums)


def _keep(
    options: CalibrationOptions, out: Path, file: str, number: int, groups: Sequence[Group], moments: Sequence[Moment],
    manifest: Manifest,
) -> None:  # fmt: skip
    """Write statistics of a layer, and note them."""
    both = zip(groups, moments, strict=True)
    # Not what a layer holds and does not call, as where it computes the same in another way.
    called = [(group, moment) for group, moment in both if group.expert is not None or moment.tokens]
    statistics = {group.key: moment.mean() for group, moment in called}
    flat = {key for key, value in statistics.items() if hessian.is_flat(value)}
    for key, value in statistics.items():
        problem = None
        if not np.isfinite(value).all():
            problem = "are NaN or infinite"
        elif key in flat and not key.endswith("]"):  # an expert may have seen no token; what all tokens pass cannot
            problem = "tell no column from another"
        if problem:
            what = f"gives inputs of layer {number} that {problem}"
            raise UserError(options.model, what, "repair the checkpoint or download it again", key)
    # Not beside the finished ones: safetensors writes under a name of its own, which a kill would leave.
    partial = out / _PARTIAL
    partial.mkdir(exist_ok=True)
    save_arrays(statistics, out / file, partial)
    for group, moment in called:
        for reader in group.readers:
            tokens = 0 if group.key in flat else moment.tokens
            manifest.entries[reader.entry] = Entry(file, group.key, tokens, group.norm)


def _layers_done(folder: Path, manifest: Manifest) -> int:
    """How many layers are finished."""
    files = {entry.file for entry in manifest.entries.values()}
    done = 0
    while f"layer-{done:04d}.safetensors" in files and (folder / f"layer-{done:04d}.safetensors").exists():
        done += 1
    return done
