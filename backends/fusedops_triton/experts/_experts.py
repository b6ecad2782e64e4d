"""experts with Triton: rows sorted by expert, products of all experts at once, and one kernel for each pass between.

    forward     route, product of the rows of x with up and activation, product with down, combine. For many rows of an
                expert, which torch multiplies faster: route, spread (the rows of x), product with up, activation, ...
    few         of at most 32 tokens without gradients: product with up and activation, product with down, combine
    backward    route, spread (the rows of the gradient, also times their weights), product with down, activation again
                and its gradient, spread (the rows of x), gradients of the weights, product with up, combine

What is between two launches is in the dtype of x. Nothing waits for the device, and there are no atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import no_autocast
from fusedops.ops.experts.arguments import ExpertsArgs, ExpertsGradArgs
from fusedops.ops.experts.formulas import Activation
from fusedops_triton.experts._expert_activation import activation_backward, activation_forward
from fusedops_triton.experts._expert_rows import Route, combine, route, spread, sum_groups
from fusedops_triton.experts._grouped import is_by_torch, rows_by_weight, weights_of_rows
from fusedops_triton.experts._up_projection import few_rows, takes_few, up_projection


def experts(a: ExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it, and keep the up-projections; tensors of any strides."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    x, index, weights, up, down = a.x, a.index, a.weights, a.up, a.down
    width = up.shape[2 if a.transposed else 1]
    if index.numel() == 0 or up.shape[0] == 0:
        y = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return y, x.new_zeros((index.numel(), width)) if save else None
    with no_autocast(x.device.type):
        x, index, weights = _plain(x), _plain(index), _plain(weights)
        up_bias = None if a.up_bias is None else _plain(a.up_bias)
        down_bias = None if a.down_bias is None else _plain(a.down_bias)
        factors = a.up_lora is not None or a.down_lora is not None
        packed = not isinstance(up, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]  # a PackedRows: quantized_experts
        if not save and not factors and not packed and takes_few(index):
            place = torch.empty_like(index, dtype=torch.int32)
            activated = few_rows(x, index, up, up_bias, not a.transposed, act, None)
            rows = few_rows(activated, index, down, None, not a.transposed, None, place)
            return combine(rows, place, weights, down_bias, index), None
        of = route(index, up.shape[0])
        if a.up_lora is not None or packed or is_by_torch(x, up, index.numel()):
            h = _up_products(a, x, of)
            activated = activation_forward(h, up_bias, of, act, save)
            kept = h if save else None
            del h
        else:
            activated, kept = up_projection(x, of, up, up_bias, not a.transposed, act, save)
        rows = rows_by_weight(activated, down, of.ends, not a.transposed)
        if a.down_lora is not None and a.down_lora_b is not None:
            rows += by_factors(activated, a.down_lora, a.down_lora_b, a.lora_scale, of.ends)[1]
        y = combine(rows, of.place, weights, down_bias, index)
    return y, kept


def _up_products(a: ExpertsArgs, x: Tensor, of: Route) -> Tensor:
    """Return the products of the rows with up, without the bias. What it copies is freed before the next pass."""
    inputs, _ = spread(x, of.place, None, True)
    assert inputs is not None
    h = rows_by_weight(inputs, a.up, of.ends, not a.transposed)
    if a.up_lora is not None and a.up_lora_b is not None:
        h += by_factors(inputs, a.up_lora, a.up_lora_b, a.lora_scale, of.ends)[1]
    return h


def by_factors(rows: Tensor, a: Tensor, b: Tensor, scale: float, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of rows with the first factor of LoRA, times the scale, and of these with the second one."""
    thin = rows_by_weight(rows, a, ends, True).mul_(scale)
    return thin, rows_by_weight(thin, b, ends, True)


def experts_backward(a: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward, each where it is wanted."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    up, down, up_bias, down_bias = a.up, a.down, a.up_bias, a.down_bias
    factors = (a.up_lora, a.up_lora_b, a.down_lora, a.down_lora_b)
    given = (a.x, a.weights, up, down, up_bias, down_bias, *factors)
    if a.index.numel() == 0 or up.shape[0] == 0:
        return tuple(
            torch.zeros_like(each, memory_format=torch.contiguous_format) if each is not None and need else None
            for each, need in zip(given, a.needs)
        )
    needs_x, needs_weights, needs_up, needs_down = a.needs[:4]
    needs_up_bias, needs_down_bias = up_bias is not None and a.needs[4], down_bias is not None and a.needs[5]
    up_a, up_b, down_a, down_b = (None if each is None else _plain(each) for each in factors)
    needs_up_a, needs_up_b, needs_down_a, needs_down_b = (
        need and each is not None for need, each in zip(a.needs[6:], factors)
    )
    of_factors: list[Tensor | None] = [None] * 4
    needs_h = needs_x or needs_up or needs_up_bias or needs_up_a or needs_up_b
    needs_activated = needs_down or needs_down_a or needs_down_b
    dx = dup = ddown = dup_bias = ddown_bias = da = None
    with no_autocast(a.x.device.type):
        grad, x, index, weights = (_plain(each) for each in (a.grad, a.x, a.index, a.weights))
        of = route(index, up.shape[0])
        needs_da = needs_h or needs_weights
        g, weighted = spread(grad, of.place, weights if needs_activated else None, needs_da or needs_down_bias)
        if needs_da and g is not None:
            da = rows_by_weight(g, down, of.ends, a.transposed)
            if down_a is not None and down_b is not None:
                da += by_factors(g, down_b.mT, down_a.mT, a.lora_scale, of.ends)[1]
        bias = None if down_bias is None else _plain(down_bias)
        wanted = (needs_h, needs_activated, needs_weights)
        found = activation_backward(da, _plain(a.hidden), g, bias, weights, of, act, wanted)
        if needs_down_bias and down_bias is not None and g is not None:
            ddown_bias = sum_groups(g, of.order, of.ends, weights, down_bias)
        del g, da
        if down_a is not None and down_b is not None and weighted is not None and found.a is not None:
            wanted = (needs_down_a, needs_down_b)
            of_factors[2:] = _factor_gradients(weighted, found.a, down_a, down_b, a.lora_scale, of.ends, wanted)
        if needs_down and weighted is not None and found.a is not None:
            ddown = weights_of_rows(*((found.a, weighted) if a.transposed else (weighted, found.a)), of.ends, down)
        del weighted
        dh = found.h
        if dh is not None:
            if needs_up_bias and up_bias is not None:
                dup_bias = sum_groups(dh, None, of.ends, None, up_bias)
            if needs_x:
                rows = rows_by_weight(dh, up, of.ends, a.transposed)
                if up_a is not None and up_b is not None:
                    rows += by_factors(dh, up_b.mT, up_a.mT, a.lora_scale, of.ends)[1]
                dx = combine(rows, of.place, None, None, index)
                del rows
            inputs = spread(x, of.place, None, True)[0] if needs_up or needs_up_a or needs_up_b else None
            if up_a is not None and up_b is not None and inputs is not None:
                wanted = (needs_up_a, needs_up_b)
                of_factors[:2] = _factor_gradients(dh, inputs, up_a, up_b, a.lora_scale, of.ends, wanted)
            if needs_up and inputs is not None:
                dup = weights_of_rows(*((inputs, dh) if a.transposed else (dh, inputs)), of.ends, up)
    return dx, found.weights, dup, ddown, dup_bias, ddown_bias, *of_factors


def _factor_gradients(
    grad: Tensor, inputs: Tensor, a: Tensor, b: Tensor, scale: float, ends: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the factors of LoRA, of which grad is the gradient of the outputs."""
    of_a = of_b = None
    if wanted[0]:
        of_a = weights_of_rows(rows_by_weight(grad, b, ends, False).mul_(scale), inputs, ends, a)
    if wanted[1]:
        of_b = weights_of_rows(grad, rows_by_weight(inputs, a, ends, True).mul_(scale), ends, b)
    return of_a, of_b


def _plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()
