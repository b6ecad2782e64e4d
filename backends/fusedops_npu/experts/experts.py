"""experts on Ascend: rows sorted by expert on the device, and the kernels of grouped_matmul, swiglu and geglu on them.

    forward     sort the routed rows, copy the rows of x, product with up, activation, product with down, sum of choices
    backward    copy the rows of the gradient, product with down; the activation again, and its gradient; the sums of
                both weights and biases; product with up, sum of choices

- The rows of sentinels are last, past the last end of grouped_matmul: their products are 0, and they take no part in
  sums. Their weights count as 0, so that one of NaN reaches nothing.
- torch sorts, gathers and scatters. The vendor's npu_moe_init_routing_v2 is for inference by its page, and backward
  needs the same order; npu_moe_token_permute has bfloat16 alone, and no expert that is elsewhere.
- The sum of a token's choices is taken one choice after another, in float32, and rounded once.
- What is between two steps is in the dtype of x. Nothing waits for the device, which the number of rows of each expert
  stays on.

Source: torch_npu.npu_grouped_matmul, npu_swiglu, npu_geglu, with the limits of these three kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Arguments, Boundary, Dim, DType, Present, Reason, SameDType
from fusedops.ops.experts.arguments import ExpertsArgs, ExpertsGradArgs
from fusedops.ops.experts.formulas import Activation, experts_of
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.experts import grouped_matmul
from fusedops_npu.gated import geglu, swiglu

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class _NoFactors(Present):
    """No factors of LoRA of ``up`` and of ``down``."""

    def __init__(self, name: str) -> None:
        super().__init__(name, False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the first factors."""
        return "up_lora", "down_lora"

    def expression(self, constants: dict[str, object]) -> str:
        return " and ".join(f"{name} is None" for name in self.names)

    def reasons(self, args: Arguments) -> list[Reason]:
        given = [name for name in self.names if args[name] is not None]
        fix = "merge the factors of LoRA into the weights"
        return [Reason(self.code, f"a {given[0]}", f"no {given[0]}", fix)] if given else []

    def describe(self) -> str:
        return f"{' and '.join(self.names)}: not accepted"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        yield Boundary("no factors", {**args, **dict.fromkeys(self.names)}, True)
        if self.reasons(args):
            yield Boundary("factors", args, False)


_LIMITS = (
    DType("x", *_DTYPES),
    SameDType("up", "x"),
    SameDType("down", "x"),
    DType("weights", *_DTYPES),
    DType("up_bias", *_DTYPES),
    DType("down_bias", *_DTYPES),
    Dim("up", (0,), at_most=1023),  # as grouped_matmul
    Dim("up", (-2, -1), at_most=65535),
    _NoFactors("up_lora"),
)
_INFINITE = Deviation(
    "infinite-gate", "torch_npu does not document swiglu and geglu of a gate of -inf: NaN, where the op has 0, may come"
)


def _rows_cost(x: Any, index: Any, *rest: Any) -> int:
    """Return the bytes of the routed rows of x."""
    return prod(index.shape) * x.shape[1] * x.dtype.itemsize


def _gradient_rows_cost(grad: Any, x: Any, index: Any, *rest: Any) -> int:
    """Return the bytes of the routed rows of the gradient, and of x."""
    return 2 * _rows_cost(x, index)


_ROWS = Adaptation("rows", "the rows of tokens are copied in the order of their experts", _rows_cost)
_GRADIENT_ROWS = Adaptation("rows", "the rows of the gradient and of x are copied so", _gradient_rows_cost)


class _Route(NamedTuple):
    """The routed rows sorted by expert, sentinels last. Row r is choice r % K of token r // K.

    Attributes:
        token: (T * K,), the token of each sorted row.
        group: (T * K,), the expert of each sorted row, E for a sentinel.
        place: (T, K), the sorted row of each choice.
        ends: (E,), the end of the sorted rows of each expert.
        weights: (T, K) float32, 0 for a sentinel.
        absent: (T, K), True for a sentinel.
    """

    token: Tensor
    group: Tensor
    place: Tensor
    ends: Tensor
    weights: Tensor
    absent: Tensor

    def sorted_weights(self) -> Tensor:
        """Return the weight of each sorted row, (T * K, 1)."""
        rows = torch.empty_like(self.weights).view(-1)
        return rows.scatter_(0, self.place.view(-1), self.weights.view(-1))[:, None]


def _route(index: Tensor, weights: Tensor, experts: int) -> _Route:
    """Sort the routed rows by expert; index (T, K), which is not empty."""
    chosen = experts_of(index, experts)
    group, order = torch.sort(chosen, stable=True)
    row = torch.arange(order.shape[0], device=index.device)
    place = torch.empty_like(order).scatter_(0, order, row).view(index.shape)
    ends = torch.searchsorted(group, torch.arange(experts, device=index.device), right=True)
    absent = (chosen == experts).view(index.shape)
    token = torch.div(order, index.shape[1], rounding_mode="floor")
    return _Route(token, group, place, ends, weights.float().masked_fill(absent, 0.0).contiguous(), absent)


@kernel(
    ops.experts,
    *_LIMITS,
    source="torch_npu.npu_grouped_matmul",
    deviations=(_INFINITE,),
    adapts=(_ROWS,),
    rows_independent=NOT_PROMISED,
)
def experts(a: ExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    if a.index.numel() == 0 or a.up.shape[0] == 0:
        y = torch.zeros_like(a.x, memory_format=torch.contiguous_format)
        return y, a.x.new_zeros(a.index.numel(), a.up.shape[2 if a.transposed else 1]) if save else None
    route = _route(a.index, a.weights, a.up.shape[0])
    product = grouped_matmul.grouped_matmul.function
    h: Tensor = product(a.x.index_select(0, route.token), a.up, route.ends, a.up_bias, a.transposed)
    rows: Tensor = product(_activated(h, act), a.down, route.ends, a.down_bias, a.transposed)
    return _sum_of_choices(rows, route, route.weights), h if save else None


@kernel(
    ops.experts,
    *_LIMITS,
    direction="backward",
    source="torch_npu.npu_grouped_matmul",
    adapts=(_GRADIENT_ROWS,),
    rows_independent=NOT_PROMISED,
)
def experts_backward(args: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward."""
    given = (args.x, args.weights, args.up, args.down, args.up_bias, args.down_bias)
    if args.index.numel() == 0 or args.up.shape[0] == 0:
        return (
            tuple(
                None if each is None or not need else torch.zeros_like(each, memory_format=torch.contiguous_format)
                for each, need in zip(given, args.needs)
            )
            + (None,) * 4
        )
    act = Activation(args.activation, args.limit, args.alpha, args.offset, args.interleaved)
    needs_x, needs_weights, needs_up, needs_down = args.needs[:4]
    needs_up_bias, needs_down_bias = (
        args.needs[4] and args.up_bias is not None,
        args.needs[5] and args.down_bias is not None,
    )
    needs_h = needs_x or needs_up or needs_up_bias
    gradients = grouped_matmul.grouped_matmul_backward.function
    route = _route(args.index, args.weights, args.up.shape[0])
    g, factor = args.grad.index_select(0, route.token), route.sorted_weights()
    a = _activated(args.hidden, act)
    dx = dweights = dup = ddown = dup_bias = ddown_bias = None
    if needs_down:
        weighted = (g * factor).to(g.dtype)
        _, ddown, _ = gradients(weighted, a, args.down, route.ends, None, args.transposed, (False, True, False))
    if (
        needs_down_bias and args.down_bias is not None
    ):  # of the weights and the gradient as they are: no product is rounded
        ddown_bias = grouped_matmul.group_sums(factor, g.float(), route.ends)[:, 0].to(args.down_bias.dtype)
    if needs_h or needs_weights:
        da, _, _ = gradients(g, a, args.down, route.ends, None, args.transposed, (True, False, False))
        if needs_weights:
            dweights = _weights_gradient(da, a, g, args.down_bias, route).to(args.weights.dtype)
        if needs_h:
            dh = _activation_gradient(da * factor, args.hidden, act)
            inputs, wanted = args.x.index_select(0, route.token), (needs_x, needs_up, needs_up_bias)
            rows, dup, dup_bias = gradients(dh, inputs, args.up, route.ends, args.up_bias, args.transposed, wanted)
            dx = _sum_of_choices(rows, route, None) if needs_x else None
    return dx, dweights, dup, ddown, dup_bias, ddown_bias, *(None,) * 4


def _is_packed(act: Activation) -> bool:
    """Return True where a vendor's function has the activation: of halves, without a clamp and other options."""
    of_swiglu = (act.limit, act.alpha, act.offset) == (None, 1.0, 0.0)
    return act.gated and not act.interleaved and (act.name != "swiglu" or of_swiglu)


def _activated(h: Tensor, act: Activation) -> Tensor:
    """Return the activation in the dtype of h."""
    if not _is_packed(act):
        return act(h.float()).to(h.dtype)
    if act.name == "swiglu":
        return swiglu.swiglu.function(h, None, None, 1.0, 0.0, False)
    return geglu.geglu.function(h, None, _form(act), False)


def _activation_gradient(da: Tensor, h: Tensor, act: Activation) -> Tensor:
    """Return the gradient of h, in its dtype, from that of the activation in float32."""
    if not _is_packed(act):
        return act.gradient(da, h.float()).to(h.dtype)
    grad, wanted = da.to(h.dtype), (True, False)
    if act.name == "swiglu":
        return swiglu.swiglu_backward.function(grad, h, None, None, 1.0, 0.0, False, wanted)[0]
    return geglu.geglu_backward.function(grad, h, None, _form(act), False, wanted)[0]


def _form(act: Activation) -> str:
    return "tanh" if act.name == "geglu_tanh" else "none"


def _weights_gradient(da: Tensor, a: Tensor, g: Tensor, down_bias: Tensor | None, route: _Route) -> Tensor:
    """Return the gradient of the weights, (T, K) float32: the rows of down times those of the gradient."""
    total = (da.float() * a).sum(-1)
    if down_bias is not None:
        row = down_bias[route.group.clamp(max=down_bias.shape[0] - 1)]
        total = total + (g.float() * row).sum(-1)
    return total[route.place].masked_fill(route.absent, 0.0)


def _sum_of_choices(rows: Tensor, route: _Route, weights: Tensor | None) -> Tensor:
    """Return the sum over the choices of each token, in their order, in float32: (T, H), the dtype of rows."""
    total: Tensor | None = None
    for k in range(route.place.shape[1]):
        part = rows.index_select(0, route.place[:, k]).float()
        part = part if weights is None else part * weights[:, k, None]
        total = part if total is None else total + part
    assert total is not None  # a call without choices has returned
    return total.to(rows.dtype)
