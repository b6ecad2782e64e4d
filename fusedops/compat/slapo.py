"""Slapo's ``slapo.op.fused_bias`` over fusedops' ops. Change the import, nothing else.

from fusedops.compat.slapo import BiasGeLUFunction, bias_dropout, bias_new_gelu, new_gelu

Where an answer differs from the original's, it is in docs/slapo.md with the reason.

Source: Slapo, ``slapo/op/fused_bias.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops import ops
from fusedops.compat import megatron
from fusedops.compat._function import OpFunction, gelu_backward


def bias_new_gelu(inp: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of ``inp + bias``, the tanh form, which Hugging Face calls ``new_gelu``.

    Args:
        inp: (..., H), any floating dtype.
        bias: broadcastable to ``inp``, usually (H,), any floating dtype, or None.

    Returns:
        (..., H), the dtype of ``inp + bias`` by torch's promotion.
    """
    return ops.bias_gelu(inp, bias)


class BiasGeLUFunction(OpFunction):
    """Bias and GELU, the tanh form: ``apply(inp, bias)``."""

    _op = staticmethod(bias_new_gelu)
    bias_gelu = staticmethod(megatron.bias_gelu)
    bias_gelu_back = staticmethod(megatron.bias_gelu_back)

    @staticmethod
    def forward(ctx: Any, inp: Tensor, bias: Tensor | None) -> Tensor:
        """GELU of ``inp + bias``, shapes and dtypes as in :func:`bias_new_gelu`."""
        ctx.save_for_backward(inp, bias)
        return ops.bias_gelu(inp, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of ``inp`` and ``bias``, each in its own shape and dtype."""
        inp, bias = ctx.saved_tensors
        return gelu_backward(grad_output, inp, bias, [True, bias is not None])


def new_gelu(inp: Tensor) -> Tensor:
    """GELU of ``inp`` (...), the tanh form, in its dtype."""
    return ops.bias_gelu(inp)


def bias_dropout(
    x: Tensor, bias: Tensor | None, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout of ``x + bias``.

    Args:
        x: (...), any floating dtype.
        bias: broadcastable to ``x``, any floating dtype, or None.
        p: probability of dropping an element, in [0, 1].
        training: False drops nothing.
        inplace: nothing to do: the original writes into the sum alone, which nobody else holds.

    Returns:
        (...), the dtype of ``x + bias`` by torch's promotion.
    """
    return ops.bias_dropout(x, bias, p, training=training)
