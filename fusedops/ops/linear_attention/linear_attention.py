"""Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236) with a decay (RetNet, GLA, Mamba-2) and with the delta
rule (DeltaNet, gated DeltaNet, KDA): one recurrence for all of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.dtypes import no_autocast
from fusedops.ops.linear_attention import arguments, formulas
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs, LinearAttentionGradArgs


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Compute ``scale * H.T @ q`` at each position, where each key and value changes the state H of its head.

    At each position, ``H = exp(decay) * H`` of the position before, then ``H = H + outer(k, u)``. u is ``v``, or
    ``beta * (v - H.T @ k)`` with ``beta``: the delta rule, which replaces what H holds for the key.

    Args:
        q: (B, S, Hk, Dk), float16, bfloat16, float32 or float64.
        k: the shape of ``q``, any of the same dtypes.
        v: (B, S, Hv, Dv), any of the same dtypes. Hv is a multiple of Hk: value head h has the queries and keys of
            head ``h // (Hv // Hk)``.
        decay: (B, S, Hv), a logarithm for each head, or (B, S, Hv, Dk), one for each row of H; any of the same dtypes.
            Usually at most 0: a larger number makes H grow. -inf forgets H. None: no decay.
        beta: (B, S, Hv), any of the same dtypes: the share of a value that is replaced, usually from 0 to 1. None: no
            delta rule.
        scale: a number, finite in float32; None is ``1 / sqrt(Dk)``.
        normalize: True divides q and k by ``sqrt(sum(x**2, -1) + 1e-6)`` first.
        initial_state: (B, Hv, Dk, Dv), any of the same dtypes: H before the first position. With ``cu_seqlens``
            (N, Hv, Dk, Dv). None: zeros.
        return_state: also return H after the last position.
        cu_seqlens: (N + 1,), int32 or int64, of N packed sequences in a batch of 1: sequence n has the positions from
            ``cu_seqlens[n]`` to before ``cu_seqlens[n + 1]``, and sees no other sequence. Positions of no sequence give
            0. One that falls, or that is outside [0, S], is an InvalidInputError on a CPU. On another device, which is
            not waited for, it is clamped: to [0, S], then to the largest one before it.
        backend: a policy for this call alone, such as "cpu" or "triton,eager". None: the policy in effect.

    Returns:
        out (B, S, Hv, Dv), contiguous, the dtype of ``v``; with ``return_state`` the pair (out, state), state
        (B, Hv, Dk, Dv), of packed sequences (N, Hv, Dk, Dv), contiguous, float32. Computed in float32 and rounded once;
        float64 if one of the tensors has it. For 16-bit tensors a kernel may round the operands of its products to 16
        bits. The state is differentiable.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: flash-linear-attention, ``fla.ops``; transformers, ``modeling_qwen3_next.py``, ``modeling_mamba2.py`` and
    ``modeling_kimi_linear.py``.

    >>> import torch, fusedops
    >>> ones = torch.ones(1, 3, 1, 1)
    >>> half = torch.full((1, 3, 1), 0.5)
    >>> fusedops.linear_attention(ones, ones, ones, half.log()).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    >>> out, state = fusedops.linear_attention(ones, ones, ones, beta=half, return_state=True)
    >>> out.flatten(), state.flatten()
    (tensor([0.5000, 0.7500, 0.8750]), tensor([0.8750]))
    """
    args = q, k, v, decay, beta, scale, normalize, initial_state, return_state, cu_seqlens
    return arguments.wanted(call(OP, args, backend), return_state)


def reference(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch, one position after another."""
    with no_autocast(a.q.device.type):
        out, state = formulas.forward(
            a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens
        )
    return out, state if a.return_state else state.detach()


def backward(a: LinearAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, decay, beta and initial_state, one position after another from the last."""
    given = (a.q, a.k, a.v, a.decay, a.beta, a.initial_state)
    of_state = a.grad_state if a.return_state else None
    with no_autocast(a.q.device.type):
        computed = formulas.gradients(
            a.grad_out, of_state, a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens
        )
    return tuple(
        each.to(own.dtype) if need and own is not None and each is not None else None
        for own, each, need in zip(given, computed, a.needs)
    )


OP = Op(
    linear_attention,
    constraints=arguments.CONSTRAINTS,
    reference=reference,
    backward=backward,
    differentiable=("q", "k", "v", "decay", "beta", "initial_state"),
    outputs=("out", "state"),
    empty=arguments.empty,
    sharding="fusedops.ops.linear_attention.sharding:LINEAR_ATTENTION",
    evidence="fusedops.ops.linear_attention.evidence:LINEAR_ATTENTION",
)
