"""How far a student's next-token distributions are from its teacher's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def divergence(student: torch.Tensor, teacher: torch.Tensor, loss: str, confidence: float = 0.0) -> torch.Tensor:
    """The mean divergence over all positions, in nats.

    ``cakld`` is BitDistiller's confidence-aware KL divergence (arXiv 2402.10631), which RCP uses as well:
    ``a KL(student || teacher) + (1 - a) KL(teacher || student)``.

    Args:
        student: logits (..., vocabulary).
        teacher: logits of the same shape, without gradient.
        loss: ``kl`` (the teacher's distribution first), ``reverse-kl`` or ``cakld``.
        confidence: a of ``cakld``, from :func:`confidence_of`.

    Raises:
        ValueError: an unknown loss.
    """
    from torch.nn.functional import kl_div, log_softmax

    own, wanted = log_softmax(student.float(), dim=-1), log_softmax(teacher.float(), dim=-1)
    count = own.shape[:-1].numel()
    share = {"kl": 0.0, "reverse-kl": 1.0, "cakld": confidence}.get(loss)
    if share is None:
        raise ValueError(f"unknown loss {loss!r}; use kl, reverse-kl or cakld")
    total = own.new_zeros(())
    if share < 1:
        total = total + (1 - share) * kl_div(own, wanted, reduction="sum", log_target=True)
    if share > 0:
        total = total + share * kl_div(wanted, own, reduction="sum", log_target=True)
    return total / count


def confidence_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean probability that a model gives to the tokens of a text, as BitDistiller measures confidence.

    Args:
        logits: (windows, context, vocabulary).
        ids: (windows, context).
    """
    likely = logits[:, :-1].float().softmax(-1)
    return likely.gather(-1, ids[:, 1:, None]).mean()
