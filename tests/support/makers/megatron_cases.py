"""Inputs, modules and comparisons shared by the tests of the drop-ins for Megatron and apex."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from fusedops.compat import megatron as ours

B, NP, SQ, SK = 2, 3, 8, 8

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def flags(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype == torch.float16, dtype == torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def masked(*shape: int) -> Tensor:
    """A mask with no fully masked row, and the diagonal free, so that a causal mask makes none either."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    if shape[-2] == 1:
        mask[..., 0] = False
    else:
        mask &= ~torch.eye(shape[-2], shape[-1], dtype=torch.bool)
    return mask


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor | None) -> list[Tensor | None]:
    """The output, and the gradient of each input."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    grad = tensor(*y.shape, dtype=y.dtype, seed=9)
    found = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], grad))
    return [y.detach(), *(None if leaf is None else next(found) for leaf in leaves)]


def assert_same(
    got: Sequence[Tensor | None], want: Sequence[Tensor | None], dtype: torch.dtype, *, roundings: int = 4
) -> None:
    """Equal in shape and dtype, and within some roundings in ``dtype``: Megatron rounds after each step."""
    # Megatron writes sqrt(2 / pi) with 8 digits, which float64 can tell
    tolerance = max(roundings * {torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps), 3e-8)
    assert_close(list(got), list(want), atol=tolerance, rtol=tolerance)


def modules(
    peer: Any, dtype: torch.dtype, kind: str, scale: float | None, window: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """Ours and Megatron's, alike."""
    last = (peer.layers.attention_mask_func, scale is not None or dtype != torch.float32, scale, window)
    return (
        ours.FusedScaleMaskSoftmax(*flags(dtype), peer.enums.AttnMaskType[kind], True, *last),
        # without fusion: with it, it would import Megatron's CUDA extension
        peer.softmax.FusedScaleMaskSoftmax(*flags(dtype), peer.enums.AttnMaskType[kind], False, *last),
    )
