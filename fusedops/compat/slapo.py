"""Replacement for Slapo's ``slapo.op.fused_bias``, with fusedops' ops. Only the import changes.

from fusedops.compat.slapo import BiasGeLUFunction, bias_dropout, bias_new_gelu, new_gelu

docs/megatron.md#in-place-of-slapos-fused_bias lists the differences from the original.

Source: Slapo, ``slapo/op/fused_bias.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops import ops
from fusedops.compat import megatron
from fusedops.compat._function import OpFunction, gelu_backward


def bias_new_gelu(inp: Tensor, bias: Tensor | None) -> Tensor:
    """Compute GELU of ``inp + bias`` in the tanh form, which Hugging Face calls ``new_gelu``.

    Args:
        inp: (..., H), any floating dtype.
        bias: broadcastable to ``inp``, usually (H,), any floating dtype, or None.

    Returns:
        (..., H), the dtype of ``inp + bias`` by torch's promotion.

    >>> import torch
    >>> bias_new_gelu(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8412])
    """
    return ops.bias_gelu(inp, bias)


class BiasGeLUFunction(OpFunction):
    """Bias and GELU, the tanh form: ``apply(inp, bias)``.

    >>> import torch
    >>> BiasGeLUFunction.apply(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8412])
    """

    _op = staticmethod(bias_new_gelu)
    bias_gelu = staticmethod(megatron.bias_gelu)
    bias_gelu_back = staticmethod(megatron.bias_gelu_back)

    @staticmethod
    def forward(ctx: Any, inp: Tensor, bias: Tensor | None) -> Tensor:
        """Compute GELU of ``inp + bias``. Shapes and dtypes are as in :func:`bias_new_gelu`."""
        ctx.save_for_backward(inp, bias)
        return ops.bias_gelu(inp, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradients of ``inp`` and ``bias``, each in its own shape and dtype."""
        inp, bias = ctx.saved_tensors
        return gelu_backward(grad_output, inp, bias, [True, bias is not None])


def new_gelu(inp: Tensor) -> Tensor:
    """Compute GELU of ``inp`` (...) in the tanh form, in the dtype of ``inp``.

    >>> import torch
    >>> new_gelu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8412])
    """
    return ops.bias_gelu(inp)


def bias_dropout(
    x: Tensor, bias: Tensor | None, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Compute dropout of ``x + bias``.

    Args:
        x: (...), any floating dtype.
        bias: broadcastable to ``x``, any floating dtype, or None.
        p: probability of dropping an element, in [0, 1].
        training: False drops nothing.
        inplace: not used. The original writes only into the sum, a temporary tensor.

    Returns:
        (...), the dtype of ``x + bias`` by torch's promotion.

    >>> import torch
    >>> bias_dropout(torch.zeros(2), torch.tensor([1.0, 2.0]), training=False)
    tensor([1., 2.])
    """
    return ops.bias_dropout(x, bias, p, training=training)
