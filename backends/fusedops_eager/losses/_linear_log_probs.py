"""linear_log_probs in plain torch: the rows in chunks, whose logits backward computes again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.losses.arguments import LinearLogProbsArgs, LinearLogProbsGradArgs, check_targets
from fusedops.ops.losses.formulas import Wanted
from fusedops_eager._chunks import in_chunks, slabs_of

_LEAST = -1e4  # a logarithm whose exponential is 0, also in float64; finite, as 0 times -inf is NaN


class Options(NamedTuple):
    """The options of a call, as the op's."""

    temperature: float
    softcap: float | None
    ignore_index: int
    return_entropy: bool


def linear_log_probs(a: LinearLogProbsArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log probabilities and the entropy in chunks of rows."""
    check_targets("linear_log_probs", a.target, a.ignore_index, a.weight.shape[0])
    options = Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    flat = a.target.reshape(-1)
    logp, entropy, lse = statistics(a.x.reshape(flat.numel(), a.x.shape[-1]), a.weight, flat, a.bias, options)
    shape = a.target.shape
    return logp.view(shape), entropy.view(shape), lse.view(shape) if save else None


def linear_log_probs_backward(a: LinearLogProbsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and the gradients of x, weight and bias."""
    options = Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    flat, wanted = a.target.reshape(-1), Wanted(a.needs[0], a.needs[1], a.needs[2] and a.bias is not None)
    of_logp, of_entropy = a.grad_logp.reshape(-1), a.grad_entropy.reshape(-1)
    x_rows, sums = a.x.reshape(flat.numel(), a.x.shape[-1]), (a.entropy.reshape(-1), a.lse.reshape(-1))
    dx, dweight, dbias = gradients(of_logp, of_entropy, x_rows, a.weight, flat, a.bias, *sums, options, wanted)
    return (
        None if dx is None else dx.view(a.x.shape),
        None if dweight is None else dweight.to(a.weight.dtype),
        None if dbias is None or a.bias is None else dbias.to(a.bias.dtype),
    )


def statistics(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probabilities, the entropies (0 where not wanted) and lse of rows: (N,), 0 for ignored ones."""
    logp, entropy, lse = (x.new_zeros(x.shape[0], dtype=compute_dtype(promoted(x, weight))) for _ in range(3))

    def turn(logits: Tensor, targets: Tensor, at: slice | Tensor) -> None:
        parts = [_row_statistics(logits[slab], targets[slab], options) for slab in slabs_of(logits)]
        for whole, each in zip((logp, entropy, lse), zip(*parts)):
            whole[at] = torch.cat(each)

    in_chunks(x, weight, target, bias, options.ignore_index, None, Wanted(False, False, False), turn)
    return logp, entropy, lse


def gradients(
    of_logp: Tensor,
    of_entropy: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    options: Options,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias that are wanted.

    Args:
        of_logp: (N,), the gradient of the log probabilities, as ``of_entropy`` is of the entropies.
        x: (N, H).
        weight: (V, H).
        target: (N,).
        bias: (V,) or None.
        entropy: (N,), of forward, as ``lse``.
        options: see the op.
        wanted: the gradients to compute.
    """

    def turn(logits: Tensor, targets: Tensor, at: slice | Tensor) -> None:
        each = [value[at].to(logits.dtype)[:, None] for value in (of_logp, of_entropy, entropy, lse)]
        for slab in slabs_of(logits):
            _gradient_in_place(logits[slab], targets[slab], *(value[slab] for value in each), options=options)

    return in_chunks(x, weight, target, bias, options.ignore_index, None, wanted, turn)


def _in_place(z: Tensor, options: Options) -> None:
    """Turn logits into what softmax takes."""
    if options.softcap is not None:
        z.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.temperature != 1:
        z.div_(options.temperature)


def _places(target: Tensor, classes: int) -> tuple[Tensor, Tensor | None]:
    """Return the class of each row, (n, 1), and elsewhere than on a CPU True where it is out of range, (n, 1)."""
    if target.device.type == "cpu":
        return target[:, None], None
    outside = ((target < 0) | (target >= classes))[:, None]
    return target[:, None].masked_fill(outside, 0), outside


def _row_statistics(z: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`statistics` returns for rows of logits, which are written to no purpose."""
    place, outside = _places(target, z.shape[1])
    _in_place(z, options)
    # a row of -inf has no maximum to subtract; a row with inf has the result that the formula gives: NaN
    largest = z.amax(1, keepdim=True)
    largest.masked_fill_(largest == -torch.inf, 0)
    z.sub_(largest)
    logp = z.gather(1, place)
    entropy = None
    if options.return_entropy:
        z.clamp_(min=_LEAST)
        terms = z.exp()
        total = terms.sum(1, keepdim=True)
        log_total = total.log()
        # no difference of large numbers: each z is at most 0 here
        entropy = log_total - terms.mul_(z).sum(1, keepdim=True) / total
    else:
        log_total = z.exp_().sum(1, keepdim=True).log_()
    logp = logp - log_total
    lse = log_total.add_(largest) if entropy is None else log_total + largest
    if outside is not None:
        ignored = (target == options.ignore_index)[:, None]
        logp = logp.masked_fill(outside, torch.nan).masked_fill_(ignored, 0)
        lse = lse.masked_fill(ignored, 0)
        if entropy is not None:
            entropy = entropy.masked_fill(outside, torch.nan).masked_fill_(ignored, 0)
    entropy = torch.zeros_like(logp) if entropy is None else entropy
    return logp[:, 0], entropy[:, 0], lse[:, 0]


def _gradient_in_place(
    z: Tensor, target: Tensor, of_logp: Tensor, of_entropy: Tensor, entropy: Tensor, lse: Tensor, options: Options
) -> None:
    """Turn rows of logits into their gradient; the other tensors are (n, 1)."""
    place, outside = _places(target, z.shape[1])
    slope: Tensor | None = None
    if options.softcap is not None:
        z.div_(options.softcap).tanh_()
        slope = z.square().neg_().add_(1)  # of c * tanh(x / c)
        z.mul_(options.softcap)
    if options.temperature != 1:
        z.div_(options.temperature)
    hit = of_logp / options.temperature
    z.sub_(lse).clamp_(_LEAST, 0)  # at most 0, which a difference of large numbers may exceed by their roundings
    if options.return_entropy:
        p = z.exp()
        z.add_(entropy).mul_(of_entropy / -options.temperature).sub_(hit).mul_(p)
    else:
        z.exp_().mul_(-hit)
    z.scatter_add_(1, place, hit)
    if slope is not None:
        z.mul_(slope)
    if outside is not None:
        z.masked_fill_(outside, torch.nan).masked_fill_((target == options.ignore_index)[:, None], 0)
