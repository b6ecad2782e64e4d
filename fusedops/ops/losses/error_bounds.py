"""The error bounds of the losses: the changes of loss and gradient where each number moves by ``absolute`` of itself.

A number of the loss is a difference of logits, and a probability the exponential of one: both move by ``absolute``
times the size of the logits. A logit of linear_cross_entropy is a sum of H products, whose rounding errors grow as the
root of the sum of their squares. Kernels of 16-bit tensors may round the logits and their gradient to 16 bits, as
torch.nn.Linear does. An error e of the logits of a row is one of at most 2 e of its loss, and changes its probabilities
by a factor of at most exp(2 e).
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.evidence import finite_size, tolerances
from fusedops.dtypes import STORAGE, compute_dtype, is_narrow
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import (
    CrossEntropyArgs,
    CrossEntropyGradArgs,
    LinearCrossEntropyArgs,
    LinearCrossEntropyGradArgs,
)
from fusedops.ops.losses.formulas import LossOptions


def cross_entropy_error_bound(absolute: float, a: CrossEntropyArgs, *save: Any) -> tuple[Tensor, ...]:
    """Return the changes of the loss, and of the saved values; inf for lse where a row of logits has no largest."""
    z = formulas.capped(a.logits.double(), a.softcap)
    size = z.abs().nan_to_num(nan=0.0, posinf=0.0)
    rows = absolute * (1 + 2 * size.amax(-1))
    options = a.options
    lse = formulas.logsumexp(z).masked_fill(a.target == a.ignore_index, 0.0)
    unknown = ~lse.isfinite()
    known = lse.masked_fill(unknown, 0.0)
    loss = rows * (1 + 2.0 * a.z_loss * known.abs()) + absolute * a.z_loss * known.square()
    if a.label_smoothing != 0:  # a sum of differences
        overflows = 2 * size.sum(-1) >= torch.finfo(compute_dtype(a.logits.dtype)).max
        loss = loss.masked_fill(overflows, math.inf)
    if _is_1_when_rounded(a.label_smoothing, a.logits.dtype):  # 0 * inf is NaN
        loss = loss.masked_fill(~z.isfinite().all(-1), math.inf)
    if a.reduction != "none":
        counted = loss.masked_fill(a.target == a.ignore_index, 0.0)
        terms = formulas.row_losses(z, a.target, options).abs()
        total = counted.sum() + absolute * terms.nan_to_num(nan=0.0, posinf=0.0).sum()
        loss = total
        if a.reduction == "mean":
            loss = total / formulas.divisor(a.target, options, total.dtype).abs()
    return loss, rows.masked_fill(unknown, math.inf), (rows + absolute * known.abs())[..., None] + absolute * size


def cross_entropy_gradient_error_bound(absolute: float, a: CrossEntropyGradArgs) -> Tensor:
    """Return the changes of the gradient of the logits; inf where a product may overflow."""
    z, size = formulas.capped(a.logits.double(), a.softcap), a.lse.double()[..., None]
    classes, wide = z.shape[-1], a.grad.double()
    given = None if a.denominator is None else a.denominator.double()
    options = LossOptions(a.ignore_index, a.label_smoothing, a.z_loss, a.softcap, a.reduction, given)
    scale = formulas.row_scales(wide, a.target, classes, options).abs()[..., None]
    moves = absolute * (2 + 2 * z.abs() + size.abs())
    weight, of_lse = 1 + 4 * a.z_loss * size.abs(), 2 * absolute * (1 + z.abs().nan_to_num(posinf=0.0).amax(-1, True))
    hit = torch.arange(classes) == a.target[..., None]
    wanted = hit.double() * (1 - a.label_smoothing) + a.label_smoothing / classes
    probability = torch.exp(z - size)
    arithmetic = torch.finfo(compute_dtype(a.logits.dtype))
    least = arithmetic.smallest_normal  # an exponential below it may be 0
    change = scale * ((probability * moves + least) * weight + absolute * wanted + 2 * a.z_loss * probability * of_lse)
    if a.softcap is not None:
        slope = 1 - (z / a.softcap).square()
        change = change * slope + absolute * scale * (probability * weight + wanted) * 4
    # their product may come first, and without it the second factor, which a gradient of 0 makes NaN
    return change.masked_fill(scale.clamp(min=1.0) * weight >= arithmetic.max, math.inf)


# ------------------------------------------------------------------------------------------------ linear_cross_entropy

LINEAR_TOLERANCE = tolerances((1e-6, 5e-6), (1e-14, 1e-13))
_SPREAD = 2  # times the root of the sum of the squares of the largest errors, which have no common sign
LINEAR_GRADIENT_TOLERANCE = tolerances((1e-6, 1e-5), (1e-14, 1e-13), roundings=2.0)


def linear_cross_entropy_error_bound(
    absolute: float, a: LinearCrossEntropyArgs, save: bool = False
) -> tuple[Tensor, ...]:
    """Return the largest errors of the loss and of the saved gradients."""
    options = a.options
    losses, logits, narrow, gradient = _linear_errors(absolute, a.x, a.weight, a.target, a.bias, options)
    loss = formulas.reduced(losses, a.target, options._replace(denominator=None))
    if a.denominator is not None:
        loss = losses.sum() / a.denominator.abs().double().reshape(())
    return (loss, *_linear_gradients(logits, narrow, gradient, a.x, a.weight, a.bias, a.reduction != "none"))


def linear_cross_entropy_gradient_error_bound(absolute: float, a: LinearCrossEntropyGradArgs) -> tuple[Tensor, ...]:
    """Return the largest errors of the gradients of x, weight and bias."""
    options = a.options
    _, logits, narrow, gradient = _linear_errors(absolute, a.x, a.weight, a.target, a.bias, options)
    scale = formulas.row_scales(a.grad.double(), a.target, a.weight.shape[0], options)[..., None]
    size = scale.abs()
    bounds = _linear_gradients(logits * size, narrow * size, gradient * scale, a.x, a.weight, a.bias, True)
    # or the rows are scaled last: forward saves gradients of the sum of the losses, of weight and bias unless "none"
    saved = _linear_gradients(logits, narrow, gradient, a.x, a.weight, a.bias, a.reduction != "none")
    factor = size.amax() if size.numel() else size.sum()
    scaled = [saved[0] * size, *(each * factor for each in saved[1:])]
    none = bounds[0].new_zeros(())
    return tuple(
        torch.maximum(bound, each.nan_to_num(nan=math.inf, posinf=math.inf) if each.numel() else none)
        for bound, each in zip(bounds, scaled)
    )


def _linear_errors(
    absolute: float,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, ...]:
    """Return the errors of the loss of each row, (...), two of the gradient of its logits, (..., V), and that gradient.

    The first is of the arithmetic, the second of roundings to 16 bits, which have no common sign in several rows.
    """
    _, label_smoothing, z_loss, softcap, *_ = options
    arithmetic = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
    if arithmetic is torch.float32:  # also beside a bias of float64
        absolute = max(absolute, LINEAR_TOLERANCE[torch.float32].absolute)
    wide_bias = None if bias is None else bias.double()
    z = formulas.linear_logits(x.double(), weight.double(), target, wide_bias, options)
    classes, *_ = formulas.classes_of(target, options.ignore_index, z.shape[-1])
    terms, drift = _errors_of_sums(x, weight, bias)
    rounding = _rounding_to_16_bits(x, weight)
    least = max(_least_of_16_bits(x, weight), torch.finfo(arithmetic).tiny)  # each smaller probability is it, or 0
    lse = formulas.logsumexp(z)[..., None]
    p = torch.exp(z - lse)
    factor = (1 + 2.0 * z_loss * lse).abs()
    hit = torch.arange(z.shape[-1], device=z.device) == classes[..., None]
    size = p * factor + hit.double() + label_smoothing / max(z.shape[-1], 1)
    gradient = (
        p * (1 + 2.0 * z_loss * lse) - hit.double() * (1 - label_smoothing) - label_smoothing / max(z.shape[-1], 1)
    )
    if softcap is not None:
        gradient = gradient * (1 - (z / softcap).square())
    of_sum = absolute * (4 + max(target.numel(), z.shape[-1]) ** 0.5)  # over rows for weight, over classes for x

    def of_row(narrow: float) -> tuple[Tensor, Tensor]:
        """Return the error of the loss, and of the logits' gradient, where logits have that rounding."""
        # 16-bit logits are rounded once more
        of_logits = ((absolute + narrow) * terms + narrow * finite_size(z) + drift).amax(-1, keepdim=True)
        if softcap is not None:
            of_logits = of_logits.clamp(max=2 * softcap)
        of_probability = (torch.expm1(2 * of_logits) * p).nan_to_num(nan=1.0).clamp(max=1.0)  # inf * 0: of any size
        of_square = 0.0 if z_loss == 0 else 2.0 * z_loss * of_logits * p
        of_slope = 0.0 if softcap is None else (2 * of_logits / softcap).clamp(max=1.0)
        dz = factor * of_probability + of_square + (of_sum + narrow + of_slope) * size + least * factor.clamp(min=1.0)
        of_loss = (2 * of_logits + 2 * absolute * finite_size(lse)) * (1 + 2.0 * z_loss * finite_size(lse))
        return of_loss[..., 0].nan_to_num(nan=0.0), dz.nan_to_num(nan=0.0)

    of_loss, every = of_row(rounding)
    wide = of_row(0.0)[1] if rounding else every
    largest = min(torch.finfo(t.dtype).max for t in (x, weight))
    # a row of 16-bit logits, or of their sums
    overflows = (finite_size(x) @ finite_size(weight).t()).amax(-1) >= largest / 2
    of_loss = of_loss.masked_fill(overflows, math.inf)
    if _is_1_when_rounded(label_smoothing, torch.promote_types(x.dtype, weight.dtype)):  # 0 * inf is NaN
        of_loss = of_loss.masked_fill(~z.isfinite().all(-1), math.inf)
    # a row of their gradient, or the factor of a z-loss alone
    overflows = overflows | (torch.maximum(size, factor).amax(-1) >= largest / 2)
    wide = wide.masked_fill(overflows[..., None], math.inf)
    narrow = (every - wide).nan_to_num(nan=0.0, neginf=0.0)
    gradient = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    ignored = target == options.ignore_index  # ignored rows have no error, even if their logits overflow
    of_logits = (each.masked_fill(ignored[..., None], 0.0) for each in (wide, narrow, gradient))
    return (of_loss.masked_fill(ignored, 0.0), *of_logits)


def _errors_of_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what the error of each logit is in units of ``absolute``, and the drift of sums of equal terms."""
    terms = (finite_size(x).square() @ finite_size(weight).square().t()).sqrt()
    # equal terms that are added one by one have roundings of one sign
    eps = torch.finfo(compute_dtype(torch.promote_types(x.dtype, weight.dtype))).eps
    drift = 0.25 * eps * x.shape[-1] * finite_size(x.double() @ weight.double().t())
    drift = drift + _flushed(x) @ finite_size(weight).t() + finite_size(x) @ _flushed(weight).t()
    return terms if bias is None else terms + finite_size(bias), drift


def _linear_gradients(
    logits: Tensor, narrow: Tensor, gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, summed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the errors of the gradients of x, weight and bias, from those and the gradient of the logits."""
    rows, rounding = (each.reshape(x.shape[:-1].numel(), weight.shape[0]) for each in (logits, narrow))
    of_x = (logits + narrow) @ finite_size(weight) + gradient.abs() @ _flushed(weight)
    of_x = of_x.nan_to_num(nan=math.inf, posinf=math.inf)  # inf * 0: of a row that overflows
    largest = min(torch.finfo(t.dtype).max for t in (x, weight))
    of_x = of_x.masked_fill(gradient.abs() @ finite_size(weight) >= largest / 2, math.inf)
    if not bool(weight.isfinite().all()):  # 0 * NaN, where ignored rows are not left out of the product
        of_x = torch.full_like(of_x, math.inf)
    nothing = rows.new_zeros(0)
    if not summed:
        return of_x, nothing, nothing
    inputs = finite_size(x).reshape(rows.shape[0], x.shape[-1])
    # equal rows of x have equal roundings
    equal = 1
    if inputs.numel() and rounding.any():
        counts: Tensor = cast("Any", inputs).unique(dim=0, return_counts=True)[1]
        equal = int(counts.max())
    squares, spread = rounding.square().t(), _SPREAD * equal**0.5
    of_weight = rows.t() @ inputs + spread * (squares @ inputs.square()).sqrt()
    of_weight = of_weight.nan_to_num(nan=math.inf, posinf=math.inf)
    # the product of each chunk of rows may be rounded to 16 bits, as torch.nn.Linear has it, before they are added
    terms, values = gradient.reshape(rows.shape).t(), x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    of_chunks = (terms @ values.reshape(inputs.shape)).abs() + _SPREAD * (terms.square() @ inputs.square()).sqrt()
    of_weight = of_weight + (_rounding_to_16_bits(x, weight) * of_chunks).nan_to_num(nan=math.inf)
    of_weight = of_weight + terms.abs() @ _flushed(x).reshape(inputs.shape) + _least_of_16_bits(x, weight)
    of_weight = of_weight.masked_fill(terms.abs() @ inputs >= largest / 2, math.inf)
    of_bias = (rows.sum(0) + spread * squares.sum(1).sqrt()).nan_to_num(nan=math.inf, posinf=math.inf)
    return of_x, of_weight, nothing if bias is None else of_bias


def _is_1_when_rounded(label_smoothing: float, dtype: torch.dtype) -> bool:
    """Return True where the arithmetic of a dtype has no number between ``label_smoothing`` and 1, and float64 has."""
    return label_smoothing != 1 and float(torch.tensor(label_smoothing, dtype=compute_dtype(dtype))) == 1


def _rounding_to_16_bits(*tensors: Tensor) -> float:
    """Return the share by which a number rounded to a 16-bit dtype of the tensors is off at most; 0 without one."""
    return max((torch.finfo(each.dtype).eps / 2 for each in tensors if is_narrow(each.dtype)), default=0.0)


def _least_of_16_bits(*tensors: Tensor) -> float:
    """Return the largest of the numbers below which one of a 16-bit dtype of the tensors may be 0; 0 without one."""
    return max((STORAGE[each.dtype].smallest_step for each in tensors if is_narrow(each.dtype)), default=0.0)


def _flushed(tensor: Tensor) -> Tensor:
    """Return the sizes of subnormal numbers of bfloat16, which a processor's products take for 0; 0 for all others."""
    normal = tensor.abs() >= torch.finfo(torch.bfloat16).tiny
    return finite_size(tensor).masked_fill(normal | (tensor.dtype is not torch.bfloat16), 0.0)


def linear_log_probs_error_bound(absolute: float, *args: Any) -> tuple[Tensor, ...]:
    """Return the largest errors of the log probabilities, of the entropy and of lse."""
    rows = _LogProbs(absolute, *args[:7])
    moved, size = rows.logits_error(rows.rounding), rows.absolute * (1 + finite_size(rows.lse))
    # a row without a largest logit has no lse either
    of_lse = (rows.lse_error(moved) + size).masked_fill(~rows.lse.isfinite(), math.inf)
    classes, *_ = formulas.classes_of(args[2], args[6], args[1].shape[0])
    of_target = rows.log_errors(moved).gather(-1, classes[..., None]) + 2 * size
    of_each = [of_target, rows.entropy_error(moved) * float(args[7]), of_lse]
    results = [each[..., 0].masked_fill(rows.overflows, math.inf).masked_fill(rows.ignored, 0.0) for each in of_each]
    return tuple(each.nan_to_num(nan=0.0, posinf=math.inf) for each in results)


def linear_log_probs_gradient_error_bound(
    absolute: float, grad_logp: Tensor, grad_entropy: Tensor, x: Tensor, weight: Tensor, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the largest errors of the gradients of x, weight and bias."""
    bias, _, _, temperature, softcap, ignore_index, with_entropy, _ = rest
    rows = _LogProbs(absolute, x, weight, target, bias, temperature, softcap, ignore_index)
    grads = grad_logp.double()[..., None], grad_entropy.double()[..., None] * float(with_entropy)
    of_target, of_entropy = finite_size(grads[0]), finite_size(grads[1])
    p, log_p, factor = rows.p, finite_size(rows.log_p), finite_size(rows.log_p + rows.entropy)
    classes, *_ = formulas.classes_of(target, ignore_index, weight.shape[0])
    hit = (torch.arange(weight.shape[0]) == classes[..., None]).double()
    slope = 1.0 if softcap is None else (1 - (rows.logits / softcap).square()).nan_to_num(nan=1.0)
    size = of_target * (p + hit) + of_entropy * p * factor
    of_sum = rows.absolute * (4 + max(target.numel(), weight.shape[0]) ** 0.5)

    def change(narrow: float) -> Tensor:
        """Return the error of the logits' gradient, where logits have that rounding."""
        moved = rows.logits_error(narrow)
        of_logs = moved + rows.lse_error(moved)  # also where p is nearly 1: lse may be of another forward's logits
        of_p = (torch.expm1(of_logs) * p).nan_to_num(nan=1.0).clamp(max=1.0) + rows.least  # inf * 0: of any size
        of_logs = of_logs + rows.entropy_error(moved) + rows.absolute * (1 + log_p + finite_size(rows.lse))
        of_slope = 0.0 if softcap is None else (2 * moved * temperature / softcap).clamp(max=1.0)
        entropy = of_entropy * (of_p * factor + (p + of_p) * of_logs)
        dz = of_target * of_p + entropy.nan_to_num(nan=0.0, posinf=math.inf)
        dz = (dz * slope + (of_sum + narrow + of_slope) * size) / temperature
        return dz.nan_to_num(nan=0.0, posinf=math.inf) + _least_of_16_bits(x, weight)  # a smaller one is it, or 0

    gradient = grads[0] * (hit - p) - grads[1] * p * (rows.log_p.nan_to_num(neginf=0.0) + rows.entropy)
    gradient = (gradient * slope / temperature).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    every = change(rows.rounding)
    overflows = rows.overflows | ((size / temperature).amax(-1) >= rows.largest / 2)
    arithmetic = (change(0.0) if rows.rounding else every).masked_fill(overflows[..., None], math.inf)
    narrow = (every - arithmetic).nan_to_num(nan=0.0, neginf=0.0)
    of_logits = [each.masked_fill(rows.ignored[..., None], 0.0) for each in (arithmetic, narrow, gradient)]
    return _linear_gradients(of_logits[0], of_logits[1], of_logits[2], x, weight, bias, True)


class _LogProbs:
    """The rows of a call in float64, and the errors of their logits: each (..., V), or (..., 1)."""

    def __init__(
        self, absolute: float, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *options: Any
    ) -> None:
        self.temperature, self.softcap = options[:2]
        arithmetic = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
        least = LINEAR_TOLERANCE[arithmetic].absolute if arithmetic is torch.float32 else 0.0
        self.absolute, self.rounding = max(absolute, least), _rounding_to_16_bits(x, weight)
        self.least = torch.finfo(arithmetic).tiny  # an exponential below it may be 0
        of_sum = LossOptions(options[2], 0.0, 0.0, self.softcap, "none", None)
        wide = (x.double(), weight.double(), target, None if bias is None else bias.double())
        self.logits = formulas.linear_logits(*wide, of_sum)
        z = self.logits / self.temperature
        self.lse = formulas.logsumexp(z)[..., None]
        self.log_p = z - self.lse
        self.p = torch.exp(self.log_p)
        self.entropy = -(self.p * self.log_p.masked_fill(self.log_p == -math.inf, 0.0)).sum(-1, keepdim=True)
        self._terms, self._drift = _errors_of_sums(x, weight, bias)
        self._size, self.ignored = finite_size(z).amax(-1, keepdim=True), target == options[2]
        self.largest = min(torch.finfo(t.dtype).max for t in (x, weight))
        divided = self._size[..., 0] >= torch.finfo(arithmetic).max / 2  # by a tiny temperature
        self.overflows = divided | ((finite_size(x) @ finite_size(weight).t()).amax(-1) >= self.largest / 2)

    def logits_error(self, narrow: float) -> Tensor:
        """Return the errors of the logits after the temperature, where they have that rounding: (..., V)."""
        moved = (self.absolute + narrow) * self._terms + narrow * finite_size(self.logits) + self._drift
        moved = moved.clamp(max=math.inf if self.softcap is None else 2 * self.softcap)
        return moved / self.temperature + self.absolute * self._size

    def lse_error(self, moved: Tensor) -> Tensor:
        """Return the error of lse where logits move so far: (..., 1)."""
        return (self.p * torch.exp(moved)).sum(-1, keepdim=True).log().nan_to_num(nan=math.inf)

    def log_errors(self, moved: Tensor) -> Tensor:
        """Return the errors of the logarithms of probabilities, of which one that is nearly 1 hardly changes."""
        odds = torch.expm1(2 * moved.amax(-1, keepdim=True)) * (1 - self.p)
        return torch.minimum(moved + self.lse_error(moved), odds.nan_to_num(nan=math.inf))

    def entropy_error(self, moved: Tensor) -> Tensor:
        """Return the error of an entropy, at most log(V), whose rate of change is at most twice itself: (..., 1)."""
        most, largest = math.log(max(self.p.shape[-1], 2)), moved.amax(-1, keepdim=True)
        grown = (torch.expm1(2 * largest) * self.entropy).nan_to_num(nan=most)
        rates = self.p * finite_size(self.log_p + self.entropy)
        second = (3 * rates.sum(-1, keepdim=True) + 2) * largest.square()
        grown = torch.where(largest < 0.25, (rates * moved).sum(-1, keepdim=True) + second, grown)
        return torch.minimum(grown, 2 * largest * most).clamp(max=most) + self.absolute * (1 + most)
