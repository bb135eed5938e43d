"""Layers that are finished: what an interrupted run goes on with."""

from pathlib import Path

import numpy as np

from gguf_itq3s.calibrate.finished import Finished
from gguf_itq3s.rounding.encode import SquaredError


def add(finished: Finished, number: int) -> None:
    entry = f"blk.{number}.ffn_down.weight"
    finished.errors[entry] = SquaredError(1.0, 2.0 + number)
    finished.add(number, {entry: np.full((2, 3), number, dtype=np.uint8)})


def test_a_torn_line_does_not_swallow_the_next_layer(tmp_path: Path) -> None:
    folder = tmp_path / "x.calibrating"
    first = Finished.resume(folder, "a")
    add(first, 0)
    with first.journal.path.open("ab") as file:
        file.write(b'{"file": "layer-0001.saf')
    second = Finished.resume(folder, "a")
    assert second.layers == 1
    add(second, 1)
    third = Finished.resume(folder, "a")
    assert third.layers == 2
    assert third.errors == {f"blk.{n}.ffn_down.weight": SquaredError(1.0, 2.0 + n) for n in range(2)}


def test_layers_behind_a_lost_file_are_done_again(tmp_path: Path) -> None:
    folder = tmp_path / "x.calibrating"
    first = Finished.resume(folder, "a")
    for number in range(3):
        add(first, number)
    (folder / "layer-0001.safetensors").unlink()
    assert Finished.resume(folder, "a").layers == 1
    assert first.journal.records() is not None and len(first.journal.records() or ()) == 1
