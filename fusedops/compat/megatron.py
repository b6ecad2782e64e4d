"""Replacements for the fused functions of Megatron-LM and apex, with fusedops' ops. Only the import changes.

from fusedops.compat.megatron import FusedScaleMaskSoftmax, bias_gelu_impl, get_bias_dropout_add

Names, parameters, defaults, error types and the order of tuples are those of the originals. docs/megatron.md lists the
differences, with reasons.

Source: Megatron-LM 0.19.2, ``megatron/core/fusions`` and ``megatron/core/utils.py``; apex,
``apex/transformer/functional``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.compat._function import OpFunction, gelu_backward
from fusedops.compat._masks import AttnMaskType as AttnMaskType
from fusedops.compat._masks import attention_mask_func as attention_mask_func
from fusedops.compat._masks import get_default_causal_mask as get_default_causal_mask
from fusedops.compat._masks import get_sliding_window_causal_mask as get_sliding_window_causal_mask
from fusedops.compat._sink import SoftmaxOne as SoftmaxOne
from fusedops.compat._softmax import GenericScaledMaskedSoftmax as GenericScaledMaskedSoftmax
from fusedops.compat._softmax import ScaledMaskedSoftmax as ScaledMaskedSoftmax
from fusedops.compat._softmax import ScaledSoftmax as ScaledSoftmax
from fusedops.compat._softmax import ScaledUpperTriangMaskedSoftmax as ScaledUpperTriangMaskedSoftmax
from fusedops.compat._softmax import generic_scaled_masked_softmax as generic_scaled_masked_softmax
from fusedops.compat._softmax import scaled_masked_softmax as scaled_masked_softmax
from fusedops.compat._softmax import scaled_softmax as scaled_softmax
from fusedops.compat._softmax import scaled_upper_triang_masked_softmax as scaled_upper_triang_masked_softmax
from fusedops.compat._softmax_modules import FusedScaleMaskSoftmax as FusedScaleMaskSoftmax
from fusedops.compat._softmax_modules import GenericFusedScaleMaskSoftmax as GenericFusedScaleMaskSoftmax
from fusedops.dtypes import promoted
from fusedops.viewless import MakeViewlessTensor as MakeViewlessTensor
from fusedops.viewless import assert_viewless_tensor as assert_viewless_tensor
from fusedops.viewless import make_viewless_tensor as make_viewless_tensor
from fusedops.viewless import safely_set_viewless_tensor_data as safely_set_viewless_tensor_data

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]

# ------------------------------------------------------------------------------------------------------ bias and GELU


def bias_gelu(bias: Tensor | None, y: Tensor) -> Tensor:
    """Compute GELU of ``y + bias`` in the tanh form. ``bias`` is the first argument.

    Args:
        bias: broadcastable to ``y``, usually (H,), any floating dtype, or None.
        y: (..., H), any floating dtype.

    Returns:
        (..., H), the dtype of ``y + bias`` by torch's promotion.

    >>> bias_gelu(torch.tensor([0.0, 1.0]), torch.zeros(2))
    tensor([0.0000, 0.8412])
    """
    return ops.bias_gelu(y, bias)


def bias_gelu_back(g: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
    """Compute the gradient of ``y`` in :func:`bias_gelu`. As in the original, it is not summed to the bias's shape.

    Args:
        g: (..., H), any floating dtype, the gradient of the output.
        bias: as in :func:`bias_gelu`.
        y: as in :func:`bias_gelu`.

    Returns:
        (..., H), the dtype of ``g * (y + bias)`` by torch's promotion.

    >>> bias_gelu_back(torch.ones(2), torch.tensor([0.0, 1.0]), torch.zeros(2))
    tensor([0.5000, 1.0830])
    """
    dtype = promoted(y, bias)
    dx, _ = gelu_backward(g, y.to(torch.promote_types(g.dtype, dtype)), bias, [True, False])
    assert dx is not None
    return dx


def _bias_gelu_swapped(input: Tensor, bias: Tensor | None) -> Tensor:
    return ops.bias_gelu(input, bias)


class GeLUFunction(OpFunction):
    """Bias and GELU, the tanh form: ``apply(input, bias)``. Unlike in :func:`bias_gelu`, the bias is last.

    >>> GeLUFunction.apply(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8412])
    """

    _op = staticmethod(_bias_gelu_swapped)

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute GELU of ``input + bias``. Shapes and dtypes are as in :func:`bias_gelu`."""
        ctx.save_for_backward(input, bias)
        return ops.bias_gelu(input, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradients of ``input`` and ``bias``, each in its own shape and dtype."""
        input, bias = ctx.saved_tensors
        return gelu_backward(grad_output, input, bias, [True, bias is not None])


bias_gelu_impl = GeLUFunction.apply

# ---------------------------------------------------------------------------------------------- bias, dropout and add


def _bias_dropout_add_func(
    x_with_bias: tuple[Tensor, Tensor | None],
    residual: Tensor,
    prob: float,
    training: bool,
    backend: str | None = None,
) -> Tensor:
    """Compute ``residual + dropout(x + bias)``. In evaluation, if no input requires grad, the result is stored in x.

    Args:
        x_with_bias: x (...) and a bias broadcastable to it, or None; any floating dtypes.
        residual: the shape of x, any floating dtype.
        prob: probability of dropping an element, in [0, 1].
        training: False drops nothing.
        backend: a policy for this call. The original does not have this parameter.

    Returns:
        (...), the dtype of ``residual``. In evaluation it is x itself, which callers of the original depend on, if x
        has the dtype of the residual and neither x, bias nor residual requires grad.
    """
    x, bias = x_with_bias
    out = ops.bias_dropout_add(x, bias, residual, prob, training=training, backend=backend)
    requires_grad = x.requires_grad or residual.requires_grad or (bias is not None and bias.requires_grad)
    return out if training or requires_grad or x.dtype != residual.dtype else x.copy_(out)


def bias_dropout_add_unfused(training: bool) -> BiasDropoutAdd:
    """Return a function ``(x_with_bias, residual, prob)`` for training or evaluation that uses the eager backend.

    >>> add = bias_dropout_add_unfused(training=False)
    >>> add((torch.ones(2), torch.ones(2)), torch.ones(2), 0.1)
    tensor([3., 3.])
    """

    def _bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        return _bias_dropout_add_func(x_with_bias, residual, prob, training, backend="eager")

    return _bias_dropout_add


def bias_dropout_add_fused_train(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    """Compute ``residual + dropout(x + bias)`` with the selected backend. No input is modified.

    >>> bias_dropout_add_fused_train((torch.ones(2), torch.ones(2)), torch.ones(2), 0.0)
    tensor([3., 3.])
    """
    return _bias_dropout_add_func(x_with_bias, residual, prob, True)


def bias_dropout_add_fused_inference(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
) -> Tensor:
    """Compute ``residual + x + bias`` with the selected backend.

    The result is stored in x if x has the dtype of ``residual`` and no input requires grad.

    >>> x = torch.ones(2)
    >>> bias_dropout_add_fused_inference((x, torch.ones(2)), torch.ones(2), 0.1) is x
    True
    """
    return _bias_dropout_add_func(x_with_bias, residual, prob, False)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return the function ``(x_with_bias, residual, prob)`` for these settings.

    Args:
        training: False drops nothing.
        fused: True uses the backend that the policy selects, False the eager backend. For the same seed, both drop the
            same elements.

    >>> get_bias_dropout_add(training=True, fused=True)((torch.ones(2), None), torch.ones(2), 0.0)
    tensor([2., 2.])
    """
    if not fused:
        return bias_dropout_add_unfused(training)
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference
