"""Evidence of group_norm: cases, tolerances, error bounds, bytes, the unfused form."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows
from fusedops.ops.group_norm import error_bounds
from fusedops.ops.group_norm.arguments import SILU, GroupNormArgs
from fusedops.ops.norms.error_bounds import GRADIENT_TOLERANCE, TOLERANCE


def unfused(a: GroupNormArgs) -> Tensor:
    """Compute the op as models do without fused ops."""
    weight, bias = (None if each is None else each.to(a.x.dtype) for each in (a.weight, a.bias))
    y = torch.group_norm(a.x, a.groups, weight, bias, a.eps)
    return torch.nn.functional.silu(y) if a.activation == SILU else y


def min_bytes(x: Any, groups: int, weight: Any, bias: Any, *rest: Any) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. Weight, bias and their gradients are read and written once."""
    whole = prod(x.shape) * x.dtype.itemsize
    small = sum(prod(each.shape) * each.dtype.itemsize for each in (weight, bias) if each is not None)
    return {"forward": 2 * whole + small, "backward": 3 * whole + 2 * small}


def _case(name: str, shape: tuple[int, ...], groups: int, source: str = "", **options: Any) -> Case:
    vectors = {"weight": shape[1:2], "bias": shape[1:2]}
    return Case(name, {"x": shape, "groups": groups, **vectors, "activation": "none", **options}, source)


GROUP_NORM = Evidence(
    formula="act((x - mean) * rsqrt(var + eps) * weight + bias), of groups of channels",
    cases=[
        _case("ragged", (3, 21, 37), 3, "no size is a power of two", activation=SILU, eps=1e-3),
        _case("sd_unet", (2, 320, 64, 64), 32, "Stable Diffusion 1.5, the first blocks", activation=SILU),
        _case("sd_vae", (1, 512, 64, 64), 32, "its autoencoder, middle block", activation=SILU, eps=1e-6),
        _case("attention", (2, 640, 32, 32), 32, "Stable Diffusion 1.5, before attention", eps=1e-6),
        _case("video", (1, 128, 4, 16, 16), 32, "CogVideoX, its autoencoder", activation=SILU, eps=1e-6),
        Case("no_weight", {"x": (2, 8, 5, 6), "groups": 2, "activation": SILU}),
    ],
    tolerance=TOLERANCE,
    gradient_tolerance=GRADIENT_TOLERANCE,
    error_bound=error_bounds.error_bound,
    gradient_error_bound=error_bounds.gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=lambda batch, length: {
        "x": (batch, 6, length),
        "groups": 2,
        "weight": (6,),
        "bias": (6,),
        "activation": SILU,
    },
    large=[
        _case("sd_vae_attention", (1, 512, 4096), 32, eps=1e-6),
        _case("sd_unet", (2, 320, 64, 64), 32, activation=SILU),
        _case("sd_vae", (1, 128, 256, 256), 32, activation=SILU),
    ],
    rows=[
        Rows(
            "samples",
            lambda count: {"x": (count, 6, 11, 7), "groups": 3, "weight": (6,), "bias": (6,), "activation": SILU},
            {"x": 0, "y": 0},
        )
    ],
    peers="""
| peer | activation | channels-last |
|---|---|---|
| torch, `group_norm` | none | kept on a CPU, copied elsewhere |
| apex, `GroupNorm` | silu | needed |
| torch_npu, `npu_group_norm_silu` | silu | copied |
| fusedops | none or silu | kept |
""",
    sharded=(
        "dim 0, the samples",
        "`weight`, `bias` replicated",
        "of x: as x; of weight and bias with a sharded x: `Partial`",
    ),
)
