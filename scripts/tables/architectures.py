#!/usr/bin/env python3
"""What becomes of each architecture: random models through this converter and llama.cpp's own, as a Markdown table.

    scripts/tables/architectures.py                                print it
    scripts/tables/architectures.py --update docs/architectures.md put it between the marks in the file
    scripts/tables/architectures.py --only Qwen3ForCausalLM        only these

Every model gets the same SentencePiece tokenizer, in both converters: which tokenizer belongs to a model is found out
by code of llama.cpp's that is not touched here.
"""

from __future__ import annotations

import argparse
import filecmp
import io
import json
import logging
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import gguf
import numpy as np
import sentencepiece
import torch
import transformers
from tqdm import tqdm

from gguf_itq3s import upstream
from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, report_errors
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint import channels, loadable, patches
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.checkpoint.request import Request
from gguf_itq3s.checkpoint.rescaling import Equalization, plan_tensors
from gguf_itq3s.codec.family import DEFAULT
from gguf_itq3s.convert import statistics
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.evaluate.tools import Tools
from gguf_itq3s.rounding.encode import KEPT_TYPES
from scripts.tables.layer_errors import layer_errors
from scripts.tables.random_models import MODELS, WITHOUT_MTP, make

TEXT: Final = Path(__file__).resolve().parents[2] / "tests" / "data" / "novel.txt"


@dataclass(frozen=True)
class Row:
    """What becomes of one model.

    Attributes:
        name: class of the model in Transformers.
        arch: ``general.architecture``; empty where the model cannot be converted.
        upstream: what llama.cpp's converter says, empty where it converts the model.
        ours: what this one says, likewise.
        same: whether both F16 files are the same, byte for byte.
        share: of the weights that become ITQ3_S in a file of that type.
        loads: whether llama.cpp's loader takes its tensors and metadata.
        rescaled: the kinds of channels by which it can be rescaled, as :func:`rescaled` finds them.
        calibrated: of the quantized weights of its layers, the share that is calibrated.
        fisher: whether gradients were taken too.
        error: behind the layers of the calibrated file on other text, over that of nearest rounding, the median.
        left: why some or all are not.
    """

    name: str
    arch: str = ""
    upstream: str = ""
    ours: str = ""
    same: bool = False
    share: float = 0.0
    loads: bool = False
    rescaled: str = ""
    calibrated: float = 0.0
    fisher: bool = False
    error: float = math.nan
    left: str = ""


def train_tokenizer(folder: Path) -> Path:
    """A SentencePiece tokenizer of 512 pieces in Llama's style."""
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        input=str(TEXT), model_writer=model, model_type="bpe", vocab_size=512, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def one_tokenizer(model: Path) -> Iterator[Any]:
    """Within, the architecture of a model takes the SentencePiece tokenizer whatever its own is; upstream's class."""
    conversion = upstream.load_conversion()
    hparams = conversion.ModelBase.load_hparams(model, False)
    model_class: Any = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))

    def set_vocab(reader: Any) -> None:
        reader._set_vocab_sentencepiece()
        if model_class.__module__.endswith(".bert"):  # as its own does
            reader.gguf_writer.add_token_type_count(reader.hparams.get("type_vocab_size", 1))

    with patches.replaced_in(model_class, "set_vocab", set_vocab):
        yield model_class


def compare(name: str, folder: Path, tokenizer: Path) -> Row:
    """Convert a model by both converters.

    Args:
        name: a key of :data:`MODELS`.
        folder: an empty one, for the model and its files.
        tokenizer: what :func:`train_tokenizer` returns.
    """
    model = make(name, folder / "model", tokenizer)
    no_nextn = name in WITHOUT_MTP
    theirs, ours, small = folder / "theirs.gguf", folder / "ours.gguf", folder / "small.gguf"
    with one_tokenizer(model) as model_class:
        try:
            with torch.inference_mode(), patches.replaced_in(model_class, "no_mtp", no_nextn):
                model_class(model, gguf.LlamaFileType.MOSTLY_F16, theirs).write()
            said = ""
        except Exception as error:  # whatever the code of an architecture raises
            said = f"{type(error).__name__}: {error}".strip(": ")
        try:
            convert(ConvertOptions.of(model, ours, outtype="f16", no_nextn=no_nextn), messages=io.StringIO())
            done = convert(ConvertOptions.of(model, small, dry_run=True, no_nextn=no_nextn), messages=io.StringIO())
        except UserError as error:
            return Row(name, upstream=said, ours=f"{error.tensor}: {error.what}" if error.tensor else error.what)
        kinds = rescaled(model, folder, no_nextn=no_nextn)
        fit = calibrated(model, folder, small, no_nextn=no_nextn)
    reader = gguf.GGUFReader(ours)
    arch = reader.fields["general.architecture"].contents()
    weights = sum(row.weights for row in done.rows)
    share = sum(row.weights for row in done.rows if row.type == DEFAULT.name) / weights
    same = not said and filecmp.cmp(theirs, ours, shallow=False)
    return Row(name, arch, said, "", same, share, done.check == loadable.BY_LOADER, kinds, *fit)


def random_factors(found: Iterable[channels.Channels], rng: np.random.Generator) -> Equalization:
    """Channels multiplied by random factors, of 2^-2.5 to 2^2.5."""
    every = tuple(found)
    return Equalization(every, {one.source: rng.integers(-20, 21, one.shape).astype(np.int8) for one in every})


def rescaled(model: Path, folder: Path, *, no_nextn: bool) -> str:
    """By which kinds of channels a model can be rescaled: llama.cpp predicts the same with any factors.

    For comparison the sources alone are multiplied, which it must notice: where it does not, nothing is proved.
    """
    plain, other, base, log = (folder / name for name in ("plain.gguf", "other.gguf", "base", "log"))
    convert(ConvertOptions.of(model, plain, outtype="f32", no_nextn=no_nextn), messages=io.StringIO())
    checkpoint = open_checkpoint(model, request=Request(no_nextn=no_nextn), messages=io.StringIO())
    with patches.replaced_in(channels, "PROVED", {checkpoint.model.arch: channels.KINDS}):
        every = plan_tensors(checkpoint).channels.values()
    if not every:
        return ""
    tools, context = Tools.find(2), 128
    try:
        tools.log_probabilities(plain, TEXT, base, 4, context, log)
    except UserError:  # no model that predicts tokens
        return ""
    rng = np.random.default_rng(0)

    def divergence(found: Sequence[channels.Channels]) -> float:
        equalization = random_factors(found, rng)
        with patches.replaced_in(statistics, "rescaling_of", lambda *_: equalization):
            options = ConvertOptions.of(model, other, outtype="f32", equalize=True, no_nextn=no_nextn)
            convert(options, messages=io.StringIO())
        return abs(float(tools.divergence(other, base, context, log)["mean_kld"]))

    kinds = []
    for kind in channels.KINDS:
        if found := [one for one in every if one.kind == kind]:
            right, wrong = divergence(found), divergence([replace(one, readers=()) for one in found])
            kinds += [kind] * (wrong > 1e-4 and right <= max(1e-6, wrong / 1000))
    if lost := set(channels.PROVED.get(checkpoint.model.arch, ())).difference(kinds):
        raise AssertionError(f"{checkpoint.model.arch}: channels.PROVED has {', '.join(lost)}, which nothing shows")
    return ", ".join(kinds)


def calibrated(model: Path, folder: Path, small: Path, *, no_nextn: bool) -> tuple[float, bool, float, str]:
    """What ``--calibrate`` does to a model, as :class:`Row` has it: calibrated, fisher, error, left."""
    text = TEXT.read_text()
    texts = folder / "one.txt", folder / "other.txt"
    for path, part in zip(texts, (text[: len(text) // 2], text[len(text) // 2 :]), strict=True):
        path.write_text(part)
    # Nothing should make up for the embedding.
    both: dict[str, Any] = {"effort": "fast", "no_nextn": no_nextn, "token_embedding_type": "f16"}
    run: dict[str, Any] = {"tokens": 1024, "context": 64, "batch": 4}
    best, failed = folder / "best.gguf", ""
    for fisher in (True, False):
        messages = io.StringIO()
        try:
            convert(ConvertOptions.of(model, best, calibrate=(texts[0],), fisher=fisher, **run, **both), messages)
            break
        except UserError as error:
            failed = failed or error.what
    else:
        return 0.0, False, math.nan, failed
    convert(ConvertOptions.of(model, small, **both), messages)
    checkpoint = open_checkpoint(model, request=Request(no_nextn=no_nextn), messages=messages)
    options = CalibrationOptions(model, [texts[1]], context=64, tokens=512)
    layered = LayeredModel(options, checkpoint)
    share, errors = layer_errors(layered, windows(options, layered.context), [best, small])
    quantized = {tensor.name for tensor in gguf.GGUFReader(best).tensors if tensor.tensor_type not in KEPT_TYPES}
    left = layered.layout.note(quantized.__contains__)
    return share, fisher, float(np.median(errors[0] / errors[1])), "; ".join(filter(None, (left, failed)))


def table(rows: Sequence[Row]) -> str:
    """The table of what is converted, and a second one of what is not."""
    good = sorted((row for row in rows if row.arch), key=lambda row: (row.arch, row.name))
    shares, errors = [row.share for row in good], [row.error for row in good if row.error == row.error]
    lines = [
        f"{len(good)} architectures of Transformers {transformers.__version__} by random models of two layers: "
        f"{sum(row.same for row in good)} F16 files equal those of llama.cpp's converter byte for byte, "
        f"{sum(row.loads for row in good)} ITQ3_S files are taken by llama.cpp's loader, and {min(shares):.0%} to "
        f"{max(shares):.0%} of their weights are in ITQ3_S. With `--calibrate`, 90% or more of the layers' quantized "
        f"weights are calibrated in {sum(row.calibrated >= 0.9 for row in good)} of them; on other text, the error "
        f"behind a layer is {median(errors or [math.nan]):.2f} of that of nearest rounding, in the median.\n",
        report.markdown(
            ["model class", "llama.cpp's architecture", "can be rescaled", "calibrated", "error / nearest", "--fisher"],
            [
                [
                    row.name
                    + " (`--no-nextn`)" * (row.name in WITHOUT_MTP)
                    + ("" if row.same else f" (F16 not upstream's: {row.upstream or 'another file'})")
                    + ("" if row.loads else " (not loaded)"),
                    row.arch,
                    row.rescaled,
                    f"{row.calibrated:.0%}",
                    "" if row.error != row.error else f"{row.error:.2f}",
                    "yes" if row.fisher else "",
                ]
                for row in good
            ],
            left=3,
        ),
    ]
    if left := [[row.name, row.left] for row in good if row.left]:
        lines += ["\nNot calibrated, in whole or in part:\n", report.markdown(["model class", "why"], left, left=2)]
    if bad := [row for row in rows if not row.arch]:
        lines.append("\nNot converted, as Transformers of this version writes their config.json:\n")
        found = [
            [row.name, row.ours, row.upstream or "converts it, to a file that llama.cpp does not load"] for row in bad
        ]
        lines.append(report.markdown(["model class", "this converter says", "llama.cpp's converter"], found))
    return "\n".join(lines) + "\n"


@report_errors
def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks in this file")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="CLASS")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = train_tokenizer(Path(scratch) / "tokenizer")
        for name in tqdm(args.only, unit=" models"):
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                rows.append(compare(name, Path(folder), tokenizer))
    if args.update is None:
        print(table(rows), end="")
    else:
        report.replace_section(args.update, "architectures", table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
