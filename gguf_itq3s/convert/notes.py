"""What is said of a file before the work on its tensors."""

from __future__ import annotations

from ..checkpoint import policy
from ..codec import native
from ..codec.family import is_trellis
from .job import Job


def say_types(job: Job) -> None:
    """One warning for the rows that are not whole blocks, one notice for types that need the built library."""
    odd, unwritable = [], set()
    writable = job.encoder.writable
    for tensor, choice in zip(job.checkpoint.tensors, job.choices, strict=True):
        fitted = policy.fit(choice.wanted, tensor.shape[-1])
        if fitted != choice.wanted:
            odd.append(f"  {tensor.name}: {tensor.shape[-1]} columns, {choice.wanted.name} -> {choice.type.name}")
        if writable is not None and fitted not in writable and fitted != choice.type:
            unwritable.add(f"{fitted.name} -> {choice.type.name}")
    if odd:
        what = f"rows of {len(odd)} tensors are not whole blocks, another type is used"
        print("\n".join([f"warning: {what}:", *odd]), file=job.messages)
    if unwritable:
        changes = ", ".join(sorted(unwritable))
        print(f"note: without the built library: {changes}; {native.build_command()} adds it", file=job.messages)


def say_unknown(job: Job) -> None:
    """One warning for the tensors that there are no statistics of, where some are given."""
    if job.statistics is None:
        return
    # Rows of the embedding are looked up, not multiplied.
    unknown = [
        f"  {tensor.name}"
        for tensor, choice in zip(job.checkpoint.tensors, job.choices, strict=True)
        if is_trellis(choice.type) and tensor.name != "token_embd.weight" and not job.statistics.share(tensor.name)
    ]
    if unknown:
        what = f"has nothing on {len(unknown)} tensors, they are rounded without"
        print("\n".join([f"warning: {job.statistics.path} {what}:", *unknown]), file=job.messages)
