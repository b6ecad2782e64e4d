"""The gated activations as modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.nn._repr import backend_repr
from fusedops.ops.bias.bias_gelu import Approximate


class _Gated(Module):
    """A gated activation: the op, called with the settings of the module."""

    _op: Any
    _settings: tuple[str, ...]
    backend: str | None

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Compute the op of the module.

        Args:
            gate: (..., H), float16, bfloat16, float32 or float64. Without ``up``: (..., 2H), gate and up packed.
            up: the shape of ``gate``, any of the same dtypes, or None.

        Returns:
            (..., H), the dtype of ``gate * up`` by torch's promotion.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        settings = {name: getattr(self, name) for name in self._settings}
        return self._op(gate, up, **settings, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings, for ``repr``."""
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._settings)
        return f"{settings}{backend_repr(self.backend)}"


class SwiGLU(_Gated):
    """The module of :func:`fusedops.swiglu`. The linear layers before and after it stay with the model.

    Call it with ``gate`` and ``up``, each (..., H), or with both packed in ``gate``, (..., 2H).

    Args:
        limit: clamps gate and up, see the op; or None.
        alpha: a number, finite in float32.
        offset: a number, finite in float32.
        interleaved: how gate and up are packed where the module is called with one tensor.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import torch, fusedops
    >>> fusedops.nn.SwiGLU(limit=7.0, alpha=1.702, offset=1.0)
    SwiGLU(limit=7.0, alpha=1.702, offset=1.0, interleaved=False)
    >>> fusedops.nn.SwiGLU()(torch.tensor([2.0]), torch.tensor([3.0]))
    tensor([5.2848])
    """

    _op = staticmethod(ops.swiglu)
    _settings = ("limit", "alpha", "offset", "interleaved")

    def __init__(
        self,
        *,
        limit: float | None = None,
        alpha: float = 1.0,
        offset: float = 0.0,
        interleaved: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.limit = limit
        self.alpha = alpha
        self.offset = offset
        self.interleaved = interleaved
        self.backend = backend


class GEGLU(_Gated):
    """The module of :func:`fusedops.geglu`. The linear layers before and after it stay with the model.

    Call it with ``gate`` and ``up``, each (..., H), or with both packed in ``gate``, (..., 2H).

    Args:
        approximate: "tanh", or "none" for the exact form.
        interleaved: how gate and up are packed where the module is called with one tensor.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import torch, fusedops
    >>> fusedops.nn.GEGLU("none")
    GEGLU(approximate='none', interleaved=False)
    >>> fusedops.nn.GEGLU()(torch.tensor([2.0]), torch.tensor([3.0]))
    tensor([5.8638])
    """

    _op = staticmethod(ops.geglu)
    _settings = ("approximate", "interleaved")

    def __init__(
        self, approximate: Approximate = "tanh", *, interleaved: bool = False, backend: str | None = None
    ) -> None:
        super().__init__()
        self.approximate: Approximate = approximate
        self.interleaved = interleaved
        self.backend = backend
