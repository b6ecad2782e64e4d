"""The gated activations as modules."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.nn._repr import backend_repr
from fusedops.ops.gelu.bias_gelu import Approximate


class SwiGLU(Module):
    """The module of :func:`fusedops.swiglu`. The linear layers before and after it stay with the model.

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

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Return ``gate * sigmoid(alpha * gate) * (up + offset)``.

        Args:
            gate: (..., H), float16, bfloat16, float32 or float64. Without ``up``: (..., 2H), gate and up packed.
            up: the shape of ``gate``, any of the same dtypes, or None.

        Returns:
            (..., H), the dtype of ``gate * up`` by torch's promotion.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return ops.swiglu(
            gate,
            up,
            limit=self.limit,
            alpha=self.alpha,
            offset=self.offset,
            interleaved=self.interleaved,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Return the settings."""
        settings = f"limit={self.limit}, alpha={self.alpha}, offset={self.offset}, interleaved={self.interleaved}"
        return f"{settings}{backend_repr(self.backend)}"


class GEGLU(Module):
    """The module of :func:`fusedops.geglu`. The linear layers before and after it stay with the model.

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

    def __init__(
        self, approximate: Approximate = "tanh", *, interleaved: bool = False, backend: str | None = None
    ) -> None:
        super().__init__()
        self.approximate: Approximate = approximate
        self.interleaved = interleaved
        self.backend = backend

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Return ``gelu(gate) * up``.

        Args:
            gate: (..., H), float16, bfloat16, float32 or float64. Without ``up``: (..., 2H), gate and up packed.
            up: the shape of ``gate``, any of the same dtypes, or None.

        Returns:
            (..., H), the dtype of ``gate * up`` by torch's promotion.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return ops.geglu(gate, up, approximate=self.approximate, interleaved=self.interleaved, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings."""
        settings = f"approximate={self.approximate!r}, interleaved={self.interleaved}"
        return f"{settings}{backend_repr(self.backend)}"
