"""Attention of the sequences in a flat batch, in the layouts of transformers."""

from __future__ import annotations

from torch import Tensor

from fusedops import ops
from fusedops.integrations._sinks import packed_with_sinks


def attention_of_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor | None],
    window: tuple[int, int] | None,
    scaling: float | None,
    sinks: Tensor | None,
    is_causal: bool = True,
) -> Tensor:
    """Return the attention, (B, S, N, Dv).

    Args:
        query: (B, N, S, D).
        key: (B, Nk, Sk, D).
        value: (B, Nk, Sk, Dv).
        bounds: of the sequences in the B * S queries, and in the keys; None: the same.
        window: ``(left, right)``, or None.
        scaling: of the scores.
        sinks: (N,), or None.
        is_causal: no query sees a later key.
    """
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    causal = is_causal if bounds[1] is None else "lower_right"
    out: Tensor
    if sinks is None:
        out = ops.varlen_attention(q, k, v, *bounds, scale=scaling, causal=causal, window=window)
    else:
        lse: Tensor
        out, lse = ops.varlen_attention(q, k, v, *bounds, scale=scaling, causal=causal, window=window, return_lse=True)
        out = packed_with_sinks(out, lse, sinks)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:])
