"""RMSNorm and LayerNorm in plain torch, with and without a residual, on any device.

LayerNorm is torch's own kernel. It gets a weight of the compute dtype: with a 16-bit weight it rounds the mean and rstd
to 16 bits. On a CPU it returns NaN for float32 values above 1e19, whose square overflows; the definition gives 0.

The compute dtype is float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops import OPS
from fusedops.ops.norms.arguments import AddLayerNormArgs, AddLayerNormGradArgs, AddRmsNormArgs, AddRmsNormGradArgs

_aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------------------ RMSNorm


def add_layer_norm(a: AddLayerNormArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, s, mean, rstd = layer_forward(*a)
    return y, s, mean if save else None, rstd if save else None


def add_layer_norm_backward(a: AddLayerNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual, weight and bias."""
    dtypes = (a.grad_y.dtype if a.needs[0] else None, a.residual_dtype if a.needs[1] else None)
    return layer_backward(a.grad_y, a.grad_s, a.s, a.mean, a.rstd, a.weight, a.bias, dtypes, (a.needs[2], a.needs[3]))


def add_rms_norm(a: AddRmsNormArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, s, rstd = rms_forward(*a)
    return y, s, rstd if save else None


def add_rms_norm_backward(a: AddRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual and weight."""
    dtypes = (a.grad_y.dtype if a.needs[0] else None, a.residual_dtype if a.needs[1] else None)
    return rms_backward(a.grad_y, a.grad_s, a.s, a.rstd, a.weight, a.offset, dtypes, a.needs[2])


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, _, mean, rstd = layer_forward(x, None, weight, bias, eps)
    return y, mean if save else None, rstd if save else None


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight and bias."""
    dtypes = (x.dtype if needs[0] else None,)
    return layer_backward(grad, None, x, mean, rstd, weight, bias, dtypes, (needs[1], needs[2]))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, _, rstd = rms_forward(x, None, weight, eps, offset)
    return y, rstd if save else None


def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and weight."""
    dtypes = (x.dtype if needs[0] else None,)
    return rms_backward(grad, None, x, rstd, weight, offset, dtypes, needs[1])


def rms_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``y = rms_norm(s)`` with ``s = x + residual``.

    Args:
        x: (..., H), floating, any strides.
        residual: (..., H), floating, any strides, or None: s is x then.
        weight: (H,), floating, or None.
        eps: added to the mean square.
        offset: added to the weight.

    Returns:
        y (..., H), of the dtype of x; s; rstd (...), of the compute dtype. New ones are contiguous.
    """
    s = x if residual is None else (x + residual).contiguous()
    shape, scale = s.shape[-1:], weight
    if weight is not None and (offset != 0 or (s.is_cuda and weight.dtype is not s.dtype)):
        scale = weight.to(compute_dtype(s.dtype)) + offset
    if s.numel() == 0 or not (s.is_cpu or (s.is_cuda and (scale is None or scale.dtype is s.dtype))):
        op = OPS["rms_norm"]  # torch's op, elsewhere or with two dtypes, may compute in the narrow one
        y, rstd = op.reference_with_saved(s, weight, eps, offset, True)
        return y.to(x.dtype).contiguous(), s, rstd.contiguous()
    y, rstd = _aten._fused_rms_norm(s, shape, scale, eps)
    return y.to(x.dtype).contiguous(), s, rstd.view(s.shape[:-1])


def rms_backward(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    dtypes: tuple[torch.dtype | None, ...],
    needs_weight: bool,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, of the residual and of the weight.

    Args:
        grad: (..., H), the gradient of y, floating, any strides.
        grad_s: (..., H), the gradient of s, any strides, or None where there is no residual.
        s: (..., H), what was normalized.
        rstd: (...), from the forward.
        weight: as in the forward.
        offset: as in the forward.
        dtypes: the dtype of the gradient of x, and of that of the residual; None for one that is not wanted.
        needs_weight: True if the gradient of the weight is wanted.

    Returns:
        (..., H), contiguous, once for each of ``dtypes``, and (H,); None for a gradient that is not wanted. Sums are
        accumulated in the compute dtype, in a fixed order.
    """
    needs = (any(dtype is not None for dtype in dtypes), needs_weight and weight is not None)
    fused = s.is_cuda and grad.dtype is s.dtype and (weight is None or (offset == 0 and weight.dtype is s.dtype))
    if fused and s.numel() and grad_s is None:
        args = (grad, s, s.shape[-1:], rstd[..., None], weight, needs)
        dx, dweight = _aten._fused_rms_norm_backward(*args)
        return dx if needs[0] else None, dweight if needs[1] else None
    op, extra = OPS["rms_norm"], s
    if grad_s is not None and s.dtype is not rstd.dtype:
        extra = s.to(rstd.dtype)  # so that ds is not rounded before grad_s is added
    ds, dweight = op.backward(grad, extra, rstd, weight, offset, needs)
    return *_gradients_of_sum(ds, grad_s, dtypes), dweight


def _gradients_of_sum(
    ds: Tensor | None, grad_s: Tensor | None, dtypes: tuple[torch.dtype | None, ...]
) -> list[Tensor | None]:
    """Return ``ds + grad_s`` in each of the dtypes, in memory of its own. ds may be written."""
    if ds is None:
        return [None for _ in dtypes]
    if grad_s is not None:
        ds = ds.add_(grad_s)
    results: list[Tensor | None] = []
    for at, dtype in enumerate(dtypes):
        used = ds.dtype is dtype and any(other is dtype for other in dtypes[:at])
        results.append(None if dtype is None else ds.to(dtype, copy=used).contiguous())
    return results


# ---------------------------------------------------------------------------------------------------------- LayerNorm


def layer_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``y = layer_norm(s)`` with ``s = x + residual``.

    Arguments and results are those of ``rms_forward``, with a bias (H,), floating, or None, and the mean (...) before
    rstd.
    """
    s = (x if residual is None else x + residual).contiguous()
    wide = compute_dtype(s.dtype)
    if s.numel() == 0:  # rows without columns have no mean
        y, mean, rstd = OPS["layer_norm"].reference_with_saved(s, weight, bias, eps, True)
        return y.to(x.dtype), x if residual is None else s, mean, rstd
    rows = s if s.is_cpu else s.to(wide)  # elsewhere the kernel may not take two dtypes
    y, mean, rstd = torch.native_layer_norm(rows, s.shape[-1:], *_parameters(s, weight, bias), eps)
    kept = x if residual is None else s
    return y.to(x.dtype), kept, mean.to(wide).view(s.shape[:-1]), rstd.to(wide).view(s.shape[:-1])


def _parameters(s: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias in the compute dtype. 16-bit rows get a weight, as torch computes rstd in its dtype."""
    wide = compute_dtype(s.dtype)
    if weight is not None:
        weight = weight.to(wide).contiguous()
    elif s.dtype is not wide:
        weight = torch.ones(s.shape[-1], dtype=wide, device=s.device)
    return weight, None if bias is None else bias.to(wide).contiguous()


def layer_backward(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dtypes: tuple[torch.dtype | None, ...],
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, of the residual, of the weight and of the bias.

    Arguments and results are those of ``rms_backward``. needs: (gradient of the weight is wanted, that of the bias).
    """
    wide = rstd.dtype
    wants = (any(dtype is not None for dtype in dtypes), needs[0] and weight is not None, needs[1] and bias is not None)
    if s.numel() == 0:
        ds, dweight, dbias = OPS["layer_norm"].backward(grad, s, mean, rstd, weight, bias, wants)
        return *_gradients_of_sum(ds, grad_s, dtypes), dweight, dbias
    mean, rstd = mean[..., None].contiguous(), rstd[..., None].contiguous()
    # from 16-bit rows, torch sums the gradients of weight and bias in 16 bits: 4096 ones are 256
    only_rows = s.is_cpu and grad_s is None and not (wants[1] or wants[2])
    if grad.dtype is s.dtype and (s.dtype is wide or only_rows):
        ds, dweight, dbias = _layer_gradients(grad, s, mean, rstd, _parameters(s, weight, bias), wants)
    else:  # widened: ds is not rounded before grad_s is added, and sums over rows are not rounded at all
        parameters = tuple(None if each is None else each.to(wide).contiguous() for each in (weight, bias))
        ds, dweight, dbias = _layer_gradients(
            grad.to(wide), s.to(wide), mean, rstd, (parameters[0], parameters[1]), wants
        )
    gradients = _gradients_of_sum(ds, grad_s, dtypes)
    dweight = dweight.to(weight.dtype) if dweight is not None and weight is not None else None
    return *gradients, dweight, dbias.to(bias.dtype) if dbias is not None and bias is not None else None


def _layer_gradients(
    grad: Tensor,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    parameters: tuple[Tensor | None, Tensor | None],
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return torch's gradients of rows, weight and bias, each None if it is not wanted. mean and rstd are (..., 1)."""
    shape = s.shape[-1:]
    return _aten.native_layer_norm_backward(grad.contiguous(), s.contiguous(), shape, mean, rstd, *parameters, wants)
