"""Dropout of a shard, in plain torch, by the numbers of the whole: the sharded run drops what the whole one drops.

A kernel counts an element's index in the tensor that it is given, which is right only where that is the whole tensor.
On a shard this composite serves instead, on every backend, and says so where it passes over a kernel of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._constraint import Reason, ReasonCode
from fusedops._dispatch import plan_for
from fusedops._op import Op
from fusedops._plan import Plan, backward_plan
from fusedops._registry import registry
from fusedops.errors import NoBackendError
from fusedops.ops._philox import philox, threshold

Sizes = Sequence[int]


def forward_of_shard(
    op: Op, local: Mapping[str, Any], whole: Sizes, part: Sizes, start: Sizes, backend: str | None
) -> Tensor:
    """This rank's part of the output.

    Args:
        op: bias_dropout or bias_dropout_add.
        local: the arguments by name, the tensors cut to this rank's part.
        whole: the shape of the whole x.
        part: the shape of this rank's part of it.
        start: where in the whole its first element is.
        backend: as the call had it.

    Raises:
        NoBackendError: the policy forbids a fallback.
    """
    x, bias, residual, p = local["x"], local["bias"], local.get("residual"), local["p"]
    _announce(op, plan_for(op, x, backend), tuple(local.values()))
    keep = keep_mask_of_shard(local["seed"], p, whole, part, start)
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


def backward_of_shard(
    op: Op, local: Mapping[str, Any], whole: Sizes, part: Sizes, start: Sizes, backend: str | None
) -> tuple[Tensor, Tensor]:
    """This rank's part of the gradients of x and of the bias; empty where not wanted. Arguments as in the forward."""
    grad, bias, p, (needs_x, needs_bias) = local["grad"], local["bias"], local["p"], local["needs"]
    forward = plan_for(op, grad, backend)
    _announce(op, backward_plan(forward, forward.first.backend if forward.first else ""), tuple(local.values()))
    keep = keep_mask_of_shard(local["seed"], p, whole, part, start)
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    du = torch.where(keep, wide, 0) * (1 / (1 - p) if p < 1 else 0.0)
    nothing = grad.new_empty(0)
    dx = du.to(local["x_dtype"]) if needs_x else nothing
    return dx, du.sum_to_size(bias.shape).to(bias.dtype) if needs_bias and bias is not None else nothing


def keep_mask_of_shard(seed: Tensor, p: float, whole: Sizes, part: Sizes, start: Sizes) -> Tensor:
    """The part of ``keep_mask(seed, p, whole)`` that begins at ``start`` and has the shape ``part``: bool.

    Made run by run: from the last dim that is cut on, a shard's elements follow each other in the whole.
    """
    cut = max((dim for dim, size in enumerate(part) if size != whole[dim]), default=0)
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = torch.full((1,), sum(a * b for a, b in zip(start, strides)), device=seed.device, dtype=torch.int64)
    for size, stride in zip(part[:cut], strides):
        steps = torch.arange(size, device=seed.device, dtype=torch.int64) * stride
        first = (first[:, None] + steps).flatten()
    run = prod(part[cut:])
    counters = (first // 4)[:, None] + torch.arange((run + 6) // 4, device=seed.device, dtype=torch.int64)
    words = torch.stack(philox(counters, seed), dim=-1).flatten(1)
    places = (first % 4)[:, None] + torch.arange(run, device=seed.device, dtype=torch.int64)
    return (words >= threshold(p)).gather(1, places).view(tuple(part))


def _announce(op: Op, plan: Plan, args: tuple[Any, ...]) -> None:
    """Makes the fallback seen, or raises, where another kernel than plain torch on any device would have served."""
    entry = plan.pick(args)
    record = registry.find(entry.backend)
    if record is None or record.backend is None or "*" in record.backend.device_types:
        return
    reason = Reason(
        ReasonCode.SHARD,
        "x is a shard, and its kernel counts a dropped element's index from the shard's own start",
        "a shard",
        "the whole tensor",
        "replicate x, as in x.redistribute(placements=[Replicate()])",
    )
    if plan.policy.fallback != "raise":
        plan.announce(entry.backend, reason, "plain torch")
        return
    from fusedops._decision import decide

    decision = decide(plan, args)
    verdicts = tuple(replace(v, status="refused", reasons=v.reasons or (reason,)) for v in decision.candidates)
    raise NoBackendError(replace(decision, backend=None, backward=None, candidates=verdicts))
