"""Files by llama.cpp's own converter, to compare ours with."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import torch

from gguf_itq3s import upstream
from gguf_itq3s.checkpoint.patches import replaced_in


def write(
    folder: Path,
    out: Path,
    ftype: gguf.LlamaFileType = gguf.LlamaFileType.MOSTLY_F16,
    *,
    mmproj: bool = False,
    vocab_only: bool = False,
    flags: tuple[str, ...] = (),
    **arguments: Any,
) -> Path:
    """The lines of convert_hf_to_gguf.py that do the work.

    Args:
        folder: a model.
        out: the file, or a folder for a file of the default name.
        ftype: of the file.
        mmproj: the projector.
        vocab_only: the vocabulary.
        flags: ``mtp_only`` or ``no_mtp``.
        arguments: of the class that reads the architecture.

    Returns:
        The file that was written; of a split one, the name that its parts are made from.
    """
    conversion = upstream.load_conversion()
    kind = conversion.ModelType.MMPROJ if mmproj else conversion.ModelType.TEXT
    architecture = conversion.get_model_architecture(conversion.ModelBase.load_hparams(folder, False), kind)
    model_class = conversion.get_model_class(architecture, mmproj=mmproj)
    with ExitStack() as stack, torch.inference_mode():
        for flag in flags:
            stack.enter_context(replaced_in(model_class, flag, True))
        reader = model_class(folder, ftype, out, **arguments)
        reader.write_vocab() if vocab_only else reader.write()
    return Path(reader.fname_out)
