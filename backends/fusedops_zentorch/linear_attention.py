"""linear_attention by zentorch's gated delta rule, in chunks of 64 positions.

The function takes packed sequences in a batch of 1: a batch is passed as sequences of one length. Its state is
(N, Hv, Dv, Dk), that of the op transposed.

Source: zentorch 2.13.0.2, ``gdn_chunk_gated_delta_rule_fwd``; flash-linear-attention, ``chunk_gated_delta_rule``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim, DType, Present, Rank, SameDType
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs
from fusedops.ops.linear_attention.formulas import scale_of
from fusedops_zentorch._library import DTYPES, NOT_PROMISED, function
from fusedops_zentorch._norm import NO_BACKWARD

_CHUNK = 64
_FORGETS = -104.0  # of -inf the differences within a chunk are NaN; exp(-104) is 0 in float32
_ANY = (torch.float32, torch.bfloat16, torch.float16)


@kernel(
    ops.linear_attention,
    DType("q", *DTYPES),
    SameDType("k", "q"),
    SameDType("v", "q"),
    Present("decay"),
    Present("beta"),
    Present("cu_seqlens", False, fix="leave packed sequences to another backend"),
    Rank("decay", 3),
    *(DType(name, *_ANY) for name in ("decay", "beta", "initial_state")),
    Dim("q", (0, 1, 2, 3), at_least=1),
    Dim("v", (3,), at_least=1),
    source="zentorch::gdn_chunk_gated_delta_rule_fwd",
    deviations=(NO_BACKWARD,),
    rows_independent=NOT_PROMISED,
)
def linear_attention(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the delta rule with one decay for each head."""
    assert a.decay is not None  # by constraints, as beta
    assert a.beta is not None
    batch, positions = a.q.shape[:2]
    state = None if a.initial_state is None else a.initial_state.mT.float().contiguous()
    queries, keys = _packed(a.q), _packed(a.k)
    if a.normalize:
        queries, keys = (function("gdn_l2norm_fwd")(each, 1e-6) for each in (queries, keys))
    rows = queries, keys, _packed(a.v), _packed(a.decay.float().clamp(min=_FORGETS)), _packed(a.beta.float())
    options = scale_of(a.q, a.scale), state, True, _CHUNK
    out, last = function("gdn_chunk_gated_delta_rule_fwd")(*rows, *options, *_bounds(batch, positions))
    return out.view(a.v.shape), last.mT.contiguous()


def _packed(tensor: Tensor) -> Tensor:
    """Return (B, S, ...) as (1, B * S, ...), contiguous."""
    return tensor.reshape(1, -1, *tensor.shape[2:]).contiguous().resolve_neg()


@lru_cache(maxsize=16)
def _bounds(batch: int, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first position of each sequence, the sequence and number of each chunk, and each one's first chunk."""
    chunks = -(-positions // _CHUNK)
    each = torch.arange(batch * chunks, dtype=torch.int32, device="cpu")
    firsts = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    return firsts * positions, torch.stack((each // chunks, each % chunks), 1), firsts * chunks
