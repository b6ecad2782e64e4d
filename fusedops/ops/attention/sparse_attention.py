"""Attention to the keys that each query chooses (DeepSeek-AI 2025, DeepSeek-V3.2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops.constraints import Indices, IndicesOfKeys, SameDevice
from fusedops.dtypes import no_autocast
from fusedops.ops.attention import arguments, formulas
from fusedops.ops.attention.arguments import (
    AttentionArgs,
    AttentionGradArgs,
    SparseAttentionArgs,
    SparseAttentionGradArgs,
)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Compute :func:`fusedops.attention` where each query sees some keys alone, as that does with ``indices``.

    Equal to the call with every other key masked. A key that is not chosen is not read, except by a backend that
    computes the scores of all keys.

    Args:
        q: (B, Nq, Sq, D), float16, bfloat16, float32 or float64.
        k: (B, Nk, Sk, D), the dtype of ``q``. Nq is a multiple of Nk: consecutive query heads share a key head.
        v: (B, Nk, Sk, Dv), the dtype of ``q``. It may be a part of ``k``, as of one latent key head for all heads.
        indices: (B, Sq, K), or (B, 1 or Nk, Sq, K) for each key head, int32 or int64: the keys that a query may see, in
            any order, and -1 for none. Another number, or a key twice, is an InvalidInputError on eager on a CPU. On
            cpu and triton a key twice counts twice; on another device another number counts as none.
        mask: as of :func:`fusedops.attention`: True or non-zero means masked out.
        scale: a number, finite in float32; None is ``1 / sqrt(D)``.
        causal: as of :func:`fusedops.attention`, for the places of the keys in ``k``.
        window: likewise.
        return_lse: also return the logarithm of the sum of exponentials of each row's scores.
        backend: a policy for this call alone, such as "cpu" or "eager". None: the policy in effect.

    Returns:
        As of :func:`fusedops.attention`: out (B, Nq, Sq, Dv), or (out, lse). A query that sees no key is 0, and its lse
        -inf. Gradients of ``k`` and ``v`` are summed in float32 in a fixed order.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``models/deepseek_v32/modeling_deepseek_v32.py``, the ``indices`` of its attention function.

    >>> import torch, fusedops
    >>> q, v = torch.zeros(1, 1, 1, 4), torch.arange(4.0).view(1, 1, 4, 1)
    >>> fusedops.sparse_attention(q, v.expand(1, 1, 4, 4), v, torch.tensor([[[3, -1, 2]]]))
    tensor([[[[2.5000]]]])
    """
    args = prepare_args((q, k, v, indices, mask, scale, causal, window, return_lse))
    return arguments.wanted(call(OP, args, backend), return_lse)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``causal`` as a text, as of attention, and indices of 4 dims."""
    others = (*args[:3], *args[4:])
    prepared, indices = arguments.prepare_args(others), arguments.for_heads(args[3])
    return args if prepared is others and indices is args[3] else (*prepared[:3], indices, *prepared[3:])


def dense(a: SparseAttentionArgs) -> AttentionArgs:
    """Return the call of attention in which the other keys are masked."""
    mask = formulas.chosen_mask(a.indices, a.mask, a.q, a.k)
    return AttentionArgs(a.q, a.k, a.v, mask, a.scale, a.causal, a.window, a.return_lse)


def dense_gradients(a: SparseAttentionGradArgs) -> AttentionGradArgs:
    """Return the same of backward."""
    mask = formulas.chosen_mask(a.indices, a.mask, a.q, a.k)
    options = a.scale, a.causal, a.window, a.return_lse, a.needs
    return AttentionGradArgs(a.grad_out, a.grad_lse, a.q, a.k, a.v, mask, a.out, a.lse, *options)


def reference(a: SparseAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    with no_autocast(a.q.device.type):
        of = dense(a)
        out, lse = formulas.forward(of.q, of.k, of.v, of.mask, of.scale, of.causal, of.window)
    return out, lse if a.return_lse else lse.detach()


def backward(a: SparseAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v."""
    return formulas.backward(dense_gradients(a))


def empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    return arguments.empty(q, k, v)


OP = Op(
    sparse_attention,
    constraints=[
        *arguments.CONSTRAINTS,
        Indices("indices", "k", 2),
        SameDevice("indices", "q"),
        IndicesOfKeys("indices", "q", "k"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("q", "k", "v"),
    outputs=(Output("out", permuted=True), "lse"),
    empty=empty,
    prepare_args=prepare_args,
    sharding="fusedops.ops.attention.sharding:SPARSE",
    evidence="fusedops.ops.attention.evidence:SPARSE",
)
