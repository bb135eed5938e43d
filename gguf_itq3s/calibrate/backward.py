"""Output Fisher matrices: the second moments of the gradients at the outputs of a model's matrices.

The loss is the log-likelihood of labels sampled from the model's own predictions, so that the second moment of its
gradient is the Fisher information, the second derivative of the KL divergence from the model to a disturbed copy. The
model runs forward once, the inputs of every layer going to disk, then backward layer by layer, each layer computed anew
with gradients; one layer's weights are in memory at any time.

Experts run in groups outside their layer (:mod:`.experts`), backward too: the products of each group are computed anew
with gradients, which go to the sums and to the gradients of what came into the experts; with these the rest of the
layer is differentiated. Of several processes each runs its windows; the sums of a layer are added up, and the first one
writes them. Labels are drawn for all windows in one order, so that they do not depend on the number of processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from ..base.journal import Journal, save_arrays
from ..codec.transform import rotation_block
from . import experts
from .activations import Activations, activation_path, activations, complete
from .experts import LayerExperts, Loaded, Routed
from .gradients import PRIOR, GradientSums, check_finite
from .inputs import LayerMatrix
from .layers import Keywords, LayeredModel
from .moments import Moment, rotated
from .ranks import ALONE, Ranks, keep_own, own_batch, own_folder
from .shared import shared_of
from .shares import Batch, Batches, Share, share, split
from .statistics import run_experts, run_layer

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
        block: rows of the blocks that are kept of a matrix with more rows than ``full``.
        full: most rows of a matrix that is kept whole.
    """

    def __init__(self, folder: Path, *, full: int, block: int, ranks: Ranks = ALONE) -> None:
        self.folder, self._full, self._block, self._ranks = folder, full, block, ranks

    @property
    def present(self) -> bool:
        """Whether this process sees the files."""
        return (self.folder / _OUTPUT).exists()

    def blocks(self, reader: LayerMatrix, number: int) -> list[np.ndarray]:
        """The matrix of a reader of a layer, float32 (m, m), or the blocks of its diagonal; empty where none is known.

        Rows are in the order of the model in Transformers. That of an expert is of the tokens that came to it, divided
        by all tokens, and shrunk to what is known of it otherwise, as the others are to a
        multiple of the identity (:meth:`GradientSums.shrink_to_identity`).
        """
        for path in sorted(self.folder.glob(f"{_stem(number)}*" if reader.expert is not None else _file(number))):
            with safe_open(path, framework="numpy") as file:
                found = sorted(name for name in file.keys() if name.rpartition("/")[0] == reader.entry)  # noqa: SIM118
                if found:
                    return [file.get_tensor(name) for name in found]
        return []

    def shared_blocks(self, reader: LayerMatrix, number: int) -> list[np.ndarray]:
        """The same on all ranks, from the first one, which has the files."""
        return self._ranks.broadcast_object(self.blocks(reader, number) if self._ranks.first else None)

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
            text: int64 (windows, context), of all ranks.
            key: of all that decides the result; what belongs to another is thrown away.

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
        key, state = ranks.broadcast_object((key, state))
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
            ranks.barrier()  # all have written what comes behind it
            state.update(changes)
            if ranks.first:
                journal.note(changes)
            ranks.barrier()

        there = self._has(folder, state, model.layers, model.dtype)
        left = state["left"]  # layers below this one are to come
        forward, backward = (state["forward"], left) if ranks.all(there) else (0, model.layers)
        keywords = model.start(folder, inputs, batches, forward)
        with tqdm(total=2 * model.layers + 1, unit=" layers", file=messages, desc="gradients", mininterval=0.5) as bar:
            bar.update(forward + model.layers - backward)
            for number in range(forward, model.layers):
                source = activations(folder, number, shape, "r", model.dtype)
                target = activations(folder, number + 1, shape, "w+", model.dtype, partial=True)
                run_layer(
                    model, number, source, target, batches, keywords[number], folder,
                    lambda found: 4 * found.weights, None,
                )  # fmt: skip
                complete(target, folder, number + 1, model.dtype)
                if number >= state["forward"]:
                    done(forward=number + 1)
                bar.update()
            if backward == model.layers:
                self._last(model, shape, own, _chances(text, batch))
            bar.update()
            for number in range(backward - 1, -1, -1):
                few, count = self._backward(model, number, shape, own.batches, keywords[number], again=number >= left)
                if number < left:
                    done(left=number, few=state["few"] + few, experts=state["experts"] + count)
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

    def _last(self, model: LayeredModel, shape: tuple[int, ...], windows: Share, chances_of: torch.Tensor) -> None:
        """The gradient behind the last layer, with respect to the log-likelihood of sampled labels.

        Args:
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
        (tokens,) = self._ranks.sums(shape[0] * shape[1])
        self._ranks.reduce(squares[0], owner=0)
        if self._ranks.first:
            save_arrays({"diagonal": (squares[0] / tokens).float().cpu().numpy()}, self.folder / _OUTPUT)
        complete(target, folder, model.layers, model.dtype)

    def _backward(
        self, model: LayeredModel, number: int, shape: tuple[int, ...], batches: Batches,
        keywords: Keywords, *, again: bool,
    ) -> tuple[int, int]:  # fmt: skip
        """One layer: its matrices' Fisher matrices to files, the gradient of its input to another.

        Args:
            again: the Fisher matrices are there already.

        Returns:
            Of experts, how many matrices saw too few tokens, and how many there are.
        """
        found = experts.find(model, number)
        readers = [r for group in model.layout.groups(number, model.blocks[number]) for r in group.readers]
        plain = [] if again else [reader for reader in readers if reader.expert is None]
        if found is None:
            self._backward_rest(model, number, model.load(number), plain, shape, batches, keywords, again=again)
            model.unload(number)
            return 0, 0
        inside = [] if again else [reader for reader in readers if reader.expert is not None]
        source = activations(self._own(), number, shape, "r", model.dtype)
        behind = activations(self._own() / _GRADIENTS, number + 1, shape, "r", model.dtype)
        with found.left_out() as layer:
            routed = run_experts(found, layer, source, batches.all, keywords, self._own(), 4 * found.weights)
            for batch in batches.all:
                with keywords.of(batch, self._own()) as given:
                    routed.put("behind", batch, _behind_experts(model, layer, routed, batch, source, behind, given))
            (tokens,) = self._ranks.sums(shape[0] * shape[1])
            few = self._backward_experts(found, inside, routed, batches.all, int(tokens))

            def known(batch: Batch) -> None:
                def answer(hidden: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                    output, of_hidden = (
                        routed.get(name, batch).reshape(hidden.shape) for name in ("output", "of hidden")
                    )
                    of_weights = routed.get("of weights", batch).reshape(weights.shape)
                    return _Known.apply(hidden, weights, output, of_hidden, of_weights)

                routed.answer(answer)

            self._backward_rest(model, number, layer, plain, shape, batches, keywords, again=again, before=known)
        routed.close()
        return few, len(inside)

    def _backward_rest(
        self, model: LayeredModel, number: int, layer: torch.nn.Module, readers: Sequence[LayerMatrix],
        shape: tuple[int, ...], batches: Batches, keywords: Keywords, *, again: bool,
        before: Callable[[Batch], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """The same of a loaded layer's own matrices; ``before`` each batch is made known what its experts do."""
        folder = self._own() / _GRADIENTS
        source = activations(self._own(), number, shape, "r", model.dtype)
        behind = activations(folder, number + 1, shape, "r", model.dtype)
        target = activations(folder, number, shape, "w+", model.dtype, partial=True)
        sums = GradientSums(self._full, self._block, model.device)
        first = None
        if number == 0 and rotation_block(model.hidden) and not again:
            first = Moment(model.hidden, model.hidden <= self._full)
        square = 0.0

        def watch(reader: LayerMatrix) -> Callable[..., None]:
            def hook(_: Any, __: Any, out: torch.Tensor) -> None:
                if out.requires_grad:
                    out.register_hook(lambda gradient: sums.add(reader.entry, reader.outputs_of(gradient)))

            return hook

        handles = [layer.get_submodule(r.path).register_forward_hook(watch(r)) for r in readers]
        for place, part in enumerate(batches.all):
            if place == len(batches.train):
                sums.hold_out()
            before(part)
            hidden = torch.from_numpy(np.array(source[part])).to(model.device).requires_grad_(True)
            with keywords.of(part, self._own()) as given, model.products():
                out = layer(hidden, **given)
            out = (out[0] if isinstance(out, tuple) else out).float()
            outs, gradients = [out], [torch.from_numpy(np.array(behind[part])).to(model.device)]
            if (states := shared_of(given)) is not None:
                lent, of_lent = states.gradients_of(folder, number)
                outs, gradients = outs + lent, gradients + of_lent
            torch.autograd.backward(outs, gradients)
            assert hidden.grad is not None
            if states is not None:
                states.keep_gradients(folder, number)
            target[part] = hidden.grad.cpu().numpy()
            if first is not None:
                first.add(rotated(hidden.grad))
                square += float(hidden.detach().square().sum(dtype=torch.float64))
        for handle in handles:
            handle.remove()
        complete(target, folder, number, model.dtype)
        if again:
            return
        ranks = self._ranks
        total_tokens, total_square = ranks.sums(shape[0] * shape[1], square)
        if first is not None:
            first.reduce(ranks, total_tokens, model.device, 0)
            if ranks.first:
                found = {"moment": first.mean(), "square": np.array([total_square / (total_tokens * model.hidden)])}
                save_arrays(found, self.folder / _INPUT)
        matrices = sums.finish(readers, int(total_tokens), ranks)
        check_finite(model.folder, matrices)
        if ranks.first:
            save_arrays(matrices, self.folder / _file(number))

    def _backward_experts(
        self, found: LayerExperts, readers: Sequence[LayerMatrix], routed: Routed, batches: Sequence[Batch], tokens: int
    ) -> int:
        """The matrices of all experts to files, and the gradients of what came into them.

        A group's are written before the next group comes. Those of down, which are shrunk to the mean of all experts,
        are written once more when that is known.

        Returns:
            How many matrices saw so few tokens that their own count for less.
        """
        by_parameter: dict[tuple[int, str], list[LayerMatrix]] = {}
        for reader in readers:
            assert reader.expert is not None
            by_parameter.setdefault((reader.expert, reader.parameter), []).append(reader)
        gate_up, down = found.names
        for batch in batches:
            for name in ("hidden", "weights"):
                routed.put(f"of {name}", batch, torch.zeros_like(routed.get(name, batch)))
        few, stem = 0, _stem(found.number)
        together: list[torch.Tensor] = []
        counts: dict[str, int] = {}
        files: dict[Path, list[str]] = {}
        sizes = (rows * (rows if rows <= self._full else self._block) for rows, _ in found.shapes)
        groups = found.groups(4 * found.weights + 8 * sum(sizes))
        kept = torch.float64 if len(groups) == 1 else torch.float32  # until the mean is known
        for place, numbers in enumerate(groups):
            sums = GradientSums(self._full, self._block, found.model.device)
            loaded = found.load(numbers)
            for batch in batches:
                _add(routed, batch, loaded, by_parameter, sums)
            del loaded
            sums.reduce([reader for reader in readers if reader.expert in numbers], self._ranks)
            if not readers or not self._ranks.first:
                continue
            downs = [reader.entry for number in numbers for reader in by_parameter.get((number, down), ())]
            means: dict[str, torch.Tensor] = {}
            for entry in downs:
                parts, counts[entry] = sums.take(entry)
                for number, part in enumerate(parts):
                    together[number : number + 1] = [part + together[number] if number < len(together) else part]
                    means[f"{entry}/{number:05d}"] = (part / tokens).to("cpu", kept)
            ups = [reader.entry for number in numbers for reader in by_parameter.get((number, gate_up), ())]
            few += sum(sums.shrink_to_diagonal(entry) for entry in ups)
            matrices = dict(sums.means(tokens))
            check_finite(found.model.folder, matrices)
            save_arrays(matrices, self.folder / f"{stem}-{place:04d}.safetensors")
            path = self.folder / f"{stem}-{place:04d}-down.safetensors"
            save_file(means, path)
            files[path] = downs
        # Of gate and up of experts without a token nothing is known, and their matrices count among the few.
        together = [(total / tokens).cpu() for total in together]
        for path, downs in files.items() if together else ():
            before, after = load_file(path), {}
            for entry in downs:
                prior = PRIOR * len(together[0])
                few += counts[entry] < prior
                for number, mean in enumerate(together):
                    name = f"{entry}/{number:05d}"
                    if name in before:
                        # What comes out of the second matrices of all experts goes to the same place.
                        own = before[name].double()
                        other = mean * (own.trace() / mean.trace().clamp(min=1e-300))
                        shrunk = own.lerp(other, prior / (counts[entry] + prior))
                    else:
                        shrunk = mean / sum(counts.values())  # of a single token
                    after[name] = shrunk.float().numpy()
            check_finite(found.model.folder, after)
            save_arrays(after, path)
        return few


class _Known(torch.autograd.Function):
    """The outputs of experts, and gradients of what came into them, that are known already."""

    @staticmethod
    def forward(
        context: Any, hidden: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, of_hidden: torch.Tensor,
        of_weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        del hidden, weights
        context.save_for_backward(of_hidden, of_weights)
        return output

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*context.saved_tensors, None, None, None)


def _behind_experts(
    model: LayeredModel, layer: torch.nn.Module, routed: Routed, batch: Batch, source: Activations,
    behind: Activations, keywords: Mapping[str, Any],
) -> torch.Tensor:  # fmt: skip
    """The gradient at the outputs of the experts, (tokens, hidden)."""
    output = routed.get("output", batch).requires_grad_(True)
    routed.answer(lambda hidden, *_: output.reshape(hidden.shape))
    with model.products():
        out = layer(torch.from_numpy(np.array(source[batch])).to(model.device), **keywords)
    out = (out[0] if isinstance(out, tuple) else out).float()
    (gradient,) = torch.autograd.grad(out, output, torch.from_numpy(np.array(behind[batch])).to(model.device))
    return gradient


def _add(
    routed: Routed, batch: Batch, loaded: Loaded, readers: Mapping[tuple[int, str], list[LayerMatrix]],
    sums: GradientSums,
) -> None:  # fmt: skip
    """Add the gradients of some experts to the sums and to those of what came into them."""
    hidden, weights, behind, of_hidden, of_weights = (
        routed.get(name, batch) for name in ("hidden", "weights", "behind", "of hidden", "of weights")
    )
    chosen = routed.chosen(batch)
    for number in loaded.numbers:
        tokens, places = torch.where(chosen == number)
        if not len(tokens):
            continue
        x = hidden[tokens].requires_grad_(True)
        share = weights[tokens, places].requires_grad_(True)
        gate_up, down = (matrix.float() for matrix in loaded.matrices(number))
        of_first, of_second = loaded.biases(number)
        first = x @ gate_up.T + of_first
        out = loaded.of.known.gate(first) @ down.T + of_second
        found = torch.autograd.grad(out * share[:, None], (x, share, first, out), behind[tokens])
        of_hidden.index_add_(0, tokens, found[0])
        of_weights[tokens, places] = found[1]
        for parameter, gradient in zip(loaded.of.names, found[2:], strict=True):
            for reader in readers.get((number, parameter), ()):
                sums.add(reader.entry, reader.outputs_of(gradient))
    routed.put("of hidden", batch, of_hidden)
    routed.put("of weights", batch, of_weights)


def sampled(logits: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Draw a label for each token from its own predictions (tokens, vocabulary): int64 (tokens,).

    Args:
        chances: float64 (tokens,), uniform in [0, 1): with them, a token's label does not depend on its company.
    """
    # On the CPU, so that a device does not decide the labels.
    likely = torch.softmax(logits.float().cpu(), -1).cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(likely, (chances * likely[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1).to(logits.device)


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


def _stem(number: int) -> str:
    """Of the files of experts."""
    return f"fisher-{number:04d}-experts"
