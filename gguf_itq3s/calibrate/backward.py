"""Output Fisher matrices: the second moments of the gradients at the outputs of a model's matrices.

The loss is the log-likelihood of labels sampled from the model's own predictions, so that the second moment of its
gradient is the Fisher information, the second derivative of the KL divergence from the model to a disturbed copy. The
model runs forward once, the inputs of every layer going to disk, then backward layer by layer, each layer computed anew
with gradients; one layer's weights are in memory at any time.

Of several processes each runs its windows; the sums of a layer are added up, and the first one writes them. Labels are
drawn for all windows in one order, so that they do not depend on the number of processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import torch
from safetensors import safe_open
from tqdm import tqdm

from ..base.journal import Journal, save_arrays
from ..codec.transform import rotation_block
from ..torch import PackedExperts, stacked
from .activations import Activations, activation_path, activations
from .folders import keep_own, own_folder
from .gradients import PRIOR, GradientSums, check_finite
from .groups import Reader
from .joining import own_batch
from .layers import LayeredModel
from .moments import Moment, rotated
from .ranks import ALONE, Ranks
from .shares import Batches, Share, share, split

_JOURNAL: Final = "journal.json"
_OUTPUT: Final = "fisher-output.safetensors"
_INPUT: Final = "fisher-input.safetensors"
#: In the folder, those of the inputs of layers.
_GRADIENTS: Final = "gradients"
#: Tokens whose logits are in memory at a time; in float64 while labels are drawn, with their gradients afterwards.
CHUNK: Final = 256


class OutputFisher:
    """Output Fisher matrices in a folder.

    Args:
        folder: where they are, or will be.
        block: rows of the blocks that are kept of a matrix with more rows than ``full``.
        full: most rows of a matrix that is kept whole.
        ranks: those that have gradients of other windows.
    """

    def __init__(self, folder: Path, *, full: int, block: int, ranks: Ranks = ALONE) -> None:
        self.folder, self._full, self._block, self._ranks = folder, full, block, ranks

    @property
    def present(self) -> bool:
        """Whether this process sees the files."""
        return (self.folder / _OUTPUT).exists()

    def blocks(self, reader: Reader, number: int) -> list[np.ndarray]:
        """The matrix of a reader of a layer, float32 (m, m), or the blocks of its diagonal; empty where none is known.

        Rows are in the order of the model in Transformers. That of an expert is of the tokens that came to it, divided
        by all tokens, and drawn to what is known of it otherwise (:meth:`GradientSums.shrink`), as the others are to a
        multiple of the identity (:meth:`GradientSums.draw_to_identity`).
        """
        with safe_open(self.folder / _file(number), framework="numpy") as file:
            names = sorted(name for name in file.keys() if name.rpartition("/")[0] == reader.entry)  # noqa: SIM118
            return [file.get_tensor(name) for name in names]

    def shared_blocks(self, reader: Reader, number: int, owner: int | None) -> list[np.ndarray]:
        """The same from the first rank, which has the files.

        Args:
            reader: the matrix.
            number: of its layer.
            owner: the rank that needs them, the others get none; None where all need them.
        """
        ranks = self._ranks
        found = self.blocks(reader, number) if ranks.first else []
        sizes = ranks.tell([len(block) for block in found])
        if owner is None:
            found = found or [np.empty((size, size), dtype=np.float32) for size in sizes]
            for block in found:
                ranks.send(0, block)
            return found
        return [ranks.hand(0, owner, block) for block in found or [np.empty((s, s), np.float32) for s in sizes]]

    def output(self) -> np.ndarray:
        """Of the output matrix, the diagonal of its Fisher matrix: float32 (tokens of the vocabulary,)."""
        with safe_open(self.folder / _OUTPUT, framework="numpy") as file:
            return file.get_tensor("diagonal")

    def input(self) -> tuple[np.ndarray, float] | None:
        """Of the input of the first layer, the rotated Fisher matrix and the mean square of a value.

        Returns:
            float32 (n, n) or (n / b, b, b), and the mean square; None where n is no multiple of 64.
        """
        if not (self.folder / _INPUT).exists():
            return None
        with safe_open(self.folder / _INPUT, framework="numpy") as file:
            return file.get_tensor("moment"), float(file.get_tensor("square")[0])

    def collect(self, model: LayeredModel, text: np.ndarray, batch: int, key: str, messages: TextIO) -> None:
        """Run the model forward and backward, unless that is done.

        Args:
            model: the model.
            text: int64 (windows, context), of all ranks.
            batch: windows at a time.
            key: of all that decides the result; what belongs to another is thrown away.
            messages: where progress goes.

        Raises:
            OSError: the folder cannot be written.
            UserError: a gradient is not finite.
        """
        ranks = self._ranks
        journal = Journal(self.folder / _JOURNAL, key)
        state = {"forward": 0, "left": model.layers, "few": 0, "experts": 0}
        if ranks.first:
            records = journal.records()
            if records is None:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
            journal.begin(len(records or ()))
            for record in records or ():
                state.update(record)
        key, state = ranks.tell((key, state))
        keep_own(self.folder.parent, key, ranks, "gradients", (self.folder.name,))
        if not state["left"]:
            return
        self._run(model, text, batch, state, journal, messages)
        if state["few"]:
            print(
                f"note: {state['few']} of {state['experts']} matrices of experts saw fewer than {PRIOR} tokens for "
                "each of their rows: down matrices rather follow all experts of the layer together, gate and up "
                "matrices get little feedback across rows",
                file=messages,
            )

    def _run(
        self, model: LayeredModel, text: np.ndarray, batch: int, state: dict[str, int], journal: Journal,
        messages: TextIO,
    ) -> None:  # fmt: skip
        """Forward and backward, from where an earlier run has come to."""
        ranks, folder = self._ranks, self._own()
        (folder / _GRADIENTS).mkdir(parents=True, exist_ok=True)
        own = share(len(text), own_batch(batch, model.device.type), ranks)
        inputs, batches = text[own.numbers], own.batches.all
        shape = (*inputs.shape, model.hidden)

        def done(**changes: int) -> None:
            ranks.meet()  # all have written what comes behind it
            state.update(changes)
            if ranks.first:
                journal.note(changes)
            ranks.meet()

        there = self._has(folder, state, model.layers, model.dtype)
        left = state["left"]  # layers below this one are to come
        forward, backward = (state["forward"], left) if ranks.all(there) else (0, model.layers)
        keywords = model.start(folder, inputs, batches, forward)
        total = 2 * model.layers + 1
        with tqdm(total=total, unit=" layers", file=messages, desc="gradients", mininterval=0.5) as bar:
            bar.update(forward + model.layers - backward)
            for number in range(forward, model.layers):
                source = activations(folder, number, shape, "r", model.dtype)
                target = activations(folder, number + 1, shape, "w+", model.dtype, partial=True)
                self._forward(model, number, source, target, batches, keywords[number])
                self._keep(number + 1, target, model.dtype, folder)
                if number >= state["forward"]:
                    done(forward=number + 1)
                bar.update()
            if backward == model.layers:
                self._last(model, shape, own, _chances(text, batch))
            bar.update()
            for number in range(backward - 1, -1, -1):
                few, experts = self._load_backward(
                    model, number, shape, own.batches, keywords[number], again=number >= left
                )
                if number < left:
                    done(left=number, few=state["few"] + few, experts=state["experts"] + experts)
                activation_path(folder / _GRADIENTS, number + 1, model.dtype).unlink(missing_ok=True)
                activation_path(folder, number, model.dtype).unlink()
                bar.update()
        activation_path(folder, model.layers, model.dtype).unlink(missing_ok=True)
        shutil.rmtree(folder / _GRADIENTS, ignore_errors=True)
        torch.cuda.empty_cache()

    def _own(self) -> Path:
        """Where this rank has its activations and gradients."""
        return self.folder if self._ranks.alone else own_folder(self.folder.parent, self._ranks) / self.folder.name

    @staticmethod
    def _has(folder: Path, state: dict[str, int], layers: int, dtype: str) -> bool:
        """Whether a folder has the activations and gradients of a run that has come so far."""
        forward, left = state["forward"], state["left"]
        if not forward:
            return True
        if left < layers:
            needed = [activation_path(folder, number, dtype) for number in range(left)]
            needed.append(activation_path(folder / _GRADIENTS, left, dtype))
        else:
            needed = [activation_path(folder, number, dtype) for number in range(forward + 1)]
        return all(path.exists() for path in needed)

    def _keep(self, number: int, array: Activations, dtype: str, folder: Path) -> None:
        array.flush()
        activation_path(folder, number, dtype, partial=True).replace(activation_path(folder, number, dtype))

    def _last(self, model: LayeredModel, shape: tuple[int, ...], windows: Share, chances_of: torch.Tensor) -> None:
        """The gradient behind the last layer, with respect to the log-likelihood of sampled labels.

        Args:
            model: the model.
            shape: of the activations of this rank.
            windows: those of this rank.
            chances_of: float64 (windows, context) of the whole text, by which labels are drawn.
        """

        folder = self._own() / _GRADIENTS
        source = activations(self._own(), model.layers, shape, "r", model.dtype)
        target = activations(folder, model.layers, shape, "w+", model.dtype, partial=True)
        own = chances_of[torch.from_numpy(windows.numbers)]
        squares: list[torch.Tensor] = []

        def watch(_: Any, __: Any, out: torch.Tensor) -> None:
            out.register_hook(lambda gradient: squares.append(gradient.flatten(0, 1).float().square().sum(0).double()))

        with model.head() as head:
            handle = model.model.get_output_embeddings().register_forward_hook(watch)
            for part in windows.batches.all:
                rows = torch.from_numpy(np.array(source[part])).flatten(0, 1)
                chances = own[torch.from_numpy(part)].flatten()
                gradients = []
                # A vocabulary is wide: the logits of few tokens at a time, and what backpropagation keeps of them.
                for hidden, chance in zip(rows.split(CHUNK), chances.split(CHUNK), strict=True):
                    hidden = hidden[None].to(model.device).requires_grad_(True)
                    logits = head(hidden)[0].float()
                    labels = sampled(logits.detach(), chance)
                    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
                    assert hidden.grad is not None
                    gradients.append(hidden.grad[0].cpu())
                    squares[:] = [sum(squares[1:], squares[0])]
                target[part] = torch.cat(gradients).reshape(len(part), *shape[1:]).numpy()
            handle.remove()
        (tokens,) = self._ranks.numbers(shape[0] * shape[1])
        self._ranks.add(squares[0], owner=0)
        if self._ranks.first:
            save_arrays({"diagonal": (squares[0] / tokens).float().cpu().numpy()}, self.folder / _OUTPUT)
        self._keep(model.layers, target, model.dtype, folder)

    def _forward(
        self, model: LayeredModel, number: int, source: Activations, target: Activations,
        batches: Sequence[np.ndarray], keywords: dict[int, dict[str, Any]],
    ) -> None:  # fmt: skip
        """Run a layer on all windows."""
        layer = model.load(number)
        for part in batches:
            target[part] = model.step(layer, source[part], keywords[len(part)])
        model.unload(number)

    def _load_backward(
        self, model: LayeredModel, number: int, shape: tuple[int, ...], batches: Batches,
        keywords: dict[int, dict[str, Any]], *, again: bool,
    ) -> tuple[int, int]:  # fmt: skip
        """:meth:`_backward` of a layer that is loaded for it."""
        found = self._backward(model, number, model.load(number), shape, batches, keywords, again=again)
        model.unload(number)
        return found

    def _backward(
        self,
        model: LayeredModel,
        number: int,
        layer: torch.nn.Module,
        shape: tuple[int, ...],
        batches: Batches,
        keywords: dict[int, dict[str, Any]],
        *,
        again: bool = False,
    ) -> tuple[int, int]:
        """One layer: its matrices' Fisher matrices to a file, the gradient of its input to another.

        Args:
            model: the model.
            number: of the layer.
            layer: with its weights.
            shape: of the activations of this rank.
            batches: its windows that run together.
            keywords: batch size -> arguments of the layer.
            again: the Fisher matrices are there already.

        Returns:
            Of experts, how many matrices saw too few tokens, and how many there are.
        """

        folder = self._own() / _GRADIENTS
        source = activations(self._own(), number, shape, "r", model.dtype)
        behind = activations(folder, number + 1, shape, "r", model.dtype)
        target = activations(folder, number, shape, "w+", model.dtype, partial=True)
        sums = GradientSums(self._full, self._block, model.device)
        first = (
            Moment(model.hidden, model.hidden <= self._full) if number == 0 and rotation_block(model.hidden) else None
        )
        square = 0.0
        tokens = 0

        def watch(entry: str) -> Callable[..., None]:
            def hook(_: Any, __: Any, out: torch.Tensor) -> None:
                if out.requires_grad:
                    out.register_hook(lambda gradient: sums.add(entry, gradient))

            return hook

        readers = [reader for group in model.layout.groups(number, layer) for reader in group.readers]
        if again:
            readers, first = [], None
        handles = [
            layer.get_submodule(reader.path).register_forward_hook(watch(reader.entry))
            for reader in readers
            if reader.parameter == "weight"
        ]
        stacks = _watched_experts(layer, readers, sums)
        for place, part in enumerate(batches.all):
            if place == len(batches.train):
                sums.hold_out()
            hidden = torch.from_numpy(np.array(source[part])).to(model.device).requires_grad_(True)
            with model.products():
                out = layer(hidden, **keywords[hidden.shape[0]])
            out = (out[0] if isinstance(out, tuple) else out).float()
            out.backward(torch.from_numpy(np.array(behind[part])).to(model.device))
            assert hidden.grad is not None
            target[part] = hidden.grad.cpu().numpy()
            if first is not None:
                first.add(rotated(hidden.grad))
                square += float(hidden.detach().square().sum(dtype=torch.float64))
            tokens += hidden.shape[0] * hidden.shape[1]
        for handle in handles:
            handle.remove()
        for path, module in stacks.items():
            layer.set_submodule(path, module)
        self._keep(number, target, model.dtype, folder)
        if again:
            return 0, 0
        ranks = self._ranks
        total_tokens, total_square = ranks.numbers(tokens, square)
        if first is not None:
            first.add_up(ranks, total_tokens, model.device, 0)
            if ranks.first:
                found = {"moment": first.mean(), "square": np.array([total_square / (total_tokens * model.hidden)])}
                save_arrays(found, self.folder / _INPUT)
        matrices, few, experts = sums.finish(readers, int(total_tokens), ranks)
        check_finite(model.folder, matrices)
        if ranks.first:
            save_arrays(matrices, self.folder / _file(number))
        return few, experts


def sampled(logits: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Draw a label for each token from its own predictions: the inverse of their distribution function.

    Args:
        logits: (tokens, vocabulary).
        chances: float64 (tokens,), uniform in [0, 1): with them, a token's label does not depend on its company.

    Returns:
        int64 (tokens,).
    """

    # On the CPU, so that a device does not decide the labels.
    likely = torch.softmax(logits.float().cpu(), -1).cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(likely, (chances * likely[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1).to(logits.device)


def _watched_experts(
    layer: torch.nn.Module, readers: Sequence[Reader], sums: GradientSums
) -> dict[str, torch.nn.Module]:
    """Let experts whose matrices are stacked add to the sums.

    Their own forward passes show no output of a single expert, so those whose class is known are replaced by a module
    that computes the same with the same parameters.

    Returns:
        The modules that were there, by their names.
    """
    places: dict[str, dict[tuple[str, int], list[str]]] = {}
    for reader in readers:
        if reader.parameter != "weight" and reader.expert is not None:
            # Gate before up, as their rows are.
            places.setdefault(reader.path, {}).setdefault((reader.parameter, reader.expert), []).append(reader.entry)
    before = {}
    for path, entries in places.items():
        module = layer.get_submodule(path)
        found = stacked.find(module)
        if isinstance(found, str) or any(stack.transposed for stack in found.stacks.values()):
            continue
        made = PackedExperts(found.count, found.stacks, found.gate, bias=found.bias, device="meta")
        made._parameters = {**made._parameters, **module._parameters}

        def watch(
            name: str, expert: int, out: torch.Tensor, entries: dict[tuple[str, int], list[str]] = entries
        ) -> None:
            halves = entries.get((name, expert), [])
            if out.requires_grad and halves:
                out.register_hook(lambda gradient: _add_halves(sums, halves, gradient))

        made.watch = watch
        layer.set_submodule(path, made)
        before[path] = module
    return before


def _add_halves(sums: GradientSums, entries: Sequence[str], gradient: torch.Tensor) -> None:
    for entry, part in zip(entries, gradient.chunk(len(entries), dim=-1), strict=True):
        sums.add(entry, part)


def _chances(text: np.ndarray, batch: int) -> torch.Tensor:
    """Random numbers by which the labels of a text are drawn: float64 (windows, context), uniform in [0, 1)."""
    generator = torch.Generator().manual_seed(0)
    result = torch.empty(text.shape, dtype=torch.float64)
    for part in split(len(text), batch).all:  # in the order of a process alone
        rows = torch.rand(len(part) * text.shape[1], generator=generator, dtype=torch.float64)
        result[torch.from_numpy(part)] = rows.reshape(len(part), -1)
    return result


def _file(number: int) -> str:
    return f"fisher-{number:04d}.safetensors"
