"""Attention sinks: scores without a value, one for each head, as gpt-oss has them."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the attention with one more key in each row, whose score is the head's sink and whose value is 0.

    Args:
        out: (B, N, Sq, Dv), of :func:`fusedops.attention`.
        lse: (B, N, Sq), of the same call.
        sinks: (N,).

    >>> out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)  # one key of score 0
    >>> with_sinks(out, lse, torch.tensor([3.0]).log()).flatten()
    tensor([0.2500, 0.2500])
    """
    # the sink adds exp(sink) to the sum of exponentials
    share = torch.sigmoid(lse - sinks.to(lse)[None, :, None])
    return (out * share[..., None]).to(out.dtype)


def packed_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the same of packed sequences: out (T, N, Dv) and lse (T, N) of :func:`fusedops.varlen_attention`.

    >>> out, lse = torch.ones(1, 1, 2), torch.zeros(1, 1)
    >>> packed_with_sinks(out, lse, torch.tensor([3.0]).log()).flatten()
    tensor([0.2500, 0.2500])
    """
    return with_sinks(out.transpose(0, 1)[None], lse.mT[None], sinks)[0].transpose(0, 1).contiguous()
