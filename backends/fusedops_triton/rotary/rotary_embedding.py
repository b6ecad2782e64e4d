"""rotary_embedding on Triton: the kernels with their constraints. The launcher is in ``_rotary.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import supported


@kernel(
    ops.rotary_embedding,
    *supported("q", "k", "cos", "sin"),
    source="fusedops_triton/rotary/_rotary.py",
    rows_independent=True,
)
def rotary_embedding(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor]:
    """Compute the op for any shape and strides, for q and k in one launch."""
    from fusedops_triton.rotary._rotary import rotate  # imports triton, so not at module level

    rotated_q, rotated_k = rotate(q, k, cos, sin, interleaved, seq_dim)
    return rotated_q, q.new_empty(0) if rotated_k is None else rotated_k


@kernel(
    ops.rotary_embedding,
    *supported("grad_rotated_q", "grad_rotated_k", "cos", "sin"),
    direction="backward",
    source="fusedops_triton/rotary/_rotary.py",
    rows_independent=True,
)
def rotary_embedding_backward(
    grad_rotated_q: Tensor,
    grad_rotated_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    seq_dim: int,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of q and k: the rotation by the opposite angles, in one launch."""
    from fusedops_triton.rotary._rotary import rotate

    wanted = [grad for grad, need in zip((grad_rotated_q, grad_rotated_k), needs) if need]
    if not wanted:
        return None, None
    first, second = rotate(wanted[0], wanted[1] if len(wanted) > 1 else None, cos, sin, interleaved, seq_dim, False)
    return (first, second) if needs[0] else (None, first)
