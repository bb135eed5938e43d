"""An evaluation: quantize a model to every type, and compare each file with F16 on a text.

KL divergence against the F16 model is the main figure; on small models perplexity hardly moves. A result is cached by
the hash of all that decides it (model, text, tools, sources of this package, arguments), so an interrupted evaluation
goes on where it was, and a row that is asked for again is there at once.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tqdm import tqdm

from ..base.errors import UserError
from ..base.journal import sources, write_text
from ..calibrate.options import CalibrationOptions
from ..calibrate.pipeline import calibrate
from ..checkpoint import policy
from ..codec import native
from ..convert.options import ConvertOptions
from ..convert.pipeline import convert
from . import wikitext
from .rows import Row
from .tools import Tools

Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What to evaluate and where to keep things.

    Attributes:
        model: Hugging Face folder, or an F16 GGUF file.
        work: folder for quantized files, logs and cached results.
        patterns: keys of rows, with wildcards; empty for all.
        chunks: windows to score, -1 for the whole text; by default `make eval` for the bundled model ends well within
            half an hour.
        context: tokens of a window.
        threads: threads of the tools.
        keep: leave quantized files and log-probabilities in ``work``, and take those that are there: a file serves
            every text that is scored.
        text: what is scored; None for WikiText-2's test split.
        training: what importance matrix and calibration are made from; None for another split of WikiText-2.
        calibration_tokens: how many tokens of it calibrated rows see.
        imatrix_tokens: how many the importance matrix sees.
        trust_remote_code: Python code of the model folder may run.
    """

    model: Path
    work: Path
    patterns: tuple[str, ...] = ()
    chunks: int = 32
    context: int = 512
    threads: int = 2
    keep: bool = False
    text: Path | None = None
    training: Path | None = None
    calibration_tokens: int = 65536
    imatrix_tokens: int = 16384
    trust_remote_code: bool = False


def _file_digest(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()


def hash_of(*parts: object) -> str:
    """A short name for anything that JSON can write."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


class Evaluation:
    """One model under evaluation.

    Args:
        settings: what and where.

    Raises:
        UserError: the model, the text or the tools are missing.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tools = Tools.find(settings.threads)
        self.work = settings.work
        for folder in (self.work / "cache", self.work / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        self.text = self.work / "text.txt"
        self.text.write_text(wikitext.read(settings.text or wikitext.test_path()), encoding="utf-8", newline="\n")
        self.f16 = self._f16_file()
        # The model alone: statistics of it serve every text that is scored.
        self.model = hash_of(_file_digest(self.f16), self.tools.digest(), settings.context)
        self.common = hash_of(self.model, _file_digest(self.text), settings.chunks)
        self.base = self.work / f"base-{self.common}.kld"

    def _f16_file(self) -> Path:
        model = self.settings.model
        if model.is_file():
            return model
        if not model.is_dir():
            raise UserError(model, "no such file or folder", "give a Hugging Face folder or an F16 GGUF file")
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(model.iterdir()) if p.is_file()]
        trusted = ["trusted"] if self.settings.trust_remote_code else []
        key = hash_of(str(model.resolve()), files, sources("evaluate"), *trusted)
        path = self.work / f"f16-{key}.gguf"
        if not path.is_file():
            self._convert(path, outtype="f16")
        return path

    def _convert(self, out: Path, **options: Any) -> None:
        """Run the converter with its messages in a log; its errors come through."""
        with (self.work / "logs" / "convert.log").open("w") as log:
            options |= {"threads": self.settings.threads, "trust_remote_code": self.settings.trust_remote_code}
            convert(ConvertOptions.of(self.settings.model, out, **options), log)

    @cached_property
    def training(self) -> tuple[Path, str]:
        """The text that importance matrix and calibration are made from, with line ends as \\n, and its hash."""
        clean = self.work / "training.txt"
        source = self.settings.training or wikitext.training_path()
        clean.write_text(wikitext.read(source), encoding="utf-8", newline="\n")
        return clean, _file_digest(clean)

    def imatrix(self) -> Path:
        """The importance matrix of the F16 model, made if it is not there."""
        text, digest = self.training
        path = self.work / f"imatrix-{hash_of(self.model, digest, self.settings.imatrix_tokens)}.gguf"
        if not path.is_file():
            partial = path.with_name(f"partial-{path.name}")  # the tool chooses its format by the suffix
            windows = max(1, self.settings.imatrix_tokens // self.settings.context)
            arguments = ["-m", self.f16, "-f", text, "-o", partial, "--chunks", windows, "-c", self.settings.context,
                         "-t", self.settings.threads]  # fmt: skip
            self.tools.run("llama-imatrix", arguments, self.work / "logs" / "imatrix.log")
            partial.replace(path)
        return path

    def calibration(self) -> Path:
        """Second moments of the model's activations, collected if they are not there."""
        text, digest = self.training
        tokens = self.settings.calibration_tokens
        path = self.work / f"calibration-{hash_of(self.model, digest, tokens)}"
        options = CalibrationOptions(
            self.settings.model, [text], tokens=tokens, context=self.settings.context,
            trust_remote_code=self.settings.trust_remote_code,
        )  # fmt: skip
        calibrate(options, path)  # returns at once if the folder is complete
        return path

    def _making(self, row: Row) -> str:
        """Hash of all that decides a row's file."""
        package = sources("evaluate") if row.maker == "package" else ""
        statistics: tuple[object, ...] = ()
        if row.learns:
            statistics = (self.training[1], self.settings.imatrix_tokens, self.settings.calibration_tokens)
        fields = {k: v for k, v in asdict(row).items() if k not in ("key", "label", "how")}
        return hash_of(self.model, fields, package, statistics)

    def _row_path(self, row: Row) -> Path:
        return self.work / "cache" / f"{hash_of(self.common, self._making(row))}.json"

    def lacks(self, row: Row) -> str:
        """What a row needs that is not there; empty if it can run. The converter reads checkpoints, not GGUF files."""
        if row.maker == "package" and not self.settings.model.is_dir():
            return "the Hugging Face folder"
        if row.learns and not self._can_learn:
            return "a text to learn from (--training-text)"
        return ""

    @cached_property
    def _can_learn(self) -> bool:
        """Whether there is a training text. Without WikiText-2, a text of the user's own is scored all the same."""
        try:
            return bool(self.training)
        except UserError:
            if self.settings.text is None or self.settings.training is not None:
                raise
            return False

    def measure(self, row: Row) -> Result:
        """The result of a row, from the cache if it is there."""
        path = self._row_path(row)
        if path.is_file():
            return json.loads(path.read_text())
        base = self._base_result()
        result = self._quantize_and_score(row, base)
        write_json(path, result)
        return result

    def _base_result(self) -> Result:
        path = self.work / "cache" / f"{self.common}.json"
        if not (path.is_file() and self.base.is_file()):
            log = self.work / "logs" / "base.log"
            count = self.tools.log_probabilities(
                self.f16, self.text, self.base, self.settings.chunks, self.settings.context, log, self.settings.text
            )
            scored = count * (self.settings.context - 1 - self.settings.context // 2)
            write_json(path, {"chunks": count, "tokens": scored})
        return json.loads(path.read_text())

    def _quantize(self, row: Row, file: Path) -> None:
        if row.maker == "llama-quantize":
            matrix = ["--imatrix", self.imatrix()] if row.imatrix else []
            *flags, name = row.arguments
            arguments = [*flags, *matrix, self.f16, file, name, str(self.settings.threads)]
            self.tools.run("llama-quantize", arguments, self.work / "logs" / f"quantize-{row.key}.log")
        elif row.maker == "ggml":
            quantize_pure(self.f16, file, gguf.GGMLQuantizationType[row.arguments[0]], self.settings.threads)
        else:
            statistics: dict[str, Any] = {"calibration": self.calibration()} if row.calibrated else {}
            statistics |= {"imatrix": self.imatrix()} if row.imatrix else {}
            if row.sequential:
                statistics |= {
                    "calibrate": (self.training[0],), "tokens": self.settings.calibration_tokens,
                    "context": self.settings.context,
                }  # fmt: skip
            self._convert(file, **dict(row.options), **statistics)

    def _quantize_and_score(self, row: Row, base: Result) -> Result:
        file = self.f16 if row.maker == "none" else self.work / f"{row.key}-{self._making(row)[:8]}.gguf"
        partial = file.with_name(f"partial-{file.name}")
        try:
            if not file.is_file():
                self._quantize(row, partial)
                partial.replace(file)
            result = describe(file)
            # Two ways to the same bytes (llama-quantize and the converter, say) are scored once.
            scored = hash_of(self.common, result["content"], row.runtime, row.environment)
            same = self.work / "cache" / f"scored-{scored}.json"
            if not same.is_file():
                log = self.work / "logs" / f"{row.key}.log"
                figures = self.tools.divergence(
                    file, self.base, base["tokens"], self.settings.context, log, row.runtime, dict(row.environment)
                )
                write_json(same, figures)
            return {**result, **json.loads(same.read_text()), **base}
        finally:
            partial.unlink(missing_ok=True)
            if file != self.f16 and not self.settings.keep:
                file.unlink(missing_ok=True)

    def run(self, rows: Sequence[Row]) -> list[Result]:
        """Measure rows in order, with a progress bar; rows for which something is missing are left out, and said."""
        lacks = {row.key: self.lacks(row) for row in rows}
        possible = [row for row in rows if not lacks[row.key]]
        for what in dict.fromkeys(filter(None, lacks.values())):
            left = ", ".join(key for key, lack in lacks.items() if lack == what)
            print(f"note: left out, they need {what}: {left}", file=sys.stderr)
        results = []
        with tqdm(total=len(possible), unit="row", desc="eval") as bar:
            for row in possible:
                bar.set_postfix_str(row.key)
                facts = {
                    "key": row.key, "type": row.label, "how": row.how, "maker": row.maker, "arguments": row.arguments,
                    "options": dict(row.options), "runtime": row.runtime,
                }  # fmt: skip
                results.append({**facts, **self.measure(row)})
                bar.update()
        return results

    def clean(self) -> None:
        """Remove the log-probabilities, which are large, unless they are to be kept."""
        if not self.settings.keep:
            self.base.unlink(missing_ok=True)


def quantize_pure(
    source: Path, target: Path, qtype: gguf.GGMLQuantizationType, threads: int, *, keep: Collection[str] = ()
) -> None:
    """Write a GGUF file with every matrix in a type by ggml's own quantizer, as ``llama-quantize --pure`` would.

    Args:
        source: F16 GGUF file.
        target: file to write.
        qtype: any type that ggml quantizes without an importance matrix.
        threads: threads that quantize.
        keep: names of tensors that stay as they are.

    Raises:
        UserError: the library is not built, or a row is not whole blocks.
    """
    library = native.load()
    if library is None:
        raise UserError(native.library_name(), "is not built", f"run {native.build_command()}")
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{qtype.name}"])
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        wanted = tensor.tensor_type == gguf.GGMLQuantizationType.F16 and tensor.name not in keep
        if wanted and policy.may_quantize(tensor.name, shape, arch):
            try:
                data = library.quantize_type(np.asarray(tensor.data, dtype=np.float32), qtype, threads=threads)
            except ValueError as error:
                raise UserError(source, str(error), "leave the row out", tensor.name) from error
            writer.add_tensor(tensor.name, data, raw_dtype=qtype)
        else:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(path: Path) -> Result:
    """Sizes of a GGUF file: bytes, weights, bits per weight of the file and of its matrices, a hash of its tensors."""
    reader = gguf.GGUFReader(path)
    weights = bits = quantized = 0
    content = hashlib.sha256()
    for tensor in sorted(reader.tensors, key=lambda t: t.name):  # llama-quantize writes them in another order
        weights += int(tensor.n_elements)
        content.update(f"{tensor.name} {tensor.tensor_type}".encode())
        content.update(tensor.data.tobytes())
        if len(tensor.shape) > 1:
            quantized += int(tensor.n_elements)
            bits += 8 * int(tensor.n_bytes)
    size = path.stat().st_size
    return {
        "bytes": size, "weights": weights, "file_bits": 8 * size / weights, "tensor_bits": bits / max(quantized, 1),
        "content": content.hexdigest(),
    }  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON in one step."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def evaluate(settings: Settings, groups: dict[str, Sequence[Row]]) -> dict[str, list[Result]]:
    """Measure groups of rows, those that ``settings.patterns`` names; each group is a table."""
    wanted = settings.patterns
    chosen = {
        title: [row for row in rows if not wanted or any(fnmatch.fnmatch(row.key, p) for p in wanted)]
        for title, rows in groups.items()
    }
    if not any(chosen.values()):
        known = ", ".join(row.key for rows in groups.values() for row in rows)
        raise UserError(settings.model, f"no row is called {' or '.join(wanted)}", f"take some of: {known}")
    evaluation = Evaluation(settings)
    results = {title: evaluation.run(rows) for title, rows in chosen.items() if rows}
    evaluation.clean()
    return results
