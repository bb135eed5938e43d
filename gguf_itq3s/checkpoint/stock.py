"""Files in llama.cpp's own types: the mixes of ``llama-quantize``, which the built tool is asked for.

With ``--dry-run`` it says what it would make of each tensor of an F16 file. It is asked about the head of that file,
with a hole in place of the weights.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from ..base.errors import UserError
from ..codec import native
from .loadable import hole
from .source import Checkpoint, padded

#: What llama-quantize takes these names for.
_MEDIUM: Final = ("q3_k", "q4_k", "q5_k")


def _types_of(name: str) -> tuple[Type, LlamaFileType]:
    whole = f"{name}_m" if name in _MEDIUM else name
    return Type[re.sub("_[sml]$", "", whole).upper()], LlamaFileType[f"MOSTLY_{whole.upper()}"]


#: llama.cpp's own types of a file: what most matrices are, and ``general.file_type``.
STOCK_TYPES: Final[Mapping[str, tuple[Type, LlamaFileType]]] = {
    name: _types_of(name)
    for name in (
        "q4_k_m", "q4_k_s", "q4_k", "iq4_xs", "iq4_nl", "q5_k_m", "q5_k_s", "q5_k", "q6_k", "q3_k_l", "q3_k_m",
        "q3_k_s", "q3_k", "q2_k", "q4_0", "q8_0",
    )
}  # fmt: skip

#: What an answer may take: far more than any list of tensors needs.
_SECONDS: Final = 120
#: An importance matrix in the form of old, of one value for a matrix that no model has: that there is one counts.
_IMPORTANCE: Final = struct.pack("<ii3siif", 1, 3, b"any", 1, 1, 1.0)
#: Of the log: a tensor, its type in the F16 file, its new type if that is another.
_CHOSEN: Final = re.compile(r"^\[ *\d+/ *\d+\] (\S+) +- .*, type = +(\S+), size = .*?(?:\((\S+)\))?$", re.MULTILINE)
#: A tensor whose rows are not whole blocks, and the type that it would have otherwise.
_WANTED: Final = re.compile(r"^warning: (\S+) +- ncols .*?\(required for type +(\S+)\)", re.MULTILINE)


@dataclass(frozen=True)
class F16File:
    """The file that llama-quantize would read.

    Attributes:
        folder: of the checkpoint, for messages.
        head: GGUF header, metadata and tensor infos.
        size: bytes of the whole file.
    """

    folder: Path
    head: bytes
    size: int

    def mixed_types(
        self, file_type: LlamaFileType, *, statistics: bool = False, given: Collection[str] = (), fitted: bool = False
    ) -> dict[str, Type]:
        """The types that llama-quantize mixes, before any fallback for the row length.

        Args:
            file_type: of the file.
            statistics: whether there are statistics of the matrices' inputs, which changes a few rules.
            given: tensors whose type is given by ``--tensor-type``; they have no place in the order.
            fitted: after the fallback.

        Returns:
            Name -> type; of tensors whose type is given any.

        Raises:
            UserError: there is no built library, it cannot read the metadata, or there is a limit on the size of files.
        """
        kind = file_type.name.removeprefix("MOSTLY_")
        base = native.library_path()
        tool = base.with_name(f"llama-quantize{'.exe' if base.suffix == '.dll' else ''}") if base else None
        if tool is None or not tool.exists():
            raise UserError(self.folder, f"{kind} needs the built library", f"run {native.build_command()}")
        words = [word for name in given for word in ("--tensor-type", f"^{re.escape(name)}$=q8_0")]
        with tempfile.NamedTemporaryFile() as matrix:
            if statistics:
                matrix.write(_IMPORTANCE)
                matrix.flush()
                words += ["--imatrix", matrix.name]
            with hole(self.head, self.size) as path:
                if path is None:
                    what = "there can be no file of its size in F16, which llama-quantize is asked about"
                    raise UserError(self.folder, what, "raise the limit on the size of files (ulimit -f)")
                log = self._log_of([str(tool), "--dry-run", *words, path, kind, "1"])
        written = {name: Type[(new or stored).upper()] for name, stored, new in _CHOSEN.findall(log)}
        return written if fitted else written | {name: Type[asked.upper()] for name, asked in _WANTED.findall(log)}

    def _log_of(self, command: Sequence[str]) -> str:
        """What llama-quantize says."""
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                errors="replace", timeout=_SECONDS, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
            )  # fmt: skip
        except (subprocess.TimeoutExpired, OSError) as error:
            raise UserError(command[0], f"cannot be asked: {error}", f"run {native.build_command()}") from error
        if done.returncode:
            found = re.search(r"failed to quantize: (.+)", done.stderr)
            reason = found[1] if found else f"it ended with code {done.returncode}"
            raise UserError(self.folder, f"llama-quantize cannot read it: {reason}", "check its config.json")
        return done.stderr


def f16_file(checkpoint: Checkpoint) -> F16File:
    """The F16 file of a checkpoint, as it now is.

    Raises:
        UserError: the model's metadata do not fit GGUF's types.
    """
    head = checkpoint.head([tensor.stored for tensor in checkpoint.tensors])
    sizes = [len(head), *(tensor.bytes_in(tensor.stored) for tensor in checkpoint.tensors)]
    return F16File(checkpoint.folder, head, sum(map(padded, sizes)))
