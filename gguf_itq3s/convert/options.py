"""What a conversion is asked for: one dataclass for each subject, handed on whole to what needs it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from ..calibrate.options import CalibrationOptions
from ..checkpoint.policy import FALLBACK_KINDS, GIVEN_TYPES, Overrides
from ..checkpoint.request import Request
from ..checkpoint.stock import STOCK_TYPES
from ..codec import formats
from ..codec.family import DEFAULT, FAMILY
from ..rounding.ldlq import SEARCHES

#: Output types that upstream's converter writes: the file has the same bytes as its file.
PLAIN_OUTTYPES: Final = ("f32", "f16", "bf16", "q8_0", "auto")
#: Output types that llama-quantize writes, mixes of llama.cpp's own types; q8_0 is one where there are statistics.
STOCK_OUTTYPES: Final = tuple(STOCK_TYPES)
#: Output types that are trellis-coded.
TRELLIS_OUTTYPES: Final = tuple(row.identifier for row in FAMILY.values())
OUTTYPES: Final = (*TRELLIS_OUTTYPES, "tq1_0", "tq2_0", *(t for t in STOCK_OUTTYPES if t != "q8_0"), *PLAIN_OUTTYPES)
#: Types that tensors may be given by name.
TENSOR_TYPES: Final = tuple(qtype.name.lower() for qtype in GIVEN_TYPES)
#: Of the trellis types.
EFFORTS: Final = tuple(SEARCHES)
TERNARY_MODES: Final = ("auto", "force", "off")
TERNARY_TYPES: Final = ("tq2_0", "tq1_0")

_FTYPES: Final = {
    "f32": LlamaFileType.ALL_F32, "bf16": LlamaFileType.MOSTLY_BF16, "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "auto": LlamaFileType.GUESSED,
}  # fmt: skip

#: The options that do not change a byte of the file.
_NEUTRAL: Final = frozenset({"model", "out", "folder", "threads", "native", "dry_run", "verbose"})


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert and how; the fields are the options of the command, see :meth:`of`.

    Attributes:
        run: the model, and how it is run where statistics are taken.
        request: what is read of the checkpoint.
        out: the GGUF file to write, perhaps with ``{ftype}`` and the like in its name; None for a name by the GGUF
            naming convention in ``folder``.
        folder: where such a name goes; None for the model's folder.
        dry_run: find out everything and write nothing.
        outtype: one of :data:`OUTTYPES`.
        pure: every matrix in that type, embeddings and output too.
        target_bpw: bits per weight of the file; the types are chosen so that the error is least. None: by the mix.
        target_size: the same by the bytes of the whole file.
        token_embedding_type: type of the token embedding, by its GGUF name, instead of the mix's.
        output_tensor_type: the same for the output matrix.
        tensor_types: patterns of names and the type of what they match.
        leave_output_tensor: the output matrix stays as it would be in an F16 file.
        fallback: what takes the place of a trellis type in rows that are not whole blocks, one of
            :data:`gguf_itq3s.checkpoint.policy.FALLBACK_KINDS`.
        codec: of trellis types, ``trellis`` or ``ternary``.
        effort: of trellis types, one of :data:`EFFORTS`; of a search with feedback,
            :data:`gguf_itq3s.rounding.ldlq.SEARCHES`.
        damping: of the Hessians, share of the mean diagonal.
        segment: columns that the calibrated search commits at a time.
        lookahead: columns it searches past them before.
        threads: threads that quantize.
        native: quantize with the built C library (True), in numpy (False), or with what is there (None).
        calibration: folder of ``gguf-itq3s calibrate``; trellis-coded tensors are rounded with its Hessians.
        imatrix: importance matrix of llama-imatrix, the same with diagonal ones.
        include_weights: of the importance matrix, only entries with one of these in their names.
        exclude_weights: of the importance matrix, only entries with none of these in their names.
        fold_norms: multiply norm gains into the matrices that read them.
        equalize: rescale channels so that rounding costs least; None: for trellis types where statistics are given.
        calibrate: quantize while the model is calibrated, layer by layer.
        fisher: errors are fed across rows too, by the Fisher information of the outputs.
        fisher_block: rows of the blocks kept of each output Fisher matrix; None for whole ones up to 8192 rows.
        ternary: ``auto`` (ternary matrices to ``ternary_type``), ``force`` (ternarize the others too) or ``off``.
        ternary_type: ``tq2_0`` or ``tq1_0``.
        ternary_scale: of ``force``, a key of ``codec.ternary.SCALES``.
        model_name: ``general.name`` in the file.
        verbose: show what llama.cpp's converter logs.
    """

    run: CalibrationOptions
    request: Request = field(default_factory=Request)
    out: Path | None = None
    folder: Path | None = None
    dry_run: bool = False
    outtype: str = DEFAULT.identifier
    pure: bool = False
    target_bpw: float | None = None
    target_size: int | None = None
    token_embedding_type: str | None = None
    output_tensor_type: str | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    leave_output_tensor: bool = False
    fallback: str = FALLBACK_KINDS[0]
    codec: str = "trellis"
    effort: str = "auto"
    damping: float | None = None
    segment: int | None = None
    lookahead: int | None = None
    threads: int = 1
    native: bool | None = None
    calibration: Path | None = None
    imatrix: Path | None = None
    include_weights: tuple[str, ...] = ()
    exclude_weights: tuple[str, ...] = ()
    fold_norms: bool = False
    equalize: bool | None = None
    calibrate: bool = False
    fisher: bool = False
    fisher_block: int | None = None
    ternary: str = "auto"
    ternary_type: str = "tq2_0"
    ternary_scale: str = "absmean"
    model_name: str | None = None
    verbose: bool = False

    @classmethod
    def of(
        cls, model: Path, out: Path | None = None, *, calibrate: tuple[Path, ...] | None = None, outtype: str = "",
        **values: Any,
    ) -> ConvertOptions:  # fmt: skip
        """The options by their names on the command line.

        Args:
            model: a local Hugging Face folder.
            out: the file to write.
            calibrate: files of text to quantize with while the model is calibrated on them, layer by layer; empty for
                the bundled text, None for no such thing.
            outtype: empty: ``auto`` of a projector or a vocabulary, else the default of the trellis types.
            values: fields, of ``run`` and ``request`` too.

        Raises:
            TypeError: there is no such field.
        """
        outtype = outtype or ("auto" if values.get("mmproj") or values.get("vocab_only") else DEFAULT.identifier)
        values |= {"model": model, "out": out, "outtype": outtype, "calibrate": calibrate is not None}
        if calibrate:
            values["text"] = calibrate
        parts: dict[str, Any] = {}
        for name, kind in (("run", CalibrationOptions), ("request", Request)):
            parts[name] = kind(**{key: values.pop(key) for key in {part.name for part in fields(kind)} & values.keys()})
        found = cls(**parts, **values)
        ftype = _FTYPES.get(outtype, LlamaFileType.MOSTLY_F16) if found.plain else LlamaFileType.MOSTLY_F16
        return replace(found, request=replace(found.request, ftype=ftype))

    def deciding(self) -> dict[str, str]:
        """By name, all that decides the bytes of the file."""
        values = {part.name: getattr(owner, part.name) for owner in (self, self.run, self.request)
                  for part in fields(owner)}  # fmt: skip
        if values["dtype"] == CalibrationOptions.dtype:
            del values["dtype"]  # so that what earlier versions began can go on
        return {name: str(value) for name, value in values.items() if name not in {*_NEUTRAL, "run", "request"}}

    @property
    def budgeted(self) -> bool:
        """Whether types are chosen for a size."""
        return self.target_bpw is not None or self.target_size is not None

    @property
    def overrides(self) -> Overrides:
        """The types that are given by name."""
        embedding, output = self.token_embedding_type, self.output_tensor_type
        return Overrides(
            Type[embedding.upper()] if embedding else None,
            Type[output.upper()] if output else None,
            tuple((pattern, Type[name.upper()]) for pattern, name in self.tensor_types),
            self.leave_output_tensor,
        )

    def gives(self, name: str, *, tied: bool) -> bool:
        """Whether the type of a tensor is given by name; ``tied``: the token embedding is the output matrix too."""
        return self.overrides.touches(name, tied=tied, quantized=not self.plain, pure=self.pure)

    @property
    def statistics(self) -> Path | None:
        """The calibration folder or the importance matrix."""
        return self.calibration or self.imatrix

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return self.run.model

    @property
    def plain(self) -> bool:
        """Whether the file is one that upstream's converter writes."""
        return self.outtype in PLAIN_OUTTYPES and not (self.outtype == "q8_0" and self.calibrated)

    @property
    def calibrated(self) -> bool:
        """Whether matrices are rounded with statistics of their inputs."""
        return self.statistics is not None or self.calibrate

    @property
    def equalizes(self) -> bool:
        """Whether channels are rescaled by statistics."""
        if self.equalize is not None:
            return self.equalize
        return self.calibrated and self.trellis and not self.fold_norms

    @property
    def trellis(self) -> bool:
        """Whether the type of the file is trellis-coded."""
        return self.outtype in TRELLIS_OUTTYPES

    @property
    def fallback_kind(self) -> str:
        """What takes the place of a trellis type in rows that are not whole blocks: short blocks have one codec."""
        return self.fallback if self.codec == formats.CODECS[0] else FALLBACK_KINDS[1]

    @property
    def stock(self) -> LlamaFileType | None:
        """``general.file_type`` of a mix of llama.cpp's own types, None for other files."""
        outtype = self.outtype
        return STOCK_TYPES[outtype][1] if outtype in STOCK_TYPES and not self.plain else None

    @property
    def mixes_stock(self) -> bool:
        """Whether the file has more than one of llama.cpp's own types; Q8_0 is mixed with nothing."""
        return self.stock is not None and not self.pure and self.target != Type.Q8_0

    @property
    def target(self) -> Type:
        """The type of the matrices; F16 where they are stored as upstream stores them."""
        if self.plain:
            return Type.F16
        outtype = self.outtype
        return STOCK_TYPES[outtype][0] if outtype in STOCK_TYPES else Type[outtype.upper()]
