"""experts with one packed weight beside one that is not, composed of quantized_linear and grouped_matmul."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.experts.arguments import ends_of
from fusedops.ops.experts.formulas import Activation, experts_of
from fusedops.ops.experts.grouped_matmul import grouped_matmul
from fusedops.ops.quantized.quantized_linear import quantized_linear
from fusedops.quantization import Packed


def experts_with_one_packed(
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
