"""What is said of a file before the work on its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from ..base import report
from ..checkpoint import policy
from ..checkpoint.policy import Choice
from ..checkpoint.source import SourceTensor
from ..codec import native
from ..codec.family import is_trellis
from ..codec.grids import GRIDS
from ..codec.types import bits_per_weight
from ..rounding.imatrix import ImportanceMatrix
from .job import Job

#: Types that hold what they are given, or codes that were chosen before.
_EXACT: Final = (Type.F32, Type.F16, Type.BF16, Type.TQ1_0, Type.TQ2_0)


def say_types(job: Job) -> None:
    """A line for the rows in trellis types of shorter blocks, one warning for other rows that are not whole blocks, one
    notice for types that need the built library."""
    odd, unwritable, short = [], set(), defaultdict[Type, list[tuple[SourceTensor, Choice]]](list)
    writable, fallback = job.encoder.writable, job.options.fallback_kind
    for tensor, choice in zip(job.checkpoint.tensors, job.choices, strict=True):
        fitted = policy.fit(choice.wanted, tensor.shape[-1], fallback)
        if fitted != choice.wanted and is_trellis(choice.type):
            short[choice.type].append((tensor, choice))
        elif fitted != choice.wanted:
            odd.append(f"  {tensor.name}: {tensor.shape[-1]} columns, {choice.wanted.name} -> {choice.type.name}")
        if writable is not None and fitted not in writable and fitted != choice.type:
            unwritable.add(f"{fitted.name} -> {choice.type.name}")
    for qtype, found in short.items():
        print(_short(qtype, found), file=job.messages)
    if odd:
        what = f"rows of {len(odd)} tensors are not whole blocks, another type is used"
        print("\n".join([f"warning: {what}:", *odd]), file=job.messages)
    if unwritable:
        changes = ", ".join(sorted(unwritable))
        print(f"note: without the built library: {changes}; {native.build_command()} adds it", file=job.messages)


def _short(qtype: Type, found: Sequence[tuple[SourceTensor, Choice]]) -> str:
    """What it is worth that some tensors are in a trellis type of shorter blocks."""
    instead = policy.fit(found[0][1].wanted, found[0][0].shape[-1], policy.FALLBACK_KINDS[1])
    saved = sum(tensor.bytes_in(instead) - tensor.bytes_in(qtype) for tensor, _ in found)
    longer = max(GGML_QUANT_SIZES[choice.wanted][0] for _, choice in found)
    return (
        f"{len(found)} matrices whose rows are no multiple of {longer} are in {qtype.name}: "
        f"{bits_per_weight(qtype):g} bits a weight where {instead.name} has {bits_per_weight(instead):g}; "
        f"{report.size(saved)} saved"
    )


def say_unknown(job: Job) -> None:
    """One warning for the tensors that there are no statistics of, or of a part, one note for types that are rounded
    without, where some are given."""
    if job.statistics is None:
        return
    unknown, without = [], defaultdict[str, int](int)
    for tensor, choice in zip(job.checkpoint.tensors, job.choices, strict=True):
        # Rows of the embedding are looked up, not multiplied, unless it is the output matrix too, and of that an
        # importance matrix alone may have something.
        embedding = tensor.name in policy.TOKEN_EMBEDDINGS
        output = tensor.name == "output.weight" or (embedding and job.checkpoint.model.tied)
        passed_over = (embedding and not output) or (output and not isinstance(job.statistics, ImportanceMatrix))
        if choice.type in _EXACT or choice.type == tensor.stored or passed_over:
            continue
        share = job.statistics.share(tensor.name)
        if not (is_trellis(choice.type) or choice.type in GRIDS):
            without[choice.type.name] += 1
        elif share < 1:
            unknown.append(f"  {tensor.name}" + (f": {1 - share:.0%} of its matrices" if share else ""))
    if unknown:
        what = f"has nothing on {len(unknown)} tensors, they are rounded without"
        print("\n".join([f"warning: {job.statistics.path} {what}:", *unknown]), file=job.messages)
    for name, count in without.items():
        print(f"note: {count} tensors are in {name}, which is rounded without statistics", file=job.messages)
