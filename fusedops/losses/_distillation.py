"""The divergence of a student's distribution from a teacher's, of two last layers in chunks of rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoints

from fusedops.dtypes import no_autocast, promoted, upcast
from fusedops.errors import InvalidInputError
from fusedops.losses._checks import check_choice, check_number, check_shapes
from fusedops.ops.losses.formulas import rows_of_chunk

_LEAST_ROWS = 192  # of a chunk: each reads both weights


def kl_divergence(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Compute the divergence between the distributions of a student and of a teacher, in chunks of rows.

    With the student's distribution s, the teacher's t, and ``m = (1 - beta) * s + beta * t``, the divergence of a row
    is ``beta * KL(t | m) + (1 - beta) * KL(s | m)``; for beta 0 it is KL(t | s), the forward one, for 1 KL(s | t), the
    reverse one. The logits of all rows never exist at once: backward computes each chunk again.

    Args:
        x: (..., H), floating, the input of the student's last layer.
        weight: (V, H), floating.
        teacher_x: (..., Ht), the input of the teacher's last layer. It has no gradient, as ``teacher_weight`` and
            ``teacher_bias``.
        teacher_weight: (V, Ht), floating.
        bias: (V,), or None.
        teacher_bias: (V,), or None.
        mask: (...), bool, True for rows that count. Others are 0, without gradient. None: all rows.
        beta: in [0, 1].
        temperature: above 0; both logits are divided by it.
        reduction: "mean" over the rows that count, at least 1; "sum"; or "none" for each row's.

    Returns:
        (), or (...) for "none"; float32, or float64 if one of the tensors of the student is, computed in that. The
        products are in the dtype of x and weight, by torch's promotion, as those of ``torch.nn.Linear`` are.

    Raises:
        InvalidInputError: an argument is not as above.

    Source: Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2023, arXiv:2306.13649; Liger,
    ``LigerFusedLinearJSDLoss``.

    >>> import torch
    >>> from fusedops.losses import kl_divergence
    >>> x, weight = torch.ones(2, 1), torch.tensor([[0.0], [1.0]])
    >>> kl_divergence(x, weight, x, 2 * weight, beta=0.5)
    tensor(0.0183)
    """
    name, rows = "kl_divergence", tuple(x.shape[:-1])
    check_choice(name, "reduction", reduction, ("mean", "sum", "none"))
    check_number(name, "temperature", temperature, 0.0, math.inf, low_allowed=False)
    if not 0 <= beta <= 1:
        raise InvalidInputError(f"{name}: got beta = {beta}, expected a number in [0, 1]; to fix: pass one")
    check_shapes(name, ((weight.shape[0], x.shape[-1]),), "(V, H) of x", weight=weight)
    check_shapes(name, ((*rows, teacher_weight.shape[-1]),), "the rows of x", teacher_x=teacher_x)
    check_shapes(name, ((weight.shape[0], teacher_x.shape[-1]),), "V of weight", teacher_weight=teacher_weight)
    check_shapes(name, ((weight.shape[0],),), "V of weight", bias=bias, teacher_bias=teacher_bias)
    check_shapes(name, (rows,), "the rows of x", mask=mask)
    student, teacher = x.reshape(-1, x.shape[-1]), teacher_x.detach().reshape(-1, teacher_x.shape[-1])
    kept = None if mask is None else mask.reshape(-1) != 0
    if kept is not None:  # a NaN in a row that does not count reaches nothing
        student, teacher = (each.masked_fill(~kept[:, None], 0.0) for each in (student, teacher))
    size = rows_of_chunk(student.shape[0], student.shape[1], weight.shape[0], _LEAST_ROWS)
    others = (teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach())
    compute = partial(_of_rows, beta=beta, temperature=temperature)
    checkpoint = cast("Any", checkpoints).checkpoint  # which has no types
    pieces: list[tuple[Tensor, Tensor]] = [*zip(torch.split(student, size), torch.split(teacher, size))]
    parts: list[Tensor] = [
        checkpoint(compute, own, weight, bias, other, *others, use_reentrant=False, preserve_rng_state=False)
        for own, other in pieces
    ]
    losses: Tensor = torch.cat(parts)
    if kept is not None:
        losses = losses.masked_fill(~kept, 0.0)
    if reduction == "none":
        return losses.view(rows)
    if reduction == "sum":
        return losses.sum()
    count = losses.numel() if kept is None else kept.sum().clamp(min=1)
    return losses.sum() / max(count, 1) if isinstance(count, int) else losses.sum() / count


def _of_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float,
) -> Tensor:
    """Return the divergence of each row: (n,)."""
    s = _log_probs(x, weight, bias, temperature)
    with torch.no_grad():
        t = _log_probs(teacher_x, teacher_weight, teacher_bias, temperature).to(s.dtype)
    if beta == 0:
        return _kl(t, s)
    if beta == 1:
        return _kl(s, t)
    none = (s == -math.inf) & (t == -math.inf)  # of which logaddexp has no gradient
    m = torch.logaddexp((s + math.log(1 - beta)).masked_fill(none, 0.0), t + math.log(beta))
    return beta * _kl(t, m) + (1 - beta) * _kl(s, m)


def _log_probs(x: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    common = promoted(x, weight)
    with no_autocast(x.device.type):
        logits = upcast(x.to(common) @ weight.to(common).t())
    return torch.log_softmax((logits if bias is None else logits + bias.to(logits.dtype)) / temperature, -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of ``exp(p) * (p - q)`` of each row; a class whose ``exp(p)`` is 0 adds 0."""
    share = torch.exp(p)
    return (share * (p - q).masked_fill(share == 0, 0.0)).sum(-1)
