"""The experts of a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), given the choice of a router. Replaces
the experts functions of transformers, Megatron's GroupedMLP, Liger's fused_moe, and the loop over experts.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.dtypes import arithmetic
from fusedops.ops.experts.arguments import CONSTRAINTS, ExpertsArgs, ExpertsGradArgs
from fusedops.ops.experts.formulas import (
    Activation,
    experts_of,
    linear,
    linear_gradients,
    order_of,
    stacked,
)


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Literal["swiglu", "geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh", "relu", "relu2"] = "swiglu",
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
    transposed: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute ``sum over k of weights[t, k] * mlp_e(x[t])`` with ``e = index[t, k]`` for each token t.

    An expert's ``mlp_e(x)`` is ``down[e] @ act(up[e] @ x + up_bias[e]) + down_bias[e]``. No token is dropped, and only
    the experts that are chosen are computed.

    Args:
        x: (T, H), the tokens, float16, bfloat16, float32 or float64.
        index: (T, K), int64 or int32, the experts of each token. A number outside [0, E) is a sentinel, as expert
            parallelism has it: its term is 0, and it has no gradient. A token may have one expert twice.
        weights: (T, K), the weight of each choice, any of the same dtypes as ``x``.
        up: (E, 2I, H) for the gated activations, (E, I, H) for the others; any of the same dtypes.
        down: (E, H, I), any of the same dtypes.
        up_bias: (E, 2I) or (E, I), any of the same dtypes, or None.
        down_bias: (E, H), any of the same dtypes, or None.
        activation: "swiglu", "geglu" (by erf) and "geglu_tanh" are gated: ``up`` has the rows of the gate, then as many
            others. "silu", "gelu" (by erf), "gelu_tanh", "relu" and "relu2" (the square of relu) are not.
        limit: of "swiglu", see :func:`fusedops.swiglu`; no other activation reads it. gpt-oss has 7.
        alpha: of "swiglu", as ``limit``. gpt-oss has 1.702.
        offset: of "swiglu", as ``limit``. gpt-oss has 1.
        interleaved: the rows of gate and of the others alternate, as gpt-oss has them.
        transposed: the last two dims of ``up`` and ``down`` are swapped: (E, H, 2I) and (E, I, H).
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        (T, H), contiguous, the dtype of ``x``. Products and the sum over k are in float32 (float64 if ``x``, ``up`` or
        ``down`` is), the sum in the order of k, and rounded once. Gradients of weights and biases are summed in
        float32; an expert without tokens has a gradient of 0.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``integrations/moe.py``; Megatron-LM, ``megatron/core/transformer/moe/experts.py``.

    >>> import torch, fusedops
    >>> x, up, down = torch.ones(2, 4), torch.ones(3, 6, 4), torch.ones(3, 4, 3)
    >>> fusedops.experts(x, torch.tensor([[0, 2], [1, 3]]), torch.full((2, 2), 0.5), up, down)[:, 0]
    tensor([47.1367, 23.5683])
    """
    options = (activation, limit, alpha, offset, interleaved, transposed)
    return call(OP, (x, index, weights, up, down, up_bias, down_bias, *options), backend)


def reference(a: ExpertsArgs) -> Tensor:
    """Compute the op in plain torch: each expert on every token, of which those that did not choose it count as 0."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    wide = a.x.to(arithmetic(a.x, a.up, a.down))
    total = wide.new_zeros(a.x.shape)
    for e in range(a.up.shape[0]):
        chosen = a.index == e
        absent = ~chosen.any(-1, keepdim=True)
        factor = a.weights.to(wide.dtype).masked_fill(~chosen, 0.0).sum(-1, keepdim=True)
        h = linear(wide.masked_fill(absent, 0.0), a.up[e], None if a.up_bias is None else a.up_bias[e], a.transposed)
        out = linear(act(h), a.down[e], None if a.down_bias is None else a.down_bias[e], a.transposed)
        total = total + (factor * out).masked_fill(absent, 0.0)
    return total.to(a.x.dtype)


def hidden(x: Tensor, index: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute the saved value: the up-projection of the routed rows, sorted by expert, (T * K, 2I or I), the dtype of
    x. 0 for sentinels.
    """
    order = order_of(index, up.shape[0])
    chosen = experts_of(index, up.shape[0])[order]
    rows = x.to(arithmetic(x, up, down))[order // max(index.shape[1], 1)]
    result = rows.new_zeros(rows.shape[0], up.shape[2 if transposed else 1])
    for e in range(up.shape[0]):
        of_expert = linear(rows, up[e], None if up_bias is None else up_bias[e], transposed)
        result = of_expert.where((chosen == e)[:, None], result)
    return result.to(x.dtype)


def backward(args: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weights, up, down and the biases, each expert on every routed row."""
    act = Activation(args.activation, args.limit, args.alpha, args.offset, args.interleaved)
    dtype = arithmetic(args.x, args.up, args.down)
    chosen = experts_of(args.index, args.up.shape[0])
    rows, g_rows = (each.to(dtype).repeat_interleave(args.index.shape[1], 0) for each in (args.x, args.grad))
    factor = args.weights.to(dtype).reshape(-1, 1)
    dx, dfactor = rows.new_zeros(rows.shape), factor.new_zeros(factor.shape)
    parts: list[list[Tensor]] = [[], [], [], []]
    for e in range(args.up.shape[0]):
        absent = (chosen != e)[:, None]
        inputs, g = rows.masked_fill(absent, 0.0), g_rows.masked_fill(absent, 0.0)
        h = linear(inputs, args.up[e], None if args.up_bias is None else args.up_bias[e], args.transposed)
        a = act(h)
        da, ddown = linear_gradients(g * factor, a, args.down[e], args.transposed)
        out = linear(a, args.down[e], None if args.down_bias is None else args.down_bias[e], args.transposed)
        dfactor = dfactor + (g * out).sum(-1, keepdim=True).masked_fill(absent, 0.0)
        dh = act.gradient(da, h).masked_fill(absent, 0.0)
        drows, dup = linear_gradients(dh, inputs, args.up[e], args.transposed)
        dx = dx + drows.masked_fill(absent, 0.0)
        parts[0].append(dup)
        parts[1].append(ddown)
        parts[2].append(dh.sum(0))
        parts[3].append((g * factor).sum(0))
    dx = dx.reshape(*args.index.shape, args.x.shape[1]).sum(1)
    return (
        dx.to(args.x.dtype) if args.needs[0] else None,
        dfactor.reshape(args.weights.shape).to(args.weights.dtype) if args.needs[1] else None,
        stacked(parts[0], args.up) if args.needs[2] else None,
        stacked(parts[1], args.down) if args.needs[3] else None,
        stacked(parts[2], args.up_bias) if args.needs[4] and args.up_bias is not None else None,
        stacked(parts[3], args.down_bias) if args.needs[5] and args.down_bias is not None else None,
    )


OP = Op(
    experts,
    constraints=CONSTRAINTS,
    reference=reference,
    backward=backward,
    differentiable=("x", "weights", "up", "down", "up_bias", "down_bias"),
    saved=(Saved("hidden", hidden),),
    sharding="fusedops.ops.experts.sharding:EXPERTS",
    evidence="fusedops.ops.experts.evidence:EXPERTS",
)
