"""Attention of packed sequences, each of which sees itself alone (Dao 2023, arXiv:2307.08691)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import (
    Dim,
    DimMultiple,
    Finite,
    Flag,
    Floating,
    Offsets,
    OneOf,
    Present,
    Rank,
    SameDevice,
    SameDims,
    SameDType,
    SameSize,
    When,
    Window,
)
from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.ops.attention import arguments, formulas
from fusedops.ops.attention.arguments import VarlenAttentionArgs, VarlenAttentionGradArgs


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Compute :func:`fusedops.attention` of each of several sequences, packed one after the other without padding.

    Sequence n has the queries from ``cu_seqlens_q[n]`` up to ``cu_seqlens_q[n + 1]``, and the keys between the same
    places of ``cu_seqlens_k``. No query sees a key of another sequence. A query of a sequence without keys, or of no
    sequence, is 0, its lse is -inf, and it adds nothing to the gradients; those of a key of no sequence are 0.

    Args:
        q: (T, Nq, D), float16, bfloat16, float32 or float64.
        k: (Tk, Nk, D), the dtype of ``q``. Nq is a multiple of Nk: consecutive query heads share a key head.
        v: (Tk, Nk, Dv), the dtype of ``q``.
        cu_seqlens_q: (B + 1,), int32 or int64, the bounds of the sequences in ``q``: 0, then the sums of the lengths.
            A bound that falls or passes T is an InvalidInputError on a CPU. On another device, which is not waited for,
            it counts as the nearest place that is not before the bound before it.
        cu_seqlens_k: (B + 1,), the same for ``k`` and ``v``. None: ``cu_seqlens_q``, and Tk is T.
        scale: a number, finite in float32; None is ``1 / sqrt(D)``. Never rounded to the dtype of ``q``.
        causal: as in :func:`fusedops.attention`, for the queries and keys of each sequence: "upper_left",
            "lower_right", False, or True where queries and keys have the same bounds: both are one.
        window: ``(left, right)``, as in :func:`fusedops.attention`, for each sequence. None: no window.
        return_lse: also return the logarithm of the sum of exponentials of each row's scores.
        backend: a policy for this call alone, such as "sdpa" or "npu,eager". None: the policy in effect.

    Returns:
        out (T, Nq, Dv), contiguous, the dtype of ``q``; with ``return_lse`` the pair (out, lse), lse (T, Nq),
        contiguous, float32 (float64 for float64). Computed as :func:`fusedops.attention` computes each sequence.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.nn.attention.varlen.varlen_attn``; flash-attn, ``flash_attn_varlen_func``.

    >>> import torch, fusedops
    >>> q, v = torch.zeros(3, 1, 4), torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1)
    >>> fusedops.varlen_attention(q, q, v, torch.tensor([0, 1, 3]), causal=True).flatten()
    tensor([1., 2., 4.])
    """
    cu_seqlens_k = arguments.bounds_of_keys(q, k, cu_seqlens_q, cu_seqlens_k)
    args = q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, window, return_lse
    return arguments.wanted(call(OP, arguments.prepare_packed(args), backend), return_lse)


def reference(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch: attention of all queries to all keys, those of other sequences masked."""
    mask = formulas.packed_mask(a.cu_seqlens_q, a.q.shape[0], a.cu_seqlens_k, a.k.shape[0], a.causal, a.window)
    queries, keys, values = map(formulas.heads_first, (a.q, a.k, a.v))
    with no_autocast(a.q.device.type):
        out, lse = formulas.forward(queries, keys, values, mask, a.scale, "none", None)
    out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return out, lse if a.return_lse else lse.detach()


def backward(a: VarlenAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v. From the inputs alone, so that it has the right derivative itself."""
    mask = formulas.packed_mask(a.cu_seqlens_q, a.q.shape[0], a.cu_seqlens_k, a.k.shape[0], a.causal, a.window)
    lse_grad = a.grad_lse.transpose(0, 1)[None] if a.return_lse else None
    with no_autocast(a.q.device.type):
        s = formulas.scores(formulas.heads_first(a.q), formulas.heads_first(a.k), mask, a.scale, "none", None)
        factor, values = formulas.scale_of(a.q, a.scale), formulas.heads_first(a.v)
        computed = formulas.gradients(formulas.heads_first(a.grad_out), lse_grad, values, s, factor, a.k.shape[1])
    return tuple(each[0].transpose(0, 1).to(a.q.dtype) if need else None for each, need in zip(computed, a.needs))


def empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype))


OP = Op(
    varlen_attention,
    constraints=[
        Floating("q"),
        Floating("k"),
        Floating("v"),
        Rank("q", 3),
        Rank("k", 3),
        Rank("v", 3),
        SameDevice("k", "q"),
        SameDevice("v", "q"),
        SameDType("k", "q"),
        SameDType("v", "q"),
        SameDims("k", "q", (2,)),
        SameDims("v", "k", (0, 1)),
        DimMultiple("q", "k", 1),
        Offsets("cu_seqlens_q", bounds=True),
        SameDevice("cu_seqlens_q", "q"),
        Rank("cu_seqlens_q", 1),
        Dim("cu_seqlens_q", (0,), at_least=1),
        Offsets("cu_seqlens_k", "k", bounds=True),
        SameDevice("cu_seqlens_k", "q"),
        Rank("cu_seqlens_k", 1),
        SameSize("cu_seqlens_k", 0, "cu_seqlens_q", 0),
        When(Present("cu_seqlens_k", False), SameDims("k", "q", (0,))),
        Finite("scale", optional=True),
        OneOf("causal", "none", "upper_left", "lower_right"),
        Window("window"),
        Flag("return_lse"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("q", "k", "v"),
    outputs=("out", "lse"),
    empty=empty,
    prepare_args=arguments.prepare_packed,
    sharding="fusedops.ops.attention.sharding:PACKED",
    evidence="fusedops.ops.attention.evidence:PACKED",
)
