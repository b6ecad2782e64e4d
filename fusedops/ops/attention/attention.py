"""Attention (Vaswani et al. 2017, arXiv:1706.03762), with grouped heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops.dtypes import no_autocast
from fusedops.ops.attention import arguments, formulas
from fusedops.ops.attention.arguments import AttentionArgs
from fusedops.ops.attention.sparse_attention import sparse_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    indices: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Compute ``softmax(where(masked, -inf, scale * q @ k.mT)) @ v`` for each head.

    A masked key has weight exactly 0, whatever its numbers are. A row whose keys are all masked is 0, its lse is -inf,
    and it adds nothing to the gradients.

    Args:
        q: (B, Nq, Sq, D), float16, bfloat16, float32 or float64.
        k: (B, Nk, Sk, D), the dtype of ``q``. Nq is a multiple of Nk: consecutive query heads share a key head.
        v: (B, Nk, Sk, Dv), the dtype of ``q``.
        mask: bool or uint8, broadcastable to (B, Nq, Sq, Sk); True or non-zero means masked out, the opposite of
            torch's scaled_dot_product_attention. :mod:`fusedops.masks` converts others. None masks nothing.
        scale: a number, finite in float32; None is ``1 / sqrt(D)``. Never rounded to the dtype of ``q``.
        causal: "upper_left": query i sees the keys up to i, as torch's is_causal. "lower_right": query i sees the keys
            up to ``i + Sk - Sq``, as flash-attn's causal. True where Sq == Sk alone: both are one. False: all keys.
        window: ``(left, right)``: a query sees the keys from ``left`` before its diagonal to ``right`` after it, itself
            included. ``causal`` sets the diagonal; with False it is at the lower right. None: no window.
        return_lse: also return the logarithm of the sum of exponentials of each row's scores.
        indices: (B, Sq, K) or (B, 1 or Nk, Sq, K), int32 or int64: each query sees these keys alone, -1 is none; the
            call is one of :func:`fusedops.sparse_attention`. None: all keys.
        backend: a policy for this call alone, such as "sdpa" or "npu,eager". None: the policy in effect.

    Returns:
        out (B, Nq, Sq, Dv), the dtype of ``q``, its dims in memory in any order, without gaps: that of ``q`` where the
        kernel allows it; with ``return_lse`` the pair (out, lse), lse (B, Nq, Sq), contiguous,
        float32 (float64 for float64), natural logarithm. Computed in float32 (float64 for float64); the probabilities
        may be rounded to the dtype of ``q`` before the product with ``v``, as fused kernels do. lse is differentiable.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.nn.functional.scaled_dot_product_attention``; flash-attn, ``flash_attn_func``.

    >>> import torch, fusedops
    >>> v = torch.tensor([[1.0], [3.0]])[None, None]
    >>> fusedops.attention(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), v, causal=True).flatten()
    tensor([1., 2.])
    """
    if indices is not None:
        return sparse_attention(
            q, k, v, indices, mask, scale, causal=causal, window=window, return_lse=return_lse, backend=backend
        )
    args = q, k, v, mask, scale, "none" if causal is False else causal, window, return_lse
    return arguments.wanted(call(OP, args if causal is False else arguments.prepare_args(args), backend), return_lse)


def reference(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    with no_autocast(a.q.device.type):
        out, lse = formulas.forward(a.q, a.k, a.v, a.mask, a.scale, a.causal, a.window)
    return out, lse if a.return_lse else lse.detach()


OP = Op(
    attention,
    of_other_ops=("indices",),
    constraints=arguments.CONSTRAINTS,
    reference=reference,
    backward=formulas.backward,
    differentiable=("q", "k", "v"),
    outputs=(Output("out", permuted=True), "lse"),
    empty=arguments.empty,
    prepare_args=arguments.prepare_args,
    sharding="fusedops.ops.attention.sharding:SHARDING",
    evidence="fusedops.ops.attention.evidence:ATTENTION",
)
