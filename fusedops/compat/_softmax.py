"""The softmax Functions of Megatron and apex, and apex's functional forms, with fusedops.scaled_masked_softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops._torch import autocasts
from fusedops.compat._function import OpFunction

# --------------------------------------------------------------------------------------------- the autograd Functions


def _forward(ctx: Any, inputs: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y = ops.scaled_masked_softmax(inputs, mask, scale, causal=causal)
    ctx.save_for_backward(y)
    ctx.scale, ctx.causal = scale, causal
    return y


def _backward(ctx: Any, output_grads: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return torch.ops.fusedops.scaled_masked_softmax_backward.default(output_grads, y, ctx.scale, ctx.causal)


class ScaledMaskedSoftmax(OpFunction):
    """Scale, mask, softmax: ``apply(inputs, mask, scale)``.

    ``inputs``: (b, np, sq, sk), or any rank from 2, any floating dtype. ``mask``: bool or uint8, broadcastable to
    ``inputs``, True where masked out, or None. ``scale``: a number.

    >>> ScaledMaskedSoftmax.apply(torch.zeros(1, 3), torch.tensor([[False, False, True]]), 1.0)
    tensor([[0.5000, 0.5000, 0.0000]])
    """

    _op = staticmethod(ops.scaled_masked_softmax)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Compute the probabilities, in the shape and dtype of ``inputs``."""
        return _forward(ctx, inputs, mask, scale, False)

    @staticmethod
    def backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradient of ``inputs``. ``output_grads`` is not modified."""
        return _backward(ctx, output_grads), None, None


class GenericScaledMaskedSoftmax(ScaledMaskedSoftmax):
    """apex's form for any number of keys. Here every form supports any number of keys.

    >>> GenericScaledMaskedSoftmax.apply(torch.zeros(1, 2), None, 1.0)
    tensor([[0.5000, 0.5000]])
    """

    _op = staticmethod(ops.scaled_masked_softmax)


class _WithoutMask(OpFunction):
    """A softmax of inputs and scale."""

    @staticmethod
    def backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradient of ``inputs``. ``output_grads`` is not modified."""
        return _backward(ctx, output_grads), None


def _causal_softmax(inputs: Tensor, scale: float) -> Tensor:
    return ops.scaled_masked_softmax(inputs, None, scale, causal=True)


class ScaledUpperTriangMaskedSoftmax(_WithoutMask):
    """Scale, causal mask, softmax: ``apply(inputs, scale)``. ``inputs``: (attn_batches, sq, sk), or any rank from 2.

    >>> ScaledUpperTriangMaskedSoftmax.apply(torch.zeros(2, 2), 1.0)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """

    _op = staticmethod(_causal_softmax)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: float) -> Tensor:
        """Compute the probabilities, in the shape and dtype of ``inputs``; exactly 0 above the diagonal."""
        return _forward(ctx, inputs, None, scale, True)


def _softmax(inputs: Tensor, scale: float) -> Tensor:
    return ops.scaled_masked_softmax(inputs, None, scale)


class ScaledSoftmax(_WithoutMask):
    """Scale, softmax: ``apply(inputs, scale)``. ``inputs``: (b, np, sq, sk), or any rank from 2.

    >>> ScaledSoftmax.apply(torch.zeros(1, 2), 1.0)
    tensor([[0.5000, 0.5000]])
    """

    _op = staticmethod(_softmax)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: float) -> Tensor:
        """Compute the probabilities, in the shape and dtype of ``inputs``."""
        return _forward(ctx, inputs, None, scale, False)


# -------------------------------------------------------------------------------------------- apex's functional forms


def _autocast(inputs: Tensor) -> Tensor:
    """Return ``inputs`` in the dtype of torch.autocast if autocast is enabled, as apex's functional forms do."""
    device_type = inputs.device.type
    if inputs.dtype == torch.float64 or not autocasts(device_type):
        return inputs
    return inputs.to(torch.get_autocast_dtype(device_type))


def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute apex's functional form: ``inputs`` (b, np, sq, sk), ``mask`` True where masked out, or None.

    >>> scaled_masked_softmax(torch.zeros(1, 2), torch.tensor([[False, True]]), 1.0)
    tensor([[1., 0.]])
    """
    return ops.scaled_masked_softmax(_autocast(inputs), mask, scale)


def generic_scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute apex's functional form for any number of keys; here the same as :func:`scaled_masked_softmax`.

    >>> generic_scaled_masked_softmax(torch.zeros(1, 2), None, 1.0)
    tensor([[0.5000, 0.5000]])
    """
    return ops.scaled_masked_softmax(_autocast(inputs), mask, scale)


def scaled_softmax(inputs: Tensor, scale: float) -> Tensor:
    """Compute ScaledSoftmax as a function. In apex it is scaled_masked_softmax without a mask.

    >>> scaled_softmax(torch.zeros(1, 2), 1.0)
    tensor([[0.5000, 0.5000]])
    """
    return ops.scaled_masked_softmax(_autocast(inputs), None, scale)


def scaled_upper_triang_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute apex's functional form: ``inputs`` (b, np, sq, sq), causal. apex ignores ``mask``; here it masks too.

    Raises:
        AssertionError: the number of keys differs from the number of queries.

    >>> scaled_upper_triang_masked_softmax(torch.zeros(2, 2), None, 1.0)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    if inputs.shape[-2] != inputs.shape[-1]:
        raise not_square(*inputs.shape[-2:])
    return ops.scaled_masked_softmax(_autocast(inputs), mask, scale, causal=True)


def not_square(sq: int, sk: int) -> AssertionError:
    """Return the error of a causal form for ``sq`` queries and a different number ``sk`` of keys."""
    return AssertionError(
        f"a causal mask is only for self attention: got {sq} queries and {sk} keys, expected equal numbers; to fix: "
        f"pass a mask with the keys of each query"
    )
