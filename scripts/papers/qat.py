#!/usr/bin/env python3
"""RCP ("Rotate, Clip, and Partition", Choi, Song, Lim, Yoo) before and after training, beside ITQ3_S and TQ2_0.

    scripts/papers/qat.py models/demo-llama --update scripts/papers/README.md

Every matrix of the layers reads 4-bit activations (symmetric, per token, clipped at 0.9), keys and values are cached in
4 bits (asymmetric, clipped at 0.95); embedding and output head stay. A rotated matrix reads rotated activations, norm
gains folded into it first. Weights are quantized in groups of 128 of a row. With learnable clipping (LWC) a group's
range is from ``sigma(beta) min(W)`` to ``sigma(gamma) max(W)``; with learnable partition (LDP) the 2-bit thresholds and
the centre of the asymmetric NF3 move as well. PTQ is the start: clipping by grid search, equal thirds or NF3 around 0,
nearest codes. QAT trains weights, clipping and partition together with CAKLD, the model itself being the teacher.
Rows that are done are remembered.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers.models.llama import modeling_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import positive, report_errors
from gguf_itq3s.calibrate.options import BUNDLED, CalibrationOptions
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.patches import replaced_in
from gguf_itq3s.codec.transform import BLOCK, FloatArray, hadamard_matrix
from scripts.papers.coding import Coded, adam, confidence_of, divergence, layer_matrices
from scripts.papers.reference import Reference, remembered, test_text

GROUP: Final = 128
#: Normal-float levels of 3 bits, asymmetric around 0 (BitDistiller, arXiv 2402.10631).
NF3: Final = (-1.0, -0.5350227, -0.2469314, 0.0, 0.1833375, 0.3819939, 0.6229857, 1.0)
#: Shares of a group's extremes that the grid search tries, for either end.
GRID: Final = (1.0, 0.85, 0.7, 0.55, 0.4)
# sigma of it is 1 in float32's eyes no more: the range can still learn to grow.
_WHOLE: Final = 0.98


def step(x: torch.Tensor) -> torch.Tensor:
    """1 where x is positive, else 0; its gradient is the identity's."""
    return (x > 0).to(x.dtype) + (x - x.detach())


def round_through(x: torch.Tensor) -> torch.Tensor:
    """Rounding whose gradient is the identity's."""
    return x + (x.round() - x).detach()


def logit(share: float | torch.Tensor) -> torch.Tensor:
    """The inverse of the logistic function, of shares within (0, 1)."""
    return torch.logit(torch.as_tensor(share, dtype=torch.float32).clamp(1 - _WHOLE, _WHOLE))


def groups(weight: torch.Tensor) -> torch.Tensor:
    """(rows, n) -> (rows, n / 128, 128)."""
    return weight.unflatten(1, (-1, GROUP))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The normalised Walsh-Hadamard transform of runs of 256 values of the last axis; its own inverse."""
    matrix = torch.from_numpy(hadamard_matrix(BLOCK)).to(x.dtype)
    return (x.unflatten(-1, (-1, BLOCK)) @ matrix).flatten(-2)


class Clipped(nn.Module):
    """The range of each group, learnable: beta and gamma, (rows, groups, 1) each, start at a share of the extremes.

    Args:
        weight: (rows, n), n a multiple of 128.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        shape = (*groups(weight).shape[:2], 1)
        self.beta = nn.Parameter(logit(_WHOLE).expand(shape).clone())
        self.gamma = nn.Parameter(logit(_WHOLE).expand(shape).clone())

    def ends(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower end and width of the range of each group, (rows, groups, 1); the width is positive."""
        low = self.beta.sigmoid() * weight.amin(-1, keepdim=True)
        high = self.gamma.sigmoid() * weight.amax(-1, keepdim=True)
        return low, (high - low).clamp_min(1e-12)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def search(self, weight: torch.Tensor, moment: torch.Tensor) -> None:
        """Start at the shares of the extremes with the least error of the products, group by group.

        The paper's |Q(W_c) X - W_c X|^2 would be least where everything is clipped; here the error is that of the
        product with the weights themselves, |Q(W) X - W X|^2.

        Args:
            weight: (rows, n).
            moment: second moment of the inputs of each group, (n / 128, 128, 128).
        """
        best = torch.full(self.beta.shape, math.inf)
        found = [self.beta.clone(), self.gamma.clone()]
        for low in GRID:
            for high in GRID:
                self.beta.fill_(logit(low).item())
                self.gamma.fill_(logit(high).item())
                error = groups(self(weight) - weight).transpose(0, 1)  # groups first
                cost = ((error @ moment) * error).sum(-1).transpose(0, 1)[..., None]
                better = cost < best
                best = torch.where(better, cost, best)
                found = [
                    torch.where(better, own, kept) for own, kept in zip((self.beta, self.gamma), found, strict=True)
                ]
        self.beta.copy_(found[0])
        self.gamma.copy_(found[1])
        self.start(weight)

    def start(self, weight: torch.Tensor) -> None:
        """Set what depends on the range."""


class TwoBits(Clipped):
    """Four levels of each group, the thresholds between them learnable where ``partition`` says so."""

    def __init__(self, weight: torch.Tensor, partition: bool) -> None:
        super().__init__(weight)
        # Equal thirds: s1 = logit(1/3), s2 = 0.
        self.s1 = nn.Parameter(logit(1 / 3).expand(self.beta.shape).clone(), requires_grad=partition)
        self.s2 = nn.Parameter(torch.zeros_like(self.beta), requires_grad=partition)

    def partition(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The three thresholds and the four points, as shares of the range."""
        p1 = self.s1.sigmoid()
        p2, p3 = (1 - p1) * self.s2.sigmoid(), (1 - p1) * (1 - self.s2.sigmoid())
        t1 = p1 / 2
        t2 = t1 + (p1 + p2) / 2
        t3 = t2 + (p2 + p3) / 2
        return [t1, t2, t3], [torch.zeros_like(t1), (t1 + t2) / 2, (t2 + t3) / 2, torch.ones_like(t1)]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        grouped = groups(weight)
        low, width = self.ends(grouped)
        place = ((grouped - low) / width).clamp(0, 1)
        thresholds, points = self.partition()
        share = points[0]
        for index, threshold in enumerate(thresholds):
            share = share + (points[index + 1] - points[index]) * step(place - threshold)
        return (low + width * share).flatten(1)


class ThreeBits(Clipped):
    """Asymmetric NF3: eight levels around a centre, a scale for either side; the centre is learnable with partition.

    Without, it is 0, which the range of a group always holds (AFPQ, arXiv 2311.01792).
    """

    def __init__(self, weight: torch.Tensor, partition: bool) -> None:
        super().__init__(weight)
        self.s1 = nn.Parameter(torch.zeros_like(self.beta), requires_grad=partition)
        self.learns = partition
        self.start(weight)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def start(self, weight: torch.Tensor) -> None:
        low, width = self.ends(groups(weight))
        self.s1.copy_(logit(-low / width))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        grouped = groups(weight)
        low, width = self.ends(grouped)
        centre = low + width * self.s1.sigmoid() if self.learns else torch.zeros_like(low)
        below, above = (centre - low).abs().clamp_min(1e-12), (low + width - centre).abs().clamp_min(1e-12)
        offset = grouped - centre
        scale = torch.where(offset < 0, below, above)
        place = (offset / scale).clamp(-1, 1)
        levels = torch.tensor(NF3, dtype=weight.dtype)
        nearest = levels[torch.bucketize(place.detach(), (levels[1:] + levels[:-1]) / 2)]
        return (centre + scale * (place + (nearest - place).detach())).flatten(1)


def quantize_activation(x: torch.Tensor, bits: int = 4, clip: float = 0.9) -> torch.Tensor:
    """Symmetric uniform, one scale a token, clipped at a share of the largest magnitude; the gradient passes."""
    top = 2 ** (bits - 1) - 1
    scale = (clip * x.detach().abs().amax(-1, keepdim=True) / top).clamp_min(1e-12)
    return x + ((x / scale).round().clamp(-top - 1, top) * scale - x).detach()


def quantize_cache(x: torch.Tensor, bits: int = 4, clip: float = 0.95, group: int = GROUP) -> torch.Tensor:
    """Asymmetric uniform, groups of 128 of the last axis or all of a shorter one; the gradient passes."""
    size = min(group, x.shape[-1])
    parts = x.detach().unflatten(-1, (-1, size))
    low, high = clip * parts.amin(-1, keepdim=True), clip * parts.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    coded = ((parts - low) / scale).round().clamp(0, 2**bits - 1) * scale + low
    return x + (coded.flatten(-2) - x).detach()


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
        return bits + 16 * (2 + learned) / GROUP


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

    steps: int = 200
    batch: int = 8
    lr: float = 3e-3
    clip_lr: float = 1e-2


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
        self.weight = nn.Parameter(rotate(weight) if row.rotated and not self.within else weight.clone())
        self.quantizer: nn.Module = nn.Identity()
        if row.weights == "rcp-2":
            self.quantizer = TwoBits(self.weight.detach(), row.partition)
        elif row.weights == "rcp-3":
            self.quantizer = ThreeBits(self.weight.detach(), row.partition)
        elif row.weights != "float":
            self.quantizer = Coded(self.weight.detach(), row.weights)
        self.moment: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.row.rotated:
            x = rotate(x)
        if self.moment is not None:
            flat = x.detach().flatten(0, -2).unflatten(1, (-1, GROUP)).transpose(0, 1)
            self.moment += flat.transpose(1, 2) @ flat
        weight = self.quantizer(self.weight)
        if self.within:
            weight = rotate(weight)
        return nn.functional.linear(quantize_activation(x), weight, self.bias)

    def collect(self) -> None:
        """Add up the second moments of the inputs of each group from now on."""
        self.moment = torch.zeros(self.weight.shape[1] // GROUP, GROUP, GROUP)

    def start(self) -> None:
        """Find the start values, with the moments that were collected."""
        if isinstance(self.quantizer, Clipped):
            assert self.moment is not None
            self.quantizer.search(self.weight.detach(), self.moment)
        self.moment = None
        self.encode()

    def encode(self) -> None:
        """Encode the weights anew, where the format is a code."""
        if isinstance(self.quantizer, Coded):
            self.quantizer.encode(self.weight)


def quantized(model: Any, gains: dict[str, FloatArray], row: Row) -> tuple[Any, list[QuantizedLinear]]:
    """A copy of a model with quantized layers; norm gains are folded where it is rotated."""
    student = copy.deepcopy(model).requires_grad_(False)
    layers = []
    for name, module in layer_matrices(student).items():
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
        return q, quantize_cache(k, bits)

    def values(module: nn.Module, _: Any, out: torch.Tensor) -> torch.Tensor:
        head = student.config.head_dim
        return quantize_cache(out.unflatten(-1, (-1, head)), bits).flatten(-2)

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
        return reference.divergence(scored)


def train(
    teacher: Any, student: Any, layers: list[QuantizedLinear], row: Row, texts: torch.Tensor, settings: Settings
) -> None:
    """Weights, clipping and partition together; codes are encoded anew every ten steps."""
    clipping = [p for layer in layers for p in layer.quantizer.parameters() if p.requires_grad]
    optimizer, schedule = adam(
        [([layer.weight for layer in layers], settings.lr), (clipping, settings.clip_lr)], settings.steps
    )
    with torch.no_grad():
        sample = texts[:: max(1, len(texts) // _SAMPLE)]
        confidence = confidence_of(teacher(input_ids=sample).logits, sample)
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
        divergence(own, wanted, confidence).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for layer in layers:
        layer.encode()


#: What the weights of a row are called.
NAMES: Final = {
    "float": "float", "rcp-2": "RCP, 2 bits", "rcp-3": "RCP, 3 bits", "itq3_s": "ITQ3_S", "tq2_0": "TQ2_0"
}  # fmt: skip


def table(results: dict[Row, dict[str, float]], base: float) -> str:
    """The table as Markdown; ``base`` is the perplexity of the float model with 16-bit activations."""
    lines = [
        [NAMES[row.weights], f"{row.bits:.4g}", "yes" if row.rotated else "", "yes" if row.partition else "",
         "QAT" if row.trained else "PTQ", str(row.cache), f"{found['perplexity']:.1f}", f"{found['mean_kld']:.4f}"]
        for row, found in results.items()
    ]  # fmt: skip
    header = ["weights", "bits", "rotated", "partition", "", "cache", "PPL", "mean KLD"]
    return f"Perplexity of the float model with 16-bit activations: {base:.1f}\n\n{report.markdown(header, lines)}"


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a model with Llama's names")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[BUNDLED], help="to train on (default: the bundled mix)"
    )
    parser.add_argument("--steps", type=positive, default=Settings.steps, help="default: %(default)s")
    parser.add_argument("--tokens", type=positive, default=262144, help="of the text (default: %(default)s)")
    parser.add_argument("--chunks", type=positive, default=16, help="windows of 512 to score (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=Path("build/qat"), help="results that are there")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between its marks in this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(steps=args.steps)
    texts = torch.from_numpy(windows(CalibrationOptions(args.model, args.text, tokens=args.tokens, context=128), 512))
    reference = Reference(args.model, test_text(), args.chunks)
    common = (
        args.chunks,
        settings,
        texts.numpy().tobytes(),
        *(p.read_bytes() for p in args.model.glob("*.safetensors")),
    )
    base = reference.divergence()["perplexity"]
    results = {
        row: remembered(args.work_dir, partial(measure, reference, row, texts, settings), *common, row)
        for row in tqdm(ROWS, unit="row")
    }
    found = table(results, base)
    print(found)
    if args.update:
        report.replace_section(args.update, "qat", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
