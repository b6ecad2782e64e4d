"""Norms for Megatron's specs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import nn, ops
from fusedops.dtypes import upcast
from fusedops.integrations.megatron._left import Needed, check, refusal

_NEEDED = (
    Needed(
        "memory_efficient_layer_norm",
        False,
        "set it to False: the op saves its input, as Megatron's other norms do",
    ),
    Needed("fused_residual_rmsnorm", False, "set it to False, or use Megatron's spec of Transformer Engine"),
    Needed("batch_invariant_mode", False, "set it to False, or use Megatron's spec of Transformer Engine"),
)


class Norm:
    """LayerNorm or RMSNorm, as the config has it, for the norms of a spec. Its parameters have the names of Megatron's.

    Args:
        config: Megatron's TransformerConfig: ``normalization``, ``layernorm_zero_centered_gamma`` and
            ``sequence_parallel`` are served. ``persist_layer_norm`` selects a kernel of apex, and is not used.
        hidden_size: H, the size of the last dimension.
        eps: added to the variance or the mean square.

    Returns:
        :class:`fusedops.nn.LayerNorm` or :class:`fusedops.nn.RMSNorm`.

    Raises:
        InvalidInputError: the config has another normalization, ``memory_efficient_layer_norm``,
            ``fused_residual_rmsnorm`` or ``batch_invariant_mode``.

    Source: Megatron-LM, ``megatron/core/transformer/torch_norm.py`` and ``fusions/fused_layer_norm.py``.

    >>> from types import SimpleNamespace
    >>> Norm(SimpleNamespace(normalization="RMSNorm", layernorm_zero_centered_gamma=True, sequence_parallel=False), 4)
    RMSNorm(4, eps=1e-05, offset=1.0)
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **names: Any) -> Any:
        """Return the module. Megatron's builders may pass names of kernels, as they do to its own norms."""
        check("Norm", config, _NEEDED)
        zero_centered = bool(config.layernorm_zero_centered_gamma)
        if config.normalization == "RMSNorm":
            norm: Any = nn.RMSNorm(hidden_size, eps, offset=1.0 if zero_centered else 0.0)
        elif config.normalization == "LayerNorm":
            norm = ZeroCenteredLayerNorm(hidden_size, eps) if zero_centered else nn.LayerNorm(hidden_size, eps)
        else:
            raise refusal(
                "Norm", f"normalization = {config.normalization!r}", "'LayerNorm' or 'RMSNorm'", "use one of these"
            )
        for parameter in norm.parameters():
            # Megatron sums the gradients of parameters with this mark over the ranks of the sequence
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class L2Norm:
    """Megatron's norm of queries and keys without a weight, for ``qk_l2_norm``: :class:`fusedops.nn.RMSNorm`.

    >>> L2Norm(hidden_size=4, eps=1e-6)
    RMSNorm(4, eps=1e-06, elementwise_affine=False)
    """

    def __new__(cls, hidden_size: int, eps: float = 1e-6, **names: Any) -> Any:
        """Return the module."""
        return nn.RMSNorm(hidden_size, eps, elementwise_affine=False)


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """LayerNorm with ``1 + weight``, for layernorm_zero_centered_gamma.

    >>> ZeroCenteredLayerNorm(2)(torch.tensor([1.0, 3.0]))
    tensor([-1.0000,  1.0000], grad_fn=...)
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__(size, eps)
        assert self.weight is not None
        torch.nn.init.zeros_(self.weight)

    def _forward(self, x: Tensor, residual: Tensor | None) -> Any:
        assert self.weight is not None
        # 1 + weight is not rounded to 16 bits
        weight = 1.0 + upcast(self.weight)
        if residual is None:
            return ops.layer_norm(x, weight, self.bias, self.eps, backend=self.backend)
        return ops.add_layer_norm(x, residual, weight, self.bias, self.eps, backend=self.backend)
