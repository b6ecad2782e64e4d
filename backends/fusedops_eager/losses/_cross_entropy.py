"""Cross entropy in plain torch: any device, fast on a CPU.

On a CPU, a large tensor is processed in slabs of rows (``_slabs.py``). Forward keeps no tensor of the size of the
logits: torch's own writes one, and reads and writes three in backward. Backward writes the gradient alone, and 16-bit
logits are widened slab by slab.

The compute dtype is float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import CrossEntropyArgs, CrossEntropyGradArgs, check_targets
from fusedops.ops.losses.formulas import LossOptions
from fusedops_eager._slabs import Buffers, max_slab_elements, pieces
from fusedops_eager._torch import log_softmax

# On a CPU torch's log_softmax adds up a row in few sums: the logarithms of 255,328 probabilities were off by 1e-4
# (torch 2.13). Those of longer rows are corrected.
_LONG_ROW = 2**16
_Buffer = Callable[[int, torch.Size], Tensor]


def cross_entropy(a: CrossEntropyArgs, save: bool) -> tuple[Tensor, Tensor | None, None]:
    """Compute the op on any device, for any rank and dtype. log_prob is not kept: lse serves."""
    check_targets("cross_entropy", a.target, a.ignore_index, a.logits.shape[-1])
    return *cross_entropy_forward(a.logits, a.target, a.options, save), None


def cross_entropy_backward(a: CrossEntropyGradArgs) -> Tensor:
    """Compute the gradient of the logits."""
    return logits_gradient(a.grad, a.logits, a.lse, a.target, a.options)


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the loss, and lse (...) if ``save``. Logits of any strides."""
    _, label_smoothing, z_loss, softcap, *_ = options
    wide = compute_dtype(logits.dtype)
    loss = torch.empty(target.shape, dtype=wide, device=logits.device)
    sums = torch.empty_like(loss) if save or z_loss != 0 else None
    classes, ignored, wrong = formulas.classes_of(target, options.ignore_index, logits.shape[-1])
    column = classes.unsqueeze(-1)
    others = (column, loss.unsqueeze(-1), None if sums is None else sums.unsqueeze(-1))
    for buffer, x, place, out, lse in _slabs(logits, wide, 1, logits, *others):
        u = _capped(x, softcap, buffer, wide)
        # a number of z in the row, for lse: one that needs no pass, or one that is finite without a look at the data
        known = None if lse is None else u.gather(-1, place) if x.is_cpu else u.amax(-1, keepdim=True)
        log_prob = log_softmax(u, -1, False, out=buffer(0, x.shape))
        torch.neg(log_prob.gather(-1, place), out=out)
        if lse is not None and known is not None:
            torch.sub(known, log_prob.gather(-1, place) if x.is_cpu else log_prob.amax(-1, keepdim=True), out=lse)
        if label_smoothing != 0:
            out.mul_(1 - label_smoothing).sub_(log_prob.mean(-1, keepdim=True), alpha=label_smoothing)
        if x.is_cpu and u.shape[-1] > _LONG_ROW:
            excess = log_prob.exp_().sum(-1, keepdim=True).log_()  # of the sum of the probabilities, which should be 1
            out.add_(excess)
            if lse is not None:
                lse.add_(excess)
    if sums is not None:
        if sums.is_cpu:
            _repair(sums, column, ignored, logits, softcap)
        sums.masked_fill_(ignored, 0.0)
        if z_loss != 0:
            loss.add_(sums * z_loss * sums)  # the square alone may overflow
    loss.masked_fill_(ignored, 0.0).masked_fill_(wrong, float("nan"))
    return formulas.reduced(loss, target, options), sums if save else None


def logits_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    options: LossOptions,
) -> Tensor:
    """Compute the gradient of the logits (..., V), contiguous, from lse of the forward."""
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    _, label_smoothing, z_loss, softcap, *_ = options
    wide, size = lse.dtype, logits.shape[-1]
    classes, ignored, _ = formulas.classes_of(target, options.ignore_index, size)
    scale = formulas.row_scales(grad, target, size, options)
    factor: Tensor | None = scale if z_loss == 0 else scale * (1 + 2.0 * z_loss * lse)
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if logits.is_cpu and not tracing and not bool((factor < 0).any()):
        # a factor that is not negative goes into the exponent: one pass less
        lse, factor = lse - factor.log(), None
    columns = (classes, lse, factor, scale, ignored)
    others = [None if each is None else each.unsqueeze(-1) for each in columns]
    buffers = (0 if dx.dtype is wide else 1) + (softcap is not None)
    for buffer, d, x, place, sums, f, g, skip in _slabs(dx, wide, buffers, dx, logits, *others):
        w = d if d.dtype is wide else buffer(0, d.shape)
        if softcap is None:
            w = torch.sub(x if x.dtype is wide else w.copy_(x), sums, out=w)
            tanh = None
        else:
            tanh = torch.div(x if x.dtype is wide else w.copy_(x), softcap, out=buffer(1, d.shape)).tanh_()
            w = torch.mul(tanh, softcap, out=w).sub_(sums)
        w.exp_()
        if f is not None:
            w.mul_(f)
        if label_smoothing != 0:
            w.sub_(g, alpha=label_smoothing / size)
        w.scatter_(-1, place, torch.sub(w.gather(-1, place), g, alpha=1 - label_smoothing))
        if tanh is not None:
            w.addcmul_(w, tanh.square_(), value=-1)
        _clear(w, skip)
        if w is not d:
            d.copy_(w)
    return dx


def _slabs(lead: Tensor, wide: torch.dtype, buffers: int, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield a function that returns buffers, and the same rows of each tensor: on a CPU in slabs, elsewhere at once."""
    if lead.numel() == 0:
        return
    if not lead.is_cpu:
        yield _new_buffer(lead.device, wide), *tensors
        return
    size = max_slab_elements(lead.numel(), buffers * wide.itemsize // lead.element_size())
    kept = Buffers(max(size, lead.shape[-1]), wide)
    for each in pieces(size, *tensors, rows=True):  # pyright: ignore[reportArgumentType]
        yield kept, *each


def _new_buffer(device: torch.device, wide: torch.dtype) -> _Buffer:
    return lambda number, shape: torch.empty(shape, dtype=wide, device=device)


def _capped(x: Tensor, softcap: float | None, buffer: _Buffer, wide: torch.dtype) -> Tensor:
    """Return z of a slab: x itself where it is that, else the first buffer."""
    if softcap is None:
        return x if x.dtype is wide else buffer(0, x.shape).copy_(x)
    u = buffer(0, x.shape)
    return torch.div(x if x.dtype is wide else u.copy_(x), softcap, out=u).tanh_().mul_(softcap)


def _clear(w: Tensor, skip: Tensor) -> None:
    """Set the rows of a contiguous slab that are ignored to 0, whatever their logits: 0 times NaN is NaN."""
    if w.is_cpu:  # where nonzero() waits for no device
        w.view(-1, w.shape[-1]).index_fill_(0, skip.reshape(-1).nonzero()[:, 0], 0.0)
    else:
        w.masked_fill_(skip, 0.0)


def _repair(sums: Tensor, column: Tensor, ignored: Tensor, logits: Tensor, softcap: float | None) -> None:
    """Compute lse again where it was the difference of two numbers of ``column`` that are far larger, or -inf."""
    size = formulas.capped(logits.gather(-1, column), softcap).squeeze(-1).abs()
    lost = (sums.isnan() | (size > 4 * sums.abs() + 64)) & ~ignored
    sums[lost] = torch.logsumexp(formulas.capped(logits[lost], softcap), -1)
