"""linear_log_probs in plain torch: the rows in chunks, whose logits backward computes again."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.losses.arguments import LinearLogProbsArgs, LinearLogProbsGradArgs, check_targets
from fusedops.ops.losses.formulas import Wanted
from fusedops_eager._chunks import in_chunks, slabs_of

_LEAST = -1e4  # a logarithm whose exponential is 0, also in float64; finite, as 0 times -inf is NaN


_Args = LinearLogProbsArgs | LinearLogProbsGradArgs


def linear_log_probs(a: LinearLogProbsArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log probabilities and the entropy (0 where not wanted) in chunks of rows; 0 for ignored ones."""
    check_targets("linear_log_probs", a.target, a.ignore_index, a.weight.shape[0])
    shape, flat = a.target.shape, a.target.reshape(-1)
    results = [a.x.new_zeros(flat.numel(), dtype=compute_dtype(promoted(a.x, a.weight))) for _ in range(3)]

    def turn(logits: Tensor, targets: Tensor, at: slice | Tensor) -> None:
        parts = [_row_statistics(logits[slab], targets[slab], a) for slab in slabs_of(logits)]
        for whole, each in zip(results, zip(*parts)):
            whole[at] = torch.cat(each)

    rows = a.x.reshape(flat.numel(), a.x.shape[-1])
    in_chunks(rows, a.weight, flat, a.bias, a.ignore_index, None, Wanted(False, False, False), turn)
    logp, entropy, lse = (each.view(shape) for each in results)
    return logp, entropy, lse if save else None


def linear_log_probs_backward(a: LinearLogProbsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and the gradients of x, weight and bias."""
    flat, wanted = a.target.reshape(-1), Wanted(a.needs[0], a.needs[1], a.needs[2] and a.bias is not None)
    by_row = [each.reshape(-1) for each in (a.grad_logp, a.grad_entropy, a.entropy, a.lse)]

    def turn(logits: Tensor, targets: Tensor, at: slice | Tensor) -> None:
        each = [value[at].to(logits.dtype)[:, None] for value in by_row]
        for slab in slabs_of(logits):
            _gradient_in_place(logits[slab], targets[slab], *(value[slab] for value in each), a=a)

    rows = a.x.reshape(flat.numel(), a.x.shape[-1])
    dx, dweight, dbias = in_chunks(rows, a.weight, flat, a.bias, a.ignore_index, None, wanted, turn)
    return (
        None if dx is None else dx.view(a.x.shape),
        None if dweight is None else dweight.to(a.weight.dtype),
        None if dbias is None or a.bias is None else dbias.to(a.bias.dtype),
    )


def _in_place(z: Tensor, a: _Args) -> None:
    """Turn logits into what softmax takes."""
    if a.softcap is not None:
        z.div_(a.softcap).tanh_().mul_(a.softcap)
    if a.temperature != 1:
        z.div_(a.temperature)


def _places(target: Tensor, classes: int) -> tuple[Tensor, Tensor | None]:
    """Return the class of each row, (n, 1), and elsewhere than on a CPU True where it is out of range, (n, 1)."""
    if target.device.type == "cpu":
        return target[:, None], None
    outside = ((target < 0) | (target >= classes))[:, None]
    return target[:, None].masked_fill(outside, 0), outside


def _row_statistics(z: Tensor, target: Tensor, a: _Args) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probabilities, the entropies and lse of rows of logits, which are written to no purpose."""
    place, outside = _places(target, z.shape[1])
    _in_place(z, a)
    # a row of -inf has no maximum to subtract; a row with inf has the result that the formula gives: NaN
    largest = z.amax(1, keepdim=True)
    largest.masked_fill_(largest == -torch.inf, 0)
    z.sub_(largest)
    logp = z.gather(1, place)
    entropy = None
    if a.return_entropy:
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
        ignored = (target == a.ignore_index)[:, None]
        logp = logp.masked_fill(outside, torch.nan).masked_fill_(ignored, 0)
        lse = lse.masked_fill(ignored, 0)
        if entropy is not None:
            entropy = entropy.masked_fill(outside, torch.nan).masked_fill_(ignored, 0)
    entropy = torch.zeros_like(logp) if entropy is None else entropy
    return logp[:, 0], entropy[:, 0], lse[:, 0]


def _gradient_in_place(
    z: Tensor, target: Tensor, of_logp: Tensor, of_entropy: Tensor, entropy: Tensor, lse: Tensor, a: _Args
) -> None:
    """Turn rows of logits into their gradient; the other tensors are (n, 1)."""
    place, outside = _places(target, z.shape[1])
    slope: Tensor | None = None
    if a.softcap is not None:
        z.div_(a.softcap).tanh_()
        slope = z.square().neg_().add_(1)  # of c * tanh(x / c)
        z.mul_(a.softcap)
    if a.temperature != 1:
        z.div_(a.temperature)
    hit = of_logp / a.temperature
    z.sub_(lse).clamp_(_LEAST, 0)  # at most 0, which a difference of large numbers may exceed by their roundings
    if a.return_entropy:
        p = z.exp()
        z.add_(entropy).mul_(of_entropy / -a.temperature).sub_(hit).mul_(p)
    else:
        z.exp_().mul_(-hit)
    z.scatter_add_(1, place, hit)
    if slope is not None:
        z.mul_(slope)
    if outside is not None:
        z.masked_fill_(outside, torch.nan).masked_fill_((target == a.ignore_index)[:, None], 0)
