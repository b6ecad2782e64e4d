"""Softmax with a sink: an extra logit in each row, whose probability is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.compat._masks import get_default_causal_mask
from fusedops.dtypes import upcast
from fusedops.errors import InvalidInputError


def union(mask: Tensor | None, other: Tensor) -> Tensor:
    """Return a mask of the positions that either mask masks out.

    Raises:
        InvalidInputError: ``mask`` is additive. ``bool()`` would convert it to a different mask.
    """
    if mask is None:
        return other
    if mask.dtype not in (torch.bool, torch.uint8):
        raise InvalidInputError(
            f"mask: got {mask.dtype}, expected bool or uint8, True where masked out; to fix: convert it, as in mask < 0"
        )
    return mask.bool() | other


def softmax_with_sink(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, sink: Tensor, backend: str | None
) -> Tensor:
    """Compute the softmax with one more logit in each row, the sink, and drop the probability of the sink.

    Args:
        x: (b, np, sq, sk), any floating dtype.
        mask: as in the op, or None.
        scale: factor of ``x``. The sink is not scaled.
        causal: as in the op.
        sink: (np,) or (1,), any floating dtype.
        backend: as in the op.

    Returns:
        (b, np, sq, sk), float32, or float64 for float64. The sum of a row is less than 1. A fully masked row is 0.
    """
    b, np, sq, sk = x.shape
    if causal:
        mask = union(mask, get_default_causal_mask(sq, x.device))
    scores = upcast(x) * scale
    scores = torch.cat([scores, sink.to(scores).reshape(1, -1, 1, 1).expand(b, np, sq, 1)], dim=-1)
    if mask is not None:
        unmasked = torch.zeros(sk + 1, dtype=torch.bool, device=x.device)
        mask = union(mask.expand(*mask.shape[:-1], sk), unmasked[:-1])
        mask = torch.cat([mask, unmasked[-1:].expand(*mask.shape[:-1], 1)], dim=-1)
    return ops.scaled_masked_softmax(scores, mask, backend=backend)[..., :-1]


class SoftmaxOne(torch.nn.Module):
    """Softmax with a sink: each head has one more logit, whose probability is dropped.

    A sink of 0 adds 1 to the denominator (https://www.evanmiller.org/attention-is-off-by-one.html).

    Args:
        dim: -1, 3 or None. All mean the last dimension.
        denominator_offset: (np,), the logit of the sink for each head; or (1,), one for all heads.

    Raises:
        InvalidInputError: ``dim`` has another value; or, when the module is called, the offset is not a tensor. The
            original ignores ``dim``, and raises AttributeError for an offset that is a number, its own default
            included.

    >>> SoftmaxOne(denominator_offset=torch.zeros(1))(torch.zeros(1, 1, 1, 3))
    tensor([[[[0.2500, 0.2500, 0.2500]]]])
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0) -> None:
        super().__init__()
        if dim not in (None, -1, 3):
            raise InvalidInputError(
                f"SoftmaxOne: dim: got {dim}, expected -1, the last of (b, np, sq, sk); to fix: transpose x first, and "
                f"leave dim out"
            )
        self.dim = dim
        self.denominator_offset = denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """Compute the probabilities of ``x`` (b, np, sq, sk), in its shape and dtype."""
        if not isinstance(self.denominator_offset, Tensor):
            raise InvalidInputError(
                f"SoftmaxOne: denominator_offset: got {self.denominator_offset!r}, expected a tensor of logits, one "
                f"per head; to fix: pass torch.zeros(heads) to add 1 to the denominator"
            )
        return softmax_with_sink(x, None, 1.0, False, self.denominator_offset, None).to(x.dtype)
