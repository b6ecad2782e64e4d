"""The modules without parameters: softmax, GELU, dropout."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.nn._repr import backend_repr
from fusedops.ops.bias.bias_gelu import Approximate


class ScaledMaskedSoftmax(Module):
    """The module of :func:`fusedops.scaled_masked_softmax`.

    Args:
        scale: a number, finite in float32.
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
        return f"scale={self.scale}, causal={self.causal}{backend_repr(self.backend)}"


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
        return f"approximate={self.approximate!r}{backend_repr(self.backend)}"


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
        return f"p={self.p}{backend_repr(self.backend)}"
