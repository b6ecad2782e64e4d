"""Bias + GELU in plain torch: any device, fast on a CPU.

By the identity ``0.5 * (1 + tanh(z)) = sigmoid(2z)`` the tanh form is ``u / (1 + 2**w)``, ``w = u * (A + B * u**2)``,
with ``-2 / ln(2)`` in the constants: in the cache an element of ATen's tanh takes 3.1 ns of a core, of its sigmoid 0.9,
of its exp2 0.5 (Zen 3, torch 2.13), and the forms agree within 5e-7. On a CPU it goes slab by slab, in the dtype of the
arithmetic: float32 (float64 for float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.ops import OPS
from fusedops_eager._bias import BiasGradient, add, at_rank, slab
from fusedops_eager._slabs import Buffers, pieces

_A = -2 * math.sqrt(2 / math.pi) / math.log(2)
_B = 0.044715 * _A
_SLOPE = -3 * math.log(2)  # the factor ln(2) of the derivative, with the 3 of ``3 * w``
_aten = torch.ops.aten
# Below this many elements ATen's own gelu wins: it takes 2 calls to torch (3 in the backward), the slabs 10 (20), and a
# call takes 5-15 us (Zen 3, 2 threads, tanh form: at half of it slabs are 1.2 and 0.75 times as fast, from it on 1.4
# and 1.0).
_SMALL = 256 * 1024
# Beyond it the tanh form's derivative is 0 or 1, in float64 too (1e-138 from either at 16), and u**3 may be infinite.
_FLAT = 32.0


def gelu_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """GELU of ``x + bias``.

    Args:
        x: (...), floating, any strides.
        bias: broadcastable to x, floating, or None.
        approximate: "tanh", or "none", the exact form.

    Returns:
        (...), contiguous, the dtype of ``x + bias``. Computed in float32 (float64 for float64).
    """
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if not x.is_cpu or x.numel() < _SMALL:
        return _plain_forward(x, bias, approximate, wide).to(dtype).contiguous()
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    tanh = approximate == "tanh"
    whole = not tanh and dtype is wide  # two calls, the second in place: slabs would only add calls
    size = x.numel() if whole else slab(x.numel(), (tanh + 1) * wide.itemsize, dtype.itemsize)
    buffers, a = Buffers(size, wide), torch.tensor(_A, dtype=wide, device="cpu")
    ready = bias is None and x.dtype is wide and x.is_contiguous()  # no sum to take, no copy to make
    for o, part, b in pieces(size, out, x, at_rank(bias, x.dim())):
        u = part if ready else add(part, b, o if whole else buffers(0, o.shape))
        y = o if dtype is wide else buffers(0, o.shape)
        if tanh:
            w = torch.addcmul(a, u, u, value=_B, out=buffers(1, o.shape))
            torch.div(u, w.mul_(u).exp2_().add_(1), out=y)
        else:
            _aten.gelu.out(u, out=y)
        if y is not o:
            o.copy_(y)
    return out


def gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the bias, from the inputs.

    The tanh form's derivative is ``s - ln(2) * s * (1 - s) * u * dw``, ``s = 1 / (1 + 2**w)``, and
    ``u * dw = 3 * w - 2 * A * u``: no pass over a slab has more than three operands, and none allocates.

    Args:
        grad: (...), the dtype of ``x + bias``, any strides.
        x: as in the forward.
        bias: as in the forward.
        approximate: as in the forward.
        needs: whether the gradient of x is wanted, and that of the bias.

    Returns:
        (...), contiguous, and the bias's shape; None where not wanted. The sum is taken in float32, in one order.
    """
    if not x.is_cpu:
        dx, dbias = OPS["bias_gelu"].backward(grad, x, bias, approximate, needs)
        return None if dx is None else dx.contiguous(), dbias
    if x.numel() < _SMALL:
        return _plain_backward(grad, x, bias, approximate, needs)
    return _backward(grad, x, bias, approximate == "tanh", needs)


def _backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, needs: tuple[bool, ...], any_value: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    wide = torch.promote_types(grad.dtype, torch.float32)
    dx = torch.empty(x.shape, dtype=x.dtype, device="cpu") if needs[0] else None
    sums = BiasGradient(bias, x.shape, wide) if bias is not None and needs[1] else None
    if dx is None and sums is None:
        return None, None
    # The quick way makes a NaN of an infinite u**3, and of an infinite gradient. Each sum tells of a NaN in its column,
    # and then all is done again in the way for any value, which takes 1.1 times as long
    any_value = any_value or sums is None or not sums.dims
    narrow = dx is None or x.dtype is not wide
    needed = (2 if tanh else grad.dtype is not wide) + narrow
    threads = None if sums is None else 2
    # as in the forward. Whether dx is wanted has no say: the bits of the sum are not a matter of it
    whole = not tanh and grad.dtype is wide and x.dtype is wide
    size = x.numel() if whole else slab(x.numel(), needed * wide.itemsize, x.dtype.itemsize, threads)
    buffers, a = Buffers(size, wide), torch.tensor(_A, dtype=wide, device="cpu")
    at = None if sums is None else sums.at_rank
    for part, g, b, o, total in pieces(size, x, grad, at_rank(bias, x.dim()), dx, at):
        du = buffers(0, part.shape) if narrow else o
        if tanh:
            u, w = add(part, b, buffers(1, part.shape)), buffers(2, part.shape)
            if any_value:
                u.clamp_(-_FLAT, _FLAT)
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
        if narrow and o is not None:
            o.copy_(du)
        if sums is not None:
            sums.add(du, total)
    if tanh and sums is not None and not any_value and not sums.sum.isfinite().all():
        return _backward(grad, x, bias, tanh, needs, any_value=True)
    return dx, None if sums is None else sums.result()


def _plain_forward(x: Tensor, bias: Tensor | None, approximate: str, wide: torch.dtype) -> Tensor:
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if approximate == "tanh" or x.is_cpu or x.is_cuda:
        return torch.nn.functional.gelu(u, approximate=approximate)
    return _erf_form(u)


def _plain_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    wide = torch.promote_types(grad.dtype, torch.float32)
    u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    du = _aten.gelu_backward(grad.to(wide), u, approximate=approximate)
    dx = du.to(x.dtype).contiguous() if needs[0] else None
    if bias is None or not needs[1]:
        return dx, None
    return dx, du.sum_to_size(bias.shape).to(bias.dtype, copy=True).contiguous()


def _erf_form(u: Tensor) -> Tensor:
    """The exact form in elementary steps: torch_npu's gelu makes the tanh form of either."""
    return u * (torch.erf(u * math.sqrt(0.5)) + 1) * 0.5
