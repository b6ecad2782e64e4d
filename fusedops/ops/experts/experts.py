"""The experts of a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), given the choice of a router. Replaces
the experts functions of transformers, Megatron's GroupedMLP, Liger's fused_moe, and the loop over experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.dtypes import arithmetic, no_autocast
from fusedops.errors import InvalidInputError
from fusedops.ops.experts.arguments import CONSTRAINTS, LORA, ExpertsArgs, ends_of, with_factors
from fusedops.ops.experts.formulas import Activation, experts_backward, experts_hidden, experts_of, experts_reference
from fusedops.ops.experts.grouped_matmul import grouped_matmul
from fusedops.ops.experts.quantized_experts import quantized_experts
from fusedops.ops.quantized.quantized_linear import quantized_linear
from fusedops.quantization import Packed


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor | Packed,
    down: Tensor | Packed,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Literal["swiglu", "geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh", "relu", "relu2"] = "swiglu",
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
    transposed: bool = False,
    up_lora: tuple[Tensor, Tensor] | Tensor | None = None,
    up_lora_b: Tensor | None = None,
    down_lora: tuple[Tensor, Tensor] | Tensor | None = None,
    down_lora_b: Tensor | None = None,
    lora_scale: float = 1.0,
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
        up: (E, 2I, H) for the gated activations, (E, I, H) for the others; any of the same dtypes, or a
            :class:`fusedops.quantization.Packed` of that shape, see :func:`fusedops.quantized_experts`.
        down: (E, H, I), any of the same dtypes, or a Packed.
        up_bias: (E, 2I) or (E, I), any of the same dtypes, or None.
        down_bias: (E, H), any of the same dtypes, or None.
        activation: "swiglu", "geglu" (by erf) and "geglu_tanh" are gated: ``up`` has the rows of the gate, then as many
            others. "silu", "gelu" (by erf), "gelu_tanh", "relu" and "relu2" (the square of relu) are not.
        limit: of "swiglu", see :func:`fusedops.swiglu`; no other activation reads it. gpt-oss has 7.
        alpha: of "swiglu", as ``limit``. gpt-oss has 1.702.
        offset: of "swiglu", as ``limit``. gpt-oss has 1.
        interleaved: the rows of gate and of the others alternate, as gpt-oss has them.
        transposed: the last two dims of ``up`` and ``down`` are swapped: (E, H, 2I) and (E, I, H).
        up_lora: a pair (A, B) of factors of LoRA, (E, r, H) and (E, 2I or I, r), any of the same dtypes, or None:
            ``lora_scale * B[e] @ A[e]`` is added to ``up[e]``. It is computed as two products of each row, and the sum
            of a weight and its factors is never built. Or A alone, beside ``up_lora_b``.
        down_lora: likewise, (E, r, I) and (E, H, r).
        lora_scale: of the products of both pairs.
        up_lora_b: B of ``up_lora``, unless that is a pair.
        down_lora_b: likewise.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        (T, H), contiguous, the dtype of ``x``. Products and the sum over k are in float32 (float64 if ``x``, ``up`` or
        ``down`` is), the sum in the order of k, and rounded once. Gradients of weights, biases and factors are summed
        in float32; an expert without tokens has a gradient of 0.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``integrations/moe.py``; Megatron-LM, ``megatron/core/transformer/moe/experts.py``.

    >>> import torch, fusedops
    >>> x, up, down = torch.ones(2, 4), torch.ones(3, 6, 4), torch.ones(3, 4, 3)
    >>> fusedops.experts(x, torch.tensor([[0, 2], [1, 3]]), torch.full((2, 2), 0.5), up, down)[:, 0]
    tensor([47.1367, 23.5683])
    """
    packed = [isinstance(each, Packed) for each in (up, down)]
    if any(packed) and transposed:
        raise InvalidInputError(
            "experts: got transposed=True beside a Packed, expected False, since its scales are those of groups of a "
            "row: (E, 2I or I, H) and (E, H, I); to fix: pass weight.mT of a tensor whose last two dims are swapped, "
            "also to fusedops.quantization.pack"
        )
    options = (activation, limit, alpha, offset, interleaved, transposed)
    factors = (up_lora, up_lora_b, down_lora, down_lora_b, lora_scale)
    args = (x, index, weights, up, down, up_bias, down_bias, *options, *factors)
    if any(packed) and not all(packed):
        return _checked_with_one_packed(ExpertsArgs(*cast("Any", args)), backend)
    if any(packed):
        given = (x, index, weights, up, down, up_bias, down_bias)
        return quantized_experts(
            *given,
            activation=activation,
            limit=limit,
            alpha=alpha,
            offset=offset,
            interleaved=interleaved,
            up_lora=up_lora,
            up_lora_b=up_lora_b,
            down_lora=down_lora,
            down_lora_b=down_lora_b,
            lora_scale=lora_scale,
            backend=backend,
        )
    return call(OP, prepare_args(args), backend)


def _checked_with_one_packed(given: ExpertsArgs, backend: str | None) -> Tensor:
    """Check a call with one Packed as one of tensors, and compute it."""
    a = with_factors(given)
    OP.validate([TensorSpec(p.shape, device=p.device) if isinstance(p, Packed) else p for p in OP.specs(a)])
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    factors = (a.up_lora, a.up_lora_b, a.down_lora, a.down_lora_b)
    return _with_one_packed(*a[:5], (a.up_bias, a.down_bias), act, factors, a.lora_scale, backend)


def _with_one_packed(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Packed | Tensor,
    down: Packed | Tensor,
    biases: Sequence[Tensor | None],
    act: Activation,
    factors: Sequence[Tensor | None],
    lora_scale: float,
    backend: str | None,
) -> Tensor:
    """Compute experts for valid arguments, one expert after another on the rows that chose it.

    The gradients are those of the ops: also of the weight that is not packed. Only one expert's up-projections are held
    where no gradient is wanted. The number of rows of each expert is read from the device.

    Args:
        x: as of experts.
        index: likewise.
        weights: likewise.
        up: likewise.
        down: likewise; of both one is a Packed.
        biases: of up and of down.
        act: the activation.
        factors: of LoRA: A and B of up, then those of down.
        lora_scale: as of experts.
        backend: a policy for both ops, or None.
    """
    wide = arithmetic(x, *(each for each in (up, down) if isinstance(each, Tensor)))
    narrow = wide if x.device.type == "cpu" else x.dtype  # of products, as those of eager
    chosen, order = experts_of(index, up.shape[0]).sort(stable=True)
    every = torch.arange(up.shape[0], device=x.device)
    ends = ends_of("experts", torch.searchsorted(chosen, every, right=True), index.numel())
    order = order[: ends[-1] if ends else 0]
    sizes = [end - start for start, end in zip([0, *ends], ends)]
    # without rows the first one, on none, so that the result depends on each argument
    members = [e for e, size in enumerate(sizes) if size] or list(range(min(len(sizes), 1)))
    of_up, of_down = (each if isinstance(each, Packed) else _each(each) for each in (up, down))
    up_bias, down_bias, *pairs = (None if each is None else _each(each) for each in (*biases, *factors))
    outs: list[Tensor] = []
    with no_autocast(x.device.type):
        rows = x.to(wide)[order // max(index.shape[1], 1)]
        parts = cast("tuple[Tensor, ...]", rows.split([sizes[e] for e in members]))
        for e, part in zip(members, parts):
            activated = act(_product(part.to(narrow), of_up, up_bias, pairs[:2], lora_scale, e, backend))
            outs.append(_product(activated, of_down, down_bias, pairs[2:], lora_scale, e, backend))
        if not outs:  # no expert
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        terms = torch.cat(outs).to(wide) * weights.reshape(-1, 1)[order].to(wide)
        slots = terms.new_zeros((index.numel(), x.shape[1])).index_copy(0, order, terms)
        total = terms.new_zeros(x.shape)
        for choice in slots.view(*index.shape, x.shape[1]).unbind(1):
            total = total + choice
        return total.to(x.dtype)


def _each(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the (1, ...) of each expert. By an index, the gradient of one would be a tensor of all of them."""
    return cast("tuple[Tensor, ...]", tensor.split(1) if len(tensor) else ())


def _product(
    rows: Tensor,
    weight: Packed | tuple[Tensor, ...],
    bias: tuple[Tensor, ...] | None,
    pair: Sequence[tuple[Tensor, ...] | None],
    scale: float,
    e: int,
    backend: str | None,
) -> Tensor:
    """Return the rows times the weight of an expert, with its bias and its factors of LoRA."""
    of_expert = None if bias is None else bias[e]
    end = torch.full((1,), rows.shape[0], device=rows.device)
    if isinstance(weight, Packed):
        bias_row = None if of_expert is None else of_expert[0]
        y = quantized_linear(rows, weight[e], bias_row, backend=backend)
    else:
        y = grouped_matmul(rows, weight[e], end, of_expert, backend=backend)
    first, second = pair
    if first is None or second is None:
        return y
    thin = grouped_matmul(rows, first[e], end, backend=backend)
    return y + scale * grouped_matmul(thin, second[e], end, backend=backend)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the factors of each pair in their places."""
    if isinstance(args[13], (tuple, list)) or isinstance(args[15], (tuple, list)):
        return tuple(with_factors(ExpertsArgs(*args)))
    return args


OP = Op(
    experts,
    constraints=CONSTRAINTS,
    reference=experts_reference,
    backward=experts_backward,
    differentiable=("x", "weights", "up", "down", "up_bias", "down_bias", *LORA),
    saved=(Saved("hidden", experts_hidden),),
    prepare_args=prepare_args,
    sharding="fusedops.ops.experts.sharding:EXPERTS",
    evidence="fusedops.ops.experts.evidence:EXPERTS",
)
