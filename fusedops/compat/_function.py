"""What the autograd Functions of the drop-ins share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


class OpFunction(torch.autograd.Function):
    """An autograd Function whose ``apply`` is an op of fusedops.

    The op has its own autograd: with second derivatives, torch.func, and a backward that was chosen along with forward.
    So a Function here names the op as ``_op``, a static method. Its ``forward`` and ``backward`` are for those who call
    them, for torch.compile, which traces them, and for subclasses, which inherit no ``_op``: their apply is torch's.
    """

    _op: Callable[..., Tensor] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_op" not in vars(cls):
            cls._op = None

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Calls the op on the arguments of ``forward`` after ctx."""
        return cast("Tensor", super().apply(*args, **kwargs)) if cls._op is None else cls._op(*args, **kwargs)


def gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of ``x`` and ``bias`` for the tanh form, by the backend of the policy; None where not needed."""
    run = torch.ops.fusedops.bias_gelu_backward.default
    found: tuple[Tensor, ...] = run(grad, x, bias, "tanh", needs)
    return tuple(gradient if need else None for gradient, need in zip(found, needs))
