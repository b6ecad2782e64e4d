"""varlen_attention on a CPU: attention's kernel on each sequence, by views, without padding and without copies.

So a sequence has the same bits beside others as alone; the corrections are those of ``attention.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim, Finite, OneOf, Present, SameDims, Scalar, When
from fusedops.ops.attention.arguments import VarlenAttentionArgs, VarlenAttentionGradArgs, sequences_of
from fusedops.ops.attention.formulas import by_sequence, gradients_by_sequence
from fusedops_sdpa import attention
from fusedops_sdpa._errors import forward_error, packed_backward_error

_SOURCE = "aten::_scaled_dot_product_flash_attention_for_cpu"
_LIMITS = (
    SameDims("v", "q", (2,)),
    Dim("q", (2,), at_least=1),
    Present("window", False),
    OneOf("causal", "none", "upper_left"),
    When(Scalar("causal", one_of=("upper_left",)), Finite("scale", 1e-30, optional=True)),  # see attention.py
)


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    source=_SOURCE,
    device_types=("cpu",),
    rows_independent="torch cuts queries and keys into blocks by the number of queries",
    extra_error=forward_error,
)
def varlen_attention(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op where the head sizes are one, and the diagonal is at the upper left of each sequence."""
    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])
    options = (None, a.scale, a.causal, None, True)
    return by_sequence(lambda *own: attention.attention.function(*own, *options), sequences, a.q, a.k, a.v)


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    # the kernel has no gradient of lse
    Scalar("return_lse", one_of=(False,)),
    direction="backward",
    source=f"{_SOURCE}_backward",
    device_types=("cpu",),
    rows_independent="torch cuts queries and keys into blocks by the number of queries",
    extra_error=packed_backward_error,
)
def varlen_attention_backward(a: VarlenAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])

    def one(grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, kept_lse: Tensor) -> Any:
        none: Any = None  # the gradient of lse is not read
        saved = (None, kept, kept_lse.contiguous(), a.scale, a.causal, None, False, a.needs)
        return attention.attention_backward.function(grad, none, q, k, v, *saved)

    return gradients_by_sequence(one, sequences, a.grad_out, a.grad_lse, a.q, a.k, a.v, a.out, a.lse, a.needs)
