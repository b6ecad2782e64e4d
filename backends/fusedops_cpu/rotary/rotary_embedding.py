"""rotary_embedding in the compiled library (``src/elementwise/rotary.cpp``)."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_NONE = (None, None, *(0,) * 9)


@library_kernel(
    ops.rotary_embedding,
    *any_dtype("q", "k", "cos", "sin"),
    source="fusedops_cpu/src/elementwise/rotary.cpp",
    rows_independent=True,
)
def rotary_embedding(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> LibraryCall:
    """Compute the op. Transposed q and k are read where they are."""
    call = _rotate(q, k, cos, sin, interleaved, seq_dim, 1.0)
    return call if k is not None else call._replace(results=(call.results[0], q.new_empty(0)))


@library_kernel(
    ops.rotary_embedding,
    *any_dtype("grad_rotated_q", "grad_rotated_k", "cos", "sin"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/rotary.cpp",
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
) -> LibraryCall | tuple[None, None]:
    """Compute the gradients of q and k: the rotation by the opposite angles."""
    q, k = grad_rotated_q if needs[0] else None, grad_rotated_k if needs[1] else None
    if q is None and k is None:
        return None, None
    return _rotate(q, k, cos, sin, interleaved, seq_dim, -1.0)


def _rotate(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int, sign: float
) -> LibraryCall:
    """Return the call that rotates the pairs of q and k; None for None. ``sign`` -1 is the opposite rotation."""
    first = q if q is not None else k
    assert first is not None
    lead, columns, positions = first.shape[:-3], first.shape[-1], first.shape[seq_dim]
    y_q, q_fields = _rows(q, seq_dim)
    y_k, k_fields = _rows(k, seq_dim)
    cos, *cos_strides = _angles(cos, lead)
    sin, *sin_strides = _angles(sin, lead)
    dtypes = (DTYPE_CODES[cos.dtype], DTYPE_CODES[sin.dtype])
    sizes = (prod(lead), positions, columns, cos.shape[-1], interleaved)
    fields = (cos, sin, *dtypes, *sizes, *cos_strides, *sin_strides, sign, *q_fields, *k_fields)
    return LibraryCall(library().rotary, fields, (y_q, y_k))


def _rows(x: Tensor | None, seq_dim: int) -> tuple[Tensor | None, tuple[Tensor | int | None, ...]]:
    """Return the tensor to write, and the fields of ``RotaryTensor`` in ``src/api.h``."""
    if x is None:
        return None, _NONE
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.dim() != 4:
        x = x.reshape(prod(x.shape[:-3]), *x.shape[-3:])
    if x.is_neg():
        x = dense(x)
    heads = x.shape[-3 if seq_dim == -2 else -2]
    outer, inner, columns = x.shape[1:]
    steps, y_steps = x.stride()[1:3], (inner * columns, columns)
    if seq_dim == -3:
        steps, y_steps = steps[::-1], y_steps[::-1]
    fields = (x, y, DTYPE_CODES[x.dtype], heads, x.stride(0), *steps, x.stride(-1))
    return y, (*fields, outer * inner * columns, *y_steps)


def _angles(angle: Tensor, lead: torch.Size) -> tuple[Tensor, int, int]:
    """Return cosines or sines whose rows are contiguous, and the elements from one batch and position to the next."""
    if angle.stride(-1) != 1 or angle.is_neg():
        angle = dense(angle)
    if angle.dim() == 2:
        return angle, 0, angle.stride(0)
    if len(lead) != 1:
        angle = angle.expand(*lead, *angle.shape[-2:]).reshape(prod(lead), *angle.shape[-2:])
    return angle, angle.stride(0) if angle.shape[0] != 1 else 0, angle.stride(1)
