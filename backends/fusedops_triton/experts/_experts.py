"""experts with Triton: rows sorted by expert, products of all experts at once, and one kernel for each pass between.

    forward     route, spread (the rows of x), product with up, activation, product with down, combine
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
from fusedops_triton.experts._grouped import rows_by_weight, weights_of_rows


def experts(a: ExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it; tensors of any strides."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    return experts_forward(a.x, a.index, a.weights, a.up, a.down, a.up_bias, a.down_bias, act, a.transposed, save)


def experts_backward(a: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    return experts_gradients(
        a.grad, a.x, a.index, a.weights, a.up, a.down, a.up_bias, a.down_bias, a.hidden, act, a.transposed, a.needs
    )


def experts_forward(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: Activation,
    transposed: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the up-projections of the sorted rows where they are saved."""
    width = up.shape[2 if transposed else 1]
    if index.numel() == 0 or up.shape[0] == 0:
        y = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return y, x.new_zeros((index.numel(), width)) if save else None
    with no_autocast(x.device.type):
        x, index, weights = _plain(x), _plain(index), _plain(weights)
        of = route(index, up.shape[0])
        h = _up_projection(x, of, up, transposed)
        a = activation_forward(h, None if up_bias is None else _plain(up_bias), of, act, save)
        kept = h if save else None
        del h
        rows = rows_by_weight(a, down, of.ends, not transposed)
        y = combine(rows, of.place, weights, None if down_bias is None else _plain(down_bias), index)
    return y, kept


def _up_projection(x: Tensor, of: Route, up: Tensor, transposed: bool) -> Tensor:
    """Return the products of the rows with up, without the bias. What it copies is freed before the next pass."""
    inputs, _ = spread(x, of.place, None, True)
    assert inputs is not None
    return rows_by_weight(inputs, up, of.ends, not transposed)


def experts_gradients(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    hidden: Tensor,
    act: Activation,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weights, up, down and the biases, each where it is wanted."""
    given = (x, weights, up, down, up_bias, down_bias)
    if index.numel() == 0 or up.shape[0] == 0:
        return tuple(
            torch.zeros_like(each, memory_format=torch.contiguous_format) if each is not None and need else None
            for each, need in zip(given, needs)
        )
    needs_x, needs_weights, needs_up, needs_down = needs[:4]
    needs_up_bias, needs_down_bias = up_bias is not None and needs[4], down_bias is not None and needs[5]
    needs_h = needs_x or needs_up or needs_up_bias
    dx = dup = ddown = dup_bias = ddown_bias = da = None
    with no_autocast(x.device.type):
        grad, x, index, weights, hidden = (_plain(each) for each in (grad, x, index, weights, hidden))
        of = route(index, up.shape[0])
        needs_da = needs_h or needs_weights
        g, weighted = spread(grad, of.place, weights if needs_down else None, needs_da or needs_down_bias)
        if needs_da and g is not None:
            da = rows_by_weight(g, down, of.ends, transposed)
        bias = None if down_bias is None else _plain(down_bias)
        wanted = (needs_h, needs_down, needs_weights)
        found = activation_backward(da, hidden, g, bias, weights, of, act, wanted)
        if needs_down_bias and down_bias is not None and g is not None:
            ddown_bias = sum_groups(g, of.order, of.ends, weights, down_bias)
        del g, da
        if weighted is not None and found.a is not None:
            ddown = weights_of_rows(*((found.a, weighted) if transposed else (weighted, found.a)), of.ends, down)
        del weighted
        dh = found.h
        if dh is not None:
            if needs_up_bias and up_bias is not None:
                dup_bias = sum_groups(dh, None, of.ends, None, up_bias)
            if needs_x:
                dx = combine(rows_by_weight(dh, up, of.ends, transposed), of.place, None, None, index)
            if needs_up:
                inputs, _ = spread(x, of.place, None, True)
                assert inputs is not None
                dup = weights_of_rows(*((inputs, dh) if transposed else (dh, inputs)), of.ends, up)
    return dx, found.weights, dup, ddown, dup_bias, ddown_bias


def _plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()
