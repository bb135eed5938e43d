"""A distillation: a model learns to give its own predictions with the weights that a file can hold."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import torch
from tqdm import tqdm

from ..base import report
from ..base.errors import UserError, output_error
from ..calibrate.layers import torch_device
from ..calibrate.store import model_hash
from ..calibrate.text import windows
from ..checkpoint.channels import ARCHITECTURES
from ..checkpoint.files import check_output
from ..checkpoint.reading import open_checkpoint
from ..checkpoint.source import Checkpoint
from .codes import encoder
from .losses import confidence_of, divergence
from .model import Student, load_model
from .optimizer import Adam
from .options import NEUTRAL, TYPES, DistillOptions
from .output import write_model
from .state import read_state, write_state

#: Of every so many windows one is not trained on; on at most so many the divergence is measured before and after.
_HELD_SHARE: Final = 16
_HELD: Final = 16
#: Windows whose tokens say the teacher's confidence.
_CONFIDENCE: Final = 32
#: Share of the steps in which the learning rate rises.
_WARM_UP: Final = 0.05


@dataclass(frozen=True)
class Distillation:
    """What a distillation did.

    Attributes:
        matrices: how many are coded.
        left: the layers' other matrices by GGUF name, with the reason.
        before: mean KL divergence from the teacher on windows that are not trained on, of the codes it began with.
        after: of those it ended with.
        steps: of the optimizer.
        size: bytes of the weights that were written.
    """

    matrices: int
    left: Mapping[str, str]
    before: float
    after: float
    steps: int
    size: int


def distill(options: DistillOptions, messages: TextIO | None = None) -> Distillation:
    """Train a checkpoint and write it.

    Args:
        options: what and how.
        messages: where notes and progress go; None for stderr.

    Raises:
        UserError: the model, the text or a folder cannot be used, or the training diverged.
        KeyboardInterrupt: interrupted; the same call continues.
    """
    messages = messages or sys.stderr
    inputs = (options.model, options.start, *options.text)
    check_output(options.out, inputs, folder=True)
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(options.out, "is there already", "remove it, or choose another folder")
    checkpoint = open_checkpoint(options.model, trust_remote_code=options.trust_remote_code, messages=messages)
    if checkpoint.model.arch not in ARCHITECTURES:
        what = f"its architecture, {checkpoint.model.arch}, cannot be distilled"
        raise UserError(options.model, what, f"distil one of {', '.join(sorted(ARCHITECTURES))}")
    work = options.out.with_name(f"{options.out.name}.distilling")
    try:
        work.mkdir(parents=True, exist_ok=True)
        run = Run(options, checkpoint, work, messages)
        try:
            run.train()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; the same command continues from {work}") from None
        done = run.finish()
        shutil.rmtree(work, ignore_errors=True)
        return done
    except OSError as error:
        raise output_error(options.out, error) from error
    finally:
        with contextlib.suppress(OSError):  # there is something in it
            work.rmdir()


class Run:
    """A training that goes on from its last checkpoint.

    Args:
        options: what and how.
        checkpoint: the model as GGUF tensors.
        work: folder for the checkpoint and the output in the making.
        messages: where notes and progress go.
    """

    def __init__(self, options: DistillOptions, checkpoint: Checkpoint, work: Path, messages: TextIO) -> None:
        self.options, self.checkpoint, self.work, self.messages = options, checkpoint, work, messages
        self.device = torch_device(options)
        if self.device.type == "cpu":
            torch.set_num_threads(options.threads)
        self.teacher = load_model(options, self.device)
        context = int(getattr(self.teacher.config.get_text_config(), "max_position_embeddings", 2048))
        every = windows(options, context, messages)
        if every.max() >= (size := int(self.teacher.get_input_embeddings().num_embeddings)):
            what = f"has a tokenizer that gives token {every.max()}, and an embedding of {size}"
            raise UserError(options.model, what, "take the tokenizer that belongs to it")
        held = np.arange(len(every)) % _HELD_SHARE == 0
        if held.all():
            what = f"gives {len(every)} window of {every.shape[1]} tokens"
            raise UserError(options.text[0], what, "give more --tokens, or less --context")
        self.windows, self.held = every[~held], every[held][:_HELD]
        self.student = Student(self.teacher, checkpoint, options)
        self.encode = encoder(TYPES[options.type], options.effort, options.threads)
        self.optimizer = Adam(self.student.groups(), options.optimizer_state)
        self._say_memory()
        if options.gradient_checkpointing:
            self.student.checkpoint_layers()
        self.key = self._key(every)
        self.path = work / "state.safetensors"
        self.facts: dict[str, Any] = {"key": self.key, "step": 0, "losses": []}

    def _key(self, every: np.ndarray) -> str:
        """A hash of all that decides the result."""
        given = {name: str(value) for name, value in asdict(self.options).items() if name not in NEUTRAL}
        digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode())
        digest.update(model_hash(self.checkpoint.files).encode())
        if self.options.start:
            digest.update(hashlib.sha256(np.memmap(self.options.start, mode="r").data).digest())
        digest.update(every.tobytes())
        return digest.hexdigest()

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        parameters = {name: p.data for group in self.optimizer.groups for name, p in group.parameters.items()}
        return {**parameters, **{f"moment/{name}": tensor for name, tensor in self.optimizer.tensors().items()}}

    def _say_memory(self) -> None:
        options, config = self.options, self.teacher.config.get_text_config()
        weights = sum(p.numel() for p in self.teacher.parameters())
        trained = sum(p.numel() for group in self.optimizer.groups for p in group.parameters.values())
        coded = sum(matrix.latent.numel() for matrix in self.student.matrices.values())
        tokens = (options.micro_batch or options.batch) * self.windows.shape[1]
        layer = tokens * (12 * int(config.hidden_size) + 4 * int(getattr(config, "intermediate_size", 0) or 0))
        layers = len(self.student.layers)
        kept = layer + layers * tokens * int(config.hidden_size) if options.gradient_checkpointing else layers * layer
        # Weights of both and offsets; gradients; coded weights that the gradient needs; logits of both, and their logs.
        memory = 4 * (2 * weights + coded + trained + 2 * coded + kept + 6 * tokens * int(config.vocab_size))
        state = self.optimizer.bytes
        place = "of CPU memory" if options.optimizer_state == "cpu" else "with them"
        print(
            f"distilling {self.student.count} matrices ({report.count(coded)} weights) to "
            f"{options.type.upper()}: about {report.size(memory)} of memory, {report.size(state)} {place} for the "
            f"optimizer; a checkpoint has {report.size(4 * trained + state)}",
            file=self.messages,
        )
        if left := self.student.left:
            reasons = sorted(set(left.values()))
            print(f"note: {len(left)} matrices of the layers stay in floats: {'; '.join(reasons)}", file=self.messages)

    # ------------------------------------------------------------------------------------------------ training

    def train(self) -> None:
        """All steps that are not done yet."""
        found = read_state(self.path, self.key, self._tensors)
        if found is not None:
            self.facts = found
            self.optimizer.count = int(found["step"])
        else:
            self.student.encode(self.encode)
            self.facts["before"] = self.measure()
            self.facts["confidence"] = self._confidence() if self.options.loss == "cakld" else 0.0
        options = self.options
        start, saved_at = self.facts["step"], time.monotonic()
        recent: list[float] = []
        with tqdm(total=options.steps, initial=start, unit="step", file=self.messages, mininterval=0.5) as bar:
            for step in range(start, options.steps):
                if step % options.every == 0:
                    if recent:
                        self.facts["losses"].append(sum(recent) / len(recent))
                        recent = []
                    self.facts["step"] = step
                    self.student.encode(self.encode)
                    if step > start and time.monotonic() - saved_at > 60 * options.checkpoint_minutes:
                        write_state(self.path, self._tensors, self.facts)
                        saved_at = time.monotonic()
                recent.append(self._step(step))
                if not np.isfinite(recent[-1]):
                    what = f"gives a loss of {recent[-1]} at step {step}"
                    raise UserError(options.model, what, "lower --lr, --scale-lr and --norm-lr")
                self.optimizer.step(rate(step, options.steps))
                bar.set_postfix_str(f"{options.loss} {recent[-1]:.4f}", refresh=False)
                bar.update()
        if recent:
            self.facts["losses"].append(sum(recent) / len(recent))
        self.facts["step"] = options.steps
        if start < options.steps:
            # The output is a folder of its own and may fail to be written: the training need not be done again.
            write_state(self.path, self._tensors, self.facts)
        self.student.encode(self.encode)

    def _step(self, step: int) -> float:
        """Gradients of a step's windows; returns their mean loss."""
        batch = torch.from_numpy(self._batch(step)).to(self.device)
        parts = batch.split(self.options.micro_batch or self.options.batch)
        total = 0.0
        for part in parts:
            with self._autocast():
                with torch.no_grad():
                    wanted = self.teacher(input_ids=part).logits
                own = self.student.model(input_ids=part).logits
            loss = divergence(own, wanted, self.options.loss, self.facts["confidence"]) * (len(part) / len(batch))
            loss.backward()
            total += float(loss.detach())
        return total

    def _batch(self, step: int) -> np.ndarray:
        """The windows of a step, int64 (batch, context): every window once before one comes again."""
        rows = []
        for place in range(step * self.options.batch, (step + 1) * self.options.batch):
            epoch, index = divmod(place, len(self.windows))
            order = np.random.default_rng((self.options.seed, epoch)).permutation(len(self.windows))
            rows.append(self.windows[order[index]])
        return np.stack(rows)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.options.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _held_logits(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self.options.micro_batch or self.options.batch
        for part in torch.from_numpy(self.held).split(size):
            ids = part.to(self.device)
            yield self.teacher(input_ids=ids).logits, self.student.model(input_ids=ids).logits

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def measure(self) -> float:
        """Mean KL divergence from the teacher on the windows that are not trained on, in float32."""
        total = count = 0.0
        for wanted, own in self._held_logits():
            total += float(divergence(own, wanted, "kl")) * len(own)
            count += len(own)
        return total / count

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _confidence(self) -> float:
        """The mean probability that the teacher gives to the tokens of the text."""
        size = self.options.micro_batch or self.options.batch
        parts = torch.from_numpy(self.windows[:: max(1, len(self.windows) // _CONFIDENCE)]).to(self.device).split(size)
        found = [float(confidence_of(self.teacher(input_ids=part).logits, part)) * len(part) for part in parts]
        return sum(found) / sum(len(part) for part in parts)

    # -------------------------------------------------------------------------------------------------- output

    def finish(self) -> Distillation:
        """Measure the end and write the model."""
        after = self.measure()
        size = write_model(self.checkpoint, self.student.changed(self.encode), self.work / "out", self.options.out)
        return Distillation(
            self.student.count, self.student.left, self.facts["before"], after, self.facts["step"], size
        )


def rate(step: int, steps: int) -> float:
    """Factor of the learning rates: up in the first twentieth of the steps, then down along a cosine to zero."""
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return (step + 1) / (rising + 1)
    return float(0.5 * (1 + np.cos(np.pi * (step - rising) / max(1, steps - rising))))
