"""linear_attention in plain torch, without constraints. The computation is in ``_linear_attention.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import no_autocast
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs, LinearAttentionGradArgs
from fusedops_eager._row_order import PRODUCTS
from fusedops_eager.linear_attention._linear_attention import linear_attention_backward as compute_backward
from fusedops_eager.linear_attention._linear_attention import linear_attention_forward


@kernel(
    ops.linear_attention,
    source="fusedops_eager/linear_attention/_linear_attention.py",
    rows_independent=PRODUCTS,
)
def linear_attention(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any sizes, in chunks of 64 positions."""
    with no_autocast(a.q.device.type):
        return linear_attention_forward(
            a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens
        )


@kernel(
    ops.linear_attention,
    direction="backward",
    source="fusedops_eager/linear_attention/_linear_attention.py",
    rows_independent=PRODUCTS,
)
def linear_attention_backward(a: LinearAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients in chunks of 64 positions, from the state before each of them."""
    of_state = a.grad_state if a.return_state else None
    with no_autocast(a.q.device.type):
        return compute_backward(
            a.grad_out,
            of_state,
            a.q,
            a.k,
            a.v,
            a.decay,
            a.beta,
            a.scale,
            a.normalize,
            a.initial_state,
            a.cu_seqlens,
            a.needs,
        )
