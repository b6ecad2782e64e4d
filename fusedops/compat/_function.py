"""Helpers for the autograd Functions of the replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fusedops.dtypes import promoted


class OpFunction(torch.autograd.Function):
    """An autograd Function whose ``apply`` calls an op of fusedops.

    The op has its own autograd, with second derivatives and torch.func. Its backward is selected together with its
    forward. So a subclass sets the static method ``_op``, which ``apply`` calls. ``forward`` and ``backward`` exist for
    callers that use them directly, for torch.compile, which traces them, and for subclasses of the subclass: these do
    not inherit ``_op``, so their ``apply`` is torch's.
    """

    _op: Callable[..., Tensor] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_op" not in vars(cls):
            cls._op = None

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Call the op with the arguments of ``forward``, without ``ctx``."""
        return cast("Tensor", super().apply(*args, **kwargs)) if cls._op is None else cls._op(*args, **kwargs)


def gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor | None, ...]:
    """Compute the gradients of ``x`` and ``bias`` for the tanh form with the selected backend; None if not needed.

    ``grad`` has the output's shape and any floating dtype.
    """
    output_dtype = promoted(x, bias)
    backward = torch.ops.fusedops.bias_gelu_backward.default
    gradients: tuple[Tensor, ...] = backward(grad.to(output_dtype), x, bias, "tanh", needs)
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs))
