"""paged_attention in plain torch: varlen_attention of the keys and values that the sequences use, in their order."""

from __future__ import annotations

from torch import Tensor

from fusedops.ops.attention.arguments import PagedAttentionArgs
from fusedops.ops.attention.paged_attention import dense
from fusedops_eager.attention.varlen_attention import varlen_attention


def paged_attention(a: PagedAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device: the lengths and the table are read, for which an accelerator is waited for."""
    out, lse = varlen_attention(dense(a))
    return out.to(a.q.dtype), lse
