"""Output Fisher matrices: the second moments of the gradients at the outputs of a model's matrices.

The loss is the log-likelihood of labels sampled from the model's own predictions, so that the second moment of its
gradient is the Fisher information, the second derivative of the KL divergence from the model to a disturbed copy. The
model runs forward once, the inputs of every layer going to disk, then backward layer by layer, each layer computed anew
with gradients; one layer's weights are in memory at any time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import torch
from safetensors import safe_open
from tqdm import tqdm

from ..base.errors import UserError
from ..base.journal import Journal, save_arrays
from ..calibration.activations import activation_path, activations
from ..calibration.groups import Reader
from ..calibration.layers import LayeredModel
from ..calibration.moments import Moment, rotated
from ..codec.transform import BLOCK
from ..rounding.target import DAMPING, decompose
from ..torch import PackedExperts, stacked
from .streams import Batches, split

_JOURNAL: Final = "journal.json"
_OUTPUT: Final = "fisher-output.safetensors"
_INPUT: Final = "fisher-input.safetensors"
#: Tokens whose logits are in memory at a time; in float64 while labels are drawn, with their gradients afterwards.
CHUNK: Final = 256
#: Tokens for each row of an expert's matrix that weigh as much as what is known of it otherwise. By the gradients of
#: other tokens, 4 to 64 leave the least.
_PRIOR: Final = 16


class OutputFisher:
    """Output Fisher matrices in a folder.

    Args:
        folder: where they are, or will be.
        block: rows of the blocks that are kept of a matrix with more rows than ``full``.
        full: most rows of a matrix that is kept whole.
    """

    def __init__(self, folder: Path, *, full: int, block: int) -> None:
        self.folder, self._full, self._block = folder, full, block

    def blocks(self, reader: Reader, number: int) -> list[np.ndarray]:
        """The matrix of a reader of a layer, float32 (m, m), or the blocks of its diagonal; empty where none is known.

        Rows are in the order of the model in Transformers. That of an expert is of the tokens that came to it, divided
        by all tokens, and drawn to what is known of it otherwise (:meth:`_Sums.shrink`), as the others are to a
        multiple of the identity (:meth:`_Sums.draw_to_identity`).
        """
        with safe_open(self.folder / _file(number), framework="numpy") as file:
            names = sorted(name for name in file.keys() if name.rpartition("/")[0] == reader.entry)  # noqa: SIM118
            return [file.get_tensor(name) for name in names]

    def output(self) -> np.ndarray:
        """Of the output matrix, the diagonal of its Fisher matrix: float32 (tokens of the vocabulary,)."""
        with safe_open(self.folder / _OUTPUT, framework="numpy") as file:
            return file.get_tensor("diagonal")

    def input(self) -> tuple[np.ndarray, float] | None:
        """Of the input of the first layer, the rotated Fisher matrix and the mean square of a value.

        Returns:
            float32 (n, n) or (n / 256, 256, 256), and the mean square; None where n is no multiple of 256.
        """
        if not (self.folder / _INPUT).exists():
            return None
        with safe_open(self.folder / _INPUT, framework="numpy") as file:
            return file.get_tensor("moment"), float(file.get_tensor("square")[0])

    def collect(self, model: LayeredModel, windows: np.ndarray, batch: int, key: str, messages: TextIO) -> None:
        """Run the model forward and backward, unless that is done.

        Args:
            model: the model.
            windows: int64 (windows, context).
            batch: windows at a time.
            key: of all that decides the result; what belongs to another is thrown away.
            messages: where progress goes.

        Raises:
            OSError: the folder cannot be written.
            UserError: a gradient is not finite.
        """

        journal = Journal(self.folder / _JOURNAL, key)
        records = journal.records()
        if records is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        journal.begin(len(records or ()))
        state = {"forward": 0, "left": model.layers, "few": 0, "experts": 0}
        for record in records or ():
            state.update(record)
        if not state["left"]:
            return
        parts = split(len(windows), batch)
        batches = parts.all
        shape = (*windows.shape, model.hidden)

        def done(**changes: int) -> None:
            state.update(changes)
            journal.note(changes)

        keywords = model.start(self.folder, windows, batches, state["forward"])
        total = 2 * model.layers + 1
        with tqdm(total=total, unit=" layers", file=messages, desc="gradients", mininterval=0.5) as bar:
            bar.update(state["forward"] + model.layers - state["left"])
            for number in range(state["forward"], model.layers):
                layer = model.load(number)
                source = activations(self.folder, number, shape, "r")
                target = activations(self.folder, number + 1, shape, "w+", partial=True)
                for part in batches:
                    target[part] = model.step(layer, source[part], keywords[number][len(source[part])])
                self._keep(number + 1, target)
                model.unload(number)
                done(forward=number + 1)
                bar.update()
            if state["left"] == model.layers:
                self._last(model, shape, batches)
            bar.update()
            for number in range(state["left"] - 1, -1, -1):
                layer = model.load(number)
                few, experts = self._backward(model, number, layer, shape, parts, keywords[number])
                model.unload(number)
                done(left=number, few=state["few"] + few, experts=state["experts"] + experts)
                (self.folder / "gradients" / activation_path(Path(), number + 1).name).unlink(missing_ok=True)
                activation_path(self.folder, number).unlink()
                bar.update()
        activation_path(self.folder, model.layers).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "gradients", ignore_errors=True)
        torch.cuda.empty_cache()
        if state["few"]:
            print(
                f"note: {state['few']} of {state['experts']} matrices of experts saw fewer than {_PRIOR} tokens for "
                "each of their rows: down matrices rather follow all experts of the layer together, gate and up "
                "matrices get little feedback across rows",
                file=messages,
            )

    def _keep(self, number: int, array: np.memmap, folder: Path | None = None) -> None:
        array.flush()
        folder = folder or self.folder
        activation_path(folder, number, partial=True).replace(activation_path(folder, number))

    def _last(self, model: LayeredModel, shape: tuple[int, ...], batches: Sequence[np.ndarray]) -> None:
        """The gradient behind the last layer, with respect to the log-likelihood of sampled labels."""

        folder = self.folder / "gradients"
        folder.mkdir(exist_ok=True)
        source = activations(self.folder, model.layers, shape, "r")
        target = activations(folder, model.layers, shape, "w+", partial=True)
        generator = torch.Generator().manual_seed(0)
        squares: list[torch.Tensor] = []

        def watch(_: Any, __: Any, out: torch.Tensor) -> None:
            out.register_hook(lambda gradient: squares.append(gradient.flatten(0, 1).float().square().sum(0).double()))

        with model.head() as head:
            handle = model.model.get_output_embeddings().register_forward_hook(watch)
            for part in batches:
                rows = torch.from_numpy(np.array(source[part])).flatten(0, 1)
                chances = torch.rand(len(rows), generator=generator, dtype=torch.float64)
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
                target[part] = torch.cat(gradients).reshape(target[part].shape).numpy()
            handle.remove()
        save_arrays({"diagonal": (squares[0] / (shape[0] * shape[1])).float().cpu().numpy()}, self.folder / _OUTPUT)
        self._keep(model.layers, target, folder)

    def _backward(
        self,
        model: LayeredModel,
        number: int,
        layer: torch.nn.Module,
        shape: tuple[int, ...],
        batches: Batches,
        keywords: dict[int, dict[str, Any]],
    ) -> tuple[int, int]:
        """One layer: its matrices' Fisher matrices to a file, the gradient of its input to another.

        Returns:
            Of experts, how many matrices saw too few tokens, and how many there are.
        """

        folder = self.folder / "gradients"
        source = activations(self.folder, number, shape, "r")
        behind = activations(folder, number + 1, shape, "r")
        target = activations(folder, number, shape, "w+", partial=True)
        sums = _Sums(self._full, self._block)
        first = Moment(model.hidden, model.hidden <= self._full) if number == 0 and not model.hidden % BLOCK else None
        square = 0.0
        tokens = 0

        def watch(entry: str) -> Callable[..., None]:
            def hook(_: Any, __: Any, out: torch.Tensor) -> None:
                if out.requires_grad:
                    out.register_hook(lambda gradient: sums.add(entry, gradient))

            return hook

        readers = [reader for group in model.layout.groups(number, layer) for reader in group.readers]
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
            out = layer(hidden, **keywords[hidden.shape[0]])
            out = out[0] if isinstance(out, tuple) else out
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
        few, experts = sums.shrink(readers, tokens)
        sums.draw_to_identity()
        matrices = {}
        for name, total in sums.means(tokens):
            matrices[name] = total
            if not np.isfinite(total).all():
                what = "gives gradients that are NaN or infinite"
                raise UserError(model.folder, what, "leave --fisher out", name.rpartition("/")[0])
        if first is not None:
            found = {"moment": first.mean(), "square": np.array([square / (tokens * model.hidden)])}
            save_arrays(found, self.folder / _INPUT)
        save_arrays(matrices, self.folder / _file(number))
        self._keep(number, target, folder)
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


class _Sums:
    """Sums of ``g g^T`` by matrix, with how many tokens they are of.

    Args:
        full: most rows of a matrix that is kept whole.
        block: rows of the blocks that are kept of another.
    """

    def __init__(self, full: int, block: int) -> None:
        self._full, self._block = full, block
        self._totals: dict[str, list[torch.Tensor]] = {}
        self._tokens: dict[str, int] = {}
        self._before: dict[str, list[torch.Tensor]] = {}

    def hold_out(self) -> None:
        """From here on tokens say how far those before them are trusted (:meth:`draw_to_identity`)."""
        self._before = {entry: [total.clone() for total in parts] for entry, parts in self._totals.items()}

    def draw_to_identity(self) -> None:
        """Draw every matrix to a multiple of the identity, as far as tokens that were held out like it.

        How far is decided as for Hessians (:func:`gguf_itq3s.rounding.target.decompose`): by what feedback by the other
        tokens leaves of the cost of errors on these. The traces stay. Experts are drawn to more than that
        (:meth:`shrink`).
        """

        for entry, parts in self._before.items():
            for before, total in zip(parts, self._totals[entry], strict=True):
                held = total - before
                mean = float(held.diagonal().mean())
                if entry.endswith("]") or not mean > 0 or not float(before.diagonal().mean()) > 0:
                    continue
                # Rows whose second moment is that of the tokens held out, however many these are.
                held.diagonal().add_(1e-6 * mean)
                lower, failed = torch.linalg.cholesky_ex(held)
                if failed:
                    continue
                damping, _ = decompose(before, lower.T.contiguous(), DAMPING)
                total.diagonal().add_(damping * float(total.diagonal().mean()))
                total /= 1 + damping
        self._before = {}

    def add(self, entry: str, gradient: torch.Tensor) -> None:
        """Gradients (..., rows) at the outputs of a matrix."""
        rows = gradient.reshape(-1, gradient.shape[-1]).float()
        parts = [part.T @ part for part in rows.split(self._size(rows.shape[1]), dim=1)]
        before = self._totals.get(entry)
        self._totals[entry] = [part.double() for part in parts] if before is None else [
            total.add_(part) for total, part in zip(before, parts, strict=True)
        ]  # fmt: skip
        self._tokens[entry] = self._tokens.get(entry, 0) + len(rows)

    def _size(self, rows: int) -> int:
        return rows if rows <= self._full else self._block

    def shrink(self, readers: Sequence[Reader], tokens: int) -> tuple[int, int]:
        """Draw the matrices of experts to what is known without their own tokens, the more the fewer these are.

        What comes out of the second matrices of all experts goes to the same place, so theirs are drawn to the mean of
        all; one that no token came to has that, of a single token. The neurons of one expert are not those of another,
        so those of gate and up are drawn to their diagonals.

        Args:
            readers: the matrices of the layer.
            tokens: of all of them.

        Returns:
            How many matrices of experts saw so few tokens that their own count for less, and how many there are.
        """
        stacked = [reader for reader in readers if reader.expert is not None]
        few = 0
        for name in dict.fromkeys(reader.name for reader in stacked):
            entries = [reader.entry for reader in stacked if reader.name == name]
            seen = [entry for entry in entries if entry in self._totals]
            if not seen:
                continue
            together = None
            if "ffn_down" in name:
                blocks = zip(*(self._totals[entry] for entry in seen), strict=True)
                together = [sum(parts[1:], parts[0]) for parts in blocks]
            for entry in entries:
                count = self._tokens.get(entry, 0)
                prior = _PRIOR * len(self._totals[seen[0]][0])
                few += count < prior
                share = prior / (count + prior)
                if count:
                    for place, own in enumerate(self._totals[entry]):
                        if together is None:
                            other = own.diagonal().diag()
                        else:
                            other = together[place] * (own.trace() / together[place].trace().clamp(min=1e-300))
                        own.lerp_(other, share)
                elif together is not None:
                    every = sum(self._tokens[other] for other in seen)
                    self._totals[entry] = [total / every for total in together]
        return few, len(stacked)

    def means(self, tokens: int) -> Iterator[tuple[str, np.ndarray]]:
        """The sums over so many tokens, divided by them, by name; each is forgotten."""
        while self._totals:
            entry, parts = self._totals.popitem()
            for place, total in enumerate(parts):
                yield f"{entry}/{place:05d}", (total / tokens).float().cpu().numpy()


def _watched_experts(layer: torch.nn.Module, readers: Sequence[Reader], sums: _Sums) -> dict[str, torch.nn.Module]:
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


def _add_halves(sums: _Sums, entries: Sequence[str], gradient: torch.Tensor) -> None:
    for entry, part in zip(entries, gradient.chunk(len(entries), dim=-1), strict=True):
        sums.add(entry, part)


def _file(number: int) -> str:
    return f"fisher-{number:04d}.safetensors"
