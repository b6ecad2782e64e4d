"""Launches of the modulated norms, gated residuals and group_norm, for ``triton_aot.py``."""

from __future__ import annotations

from typing import Any

import torch


def launch_modulated(case: dict[str, Any]) -> None:
    """Make the launches of a case. op: "modulated", or with " backward"; shape (B, S, H), dtype, kind."""
    from fusedops.ops.modulated.arguments import GatedAddModulatedNormArgs, GatedAddModulatedNormGradArgs
    from fusedops_triton.modulated import _modulated, _modulated_backward

    batches, tokens, columns = case["shape"]
    x = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]), device="meta")
    shift, scale, gate = x.new_empty(batches, 1, 6 * columns).chunk(6, -1)[:3]
    weight, rstd = x.new_empty(columns), x.new_empty((batches, tokens), dtype=torch.float32)
    of_norm = (scale, shift, weight, weight)
    if case["op"].endswith("backward"):
        saved = (x, rstd, rstd, x, gate, *of_norm)
        args = GatedAddModulatedNormGradArgs(x, x, *saved, case["kind"], 1.0, "tanh", (True,) * 7)
        _modulated_backward.gated_add_modulated_norm_backward(args)
    else:
        forward = GatedAddModulatedNormArgs(x, x, gate, *of_norm, 1e-6, case["kind"], 1.0, "tanh")
        _modulated.gated_add_modulated_norm(forward, True)


def launch_group_norm(case: dict[str, Any]) -> None:
    """Make the launches of a case. op: "group_norm", or with " backward"; shape (B, C, ...), dtype, by_channel."""
    from fusedops.ops.group_norm.arguments import GroupNormArgs, GroupNormGradArgs
    from fusedops_triton.group_norm import _group_norm

    x = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]), device="meta")
    if case.get("by_channel"):
        x = x.contiguous(memory_format=torch.channels_last)
    weight, rstd = x.new_empty(x.shape[1]), x.new_empty((x.shape[0], 32), dtype=torch.float32)
    if case["op"].endswith("backward"):
        args = GroupNormGradArgs(x, x, rstd, rstd, weight, weight, 32, "silu", (True, True, True))
        _group_norm.group_norm_backward(args)
    else:
        _group_norm.group_norm(GroupNormArgs(x, 32, weight, weight, 1e-5, "silu"), True)
