"""What quantized files do to the layers of a model, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import gguf
import numpy as np
import torch

from gguf_itq3s.calibrate.activations import activations
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.checkpoint.gguf_file import open_gguf
from gguf_itq3s.checkpoint.rescaling import rescaling_of
from gguf_itq3s.rounding.encode import KEPT_TYPES


def layer_errors(model: LayeredModel, text: np.ndarray, files: Sequence[Path]) -> tuple[float, np.ndarray]:
    """How much of a model was calibrated, and the errors of its layers.

    Args:
        model: the original; matrices that it knows nothing of stay as they are.
        text: tokens, int64 (windows, context).
        files: GGUF files of the model, of the same types, whose norms are not folded.

    Returns:
        The share of the quantized weights of the layers whose inputs are known, and (files, layers) the squared errors
        behind each layer over the squares of what it adds, embeddings being those of the original.
    """
    tensors = [{tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors} for file in files]
    rescalings = [rescaling_of(open_gguf(file), lambda _: np.zeros(0, np.float32)) for file in files]
    everything = np.arange(len(text))
    errors = np.zeros((len(files), model.layers))
    known: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        keywords = model.start(Path(scratch), text, [everything], 0)
        hidden = np.array(activations(Path(scratch), 0, (*text.shape, model.hidden), "r")[:])
        streams = [hidden] * len(files)
        for number in range(model.layers):
            layer = model.load(number)
            readers = [reader for group in model.layout.groups(number, layer) for reader in group.readers]
            known |= {reader.name for reader in readers}
            with keywords[number].of(everything, Path(scratch)) as given:
                right = model.step(layer, hidden, given)
            for place, of_file in enumerate(tensors):
                for reader in readers:
                    tensor = of_file[reader.name]
                    data = tensor.data if reader.expert is None else tensor.data[reader.expert]
                    decoded = gguf.quants.dequantize(data, tensor.tensor_type).reshape(-1, tensor.shape[0])
                    decoded = rescalings[place].unscale(reader.name, decoded, reader.expert)
                    reader.put(reader.matrix(layer), torch.tensor(reader.in_model(decoded)))
                with keywords[number].of(everything, Path(scratch) / str(place)) as given:
                    streams[place] = model.step(layer, streams[place], given)
                # Some first tokens are a hundred times as large as the others.
                off, size = (np.square(x, dtype=np.float64).sum(-1) for x in (streams[place] - right, right - hidden))
                errors[place, number] = (off / size).mean()
            model.unload(number)
            hidden = right
    quantized = {
        name: tensor.n_elements for name, tensor in tensors[0].items()
        if name.startswith("blk.") and tensor.tensor_type not in KEPT_TYPES
    }  # fmt: skip
    return sum(size for name, size in quantized.items() if name in known) / sum(quantized.values()), errors
