"""Attention as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.nn._repr import backend_repr


class Attention(Module):
    """The module of :func:`fusedops.attention`. The projections before and after it stay with the model.

    Args:
        scale: a number, finite in float32, or None for ``1 / sqrt(D)``.
        causal: False, "upper_left", "lower_right", or True for calls where Sq == Sk.
        window: keys before and after the diagonal, or None.
        return_lse: also return lse.
        backend: a policy for this module alone, such as "sdpa" or "npu,eager". None: the policy in effect.

    >>> import torch, fusedops
    >>> fusedops.nn.Attention(causal="lower_right", window=(127, 0))
    Attention(scale=None, causal='lower_right', window=(127, 0))
    >>> fusedops.nn.Attention()(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)).shape
    torch.Size([1, 1, 1, 4])
    """

    def __init__(
        self,
        *,
        scale: float | None = None,
        causal: bool | str = False,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal
        self.window = window
        self.return_lse = return_lse
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
        """Return ``softmax(where(masked, -inf, scale * q @ k.mT)) @ v`` for each head.

        Args:
            q: (B, Nq, Sq, D), float16, bfloat16, float32 or float64.
            k: (B, Nk, Sk, D), the dtype of ``q``. Nq is a multiple of Nk.
            v: (B, Nk, Sk, Dv), the dtype of ``q``.
            mask: bool or uint8, broadcastable to (B, Nq, Sq, Sk); True or non-zero is masked out. None masks nothing.

        Returns:
            (B, Nq, Sq, Dv), the dtype of ``q``; with ``return_lse`` the pair (out, lse).

        Raises:
            InvalidInputError: an argument or a setting is not as above.
            NoBackendError: the policy forbids a fallback and its backend does not take the call.
        """
        settings: Any = {"causal": self.causal, "window": self.window, "return_lse": self.return_lse}
        return ops.attention(q, k, v, mask, self.scale, **settings, backend=self.backend)

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        text = f"scale={self.scale}, causal={self.causal!r}, window={self.window}"
        return text + (", return_lse=True" if self.return_lse else "") + backend_repr(self.backend)
