"""The shared parts of the dropout ops: the seed, the error model, and dropout on DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from sys import modules
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.constraint import shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._contract.values import Shard
from fusedops.errors import InvalidInputError
from fusedops.ops.gelu.bias_gelu import promoted
from fusedops.philox import dropped, philox, threshold


def seed_tensor(name: str, seed: int | Tensor | None, x: Tensor) -> Tensor | None:
    """Return a seed given as a number as an int64 tensor of one element on the device of ``x``.

    Raises:
        InvalidInputError: the number has more than 64 bits, or the seed is of another type.
    """
    if seed is None or isinstance(seed, (Tensor, TensorSpec)):
        return seed
    if type(seed) is not int and hasattr(seed, "tracer"):  # a value of torch.fx.symbolic_trace
        return cast("Any", seed)
    if type(seed) is not int or not -(2**63) <= seed < 2**64:
        raise InvalidInputError(
            f"{name}: got seed = {shown(seed)}, expected None, a 64-bit integer, or an int64 tensor of one element; to "
            f"fix: pass None to have one drawn"
        )
    if not isinstance(x, (Tensor, TensorSpec)):  # pyright: ignore[reportUnnecessaryIsInstance]
        return seed  # type: ignore[return-value]  # the op's check reports x; torch.fx records the number
    if isinstance(x, TensorSpec):
        return TensorSpec((1,), torch.int64, x.device)  # type: ignore[return-value]
    # a 64-bit seed may be given as unsigned. Not torch.tensor(...), of which torch.jit.trace warns
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, device=x.device, dtype=torch.int64)


def with_seed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a dropout's arguments, which end with p, training and seed, with the seed as a tensor: drawn where needed.

    The seed comes from torch's generator of the device, so that manual_seed, fork_rng and CUDA graphs apply to it.
    """
    *others, p, training, seed = args
    x = args[0]
    if isinstance(seed, int):
        return (*others, p, training, seed_tensor("seed", seed, x))
    if not training or p == 0 or seed is not None:
        return args
    if isinstance(x, TensorSpec):
        return (*others, p, training, TensorSpec((1,), torch.int64, x.device))
    drawn = torch.randint(2**63 - 1, (1,), device=x.device, dtype=torch.int64)
    if type(x) is not Tensor and "torch.distributed.tensor" in modules:
        from fusedops._dispatch.dtensor import shared_draw

        drawn = shared_draw(drawn, x)
    return (*others, p, training, drawn)


def backward_bytes(x: Any, bias: Any, dtype: torch.dtype, p: float, training: bool) -> int:
    """Return the bytes of reading grad (of ``dtype``), writing dx unless it is grad itself, and the bias's gradient."""
    elements = prod(x.shape)
    small = 0 if bias is None else prod(bias.shape) * bias.dtype.itemsize
    if (p == 0 or not training) and x.dtype is dtype:
        return 0 if bias is None else elements * dtype.itemsize + small
    return elements * (dtype.itemsize + x.dtype.itemsize) + small


def magnitude(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``abs(x) + abs(bias)``, and 0 for what is not finite: it has no error, or the sum is not finite either."""
    size = x.abs().nan_to_num(nan=0.0, posinf=0.0)
    return size if bias is None else size + bias.abs().nan_to_num(nan=0.0, posinf=0.0)


def error(absolute: float, x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    """Return ``absolute`` times the magnitudes of the terms, where an element is kept."""
    wide = torch.promote_types(promoted(x, bias), torch.float32)
    size = magnitude(x.to(wide), None if bias is None else bias.to(wide))
    return absolute * dropped(size, p, seed if training and p > 0 else None)


def gradient_error(
    absolute: float,
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None]:
    """Return the error of the scale for x, and for the bias of its sum; of float32 also where the result is wider."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    size = dropped(magnitude(grad.to(wide)), p, seed if training and p > 0 else None)
    least = 4 * torch.finfo(wide).eps
    return least * size, None if bias is None else max(absolute, least) * size.sum_to_size(bias.shape)


def drops(arguments: Mapping[str, Any]) -> bool:
    """Return True where a call drops elements."""
    return arguments["seed"] is not None and arguments["training"] and arguments["p"] > 0


def forward_of_shard(arguments: Mapping[str, Any], shard: Shard) -> Tensor:
    """Compute a rank's part of the output by the random numbers of the whole, in plain torch."""
    x, bias, residual, p = arguments["x"], arguments["bias"], arguments.get("residual"), arguments["p"]
    keep = keep_mask_of_shard(arguments["seed"], p, shard)
    scale = 1 / (1 - p) if p < 1 else 0.0
    if residual is None:
        out = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
        wide = torch.promote_types(out, torch.float32)
        u = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
        return (torch.where(keep, u, 0) * scale).to(out)
    out = residual.dtype
    wide = torch.promote_types(out, torch.float32)
    u = x.to(out).to(wide)
    if bias is not None:
        u = u + bias.to(out).to(wide)
    # one rounding, as in the kernels: u * scale and the sum are fused
    return torch.add(residual.to(wide), torch.where(keep, u, 0), alpha=scale).to(out)


def backward_of_shard(arguments: Mapping[str, Any], shard: Shard) -> tuple[Tensor | None, Tensor | None]:
    """Compute a rank's part of the gradients of x and of the bias; None where not wanted."""
    grad, bias, p = arguments["grad"], arguments["bias"], arguments["p"]
    needs_x, needs_bias = arguments["needs"]
    keep = keep_mask_of_shard(arguments["seed"], p, shard)
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    du = torch.where(keep, wide, 0) * (1 / (1 - p) if p < 1 else 0.0)
    dx = du.to(arguments["x_dtype"]) if needs_x else None
    return dx, du.sum_to_size(bias.shape).to(bias.dtype) if needs_bias and bias is not None else None


def keep_mask_of_shard(seed: Tensor, p: float, shard: Shard) -> Tensor:
    """Return a rank's part of ``keep_mask(seed, p, shard.whole)``: bool.

    Made run by run: from the last dim that is cut on, the elements of a part follow each other in the whole.
    """
    whole, part, start = shard
    cut = max((dim for dim, size in enumerate(part) if size != whole[dim]), default=0)
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = torch.full((1,), _linear(start, strides), device=seed.device, dtype=torch.int64)
    for size, stride in zip(part[:cut], strides):
        steps = torch.arange(size, device=seed.device, dtype=torch.int64) * stride
        first = (first[:, None] + steps).flatten()
    run = prod(part[cut:])
    counters = (first // 4)[:, None] + torch.arange((run + 6) // 4, device=seed.device, dtype=torch.int64)
    words = torch.stack(philox(counters, seed), dim=-1).flatten(1)
    places = (first % 4)[:, None] + torch.arange(run, device=seed.device, dtype=torch.int64)
    return (words >= threshold(p)).gather(1, places).view(tuple(part))


def _linear(place: Sequence[int], strides: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(place, strides))
