"""Bias + GELU in plain torch: any device, fast on a CPU.

``0.5 * (1 + tanh(z)) = sigmoid(2z)``, so the tanh form is ``u / (1 + 2**w)`` with ``w = u * (A + B * u**2)``.
The constants A and B contain the factor ``-2 / ln(2)``. For an element in the cache, one core takes 3.1 ns with ATen's
tanh, 0.9 ns with its sigmoid and 0.5 ns with its exp2 (Zen 3, torch 2.13). The forms agree within 5e-7. On a CPU, large
tensors are processed in slabs. The compute dtype is float32 (float64 for float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops import OPS
from fusedops_eager._bias import BiasGradient, add, slab_elements, with_rank
from fusedops_eager._slabs import Buffers, pieces

_A = -2 * math.sqrt(2 / math.pi) / math.log(2)
_B = 0.044715 * _A
_SLOPE = -3 * math.log(2)  # of the derivative: -ln(2), times the 3 of ``3 * w``
_aten = torch.ops.aten
# With fewer elements, ATen's own gelu is faster: it takes 2 torch calls (3 in the backward), the slabs 10 (20), and a
# call takes 5-15 us. The ratio time of ATen / time of slabs is 1.2 forward and 0.75 backward at half of this size, and
# 1.4 and 1.0 from this size on (Zen 3, 2 threads, tanh form).
_MIN_SLAB_ELEMENTS = 256 * 1024
# For larger abs(u), the derivative of the tanh form is 0 or 1, in float64 too (it differs by 1e-138 at 16), and u**3
# can overflow.
_TANH_SATURATION = 32.0
_ERF_SATURATION = 32.0  # for larger u, the exact form is u, in float64 too


def gelu_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute ``gelu(x + bias)``.

    Args:
        x: (...), floating, any strides.
        bias: broadcastable to x, floating, or None.
        approximate: "tanh", or "none" for the exact form.

    Returns:
        (...), contiguous, the dtype of ``x + bias``. Computed in float32 (float64 for float64).
    """
    dtype = promoted(x, bias)
    wide = compute_dtype(dtype)
    if not x.is_cpu or x.numel() < _MIN_SLAB_ELEMENTS:
        y = _plain_forward(x, bias, approximate, wide).to(dtype).contiguous()
        return y if approximate == "tanh" else _restore_large(y, x, bias)
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    tanh = approximate == "tanh"
    one_slab = not tanh and dtype is wide  # two torch calls, the second in place: slabs would only add calls
    size = x.numel() if one_slab else slab_elements(x.numel(), (tanh + 1) * wide.itemsize, dtype.itemsize)
    buffers, a = Buffers(size, wide), torch.tensor(_A, dtype=wide, device="cpu")
    x_is_sum = bias is None and x.dtype is wide and x.is_contiguous()  # x can be used as it is
    for o, part, b in pieces(size, out, x, with_rank(bias, x.dim())):
        u = part if x_is_sum else add(part, b, o if one_slab else buffers(0, o.shape))
        y = o if dtype is wide else buffers(0, o.shape)
        if tanh:
            w = torch.addcmul(a, u, u, value=_B, out=buffers(1, o.shape))
            torch.div(u, w.mul_(u).exp2_().add_(1), out=y)
        else:
            _aten.gelu.out(u, out=y)
        if y is not o:
            o.copy_(y)
    return out if tanh else _restore_large(out, x, bias)


def _restore_large(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Set the exact form's result for large ``u = x + bias`` to u, which it is.

    torch's kernel for AVX-512 returns NaN for inf, and inf for u above half of the largest float32 (torch 2.13).
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and y.is_cpu and not torch.isfinite(y.sum()):
        wide = compute_dtype(y.dtype)  # a sum with a bias of no dims has the dtype of x
        u = (x if bias is None else x.to(wide) + bias.to(wide)).to(y.dtype)
        torch.where(u > _ERF_SATURATION, u, y, out=y)
    return y


def gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias from the inputs.

    The derivative of the tanh form is ``s - ln(2) * s * (1 - s) * u * dw`` with ``s = 1 / (1 + 2**w)`` and
    ``u * dw = 3 * w - 2 * A * u``. So no torch call on a slab has more than three operands, and none allocates.

    Args:
        grad: (...), the dtype of ``x + bias``, any strides.
        x: as in the forward.
        bias: as in the forward.
        approximate: as in the forward.
        needs: (gradient of x is wanted, gradient of the bias is wanted).

    Returns:
        (...), contiguous, and the shape of the bias; None for a gradient that is not wanted. The sum is accumulated in
        float32 (float64 for float64), in a fixed order.
    """
    if not x.is_cpu:
        dx, dbias = OPS["bias_gelu"].backward(grad, x, bias, approximate, needs)
        return None if dx is None else dx.contiguous(), dbias
    if x.numel() < _MIN_SLAB_ELEMENTS:
        return _plain_backward(grad, x, bias, approximate, needs)
    return _slab_backward(grad, x, bias, approximate == "tanh", needs)


def _slab_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, needs: tuple[bool, ...], any_value: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``gelu_backward`` in slabs. ``any_value``: also for an infinite gradient, and where u**3 overflows."""
    wide = compute_dtype(grad.dtype)
    dx = torch.empty(x.shape, dtype=x.dtype, device="cpu") if needs[0] else None
    sums = BiasGradient(bias, x.shape, wide) if bias is not None and needs[1] else None
    if dx is None and sums is None:
        return None, None
    # The fast form returns NaN for an infinite u**3 and for an infinite gradient. Each sum shows a NaN in its column;
    # then the form for any value is computed, which takes 1.1 times as long.
    any_value = any_value or sums is None or not sums.dims
    needs_buffer = dx is None or x.dtype is not wide
    buffer_count = (2 if tanh else grad.dtype is not wide) + needs_buffer
    threads = None if sums is None else 2
    # as in the forward. It does not depend on whether dx is wanted: the bits of the sum must not either
    one_slab = not tanh and grad.dtype is wide and x.dtype is wide
    size = x.numel() if one_slab else slab_elements(x.numel(), buffer_count * wide.itemsize, x.dtype.itemsize, threads)
    buffers, a = Buffers(size, wide), torch.tensor(_A, dtype=wide, device="cpu")
    sum_at_rank = None if sums is None else sums.sum_at_rank
    for part, g, b, o, total in pieces(size, x, grad, with_rank(bias, x.dim()), dx, sum_at_rank):
        du = buffers(0, part.shape) if needs_buffer else o
        if tanh:
            u, w = add(part, b, buffers(1, part.shape)), buffers(2, part.shape)
            if any_value:
                u.clamp_(-_TANH_SATURATION, _TANH_SATURATION)
            torch.addcmul(a, u, u, value=_B, out=w)
            torch.exp2(w.mul_(u), out=du).add_(1)
            w.add_(u, alpha=-2 / 3 * _A)
            wide_g = g if g.dtype is wide else u.copy_(g)
            if any_value:
                _aten.sigmoid_backward.grad_input(w, du.reciprocal_(), grad_input=w)
                du.add_(w, alpha=_SLOPE).mul_(wide_g)
            else:
                gs = torch.div(wide_g, du, out=u)
                torch.addcdiv(gs, gs, du, value=-1, out=du)
                torch.addcmul(gs, du, w, value=_SLOPE, out=du)
        else:
            wide_g = g if g.dtype is wide else buffers(1, part.shape).copy_(g)
            _aten.gelu_backward.grad_input(wide_g, add(part, b, du), grad_input=du)
        if needs_buffer and o is not None:
            o.copy_(du)
        if sums is not None:
            sums.add(du, total)
    if tanh and sums is not None and not any_value and not sums.sum.isfinite().all():
        return _slab_backward(grad, x, bias, tanh, needs, any_value=True)
    return dx, None if sums is None else sums.result()


def _plain_forward(x: Tensor, bias: Tensor | None, approximate: str, wide: torch.dtype) -> Tensor:
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if approximate == "tanh" or x.is_cpu or x.is_cuda:
        return torch.nn.functional.gelu(u, approximate=approximate)
    return _erf_form(u)


def _plain_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    wide = compute_dtype(grad.dtype)
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    du = _aten.gelu_backward(grad.to(wide), u, approximate=approximate)
    dx = du.to(x.dtype).contiguous() if needs[0] else None
    if bias is None or not needs[1]:
        return dx, None
    return dx, du.sum_to_size(bias.shape).to(bias.dtype, copy=True).contiguous()


def _erf_form(u: Tensor) -> Tensor:
    """Compute the exact form from elementary operations. torch_npu's gelu computes the tanh form for both values."""
    return 0.5 * u * (torch.erf(u * math.sqrt(0.5)) + 1)  # 0.5 first: u * 2 overflows for the largest numbers
