"""rotary_embedding in plain torch, without constraints. The computation is in ``_rotary.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import VECTORS
from fusedops_eager.rotary._rotary import rotate


@kernel(
    ops.rotary_embedding,
    source="fusedops_eager/rotary/_rotary.py",
    rows_independent=VECTORS,
)
def rotary_embedding(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any number of rotated pairs."""
    rotated_q = rotate(q, cos, sin, interleaved, seq_dim)
    return rotated_q, q.new_empty(0) if k is None else rotate(k, cos, sin, interleaved, seq_dim)


@kernel(
    ops.rotary_embedding,
    direction="backward",
    source="fusedops_eager/rotary/_rotary.py",
    rows_independent=VECTORS,
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
    """Compute the gradients of q and k: the rotation by the opposite angles."""
    dq = rotate(grad_rotated_q, cos, sin, interleaved, seq_dim, sign=-1) if needs[0] else None
    return dq, rotate(grad_rotated_k, cos, sin, interleaved, seq_dim, sign=-1) if needs[1] else None
