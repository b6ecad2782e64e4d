"""The softmax Functions of Megatron and apex, and apex's functional forms, over fusedops.scaled_masked_softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import ops
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

    ``inputs``: (b, np, sq, sk), or any rank from 2, any floating dtype. ``mask``: bool or uint8, broadcastable to it,
    True where masked out, or None. ``scale``: a number.
    """

    _op = staticmethod(ops.scaled_masked_softmax)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """The probabilities, as ``inputs`` in shape and dtype."""
        return _forward(ctx, inputs, mask, scale, False)

    @staticmethod
    def backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of ``inputs``; mask and scale have none. ``output_grads`` is not written."""
        return _backward(ctx, output_grads), None, None


class GenericScaledMaskedSoftmax(ScaledMaskedSoftmax):
    """apex's form without a limit on the number of keys; here no form has one."""

    _op = staticmethod(ops.scaled_masked_softmax)


def _causal_softmax(inputs: Tensor, scale: float) -> Tensor:
    return ops.scaled_masked_softmax(inputs, None, scale, causal=True)


class ScaledUpperTriangMaskedSoftmax(OpFunction):
    """Scale, causal mask, softmax: ``apply(inputs, scale)``. ``inputs``: (attn_batches, sq, sk), or any rank from 2."""

    _op = staticmethod(_causal_softmax)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: float) -> Tensor:
        """The probabilities, as ``inputs`` in shape and dtype; exactly 0 above the diagonal."""
        return _forward(ctx, inputs, None, scale, True)

    @staticmethod
    def backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of ``inputs``; scale has none. ``output_grads`` is not written."""
        return _backward(ctx, output_grads), None


def _softmax(inputs: Tensor, scale: float) -> Tensor:
    return ops.scaled_masked_softmax(inputs, None, scale)


class ScaledSoftmax(OpFunction):
    """Scale, softmax: ``apply(inputs, scale)``. ``inputs``: (b, np, sq, sk), or any rank from 2."""

    _op = staticmethod(_softmax)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: float) -> Tensor:
        """The probabilities, as ``inputs`` in shape and dtype."""
        return _forward(ctx, inputs, None, scale, False)

    @staticmethod
    def backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of ``inputs``; scale has none. ``output_grads`` is not written."""
        return _backward(ctx, output_grads), None


# -------------------------------------------------------------------------------------------- apex's functional forms


def _autocast(inputs: Tensor) -> Tensor:
    """``inputs`` in the dtype of torch.autocast where it is on, as apex's functional forms take them."""
    kind = inputs.device.type
    if inputs.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return inputs
    return inputs.to(torch.get_autocast_dtype(kind))


def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The functional form of apex: ``inputs`` (b, np, sq, sk), ``mask`` True where masked out, or None."""
    return ops.scaled_masked_softmax(_autocast(inputs), mask, scale)


def generic_scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The functional form of apex for any number of keys; the same as :func:`scaled_masked_softmax` here."""
    return ops.scaled_masked_softmax(_autocast(inputs), mask, scale)


def scaled_softmax(inputs: Tensor, scale: float) -> Tensor:
    """ScaledSoftmax as a function. apex has none of this name: there it is scaled_masked_softmax without a mask."""
    return ops.scaled_masked_softmax(_autocast(inputs), None, scale)


def scaled_upper_triang_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The functional form of apex: ``inputs`` (b, np, sq, sq), causal. A ``mask``, which apex ignores, masks as well.

    Raises:
        AssertionError: there are not as many keys as queries.
    """
    if inputs.shape[-2] != inputs.shape[-1]:
        raise not_square(*inputs.shape[-2:])
    return ops.scaled_masked_softmax(_autocast(inputs), mask, scale, causal=True)


def not_square(sq: int, sk: int) -> AssertionError:
    """What a causal form says of ``sq`` queries and ``sk`` other keys. Returned, not raised."""
    return AssertionError(
        f"a causal mask is only for self attention; input has {sq} queries and {sk} keys; needs as many keys as "
        f"queries, or a mask that says which keys each query sees"
    )
