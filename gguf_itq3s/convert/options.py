"""What a conversion is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

OUTTYPES: Final = ("itq3_s", "tq1_0", "tq2_0", "f16")
#: Types that embedding and output may be given by name.
TENSOR_TYPES: Final = ("f32", "f16", "q8_0", "q6_k", "q5_k", "q4_k", "itq3_s", "tq2_0", "tq1_0")
TERNARY_MODES: Final = ("auto", "force", "off")
TERNARY_TYPES: Final = ("tq2_0", "tq1_0")

#: The options that do not change a byte of the file.
NEUTRAL: Final = frozenset({"model", "out", "threads", "native", "dry_run", "verbose"})


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert and how; the fields are the options of the command.

    Attributes:
        model: a local Hugging Face folder.
        out: the GGUF file to write.
        outtype: one of :data:`OUTTYPES`.
        pure: every matrix in that type, embeddings and output too.
        codec: of ITQ3_S, ``trellis`` or ``ternary``.
        effort: of ITQ3_S, ``fast`` or ``default``.
        threads: threads that quantize.
        native: quantize with the built C library (True), in numpy (False), or with what is there (None).
        ternary: ``auto`` (ternary matrices to ``ternary_type``), ``force`` (ternarize the others too) or ``off``.
        ternary_type: ``tq2_0`` or ``tq1_0``.
        ternary_scale: of ``force``, a key of ``codec.ternary.SCALES``.
        dry_run: find out everything and write nothing.
        model_name: ``general.name`` in the file.
        verbose: show what llama.cpp's converter logs.
        fold_norms: multiply norm gains into the matrices that read them; None: yes for ITQ3_S, else no.
        calibration: folder of ``gguf-itq3s calibrate``; ITQ3_S tensors are rounded with its Hessians.
        imatrix: importance matrix of llama-imatrix, the same with diagonal ones.
        damping: of the Hessians, share of the mean diagonal.
        segment: columns that the calibrated search commits at a time.
        lookahead: columns it searches past them before.
        token_embedding_type: type of the token embedding, by its GGUF name, instead of the mix's.
        output_tensor_type: the same for the output matrix.
        trust_remote_code: Python code of the model folder may run, as its tokenizer.
    """

    model: Path
    out: Path
    outtype: str = "itq3_s"
    pure: bool = False
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
    fold_norms: bool | None = None
    calibration: Path | None = None
    imatrix: Path | None = None
    damping: float | None = None
    segment: int | None = None
    lookahead: int | None = None
    token_embedding_type: str | None = None
    output_tensor_type: str | None = None
    trust_remote_code: bool = False

    @property
    def folds(self) -> bool:
        """Whether norms are folded."""
        return self.outtype == "itq3_s" if self.fold_norms is None else self.fold_norms

    @property
    def statistics(self) -> Path | None:
        """The calibration folder or the importance matrix."""
        return self.calibration or self.imatrix

    @property
    def own_types(self) -> dict[str, str]:
        """The tensors whose type is given by name: GGUF name -> type."""
        given = {"token_embd.weight": self.token_embedding_type, "output.weight": self.output_tensor_type}
        return {name: qtype for name, qtype in given.items() if qtype}
