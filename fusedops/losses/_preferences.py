"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and losses of the same four numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fusedops.dtypes import upcast
from fusedops.errors import InvalidInputError
from fusedops.losses._checks import check_choice, check_number, check_present, check_shapes

_BY_LENGTH = ("ipo", "sigmoid_norm")
_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
TYPES = (
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm",
)  # fmt: skip


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute a loss of pairs of answers, of which one was chosen and one rejected.

    With ``c = chosen - ref_chosen``, ``r = rejected - ref_rejected`` and ``d = beta * (c - r)``, "sigmoid" is
    ``-log(sigmoid(d))``. :doc:`The page of the losses <../losses>` has the formulas of all types.

    Args:
        chosen: (B,), floating: the sum of the log probabilities of each chosen answer's tokens, as in
            ``linear_log_probs(x, weight, target).sum(-1)`` with the prompt's targets ignored.
        rejected: (B,), the same of the rejected answers.
        ref_chosen: (B,), ``chosen`` of the reference model, or None for 0: without a reference.
        ref_rejected: (B,), ``rejected`` of the reference model, or None for 0.
        loss_type: "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
            "aot_unpaired", "apo_zero", "apo_down", "discopop" or "sigmoid_norm".
        beta: above 0, the weight of the difference from the reference.
        label_smoothing: the share of labels that are wrong, in [0, 0.5), of "robust", "aot" and "aot_unpaired";
            above 0 of "exo_pair". Other types take 0 alone.
        discopop_tau: the temperature of "discopop", above 0.
        chosen_lengths: (B,), the number of tokens of each chosen answer, for "ipo" and "sigmoid_norm", which divide by
            it.
        rejected_lengths: (B,), the same of the rejected answers.
        reduction: "mean", "sum", or "none" for the loss of each pair.

    Returns:
        (), or (B,) for "none"; float32, or float64 for float64, computed in that. The mean of no pairs is 0.

    Raises:
        InvalidInputError: an argument is not as above.

    Source: trl, ``DPOTrainer``; Liger, ``LigerFusedLinearDPOLoss``.

    >>> import torch
    >>> from fusedops.losses import dpo_loss
    >>> dpo_loss(torch.tensor([-10.0, -12.0]), torch.tensor([-11.0, -11.0]))
    tensor(0.6944)
    """
    name = "dpo_loss"
    check_choice(name, "loss_type", loss_type, TYPES)
    check_choice(name, "reduction", reduction, ("mean", "sum", "none"))
    check_shapes(name, ((chosen.shape[0],) if chosen.dim() else (1,),), "a number of each pair", chosen=chosen)
    others = {"rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    lengths = {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    check_shapes(name, (tuple(chosen.shape),), "that of chosen", **others, **lengths)
    check_number(name, "beta", beta, 0.0, math.inf, low_allowed=False)
    check_number(name, "discopop_tau", discopop_tau, 0.0, math.inf, low_allowed=False)
    if loss_type in _SMOOTHED:
        check_number(name, "label_smoothing", label_smoothing, 0.0, 0.5, low_allowed=loss_type != "exo_pair")
    elif label_smoothing != 0:
        raise InvalidInputError(
            f"{name}: got label_smoothing = {label_smoothing} with loss_type = {loss_type!r}, expected 0; to fix: pass "
            f"one of {', '.join(map(repr, _SMOOTHED))} as loss_type"
        )
    if loss_type in _BY_LENGTH:
        check_present(name, f"by which {loss_type} divides", **lengths)
    c = upcast(chosen) if ref_chosen is None else upcast(chosen) - upcast(ref_chosen)
    r = upcast(rejected) if ref_rejected is None else upcast(rejected) - upcast(ref_rejected)
    if loss_type == "aot":
        each = _sorted_difference(chosen, rejected, ref_chosen, ref_rejected)
        losses = _smoothed(beta * each, label_smoothing)
    elif loss_type in _BY_LENGTH and chosen_lengths is not None and rejected_lengths is not None:
        c, r = c / chosen_lengths.clamp(min=1), r / rejected_lengths.clamp(min=1)
        losses = (c - r - 1 / (2 * beta)).square() if loss_type == "ipo" else -logsigmoid(beta * (c - r))
    else:
        losses = _of_ratios(loss_type, c, r, beta, label_smoothing, discopop_tau)
    if reduction == "none":
        return losses
    return losses.sum() / (max(losses.numel(), 1) if reduction == "mean" else 1)


def _of_ratios(loss_type: str, c: Tensor, r: Tensor, beta: float, smoothing: float, tau: float) -> Tensor:
    """Return the loss of each pair from its differences from the reference."""
    d = beta * (c - r)
    if loss_type == "sigmoid":
        return -logsigmoid(d)
    if loss_type == "hinge":
        return torch.relu(1 - d)
    if loss_type == "robust":
        return _smoothed(d, smoothing / (2 * smoothing - 1))  # a share below 0
    if loss_type == "exo_pair":
        d = d.clamp(-1e3, 1e3)  # beyond, one share is 0, and its logarithm may be infinite
        of_chosen = torch.sigmoid(d) * (logsigmoid(d) - math.log1p(-smoothing))
        return of_chosen + torch.sigmoid(-d) * (logsigmoid(-d) - math.log(smoothing))
    if loss_type == "nca_pair":
        return -logsigmoid(beta * c) - 0.5 * (logsigmoid(-beta * c) + logsigmoid(-beta * r))
    if loss_type == "bco_pair":
        return -logsigmoid(beta * c) - logsigmoid(-beta * r)
    if loss_type == "sppo_hard":
        return (c - 0.5 / beta).square() + (r + 0.5 / beta).square()
    if loss_type == "aot_unpaired":
        return _smoothed(beta * (c.sort().values - r.sort().values), smoothing)
    if loss_type == "apo_zero":
        return torch.sigmoid(-beta * c) + torch.sigmoid(beta * r)
    if loss_type == "apo_down":
        return torch.sigmoid(beta * c) + torch.sigmoid(-d)
    finite = d.clamp(min=torch.finfo(d.dtype).min)  # discopop, whose share times exp(-d) may be 0 times infinity
    return torch.exp(logsigmoid(finite / tau) - finite) - logsigmoid(d) * torch.sigmoid(-finite / tau)


def _smoothed(d: Tensor, smoothing: float) -> Tensor:
    loss = -(1 - smoothing) * logsigmoid(d)
    return loss - smoothing * logsigmoid(-d) if smoothing else loss  # 0 times infinity


def _sorted_difference(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor | None, ref_rejected: Tensor | None
) -> Tensor:
    """Return the differences between the sorted margins of both models."""
    margin = (upcast(chosen) - upcast(rejected)).sort().values
    of_ref = [torch.zeros_like(margin) if ref is None else upcast(ref) for ref in (ref_chosen, ref_rejected)]
    return margin - (of_ref[0] - of_ref[1]).sort().values
