"""The bytes of the tensors, one after the other, into the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..base.errors import UserError, errors_of_weights
from ..base.report import TensorRow
from ..checkpoint.policy import Choice
from ..checkpoint.source import SourceTensor
from ..codec.family import rotation
from ..rounding.encode import SquaredError, takes_hessian
from ..rounding.hessian import Factor
from .job import Job
from .output import Output

if TYPE_CHECKING:
    from ..calibrate.finished import Finished


class TensorWriter:
    """What makes the bytes of tensors.

    Args:
        job: the conversion.
        finished: matrices that are encoded already, if some are.
    """

    def __init__(self, job: Job, finished: Finished | None) -> None:
        self._job, self._finished = job, finished

    def write(self, output: Output, rows: Sequence[TensorRow]) -> list[TensorRow]:
        """Write every tensor that is not there yet; returns the rows, one for each tensor, with their errors.

        Raises:
            UserError: weights cannot be read or encoded, or the file cannot be written.
        """
        job, messages = self._job, self._job.messages
        done = len(output.records)
        if done:
            print(f"continuing after {done} of {len(rows)} tensors", file=messages)
        total = sum(row.weights for row in rows)
        written = sum(row.weights for row in rows[:done])
        progress = tqdm(
            total=total, initial=written, unit=" weights", unit_scale=True, mininterval=0.5, file=messages,
        )  # fmt: skip
        with progress as bar:
            for tensor, choice in list(zip(job.checkpoint.tensors, job.choices, strict=True))[done:]:
                bar.set_postfix_str(tensor.name, refresh=False)
                self._write(output, tensor, choice, bar)
        return [replace(row, error=noted["error"]) for row, noted in zip(rows, output.records, strict=True)]

    def _write(self, output: Output, tensor: SourceTensor, choice: Choice, bar: Any) -> None:
        error = SquaredError()

        def pieces() -> Iterator[np.ndarray]:
            nonlocal error
            left = tensor.size
            for data, weights, part in self._pieces(tensor, choice):
                yield data
                error += part
                bar.update(weights)
                left -= weights
            bar.update(left)

        output.write(pieces(), lambda: {"name": tensor.name, "error": error.relative})

    def _pieces(self, tensor: SourceTensor, choice: Choice) -> Iterator[tuple[np.ndarray, int, SquaredError]]:
        """The bytes of a tensor in order, with the number of weights and their error."""
        if self._finished is not None and self._finished.known(tensor.name):
            for data, error in self._finished.pieces(tensor.name):
                yield data, 0, error
            return

        def factor(number: int) -> Factor | None:
            return self._factor(tensor, choice, number)

        try:
            with errors_of_weights(self._job.checkpoint.folder, tensor.label):
                for piece in self._job.encoder.encode(tensor.load(), tensor.size, choice.type, factor):
                    yield piece.data, piece.weights, piece.error
        except OSError as problem:
            what = f"cannot be read: {problem.strerror or problem}"
            raise UserError(self._job.checkpoint.folder, what, "check the disk of the model", tensor.label) from problem

    def _factor(self, tensor: SourceTensor, choice: Choice, number: int) -> Factor | None:
        """The factor of one matrix of a stack, None where nothing is known."""
        factors = self._job.factors
        if factors is None or not takes_hessian(choice.type, tensor.shape[-1]):
            return None
        if not factors.source.known(tensor.name):
            return None
        return factors.factor(tensor.name, tensor.shape, number, block=rotation(choice.type))
