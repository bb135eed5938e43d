"""What a conversion is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from ..calibration.options import CalibrationOptions
from ..checkpoint.policy import GIVEN_TYPES, Overrides
from ..checkpoint.request import Request
from ..checkpoint.stock import STOCK_TYPES
from ..codec import blocks

#: Output types that upstream's converter writes: the file has the same bytes as its file.
PLAIN_OUTTYPES: Final = ("f32", "f16", "bf16", "q8_0", "auto")
#: Output types that llama-quantize writes, mixes of llama.cpp's own types; q8_0 is one where there are statistics.
STOCK_OUTTYPES: Final = tuple(STOCK_TYPES)
OUTTYPES: Final = ("itq3_s", "tq1_0", "tq2_0", *(t for t in STOCK_OUTTYPES if t != "q8_0"), *PLAIN_OUTTYPES)
#: Types that tensors may be given by name.
TENSOR_TYPES: Final = tuple(qtype.name.lower() for qtype in GIVEN_TYPES)
#: Of ITQ3_S: those of the codec, and the widest calibrated search.
EFFORTS: Final = (*blocks.EFFORTS, "best")
TERNARY_MODES: Final = ("auto", "force", "off")
TERNARY_TYPES: Final = ("tq2_0", "tq1_0")

_FTYPES: Final = {
    "f32": LlamaFileType.ALL_F32, "bf16": LlamaFileType.MOSTLY_BF16, "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "auto": LlamaFileType.GUESSED,
}  # fmt: skip

#: The options that do not change a byte of the file.
NEUTRAL: Final = frozenset({"model", "out", "folder", "threads", "native", "dry_run", "verbose"})


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert and how; the fields are the options of the command.

    Attributes:
        model: a local Hugging Face folder.
        out: the GGUF file to write, perhaps with ``{ftype}`` and the like in its name; None for a name by the GGUF
            naming convention in ``folder``.
        folder: where such a name goes; None for the model's folder.
        outtype: one of :data:`OUTTYPES`; empty: ``auto`` of a projector or a vocabulary, else ``itq3_s``.
        pure: every matrix in that type, embeddings and output too.
        target_bpw: bits per weight of the file; the types are chosen so that the error is least. None: by the mix.
        target_size: the same by the bytes of the whole file.
        codec: of ITQ3_S, ``trellis`` or ``ternary``.
        effort: of ITQ3_S, one of :data:`EFFORTS`; ``best`` is ``default`` with a wider calibrated search.
        threads: threads that quantize.
        native: quantize with the built C library (True), in numpy (False), or with what is there (None).
        ternary: ``auto`` (ternary matrices to ``ternary_type``), ``force`` (ternarize the others too) or ``off``.
        ternary_type: ``tq2_0`` or ``tq1_0``.
        ternary_scale: of ``force``, a key of ``codec.ternary.SCALES``.
        dry_run: find out everything and write nothing.
        model_name: ``general.name`` in the file.
        verbose: show what llama.cpp's converter logs.
        fold_norms: multiply norm gains into the matrices that read them.
        equalize: rescale channels so that rounding costs least; None: for ITQ3_S where statistics
            are given.
        calibration: folder of ``gguf-itq3s calibrate``; ITQ3_S tensors are rounded with its Hessians.
        imatrix: importance matrix of llama-imatrix, the same with diagonal ones.
        calibrate: files of text to quantize with while the model is calibrated on them, layer by layer; empty for the
            bundled text, None for no such thing.
        tokens: of these texts, about how many tokens are run.
        context: length of their windows; None for :func:`gguf_itq3s.calibration.text.usual_context`, at most the
            model's.
        hessian: form of the sums over their tokens, as :class:`gguf_itq3s.calibration.options.CalibrationOptions`.
        device: torch device that the model runs on.
        batch: windows at a time.
        fisher: errors are fed across rows too, by the Fisher information of the outputs.
        fisher_block: rows of the blocks kept of each output Fisher matrix; None for whole ones up to 8192 rows.
        include_weights: of the importance matrix, only entries with one of these in their names.
        exclude_weights: of the importance matrix, only entries with none of these in their names.
        damping: of the Hessians, share of the mean diagonal.
        segment: columns that the calibrated search commits at a time.
        lookahead: columns it searches past them before.
        token_embedding_type: type of the token embedding, by its GGUF name, instead of the mix's.
        output_tensor_type: the same for the output matrix.
        tensor_types: patterns of names and the type of what they match.
        leave_output_tensor: the output matrix stays as it would be in an F16 file.
        prune_layers: layers that are left out.
        override_kv: metadata, ``KEY=TYPE:VALUE``.
        split_max_tensors: tensors of a part, 0 for any number.
        split_max_size: bytes of the tensors of a part, 0 for any number.
        no_tensor_first_split: the first part has metadata alone.
        trust_remote_code: Python code of the model folder may run, as its tokenizer.

    The others are those of :class:`gguf_itq3s.checkpoint.request.Request`.
    """

    model: Path
    out: Path | None = None
    folder: Path | None = None
    outtype: str = ""
    pure: bool = False
    target_bpw: float | None = None
    target_size: int | None = None
    codec: str = "trellis"
    effort: str = "default"
    threads: int = 1
    native: bool | None = None
    ternary: str = "auto"
    ternary_type: str = "tq2_0"
    ternary_scale: str = "absmean"
    dry_run: bool = False
    model_name: str | None = None
    verbose: bool = False
    fold_norms: bool = False
    equalize: bool | None = None
    calibration: Path | None = None
    imatrix: Path | None = None
    calibrate: tuple[Path, ...] | None = None
    tokens: int = CalibrationOptions.tokens
    context: int | None = None
    hessian: str | None = None
    device: str = "cpu"
    batch: int = CalibrationOptions.batch
    fisher: bool = False
    fisher_block: int | None = None
    include_weights: tuple[str, ...] = ()
    exclude_weights: tuple[str, ...] = ()
    damping: float | None = None
    segment: int | None = None
    lookahead: int | None = None
    token_embedding_type: str | None = None
    output_tensor_type: str | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    leave_output_tensor: bool = False
    prune_layers: tuple[int, ...] = ()
    override_kv: tuple[str, ...] = ()
    split_max_tensors: int = 0
    split_max_size: int = 0
    no_tensor_first_split: bool = False
    trust_remote_code: bool = False
    mmproj: bool = False
    mtp: bool = False
    no_nextn: bool = False
    vocab_only: bool = False
    metadata: Path | None = None
    quantized_by: str | None = None
    repository: str | None = None
    no_lazy: bool = False
    fuse_gate_up_exps: bool = False
    fp8_as_q8: bool = False
    fuse_qkv: bool = False
    sentence_transformers_dense_modules: bool = False
    target_model_dir: Path | None = None

    def __post_init__(self) -> None:
        if not self.outtype:
            object.__setattr__(self, "outtype", "auto" if self.mmproj or self.vocab_only else "itq3_s")

    @property
    def plain(self) -> bool:
        """Whether the file is one that upstream's converter writes."""
        return self.outtype in PLAIN_OUTTYPES and not (self.outtype == "q8_0" and self.calibrated)

    @property
    def calibrated(self) -> bool:
        """Whether matrices are rounded with statistics of their inputs."""
        return self.statistics is not None or self.calibrate is not None

    @property
    def equalizes(self) -> bool:
        """Whether channels are rescaled by statistics."""
        if self.equalize is not None:
            return self.equalize
        return self.calibrated and self.outtype == "itq3_s" and not self.fold_norms

    @property
    def stock(self) -> LlamaFileType | None:
        """``general.file_type`` of a mix of llama.cpp's own types, None for other files."""
        return STOCK_TYPES[self.outtype][1] if self.outtype in STOCK_TYPES and not self.plain else None

    @property
    def mixes_stock(self) -> bool:
        """Whether the file has more than one of llama.cpp's own types; Q8_0 is mixed with nothing."""
        return self.stock is not None and not self.pure and self.target != Type.Q8_0

    @property
    def codec_effort(self) -> str:
        """The effort of the codec."""
        return "default" if self.effort == "best" else self.effort

    @property
    def splits(self) -> bool:
        """Whether the file is to be split."""
        return bool(self.split_max_tensors or self.split_max_size or self.no_tensor_first_split)

    @property
    def budgeted(self) -> bool:
        """Whether types are chosen for a size."""
        return self.target_bpw is not None or self.target_size is not None

    @property
    def statistics(self) -> Path | None:
        """The calibration folder or the importance matrix."""
        return self.calibration or self.imatrix

    @property
    def target(self) -> Type:
        """The type of the matrices; F16 where they are stored as upstream stores them."""
        if self.plain:
            return Type.F16
        return STOCK_TYPES[self.outtype][0] if self.outtype in STOCK_TYPES else Type[self.outtype.upper()]

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

    @property
    def request(self) -> Request:
        """What is to be read of the checkpoint."""
        fields = {name: getattr(self, name) for name in Request.__dataclass_fields__ if name != "ftype"}
        ftype = _FTYPES.get(self.outtype, LlamaFileType.MOSTLY_F16) if self.plain else LlamaFileType.MOSTLY_F16
        return Request(ftype=ftype, **fields)
