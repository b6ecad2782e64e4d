"""The ops as modules, for models that are built of modules. They have settings, and no parameters or buffers.

>>> import torch, fusedops
>>> fusedops.nn.ScaledMaskedSoftmax(scale=0.125, causal=True)(torch.zeros(1, 2, 2))
tensor([[[1.0000, 0.0000],
         [0.5000, 0.5000]]])
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.ops._bias_gelu import Approximate

__all__ = ["BiasDropoutAdd", "BiasGELU", "GEGLU", "ScaledMaskedSoftmax", "SwiGLU"]


class ScaledMaskedSoftmax(Module):
    """The module of :func:`fusedops.scaled_masked_softmax`.

    Args:
        scale: a finite number.
        causal: also masks the keys after each query.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import fusedops
    >>> fusedops.nn.ScaledMaskedSoftmax(0.5)
    ScaledMaskedSoftmax(scale=0.5, causal=False)
    """

    def __init__(self, scale: float = 1.0, *, causal: bool = False, backend: str | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal
        self.backend = backend

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attention probabilities.

        Args:
            x: (..., Sq, Sk), float16, bfloat16, float32 or float64.
            mask: bool or uint8, broadcastable to ``x``, True where masked out; or None.

        Returns:
            (..., Sq, Sk), the dtype of ``x``.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return ops.scaled_masked_softmax(x, mask, self.scale, causal=self.causal, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"scale={self.scale}, causal={self.causal}{_backend_repr(self.backend)}"


class BiasGELU(Module):
    """The module of :func:`fusedops.bias_gelu`. The bias stays with the layer that has it.

    Args:
        approximate: "tanh", or "none" for the exact form.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import fusedops
    >>> fusedops.nn.BiasGELU(backend="eager")
    BiasGELU(approximate='tanh', backend='eager')
    """

    def __init__(self, approximate: Approximate = "tanh", *, backend: str | None = None) -> None:
        super().__init__()
        self.approximate: Approximate = approximate
        self.backend = backend

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return GELU of ``x + bias``.

        Args:
            x: (..., H), float16, bfloat16, float32 or float64.
            bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.

        Returns:
            (..., H), the dtype of ``x + bias`` by torch's promotion.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return ops.bias_gelu(x, bias, approximate=self.approximate, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"approximate={self.approximate!r}{_backend_repr(self.backend)}"


class BiasDropoutAdd(Module):
    """The module of :func:`fusedops.bias_dropout_add`. It drops only in training mode, as torch.nn.Dropout does.

    Args:
        p: probability of dropping an element, in [0, 1].
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import fusedops
    >>> fusedops.nn.BiasDropoutAdd(0.1)
    BiasDropoutAdd(p=0.1)
    """

    def __init__(self, p: float = 0.5, *, backend: str | None = None) -> None:
        super().__init__()
        self.p = p
        self.backend = backend

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor, *, seed: int | Tensor | None = None) -> Tensor:
        """Return ``residual + dropout(x + bias)``. No input is written.

        Args:
            x: (...), float16, bfloat16, float32 or float64.
            bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.
            residual: the shape of ``x``, any of the same dtypes.
            seed: as the op takes it. None: drawn from torch's generator.

        Returns:
            (...), the dtype of ``residual``.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return ops.bias_dropout_add(x, bias, residual, self.p, training=self.training, seed=seed, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"p={self.p}{_backend_repr(self.backend)}"


def _backend_repr(backend: str | None) -> str:
    """Return the backend's part of a repr."""
    return "" if backend is None else f", backend={backend!r}"


class SwiGLU(Module):
    """The module of :func:`fusedops.swiglu`. The linear layers before and after it stay with the model.

    Args:
        limit: clamps gate and up, see the op; or None.
        alpha: a finite number.
        offset: a finite number.
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
        return f"{settings}{_backend_repr(self.backend)}"


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
        return f"{settings}{_backend_repr(self.backend)}"
