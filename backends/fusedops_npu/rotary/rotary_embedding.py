"""rotary_embedding on Ascend: torch_npu's op for one tensor, called for q and for k, forward and backward.

It takes cos and sin doubled, which are made in each call: they are small beside q. It rounds them to the dtype of q, so
other dtypes are refused. Its limits are documented for 4 dimensions, except that of B * N with seq_dim -2, which its
kernel checks at run time. Source: torch_npu.npu_rotary_mul; ops-transformer, ``rope_rotate_half_tiling.cpp``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Constraint, Dim, DType, OneOf, Rank, SameDType, Scalar, When
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.rotary._rotary_limits import FewHeads, WholeHead


def _limits(q: str, k: str) -> tuple[Constraint, ...]:
    """Return the constraints, by the names of the two tensors."""
    return (
        DType(q, torch.float16, torch.bfloat16, torch.float32),
        SameDType(k, q),
        SameDType("cos", q),
        SameDType("sin", q),
        Rank(q, 3, 4),
        WholeHead("cos", q),
        Dim(q, (-1,), at_most=895),
        # the vendor's kernel refuses some smaller sizes that are not aligned, by the number of its cores
        When(OneOf("seq_dim", -2), Dim(q, (-1,), multiple_of=32)),
        When(Scalar("interleaved", one_of=(True,)), Rank("cos", 2)),
        FewHeads(q),
        FewHeads(k),
    )


def _doubled_bytes(q: Any, k: Any, cos: Any, *rest: Any) -> int:
    return 4 * prod(cos.shape) * cos.dtype.itemsize


_DOUBLED = Adaptation("doubled", "the vendor takes cos and sin with each entry twice", _doubled_bytes)
_RANGE = Deviation(
    "angles-above-1",
    "torch_npu documents cos and sin within [-1, 1]; larger ones, such as YaRN's, are passed on without a check",
)


@kernel(
    ops.rotary_embedding,
    *_limits("q", "k"),
    source="torch_npu.npu_rotary_mul",
    deviations=(_RANGE,),
    adapts=(_DOUBLED,),
    rows_independent=NOT_PROMISED,
)
def rotary_embedding(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor]:
    """Compute the op where all of each head rotates."""
    rotated_q = _rotate(q, cos, sin, interleaved, seq_dim)
    return rotated_q, q.new_empty(0) if k is None else _rotate(k, cos, sin, interleaved, seq_dim)


@kernel(
    ops.rotary_embedding,
    *_limits("grad_rotated_q", "grad_rotated_k"),
    direction="backward",
    source="torch_npu.npu_rotary_mul",
    deviations=(_RANGE,),
    adapts=(_DOUBLED,),
    rows_independent=NOT_PROMISED,
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
    dq = _rotate(grad_rotated_q, cos, -sin, interleaved, seq_dim) if needs[0] else None
    return dq, _rotate(grad_rotated_k, cos, -sin, interleaved, seq_dim) if needs[1] else None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    r1, r2 = (_doubled(angle, interleaved, seq_dim) for angle in (cos, sin))
    x4 = x.contiguous().view(-1, *x.shape[-3:])
    return _vendors(x4, r1, r2, "interleave" if interleaved else "half").view(x.shape)


def _vendors(x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> Tensor:
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    return vendor.npu_rotary_mul(x, r1, r2, mode)


def _doubled(angle: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    """Return (S, D/2) or (B, S, D/2) as (1 or B, 1, S, D), or (1 or B, S, 1, D) with seq_dim -3."""
    both = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    both = both if both.dim() == 3 else both[None]
    return both.unsqueeze(1 if seq_dim == -2 else 2).contiguous()
