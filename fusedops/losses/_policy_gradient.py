"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its variants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic
from fusedops.errors import InvalidInputError
from fusedops.losses._checks import check_choice, check_number, check_present, check_shapes

TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_LEAST_LOG, _MOST_LOG = math.log(1e-8), 20.0  # bounds of the logarithm of a weight of "vespo"


def grpo_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    sampling_ratio: Tensor | None = None,
    max_completion_length: int | None = None,
    num_items: float | Tensor | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_positive: tuple[float, float] = (2.0, 3.0),
    vespo_negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Compute the loss of a policy from the log probabilities of the tokens that it sampled.

    With ``ratio = exp(logp - old_logp)``, a token's loss is ``-min(ratio * a, clip(ratio) * a)``, with the advantage a.
    :doc:`The page of the losses <../losses>` has the formulas and the divisors of all types.

    Args:
        logp: (B, T), floating, such as ``linear_log_probs(x, weight, tokens, temperature=...)``.
        advantages: (B,) or (B, T), floating.
        mask: (B, T), bool or a number: 1 for tokens that count. Others have no effect, whatever their numbers.
        old_logp: (B, T), ``logp`` of the policy that sampled, without gradient. None: ``logp`` itself, detached.
        ref_logp: (B, T), ``logp`` of the reference model, for ``beta``.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
        importance_sampling_level: "token", or "sequence" for the geometric mean of a sequence's ratios, as in GSPO. Not
            of "cispo", "sapo" and "vespo".
        epsilon_low: ratios are clipped below ``1 - epsilon_low``.
        epsilon_high: and above ``1 + epsilon_high``; of "cispo" above ``epsilon_high`` alone.
        delta: the largest ratio that is not clipped either, or None. Not of "cispo", "sapo" and "vespo".
        beta: the weight of the estimate k3 of KL(policy | reference), at least 0.
        use_bias_correction_kl: multiply that by the ratio.
        sampling_ratio: (B, T) or (B, 1), a correction of each token's loss for an engine that sampled by other numbers,
            or None.
        max_completion_length: what "dr_grpo" divides by, beside B.
        num_items: what "dapo", "cispo" and "vespo" divide by, a number or a tensor of one element: the tokens of all
            batches of a step. None: those of ``mask``, at least 1.
        sapo_temperatures: of "sapo", for positive advantages and for others, above 0.
        vespo_positive: of "vespo", the exponent k and the rate lambda of a sequence's weight, for advantages that are
            not negative.
        vespo_negative: the same for negative advantages.

    Returns:
        (), float32, or float64 for float64, computed in that. Far ratios have the limits of the formulas;
            the loss of no tokens is 0.

    Raises:
        InvalidInputError: an argument is not as above.

    Source: trl, ``GRPOTrainer``; Liger, ``LigerFusedLinearGRPOLoss``.

    >>> import torch
    >>> from fusedops.losses import grpo_loss
    >>> logp = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
    >>> grpo_loss(logp, torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]]), old_logp=logp - 0.1)
    tensor(-0.3684)
    """
    name, shape = "grpo_loss", tuple(logp.shape)
    check_choice(name, "loss_type", loss_type, TYPES)
    check_choice(name, "importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    if importance_sampling_level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise InvalidInputError(
            f"{name}: got importance_sampling_level = 'sequence' with loss_type = {loss_type!r}, expected 'token'; to "
            f"fix: pass importance_sampling_level='token'"
        )
    if logp.dim() != 2:
        raise InvalidInputError(f"{name}: got logp of shape {shape}, expected (B, T); to fix: pass 2 dims")
    check_shapes(name, (shape,), "that of logp", mask=mask, old_logp=old_logp, ref_logp=ref_logp)
    check_shapes(name, (shape[:1], shape), "(B,) or (B, T) of logp", advantages=advantages)
    check_shapes(name, (shape, (shape[0], 1)), "(B, T) or (B, 1) of logp", sampling_ratio=sampling_ratio)
    check_number(name, "beta", beta, 0.0, math.inf)
    for at, each in enumerate(sapo_temperatures):
        check_number(name, f"sapo_temperatures[{at}]", each, 0.0, math.inf, low_allowed=False)
    if beta:
        check_present(name, "for beta", ref_logp=ref_logp)
    if loss_type == "dr_grpo":
        check_present(name, "by which dr_grpo divides", max_completion_length=max_completion_length)
    dtype = arithmetic(logp, advantages, old_logp, ref_logp, sampling_ratio)
    kept, weights = mask != 0, mask.to(dtype)
    wide = _of_kept(logp, kept, dtype)
    side = (advantages if advantages.dim() == 2 else advantages[:, None]).to(dtype)  # of which the sign alone is read
    a = _of_kept(side, kept, dtype)
    old = wide.detach() if old_logp is None else _of_kept(old_logp, kept, dtype)
    correction = None
    if sampling_ratio is not None:  # "vespo" has one of a sequence once
        counts = kept if sampling_ratio.shape == kept.shape else kept.any(-1, keepdim=True)
        correction = _of_kept(sampling_ratio, counts, dtype, 1.0)
    log_ratio = wide - old
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(min=1.0)
    if correction is not None and loss_type != "vespo":
        a = a * correction.masked_fill(a == 0, 0.0)
    if loss_type == "sapo":
        finite = (0.0, torch.finfo(dtype).max / 4)  # the gate is 1 long before
        positive, other = sapo_temperatures
        temperature = torch.full_like(side, other).masked_fill(side > 0, positive)
        ratio = _ratio_within(log_ratio, a, side, finite, finite)
        losses = -torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * a
    elif loss_type in ("cispo", "vespo"):
        if loss_type == "cispo":
            weight = _ratio_within(log_ratio, a, side, (0.0, epsilon_high), (0.0, epsilon_high)).detach() * a
        else:
            weight = _gamma_weights(log_ratio, side, weights, correction, vespo_positive, vespo_negative) * a
        losses = -weight * wide.masked_fill(weight == 0, 0.0)
    else:  # -min(min(ratio, delta) * a, clip(ratio) * a)
        most = 1 + epsilon_high
        below = (0.0, most if delta is None else min(most, delta))
        above = (1 - epsilon_low, math.inf if delta is None else max(most, delta))
        losses = -_ratio_within(log_ratio, a, side, below, above) * a
    if beta and ref_logp is not None:
        difference = _of_kept(ref_logp, kept, dtype) - wide
        losses = losses + beta * _k3(difference, log_ratio if use_bias_correction_kl else None)
    each = losses * weights
    if loss_type in ("grpo", "sapo", "luspo"):
        of_sequences = each.sum(-1)
        if loss_type != "luspo":
            of_sequences = of_sequences / weights.sum(-1).clamp(min=1.0)
        return of_sequences.sum() / max(shape[0], 1)
    if loss_type == "dr_grpo" and max_completion_length is not None:
        return each.sum() / max(shape[0] * max_completion_length, 1)
    count = weights.sum() if num_items is None or loss_type == "bnpo" else num_items
    if isinstance(count, Tensor):
        return each.sum() / count.to(each.dtype).reshape(()).clamp(min=1.0)
    return each.sum() / max(float(count), 1.0)


def _of_kept(tensor: Tensor, kept: Tensor, dtype: torch.dtype, neutral: float = 0.0) -> Tensor:
    """Return the numbers of the tokens that count, and a neutral number elsewhere.

    No operation reads the others, in which 0 times NaN or infinity would be NaN, forward or backward.
    """
    return tensor.to(dtype).masked_fill(~kept, neutral)


def _ratio_within(
    log_ratio: Tensor, a: Tensor, side: Tensor, positive: tuple[float, float], negative: tuple[float, float]
) -> Tensor:
    """Return ``exp(log_ratio)`` within the bounds of positive or of negative advantages; 1 where the advantage is 0.

    The logarithm is bounded: the gradient of a bounded ratio that is infinite would be 0 times infinity.
    """
    logs = [[math.log(each) if each > 0 else -math.inf for each in bounds] for bounds in (positive, negative)]
    least, most = (torch.full_like(side, other).masked_fill(side > 0, own) for own, other in zip(*logs))
    return torch.exp(log_ratio.clamp(least, most).masked_fill(a == 0, 0.0))


def _k3(difference: Tensor, log_ratio: Tensor | None) -> Tensor:
    """Return ``exp(difference) - difference - 1``, times ``exp(log_ratio)``."""
    tangent = difference.clamp(max=1e3) + 1  # beyond, exp is infinite
    if log_ratio is None:
        return torch.exp(difference) - tangent
    below = log_ratio.clamp(max=0.0)  # goes into the difference, for 0 times infinity
    above = torch.relu(log_ratio).masked_fill(difference == 0, 0.0)
    return torch.exp(above) * (torch.exp(below + difference) - torch.exp(below) * tangent)


@torch.no_grad()
def _gamma_weights(
    log_ratio: Tensor,
    a: Tensor,
    weights: Tensor,
    correction: Tensor | None,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """Return ``exp(lambda) * w**k * exp(-lambda * w)`` of the ratio w of each sequence: (B, 1), or (B, T) as ``a``."""
    log_w = (log_ratio.clamp(-_MOST_LOG, _MOST_LOG) * weights).sum(-1, keepdim=True)
    if correction is not None:
        log_w = log_w + correction.log().clamp(_LEAST_LOG, _MOST_LOG).sum(-1, keepdim=True)
    log_w = log_w.clamp(_LEAST_LOG, _MOST_LOG)
    at_least_0 = a >= 0
    k, rate = (torch.full_like(a, other).masked_fill(at_least_0, own) for own, other in zip(positive, negative))
    rate = rate.clamp(min=1e-4)
    return torch.exp(rate + k * log_w - rate * torch.exp(log_w)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
