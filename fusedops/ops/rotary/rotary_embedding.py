"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), on queries and keys. Replaces transformers'
apply_rotary_pos_emb, Liger's liger_rotary_pos_emb, torch_npu's npu_rotary_mul, and the chain rotate_half -> mul -> add.
"""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops.constraints import Flag, Floating, OneOf, Rank, SameDevice, SameShape
from fusedops.ops.rotary import formulas
from fusedops.ops.rotary.arguments import Angles, Heads, without_head_dim
from fusedops.ops.rotary.formulas import rotated


def rotary_embedding(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    seq_dim: int = -2,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs of elements of q and k by the angles whose cosines and sines are given.

    ``(x1, x2)`` becomes ``(x1 * cos - x2 * sin, x2 * cos + x1 * sin)``. The first R elements of the last dim rotate,
    where cos has R/2 entries for each position; the others pass through.

    Args:
        q: (..., Nq, S, D), or (..., S, Nq, D) with ``seq_dim=-3``; float16, bfloat16, float32 or float64.
        k: the same with its own number of heads, any of the same dtypes, or None.
        cos: (S, R/2), or (..., S, R/2) with leading dims that broadcast to those of ``q``; R <= D; any of the same
            dtypes. A head dim of size 1, as in (B, 1, S, R/2), is dropped. One entry for each pair: models that keep
            each twice pass a view, ``cos[..., : R // 2]`` for halves and ``cos[..., ::2]`` for interleaved pairs.
        sin: the shape of ``cos``.
        interleaved: a pair is an even element and the next one (GPT-J, GLM). False: an element of the first half of R
            and its counterpart in the second half (Llama, GPT-NeoX).
        seq_dim: the dim of S, -2 or -3.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        q and k, rotated: new contiguous tensors of their own shapes and dtypes; None for a k that is None. Computed in
        float32 (float64 where a tensor has it), rounded once; cos and sin are not rounded, and have no gradient.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``modeling_llama.py`` and ``modeling_glm4.py``; torch_npu, ``npu_rotary_mul``.

    >>> import torch, fusedops
    >>> q, quarter_turn = torch.tensor([[[1.0, 2.0]]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> fusedops.rotary_embedding(q, None, *quarter_turn)
    (tensor([[[-2.,  1.]]]), None)
    """
    args = without_head_dim((q, k, cos, sin, interleaved, seq_dim))  # before kernels are asked, which see it so
    return OP.absent_outputs_to_none(call(OP, args, backend), args)


def reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch. Without k the second output is an empty tensor."""
    cos, sin = cos.detach(), sin.detach()  # they have no gradient under any transform
    rotated_q = rotated(q, cos, sin, interleaved, seq_dim)
    return rotated_q, q.new_empty(0) if k is None else rotated(k, cos, sin, interleaved, seq_dim)


def backward(
    grad_rotated_q: Tensor,
    grad_rotated_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    seq_dim: int,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of q and k: the rotation by the opposite angles."""
    cos, sin = cos.detach(), sin.detach()
    dq = rotated(grad_rotated_q, cos, -sin, interleaved, seq_dim) if needs[0] else None
    return dq, rotated(grad_rotated_k, cos, -sin, interleaved, seq_dim) if needs[1] else None


OP = Op(
    rotary_embedding,
    constraints=[
        Floating("q"),
        Rank("q", at_least=3),
        Flag("interleaved"),
        OneOf("seq_dim", -2, -3),
        Floating("k"),
        SameDevice("k", "q"),
        Heads("k", "q", "seq_dim"),
        Floating("cos"),
        SameDevice("cos", "q"),
        Angles("cos", "q", "seq_dim"),
        Floating("sin"),
        SameDevice("sin", "q"),
        SameShape("sin", "cos"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("q", "k"),
    outputs=("rotated_q", Output("rotated_k", of="k")),
    empty=formulas.empty,
    prepare_args=without_head_dim,
    sharding="fusedops.ops.rotary.sharding:SHARDING",
    evidence="fusedops.ops.rotary.evidence:ROTARY_EMBEDDING",
)
