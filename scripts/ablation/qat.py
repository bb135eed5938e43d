#!/usr/bin/env python3
"""RCP's quantizers on a model, before and after training, beside ITQ3_S and TQ2_0 trained the same way.

    scripts/ablation/qat.py models/demo-llama --text FILE...                   # writes build/qat
    scripts/ablation/qat.py models/demo-llama --text FILE... --results docs    # and the section of docs/results.md

Every matrix of the layers reads 4-bit activations (symmetric, per token, clipped at 0.9), keys and values are cached in
4 bits (asymmetric, clipped at 0.95); embedding and output head stay. A rotated matrix reads rotated activations, norm
gains folded into it first. PTQ is the start: clipping by grid search, equal thirds or NF3 around 0, nearest codes.
QAT trains weights, clipping and partition together with CAKLD, the model itself being the teacher.

Interrupt it at any time; the same command goes on from the rows that are done.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers.models.llama import modeling_llama

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import report_errors  # noqa: E402
from gguf_itq3s.calibrate.options import BUNDLED, CalibrationOptions  # noqa: E402
from gguf_itq3s.calibrate.text import windows  # noqa: E402
from gguf_itq3s.checkpoint.patches import replaced_in  # noqa: E402
from gguf_itq3s.distill.codes import Coded, encoder  # noqa: E402
from gguf_itq3s.distill.losses import confidence_of, divergence  # noqa: E402
from gguf_itq3s.distill.optimizer import Adam, Group  # noqa: E402
from gguf_itq3s.distill.pipeline import rate  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from scripts.ablation import rcp, study  # noqa: E402
from scripts.papers.reference import Reference  # noqa: E402

#: Windows of the training text that say the second moments of the grid search, and the teacher's confidence.
_SAMPLE: Final = 32


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        weights: ``float``, ``rcp-2``, ``rcp-3``, ``itq3_s`` or ``tq2_0``.
        rotated: whether inputs and weights are rotated.
        partition: whether the partition is learned (RCP).
        trained: whether it is trained.
        cache: bits of the cached keys and values, 16 for none.
    """

    weights: str
    rotated: bool
    partition: bool = False
    trained: bool = False
    cache: int = 4

    @property
    def bits(self) -> float:
        """Of a weight; RCP's groups of 128 have two scales and two parameters of the partition in float16."""
        own = {"float": 16.0, "itq3_s": 3.125, "tq2_0": 2.0625}
        if self.weights in own:
            return own[self.weights]
        bits = int(self.weights[-1])
        learned = (2 if bits == 2 else 1) if self.partition else 0
        return bits + 16 * (2 + learned) / rcp.GROUP


ROWS: Final = (
    Row("float", False), Row("float", True),
    Row("rcp-2", False), Row("rcp-2", True), Row("rcp-2", False, False, True), Row("rcp-2", True, False, True),
    Row("rcp-2", False, True, True), Row("rcp-2", True, True, True),
    Row("rcp-3", False), Row("rcp-3", True), Row("rcp-3", False, False, True), Row("rcp-3", True, False, True),
    Row("rcp-3", True, True, True), Row("rcp-3", True, True, True, 16),
    Row("tq2_0", False), Row("tq2_0", False, False, True), Row("itq3_s", True), Row("itq3_s", True, False, True),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What decides a result besides the model, the texts and the row."""

    steps: int
    batch: int
    length: int
    tokens: int
    chunks: int
    lr: float
    clip_lr: float


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights that reads 4-bit activations.

    Args:
        linear: what it stands for.
        row: how it is quantized.
    """

    def __init__(self, linear: nn.Linear, row: Row) -> None:
        super().__init__()
        self.row, self.bias = row, linear.bias
        weight = linear.weight.detach()
        # ITQ3_S rotates by itself; its latent weights are those of the model.
        self.within = row.weights == "itq3_s"
        self.weight = nn.Parameter(rcp.rotate(weight) if row.rotated and not self.within else weight.clone())
        self.quantizer: nn.Module = nn.Identity()
        if row.weights == "rcp-2":
            self.quantizer = rcp.TwoBits(self.weight.detach(), row.partition)
        elif row.weights == "rcp-3":
            self.quantizer = rcp.ThreeBits(self.weight.detach(), row.partition)
        elif row.weights != "float":
            self.quantizer = Coded(self.weight.detach())
        self.moment: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.row.rotated:
            x = rcp.rotate(x)
        if self.moment is not None:
            flat = x.detach().flatten(0, -2).unflatten(1, (-1, rcp.GROUP)).transpose(0, 1)
            self.moment += flat.transpose(1, 2) @ flat
        weight = self.quantizer(self.weight)
        if self.within:
            weight = rcp.rotate(weight)
        return nn.functional.linear(rcp.quantize_activation(x), weight, self.bias)

    def collect(self) -> None:
        """Add up the second moments of the inputs of each group from now on."""
        self.moment = torch.zeros(self.weight.shape[1] // rcp.GROUP, rcp.GROUP, rcp.GROUP)

    def start(self) -> None:
        """Find the start values, with the moments that were collected."""
        if isinstance(self.quantizer, rcp.Clipped):
            assert self.moment is not None
            self.quantizer.search(self.weight.detach(), self.moment)
        self.moment = None
        self.encode()

    def encode(self) -> None:
        """Encode the weights anew, where the format is a code."""
        if isinstance(self.quantizer, Coded):
            self.quantizer.encode(self.weight, encoder(self.row.weights, "default", 1))


def quantized(model: Any, gains: dict[str, np.ndarray], row: Row) -> tuple[Any, list[QuantizedLinear]]:
    """A copy of a model with quantized layers; norm gains are folded where it is rotated."""
    student = copy.deepcopy(model).requires_grad_(False)
    layers = []
    for name, module in list(student.named_modules()):
        if not isinstance(module, nn.Linear) or ".layers." not in f".{name}":
            continue
        if row.rotated and name in gains:
            module.weight.mul_(torch.from_numpy(gains[name]))
        layers.append(QuantizedLinear(module, row))
        parent, _, own = name.rpartition(".")
        setattr(student.get_submodule(parent), own, layers[-1])
    if row.rotated:
        for name, parameter in student.named_parameters():
            if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
                parameter.fill_(1)
    return student, layers


@contextmanager
def cache_bits(student: Any, bits: int) -> Iterator[None]:
    """Within, keys (after their rotary positions) and values are what a cache of so many bits gives back."""
    if bits == 16:
        yield
        return
    own = modeling_llama.apply_rotary_pos_emb

    def positions(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = own(q, k, *args, **kwargs)
        return q, rcp.quantize_cache(k, bits)

    def values(module: nn.Module, _: Any, out: torch.Tensor) -> torch.Tensor:
        head = student.config.head_dim
        return rcp.quantize_cache(out.unflatten(-1, (-1, head)), bits).flatten(-2)

    handles = [m.register_forward_hook(values) for name, m in student.named_modules() if name.endswith(".v_proj")]
    with replaced_in(modeling_llama, "apply_rotary_pos_emb", positions):
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def measure(reference: Reference, row: Row, texts: torch.Tensor, settings: Settings) -> dict[str, float]:
    """Quantize, train where the row says so, and score."""
    teacher = reference.model.requires_grad_(False)
    student, layers = quantized(teacher, reference.norm_gains(), row)
    with torch.no_grad():
        for layer in layers:
            layer.collect()
        for part in texts[:: max(1, len(texts) // _SAMPLE)].split(8):
            student(input_ids=part)
        for layer in layers:
            layer.start()
    if row.trained:
        train(teacher, student, layers, row, texts, settings)
    scored = copy.copy(reference)
    scored.model = student
    # The teacher's log-probabilities are kept, so only the student runs in here.
    with cache_bits(student, row.cache):
        return reference.divergence(scored).to_json()


def train(
    teacher: Any, student: Any, layers: list[QuantizedLinear], row: Row, texts: torch.Tensor, settings: Settings
) -> None:
    """Weights, clipping and partition together; codes are encoded anew every ten steps."""
    weights = {f"{index}": layer.weight for index, layer in enumerate(layers)}
    clipping = {
        f"{index} {name}": parameter
        for index, layer in enumerate(layers)
        for name, parameter in layer.quantizer.named_parameters()
        if parameter.requires_grad
    }
    adam = Adam([Group(weights, settings.lr), Group(clipping, settings.clip_lr)], "float32")
    with torch.no_grad():
        sample = texts[:: max(1, len(texts) // _SAMPLE)]
        confidence = float(confidence_of(teacher(input_ids=sample).logits, sample))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(texts)))
    for index in range(settings.steps):
        if index % 10 == 0:
            for layer in layers:
                layer.encode()
        places = torch.arange(index * settings.batch, (index + 1) * settings.batch) % len(order)
        part = texts[order[places]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(input_ids=part).logits
            with cache_bits(student, row.cache):
                own = student(input_ids=part).logits
        divergence(own, wanted, "cakld", confidence).backward()
        adam.step(rate(index, settings.steps))
    for layer in layers:
        layer.encode()


def label(row: Row) -> str:
    """The row's first cells."""
    names = {"float": "float", "rcp-2": "RCP, 2 bits", "rcp-3": "RCP, 3 bits", "itq3_s": "ITQ3_S", "tq2_0": "TQ2_0"}
    return names[row.weights]


def table(results: dict[Row, dict[str, float]], base: float) -> str:
    """The table as Markdown."""
    lines = [
        [label(row), f"{row.bits:.4g}", "yes" if row.rotated else "", "yes" if row.partition else "",
         "QAT" if row.trained else "PTQ", str(row.cache), f"{found['perplexity']:.1f}", f"{found['mean_kld']:.4f}"]
        for row, found in results.items()
    ]  # fmt: skip
    header = ["weights", "bits", "rotated", "partition", "", "cache", "PPL", "mean KLD"]
    return f"Perplexity of the float model with 16-bit activations: {base:.1f}\n\n{report.markdown(header, lines)}"


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="Hugging Face folder of a model with Llama's names")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[BUNDLED], help="to train on (default: the bundled mix)"
    )
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=262144, help="of the text (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of weights, in their RMS (default: %(default)g)")
    parser.add_argument("--clip-lr", type=float, default=1e-2, help="clipping, partition (default: %(default)g)")
    parser.add_argument("--chunks", type=int, default=16, help="windows of 512 tokens to score (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "qat", help="cached results")
    parser.add_argument("--results", type=Path, help="folder of results.md to update")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    args.work_dir.mkdir(parents=True, exist_ok=True)
    options = CalibrationOptions(args.model_dir, args.text, tokens=settings.tokens, context=settings.length)
    texts = windows(options, 512)
    test = wikitext.read(wikitext.test_path())
    sources: tuple[Any, ...] = (measure, train, quantized, cache_bits, QuantizedLinear, rcp)
    common = study.digest(
        study.model_digest(args.model_dir), test, texts.tobytes(), json.dumps(asdict(settings)),
        *(inspect.getsource(part) for part in sources),
    )  # fmt: skip
    reference = Reference(args.model_dir, test, settings.chunks)
    results: dict[Row, dict[str, float]] = {}
    for row in tqdm(ROWS, unit="row"):
        path = args.work_dir / f"{study.digest(common, json.dumps(asdict(row)))}.json"
        if not path.is_file():
            study.write(path, measure(reference, row, torch.from_numpy(texts), settings))
        results[row] = json.loads(path.read_text())
        tqdm.write(f"{row} {results[row]['perplexity']:.2f} {results[row]['mean_kld']:.4f}", file=sys.stderr)
    found = table(results, reference.original.perplexity)
    print(found)
    if args.results:
        report.replace_section(args.results / "results.md", "qat", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
