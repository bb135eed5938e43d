"""Rescaling of channels: a model's weights multiplied and divided so that the model stays what it is.

What makes a channel is multiplied by ``t``, what reads it is divided by ``t``::

    W n = (W diag(1/t)) (diag(t) n)

It is exact wherever nothing but a linear map stands between the two (:mod:`gguf_itq3s.checkpoint.channels` says where),
changes nothing at run time, and changes what rounding costs (:mod:`gguf_itq3s.rounding.equalize`).
:class:`Equalization` has a factor for every channel. :class:`Folding` is the special case ``t = 1 / gain`` for the
channels that norms make (QuaRot, arXiv 2404.00456, does it to its norms): the norm becomes all ones.

Both say of a tensor what its rows and columns are multiplied by, ``W_file = rows[:, None] * W * columns[None, :]``, and
everything that has to bring weights, statistics or adapters from the model to the file or back asks them. The residual
stream is the same in both models.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from ..base.errors import UserError
from .channels import Channels, Norms, Plan, plan, plan_norms
from .gguf_file import GGUFFile, contents_of, shape_of

if TYPE_CHECKING:
    from .source import Checkpoint, SourceTensor

#: The key of a file, model or adapter, whose norms are folded; the patched llama.cpp compares the two.
NORMS_FOLDED: Final = "itq3s.norms_folded"
#: Keys of an equalized file: what makes the channels, their exponents, and a short hash of both, which alone an adapter
#: has; the patched llama.cpp compares it with the model's.
SOURCES: Final = "itq3s.rescaling.sources"
EXPONENTS: Final = "itq3s.rescaling.exponents"
ID: Final = "itq3s.rescaling.id"

#: The quantization method of a model that PyTorch holds packed.
PACKED_METHOD: Final = "itq3_s"
#: The tag of such a model, which PEFT writes into the model card of an adapter that was trained beside it; that of an
#: equalized one ends with its id.
FOLDED_TAG: Final = "itq3_s-norms-folded"
EQUALIZED_TAG: Final = "itq3_s-rescaled-"

#: Of what is rescaled, so that no conversion that another version began is continued. The first folded ``output_norm``.
PLAN_VERSION: Final = 4

#: Factors are 2^(k / STEPS): so coarse a grid costs 0.3% of what they gain, and k fits a byte.
STEPS: Final = 8
#: Largest k: factors of 1/256 to 256. float16 holds the weights of a model times these.
LARGEST: Final = 8 * STEPS

_REMEDY: Final = "write or download the file again"
_HASH: Final = re.compile(r"[0-9a-f]{16}")

Factors = npt.NDArray[np.float32]


class Rescaling:
    """What a model's tensors are multiplied by in a file; this one leaves them as they are."""

    #: Vectors that are all ones in the file.
    neutral: frozenset[str] = frozenset()

    def columns(self, name: str, expert: int | None = None) -> Factors | None:
        """What the columns of a matrix, or of one of a stack, are multiplied by: float32 (n,), None for ones."""
        del name, expert
        return None

    def rows(self, name: str, expert: int | None = None) -> Factors | None:
        """What the rows of a matrix, or the elements of a vector, are multiplied by: float32 (m,), None for ones."""
        del name, expert
        return None

    def __bool__(self) -> bool:
        return bool(self.key)

    @property
    def key(self) -> str:
        """Equal for two that rescale alike, of one checkpoint; empty for one that rescales nothing."""
        return ""

    def metadata(self) -> dict[str, bool | str | list[str]]:
        """What a file with it says of itself, without an architecture of its own."""
        return {}

    def marks(self) -> dict[str, bool | str]:
        """What an adapter for such a file says."""
        said = self.metadata()
        return {key: value for key in (NORMS_FOLDED, ID) if isinstance(value := said.get(key), (bool, str))}

    def describe(self, writer: GGUFWriter) -> None:
        """Give the writer of a file what it says of this."""
        for key, value in self.metadata().items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)

    def touches(self, name: str) -> bool:
        """Whether a tensor is another one in the file."""
        return name in self.neutral or self.columns(name, 0) is not None or self.rows(name, 0) is not None

    def scale(self, name: str, part: npt.NDArray[Any], start: int = 0) -> Factors:
        """Some of a tensor as it is in the file.

        Args:
            name: GGUF name.
            part: (..., n), along the first axis from ``start`` on.
            start: its first row, or its first expert where it has three axes.

        Returns:
            float32, the shape of ``part``; ``part`` itself where it is float32 and nothing is rescaled.

        Raises:
            ValueError: it has other columns or rows than the factors.
        """
        if name in self.neutral:
            return np.ones(part.shape, dtype=np.float32)
        stacked = part.ndim == 3
        matrices = [(name, start + i) for i in range(len(part))] if stacked else [(name, None)]
        factors = [(self.columns(*matrix), self.rows(*matrix)) for matrix in matrices]
        if all(columns is None and rows is None for columns, rows in factors):
            return np.asarray(part, dtype=np.float32)
        weights = np.array(part, dtype=np.float32)  # scaled in place: a third copy of the largest would not fit
        for matrix, (columns, rows) in zip(weights if stacked else [weights], factors, strict=True):
            _scale(matrix, columns, rows, name, 0 if stacked else start)
        return weights

    def unscale(self, name: str, weights: Factors, expert: int | None = None) -> Factors:
        """The weights of the model, float32 (m, n), out of those in the file; nothing comes through a column of 0."""
        columns, rows = self.columns(name, expert), self.rows(name, expert)
        if columns is not None:
            weights = np.divide(weights, columns, out=np.zeros_like(weights), where=columns != 0)
        return weights if rows is None else weights / rows[:, None]

    def apply(self, tensors: Sequence[SourceTensor], folder: Path) -> list[SourceTensor]:
        """All tensors of a model as they are in the file; rescaled ones load as float32, still one at a time."""

        def rescaled(tensor: SourceTensor) -> Iterator[np.ndarray]:
            start = 0
            for part in tensor.load():
                try:
                    yield self.scale(tensor.name, part, start)
                except ValueError as problem:
                    remedy = "convert with --no-equalize --no-fold-norms"
                    raise UserError(folder, str(problem), remedy, tensor.label) from problem
                start += len(part)

        def matrix(tensor: SourceTensor, number: int) -> np.ndarray | None:
            found = tensor.load_matrix(number)
            return None if found is None else self.scale(tensor.name, found[None], number)[0]

        def of(tensor: SourceTensor) -> SourceTensor:
            if not self.touches(tensor.name):
                return tensor
            return replace(tensor, load=lambda: rescaled(tensor), load_matrix=partial(matrix, tensor))

        return [of(tensor) for tensor in tensors] if self else list(tensors)


def _scale(weights: Factors, columns: Factors | None, rows: Factors | None, name: str, start: int) -> None:
    """Multiply a matrix, or some of its rows from ``start`` on, or a vector, by the factors in place."""
    if columns is not None:
        if columns.size != weights.shape[-1]:
            raise ValueError(f"{name}: has {weights.shape[-1]} columns, and factors for {columns.size}")
        weights *= columns
    if rows is not None:
        here = rows[start : start + len(weights)]
        if len(here) != len(weights):
            raise ValueError(f"{name}: has more rows than the {len(rows)} that have factors")
        weights *= here[:, None] if weights.ndim == 2 else here


class Folding(Rescaling):
    """Gains of norms multiplied into the matrices that read them, and set to one.

    Args:
        norms: which.
        gain: of a norm by its GGUF name, float32 (n,).
    """

    def __init__(self, norms: Norms, gain: Callable[[str], Factors]) -> None:
        self.norms, self._gain = norms, gain
        self.neutral = frozenset(norms.readers)

    def columns(self, name: str, expert: int | None = None) -> Factors | None:
        del expert
        norm = self.norms.norm_of(name)
        return None if norm is None else self._gain(norm)

    def rows(self, name: str, expert: int | None = None) -> Factors | None:
        del expert
        if name not in self.neutral:
            return None
        gain = self._gain(name)  # 1 / gain; where that is 0, so is the column of the file
        return np.divide(np.float32(1), gain, out=np.zeros_like(gain), where=gain != 0)

    @property
    def key(self) -> str:  # the gains are the checkpoint's
        return " ".join(sorted(self.norms.readers))

    def metadata(self) -> dict[str, bool | str | list[str]]:
        return {NORMS_FOLDED: True} if self else {}  # the norms show which


class Equalization(Rescaling):
    """Channels multiplied by powers of two at their sources, and divided by them where they are read.

    Args:
        channels: those that are rescaled.
        exponents: source -> int8 (experts or 1, count), -64 to 64: eighths of an exponent.
    """

    def __init__(self, channels: Iterable[Channels], exponents: Mapping[str, npt.NDArray[np.int8]]) -> None:
        self.channels = {found.source: found for found in channels if found.source in exponents}
        self.exponents = {source: exponents[source] for source in self.channels}
        self._read = {reader: found for found in self.channels.values() for reader in found.readers}
        self._made = {found.source: found for found in self.channels.values()}
        self._made |= {found.bias: found for found in self.channels.values() if found.bias is not None}

    def _exponents(self, channels: Channels, expert: int | None) -> npt.NDArray[np.float64]:
        stored = self.exponents[channels.source]
        return stored[(expert or 0) if channels.experts else 0].astype(np.float64)

    def columns(self, name: str, expert: int | None = None) -> Factors | None:
        channels = self._read.get(name)
        if channels is None:
            return None
        return _power(-self._exponents(channels, expert))[channels.of_column]

    def rows(self, name: str, expert: int | None = None) -> Factors | None:
        channels = self._made.get(name)
        if channels is None:
            return None
        rows = np.ones(channels.rows, dtype=np.float32)  # those of a fused matrix that make no channel stay
        rows[channels.start : channels.start + channels.count] = _power(self._exponents(channels, expert))
        return rows

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits of a hash."""
        digest = hashlib.sha256("\n".join(self.channels).encode())
        for exponents in self.exponents.values():
            digest.update(b"\0" + exponents.tobytes())
        return digest.hexdigest()[:16]

    @property
    def key(self) -> str:
        return self.id if self.channels else ""

    def metadata(self) -> dict[str, bool | str | list[str]]:
        if not self:
            return {}
        # One string: a large model has millions of exponents.
        packed = b"".join(exponents.tobytes() for exponents in self.exponents.values())
        return {SOURCES: list(self.channels), EXPONENTS: base64.b64encode(packed).decode(), ID: self.id}


def _power(eighths: npt.NDArray[np.float64]) -> Factors:
    return np.exp2(eighths / STEPS).astype(np.float32)


# ----------------------------------------------------------------------------------------------------- of a checkpoint


def plan_tensors(checkpoint: Checkpoint, kept: Iterable[str] = ()) -> Plan:
    """The channels of a checkpoint that a conversion can rescale.

    Matrices ``kept`` stay as they are, as ternary ones, which would have more than three values.
    """
    arch = checkpoint.model.arch
    clamp = checkpoint.writer.kv_data[0].get(f"{arch}.attention.clamp_kqv")
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    clamped = clamp is not None and bool(clamp.value)
    return plan(arch, shapes, checkpoint.model.heads, clamped=clamped, fixed=_fixed(checkpoint.tensors, kept))


def _fixed(tensors: Iterable[SourceTensor], kept: Iterable[str]) -> Callable[[str], bool]:
    names = {tensor.name for tensor in tensors if tensor.stored.name not in ("F32", "F16", "BF16")}.union(kept)
    return names.__contains__


def fold(checkpoint: Checkpoint, kept: Iterable[str] = ()) -> Folding:
    """The folding of a checkpoint's norms; arguments as for :func:`plan_tensors`."""
    names = [tensor.name for tensor in checkpoint.tensors]
    norms = plan_norms(checkpoint.model.arch, names, _fixed(checkpoint.tensors, kept))
    return Folding(norms, gains(checkpoint.tensors, checkpoint.folder))


def gains(tensors: Iterable[SourceTensor], folder: Path) -> Callable[[str], Factors]:
    """The gain of a norm by its GGUF name, float32 (n,), out of all tensors of a model; each is read once."""
    by_name = {tensor.name: tensor for tensor in tensors}
    read: dict[str, Factors] = {}

    def gain(norm: str) -> Factors:
        if norm not in read:
            read[norm] = by_name[norm].vector()
            # Once folded, the norm is all ones and the fault would show in the matrices that read it.
            if bad := np.count_nonzero(~np.isfinite(read[norm])):
                what = f"{bad} of its weights {'is' if bad == 1 else 'are'} NaN or infinite"
                raise UserError(folder, what, "repair the checkpoint or download it again", by_name[norm].label)
        return read[norm]

    return gain


# ----------------------------------------------------------------------------------------------------------- of a file


def rescaling_of(file: GGUFFile, gain: Callable[[str], Factors]) -> Rescaling:
    """The rescaling of a GGUF file, out of what it says of itself. Nothing of it is believed.

    Args:
        file: the file.
        gain: of a norm of the model that it was made from, float32 (n,), by GGUF name. Only asked for where norms are
            folded.

    Raises:
        UserError: the description does not fit the file.
    """
    tensors = {tensor.name: tensor for tensor in file.tensors}
    shapes = {name: shape_of(tensor) for name, tensor in tensors.items()}
    contents = partial(contents_of, file)
    if (sources := contents(SOURCES)) is not None:
        return _equalization(file.paths[0], sources, contents, shapes)
    if contents(NORMS_FOLDED) is not True:
        return Rescaling()
    # That a norm is all ones and was not tells which.
    readers = {}
    for norm, read_by in plan_norms(str(contents("general.architecture")), shapes).readers.items():
        if tensors[norm].tensor_type not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            what = f"is {tensors[norm].tensor_type.name}, which no norm is"
            raise UserError(file.paths[0], what, _REMEDY, norm)
        now = np.asarray(tensors[norm].data, dtype=np.float32).reshape(-1)
        if (now == 1).all() and (was := gain(norm)).shape == now.shape and not (was == 1).all():
            readers[norm] = read_by
    return Folding(Norms(readers), gain)


def _equalization(
    path: Path, sources: object, contents: Callable[[str], object], shapes: Mapping[str, tuple[int, ...]]
) -> Equalization:
    arch, exponents = contents("general.architecture"), contents(EXPONENTS)
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise UserError(path, f"has {SOURCES} that are no names", _REMEDY)
    heads, clamp = contents(f"{arch}.attention.head_count"), contents(f"{arch}.attention.clamp_kqv")
    known = plan(str(arch), shapes, heads if isinstance(heads, int) else 0, clamped=bool(clamp)).channels
    if strange := [source for source in sources if source not in known]:
        raise UserError(path, "is said to be rescaled, and cannot be", _REMEDY, f"{strange[0]!r:.80}")
    if len(set(sources)) != len(sources):
        raise UserError(path, f"has {SOURCES} twice", _REMEDY)
    total = sum(math.prod(known[source].shape) for source in sources)
    try:
        packed = base64.b64decode(exponents, validate=True) if isinstance(exponents, str) else b""
    except (binascii.Error, ValueError):
        packed = b""
    found = np.frombuffer(packed, dtype=np.int8)
    if found.size != total or (np.abs(found.astype(np.int16)) > LARGEST).any():
        raise UserError(path, f"has {EXPONENTS} that are not {total} numbers up to {LARGEST}", _REMEDY)
    parts, start = {}, 0
    for source in sources:
        end = start + math.prod(known[source].shape)
        parts[source], start = found[start:end].reshape(known[source].shape), end
    made = Equalization([known[source] for source in sources], parts)
    if contents(ID) != made.id:
        raise UserError(path, f"has an {ID} that is not that of its exponents", _REMEDY)
    return made


def is_folded_packed(config: Mapping[str, object]) -> bool:
    """Whether a ``config.json`` is of a model that PyTorch holds packed and whose norms are folded."""
    return _packed(config).get("norms_folded") is True


def id_packed(config: Mapping[str, object]) -> str:
    """The id of the equalization of a model that PyTorch holds packed, by its ``config.json``; empty if it has none."""
    found = _packed(config).get("rescaling")
    return str(found) if is_id(found) else ""


def is_id(value: object) -> bool:
    """Whether a value is the id of an equalization."""
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _packed(config: Mapping[str, object]) -> Mapping[str, object]:
    packed = config.get("quantization_config")
    return packed if isinstance(packed, Mapping) and packed.get("quant_method") == PACKED_METHOD else {}
