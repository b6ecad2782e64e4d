"""linear_attention on Triton: the kernels with their constraints. ``_linear_attention.py`` launches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim, Rank
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs, LinearAttentionGradArgs
from fusedops_triton._constraints import supported

#: The most rows of a state: a program has some columns of it in registers.
_MOST_ROWS = 256


class DecayOfHeads(Rank):
    """A decay is one for each head. With one for each row of a state, the products of a chunk are no plain matmuls."""

    def needed(self, tensor: Any) -> str:
        return "one decay for each head, (B, S, Hv): chunks of a decay of each row are no plain matmuls"

    def fix_of(self, tensor: Any) -> str:
        return f"pass {self.name} as (B, S, Hv), or use another backend"


_CONSTRAINTS = (
    *supported("q", "k", "v", "decay", "beta", "initial_state"),
    DecayOfHeads("decay", 3),
    Dim("q", (1,), at_most=2**30),  # positions are counted in 32 bits
    Dim("q", (3,), at_most=_MOST_ROWS),
    Dim("v", (3,), at_most=2**20),  # elements of a state too
)
_SOURCE = "fusedops_triton/linear_attention/_linear_attention.py"
_BACKWARD = "fusedops_triton/linear_attention/_linear_attention_backward.py"


@kernel(
    ops.linear_attention,
    *_CONSTRAINTS,
    source=_SOURCE,
    rows_independent="packed sequences are computed in chunks, or one position after another, by their mean length",
)
def linear_attention(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op with one decay for each head, or none, in chunks of positions; few positions one by one."""
    from fusedops_triton.linear_attention._linear_attention import (
        linear_attention_forward,  # imports triton, so not at module level
    )
    from fusedops_triton.linear_attention._linear_attention_parts import call_of

    return linear_attention_forward(
        call_of(a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens)
    )


@kernel(
    ops.linear_attention,
    *_CONSTRAINTS,
    direction="backward",
    source=_BACKWARD,
    rows_independent="packed sequences are computed in chunks, or one position after another, by their mean length",
)
def linear_attention_backward(a: LinearAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients in chunks of positions, from the states before them, which are computed again."""
    from fusedops_triton.linear_attention._linear_attention_backward import (
        linear_attention_backward as compute_backward,
    )
    from fusedops_triton.linear_attention._linear_attention_parts import call_of

    call = call_of(a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens)
    return compute_backward(call, a.grad_out, a.grad_state if a.return_state else None, a.needs)
