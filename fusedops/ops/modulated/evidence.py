"""Evidence of the modulated norms and gated residuals: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, tolerances
from fusedops.ops.modulated import error_bounds
from fusedops.ops.modulated.arguments import (
    LAYER,
    RMS,
    TANH,
    GatedAddModulatedNormArgs,
    ModulatedNormArgs,
)
from fusedops.ops.norms.error_bounds import GRADIENT_TOLERANCE, TOLERANCE


def _bytes(*tensors: Any) -> int:
    return sum(prod(each.shape) * each.dtype.itemsize for each in tensors if each is not None)


# ------------------------------------------------------------------------------------------------------ modulated_norm


def modulated_norm_unfused(a: ModulatedNormArgs) -> Tensor:
    """Compute the op as models do without fused ops."""
    norm = torch.nn.functional.layer_norm if a.kind == LAYER else torch.nn.functional.rms_norm
    vectors = [None if each is None else each.to(a.x.dtype) for each in (a.weight, a.bias)]
    y = norm(a.x, a.x.shape[-1:], *vectors[: 2 if a.kind == LAYER else 1], eps=a.eps)
    y = y if a.kind == LAYER or vectors[1] is None else y + vectors[1]
    y = y * (a.offset + a.scale)
    return (y if a.shift is None else y + a.shift).to(a.x.dtype)


def modulated_norm_min_bytes(x: Any, scale: Any, shift: Any, weight: Any, bias: Any, *rest: Any) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. The others, and their gradients, are read and written once."""
    small = _bytes(scale, shift, weight, bias)
    return {"forward": 2 * _bytes(x) + small, "backward": 3 * _bytes(x) + _bytes(scale, weight, bias) + small}


def _rows(count: int) -> Mapping[str, Any]:
    return {"x": (2, count, 67), "scale": (2, 1, 67), "shift": (1, 1, 67), "weight": (67,), "bias": (67,)}


def _wide_rows(count: int) -> Mapping[str, Any]:
    return {"x": (1, count, 40011), "scale": (40011,), "shift": (1, 1, 40011), "kind": RMS}


def _samples(count: int) -> Mapping[str, Any]:
    return {"x": (count, 3, 67), "scale": (count, 1, 67), "shift": (count, 3, 67)}


def _modulated(shape: tuple[int, int, int], **options: Any) -> dict[str, Any]:
    of_sample = (shape[0], 1, shape[2])
    return {"x": shape, "scale": of_sample, "shift": of_sample, **options}


_AFFINE = {"weight": (1001,), "bias": (1001,), "eps": 1e-3}
MODULATED_NORM = Evidence(
    formula="(norm(x) * weight + bias) * (offset + scale) + shift",
    cases=[
        Case("ragged", _modulated((3, 5, 1001), **_AFFINE), "no size is a power of two"),
        Case("dit_xl", _modulated((4, 256, 1152)), "DiT-XL/2, 256 tokens"),
        Case("sd3_medium", _modulated((2, 1024, 1536)), "Stable Diffusion 3 medium, 512 x 512"),
        Case("flux", _modulated((1, 4096, 3072)), "FLUX.1, 1024 x 1024"),
        Case("wan_2.2", {**_modulated((1, 512, 3072)), "scale": (1, 512, 3072)}, "Wan 2.2 5B, a scale for each token"),
        Case("z_image", {"x": (1, 1024, 3840), "scale": (1, 1, 3840), "weight": (3840,), "kind": RMS}, "Z-Image"),
        Case("one_row", {"x": (2, 7, 96), "scale": (96,), "shift": (96,), "kind": RMS, "offset": 0.0}),
    ],
    tolerance=TOLERANCE,
    gradient_tolerance=GRADIENT_TOLERANCE,
    error_bound=error_bounds.modulated_norm_error_bound,
    gradient_error_bound=error_bounds.modulated_norm_gradient_error_bound,
    min_bytes=modulated_norm_min_bytes,
    unfused=modulated_norm_unfused,
    sample=lambda batch, length: _modulated((batch, length, 6), weight=(6,), bias=(6,)),
    large=[
        Case("layer", _modulated((2, 1024, 1536))),
        Case("rms", _modulated((1, 4096, 3072), kind=RMS)),
    ],
    sweep=lambda rows, width: _modulated((1, rows, width)),
    rows=[
        Rows("rows", _rows, {"x": 1, "y": 1}),
        Rows("wide rows", _wide_rows, {"x": 1, "y": 1}),
        Rows("samples", _samples, {"x": 0, "scale": 0, "shift": 0, "y": 0}),
    ],
    peers="""
| peer | scale and shift | norm | rounded |
|---|---|---|---|
| diffusers, `AdaLayerNormZero` | (B, H) | LayerNorm | after the norm, the product and the sum |
| diffusers, `WanTransformerBlock` | (B, 1, H) or (B, S, H), float32 | LayerNorm | once |
| Liger, `LigerModulatedRMSNorm` | (B, H) | RMSNorm | by `casting_mode` |
| fusedops | any of these | both | once |
""",
    sharded=(
        "any dim except the last",
        "`scale`, `shift` likewise, replicated where they lack the dim or its size is 1; `weight`, `bias` replicated",
        "of x: as x; of the others as they are, with a sharded x `Partial` where they are replicated",
    ),
)


# ----------------------------------------------------------------------------------------------------------- gated_add


def gated_add_unfused(residual: Tensor, y: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Compute the op as models do without fused ops."""
    return (residual + y * (torch.tanh(gate) if activation == TANH else gate)).to(residual.dtype)


def gated_add_min_bytes(residual: Any, y: Any, gate: Any, activation: str) -> Mapping[Any, int]:
    """Read residual and y, write s; read grad and y, write dy. The gate, and its gradient, move once."""
    backward = _bytes(residual, y, y) + 2 * _bytes(gate)
    return {"forward": _bytes(residual, residual, y, gate), "backward": backward}


def _gated(shape: tuple[int, int, int], **options: Any) -> dict[str, Any]:
    return {"residual": shape, "y": shape, "gate": (shape[0], 1, shape[2]), **options}


GATED_ADD = Evidence(
    formula="residual + y * act(gate)",
    cases=[
        Case("sd3_medium", _gated((2, 1024, 1536)), "Stable Diffusion 3 medium, 512 x 512"),
        Case("flux", _gated((1, 4096, 3072)), "FLUX.1, 1024 x 1024"),
        Case("z_image", _gated((1, 1024, 3840), activation=TANH), "Z-Image"),
        Case("of_tokens", {**_gated((2, 33, 96)), "gate": (2, 33, 1)}, "a gate for each token"),
        Case("ragged", {**_gated((3, 5, 1001), activation=TANH), "gate": (3, 5, 1001)}, "no size is a power of two"),
        Case("one_row", {**_gated((2, 7, 96)), "gate": (96,)}),
    ],
    tolerance=tolerances((1e-6, 1e-6), (1e-14, 1e-12)),
    gradient_tolerance=tolerances((2e-6, 1e-5), (1e-14, 1e-12)),
    error_bound=error_bounds.gated_add_error_bound,
    gradient_error_bound=error_bounds.gated_add_gradient_error_bound,
    min_bytes=gated_add_min_bytes,
    unfused=gated_add_unfused,
    sample=lambda batch, length: _gated((batch, length, 6), activation=TANH),
    large=[
        Case("gate", _gated((2, 1024, 1536))),
        Case("tanh", _gated((1, 4096, 3072), activation=TANH)),
    ],
    sweep=lambda rows, width: _gated((1, rows, width)),
    rows=[
        Rows("rows", lambda count: _gated((1, count, 67), activation=TANH), dict.fromkeys(("residual", "y", "s"), 1)),
        Rows("samples", lambda count: _gated((count, 3, 67)), dict.fromkeys(("residual", "y", "gate", "s"), 0)),
    ],
    sharded=(
        "any dim",
        "`y` as residual; `gate` likewise, replicated where it lacks the dim or its size is 1",
        "of residual and y: as residual; of a replicated gate with a sharded residual: `Partial`",
    ),
)


# -------------------------------------------------------------------------------------------- gated_add_modulated_norm


def gated_add_modulated_norm_unfused(a: GatedAddModulatedNormArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops."""
    s = gated_add_unfused(a.residual, a.y, a.gate, a.activation)
    return modulated_norm_unfused(ModulatedNormArgs(s, *a[3:10])), s


def gated_add_modulated_norm_min_bytes(a: GatedAddModulatedNormArgs) -> Mapping[Any, int]:
    """Read residual and y, write z and s; read s, y and both gradients, write two. The others move once."""
    small, twice = _bytes(a.shift), _bytes(a.gate, a.scale, a.weight, a.bias)
    return {
        "forward": 3 * _bytes(a.residual) + _bytes(a.y) + small + twice,
        "backward": 4 * _bytes(a.residual) + 2 * _bytes(a.y) + small + 2 * twice,
    }


def _both(shape: tuple[int, int, int], **options: Any) -> dict[str, Any]:
    of_sample = (shape[0], 1, shape[2])
    return {**_gated(shape), "scale": of_sample, "shift": of_sample, **options}


def _sum_rows(count: int) -> Mapping[str, Any]:
    return {**_both((1, count, 67), activation=TANH), "weight": (67,)}


_SUM = ("residual", "y", "z", "s")
GATED_ADD_MODULATED_NORM = Evidence(
    formula="s = residual + y * act(gate), (norm(s) * weight + bias) * (offset + scale) + shift",
    cases=[
        Case("ragged", _both((3, 5, 1001), **_AFFINE, activation=TANH), "no size is a power of two"),
        Case("sd3_medium", _both((2, 1024, 1536)), "Stable Diffusion 3 medium, 512 x 512"),
        Case("flux", _both((1, 4096, 3072)), "FLUX.1, 1024 x 1024"),
        Case(
            "z_image",
            {**_gated((1, 1024, 3840), activation=TANH), "scale": (1, 1, 3840), "weight": (3840,), "kind": RMS},
            "Z-Image",
        ),
        Case("of_tokens", {**_both((2, 33, 96)), "gate": (2, 33, 1), "scale": (2, 33, 96), "kind": RMS}),
        Case("one_row", {**_both((2, 7, 96)), "gate": (96,), "scale": (96,), "offset": 0.0}),
    ],
    tolerance=TOLERANCE,
    gradient_tolerance=GRADIENT_TOLERANCE,
    error_bound=error_bounds.gated_add_modulated_norm_error_bound,
    gradient_error_bound=error_bounds.gated_add_modulated_norm_gradient_error_bound,
    min_bytes=gated_add_modulated_norm_min_bytes,
    unfused=gated_add_modulated_norm_unfused,
    sample=lambda batch, length: _both((batch, length, 6), weight=(6,), bias=(6,), activation=TANH),
    large=[
        Case("layer", _both((2, 1024, 1536))),
        Case("rms", _both((1, 4096, 3072), kind=RMS, activation=TANH)),
    ],
    sweep=lambda rows, width: _both((1, rows, width)),
    rows=[
        Rows("rows", _sum_rows, dict.fromkeys(_SUM, 1)),
        Rows("wide rows", lambda count: _both((1, count, 40011), kind=RMS), dict.fromkeys(_SUM, 1)),
        Rows(
            "samples",
            lambda count: _both((count, 3, 67)),
            dict.fromkeys((*_SUM, "gate", "scale", "shift"), 0),
        ),
    ],
    sharded=(
        "any dim except the last",
        "`y` as residual; `gate`, `scale`, `shift` likewise, replicated where they lack the dim or its size is 1; "
        "`weight`, `bias` replicated",
        "of residual and y: as residual; of what is replicated beside a sharded residual: `Partial`; both outputs as "
        "residual",
    ),
)
