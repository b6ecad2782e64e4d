"""The norms as modules. State dicts of torch's and transformers' modules load: the parameters have the same names."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fusedops import ops
from fusedops.errors import InvalidInputError
from fusedops.nn._repr import backend_repr


class _Norm(Module):
    """A module with a weight (H,), or without."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        weight: float | None,
        backend: str | None,
        **options: Any,
    ) -> None:
        super().__init__()
        whole: Any = normalized_shape
        sizes: list[Any] = list(cast("Any", whole)) if isinstance(whole, Sequence) else [whole]
        if len(sizes) != 1 or not isinstance(sizes[0], Integral):
            raise InvalidInputError(
                f"{type(self).__name__}: got normalized_shape = {normalized_shape!r}, expected H or (H,), the size of "
                f"the last dim; to fix: flatten the dims that the norm is of, as in x.flatten(-2)"
            )
        size = int(sizes[0])
        self.size = size
        self.eps = eps
        self.backend = backend
        self.weight: Parameter | None = None if weight is None else Parameter(torch.full((size,), weight, **options))

    def _forward(self, x: Tensor, residual: Tensor | None) -> Any:
        raise NotImplementedError

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x; with a residual, the norm of ``x + residual`` and the sum.

        Args:
            x: (..., H), float16, bfloat16, float32 or float64.
            residual: the shape of ``x``, any of the same dtypes, or None.

        Returns:
            (..., H), the dtype of ``x``. With a residual also the sum, of the dtype of ``x + residual``.

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        return self._forward(x, residual)


class RMSNorm(_Norm):
    """The module of :func:`fusedops.rms_norm` and, with a residual, of :func:`fusedops.add_rms_norm`.

    Args:
        normalized_shape: H, the size of the last dimension, or (H,).
        eps: added to the mean square.
        elementwise_affine: False leaves out the weight.
        device: of the weight.
        dtype: of the weight.
        offset: added to the weight; 1.0 for state dicts of Gemma, which keep ``weight - 1``.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import torch, fusedops
    >>> norm = fusedops.nn.RMSNorm(2, eps=0.0)
    >>> norm(torch.tensor([3.0, 4.0])), norm
    (tensor([0.8485, 1.1314], grad_fn=...), RMSNorm(2, eps=0.0))
    >>> y, stream = norm(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0]))
    >>> stream.tolist()
    [3.0, 4.0]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        backend: str | None = None,
    ) -> None:
        weight = 1.0 - offset if elementwise_affine else None  # the first result is the norm itself
        super().__init__(normalized_shape, eps, weight, backend, device=device, dtype=dtype)
        self.offset = offset

    def _forward(self, x: Tensor, residual: Tensor | None) -> Any:
        settings: Any = {"offset": self.offset, "backend": self.backend}
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps, **settings)
        return ops.add_rms_norm(x, residual, self.weight, self.eps, **settings)

    def extra_repr(self) -> str:
        """Return the settings."""
        offset = f", offset={self.offset}" if self.offset else ""
        affine = ", elementwise_affine=False" if self.weight is None else ""
        return f"{self.size}, eps={self.eps}{offset}{affine}{backend_repr(self.backend)}"


class LayerNorm(_Norm):
    """The module of :func:`fusedops.layer_norm` and, with a residual, of :func:`fusedops.add_layer_norm`.

    Args:
        normalized_shape: H, the size of the last dimension, or (H,).
        eps: added to the variance.
        elementwise_affine: False leaves out weight and bias.
        bias: False leaves out the bias.
        device: of weight and bias.
        dtype: of weight and bias.
        backend: a policy for this module alone, such as "triton" or "npu,eager". None: the policy in effect.

    >>> import torch, fusedops
    >>> norm = fusedops.nn.LayerNorm(2, eps=0.0, bias=False)
    >>> norm(torch.tensor([1.0, 3.0])), norm
    (tensor([-1.,  1.], grad_fn=...), LayerNorm(2, eps=0.0, bias=False))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        weight = 1.0 if elementwise_affine else None
        super().__init__(normalized_shape, eps, weight, backend, device=device, dtype=dtype)
        has_bias = elementwise_affine and bias
        self.bias: Parameter | None = (
            Parameter(torch.zeros(self.size, device=device, dtype=dtype)) if has_bias else None
        )

    def _forward(self, x: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            return ops.layer_norm(x, self.weight, self.bias, self.eps, backend=self.backend)
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings."""
        bias = ", bias=False" if self.bias is None and self.weight is not None else ""
        affine = ", elementwise_affine=False" if self.weight is None else ""
        return f"{self.size}, eps={self.eps}{bias}{affine}{backend_repr(self.backend)}"
