"""varlen_attention in the compiled library: attention's functions (``src/dot/``) on each sequence, by views.

So a sequence has the same bits beside others as alone. For few tokens: the keys of a sequence are read once for all
its query heads, as in a step of generation of several requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import DType
from fusedops.ops.attention.arguments import VarlenAttentionArgs, VarlenAttentionGradArgs, sequences_of
from fusedops.ops.attention.formulas import by_sequence, gradients_by_sequence
from fusedops_cpu.attention import attention
from fusedops_cpu.launch.calls import results_of

_DTYPES = DType("q", torch.float32, torch.bfloat16, torch.float16)
_SOURCE = "fusedops_cpu/src/dot/attention.cpp"


@kernel(
    ops.varlen_attention,
    _DTYPES,
    source=_SOURCE,
    rows_independent=True,
)
def varlen_attention(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for any number of tokens and keys."""
    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])
    options = (None, a.scale, a.causal, a.window, True)
    return by_sequence(lambda *own: results_of(attention.attention.function(*own, *options)), sequences, a.q, a.k, a.v)


@kernel(
    ops.varlen_attention,
    _DTYPES,
    direction="backward",
    source=_SOURCE,
    rows_independent=True,
)
def varlen_attention_backward(a: VarlenAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v from the scores, which are computed again."""
    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])

    def one(grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, kept_lse: Tensor) -> Any:
        saved = (None, kept, kept_lse, a.scale, a.causal, a.window, a.return_lse, a.needs)
        return results_of(attention.attention_backward.function(grad, lse_grad, q, k, v, *saved))

    return gradients_by_sequence(one, sequences, a.grad_out, a.grad_lse, a.q, a.k, a.v, a.out, a.lse, a.needs)
