"""Evidence of causal_conv1d: cases, bytes, the unfused form."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch

from fusedops._contract.evidence import Case, Evidence, Rows
from fusedops.ops.convolution import error_bounds
from fusedops.ops.convolution.arguments import CausalConv1dArgs
from fusedops.ops.convolution.formulas import SILU


def unfused(a: CausalConv1dArgs) -> Any:
    """Compute the op as models do without fused ops; packed sequences one by one."""
    if a.cu_seqlens is not None:
        bounds: list[int] = [int(bound) for bound in a.cu_seqlens]
        states: list[Any] = [None] * len(bounds)
        if a.initial_state is not None:
            states = [*cast("Any", a.initial_state).split(1)]
        parts = [
            unfused(a._replace(x=a.x[..., start:end], initial_state=state, cu_seqlens=None))
            for (start, end), state in zip(pairwise(bounds), states)
        ]
        if not a.return_state:
            return torch.cat(parts, -1)
        return torch.cat([part[0] for part in parts], -1), torch.cat([part[1] for part in parts])
    width = a.weight.shape[1]
    whole = (
        torch.nn.functional.pad(a.x, (width - 1, 0))
        if a.initial_state is None
        else torch.cat((a.initial_state, a.x), -1)
    )
    own = None if a.bias is None else a.bias.to(a.x.dtype)
    y = torch.nn.functional.conv1d(whole, a.weight.to(a.x.dtype)[:, None], own, groups=a.x.shape[1])
    y = torch.nn.functional.silu(y) if a.activation == SILU else y
    return (y, whole[..., a.x.shape[-1] :]) if a.return_state else y


def min_bytes(a: CausalConv1dArgs) -> Mapping[Any, int]:
    """Read x and the small tensors, write y; read grad and x, write dx. The states are W - 1 positions, both times."""
    whole = prod(a.x.shape) * a.x.dtype.itemsize
    small = prod(a.weight.shape) * a.weight.dtype.itemsize
    small = small if a.bias is None else small + a.bias.shape[0] * a.bias.dtype.itemsize
    sequences = a.x.shape[0] if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
    state = sequences * a.x.shape[1] * (a.weight.shape[1] - 1) * a.x.dtype.itemsize
    states = (0 if a.initial_state is None else state) + (state if a.return_state else 0)
    return {"forward": 2 * whole + small + states, "backward": 3 * whole + 2 * small + 2 * states}


def _case(name: str, shape: tuple[int, int, int], width: int, source: str = "", **options: Any) -> Case:
    """Return a case; bias: True; initial_state: True; sequences: the number of packed ones."""
    b, c, _ = shape
    args: dict[str, Any] = {"x": shape, "weight": (c, width)}
    sequences = options.pop("sequences", None)
    if options.pop("bias", False):
        args["bias"] = (c,)
    args["activation"] = options.pop("activation", SILU)
    if options.pop("initial_state", False):
        args["initial_state"] = (sequences or b, c, width - 1)
    if sequences is not None:
        args["cu_seqlens"] = (sequences + 1,)
    return Case(name, {**args, **options}, source)


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    shape = (batch, 6, length)
    return {**_case("", shape, 4, bias=True, initial_state=True).args, "return_state": True}


_STATES = dict.fromkeys(("initial_state", "state"), 0)


def _sequences(count: int) -> Mapping[str, Any]:
    return {**_case("", (count, 9, 21), 4, bias=True, initial_state=True).args, "return_state": True}


def _packed_sequences(count: int) -> Mapping[str, Any]:
    return {**_case("", (1, 9, 6 * count), 4, initial_state=True, sequences=count).args, "return_state": True}


CAUSAL_CONV1D = Evidence(
    formula="act(bias + sum over w of weight[w] * x[s - (W - 1) + w])",
    cases=[
        _case("every_argument", (2, 9, 11), 4, "small", bias=True, initial_state=True, return_state=True),
        _case("packed", (1, 10, 40), 4, "small", bias=True, sequences=7, return_state=True),
        _case("packed_states", (1, 6, 30), 3, "small", initial_state=True, sequences=6, return_state=True),
        _case("qwen_3_next", (1, 8192, 1024), 4, "Qwen3-Next 80B"),
        _case("granite_4", (2, 3328, 512), 4, "Granite 4 tiny, Mamba-2 layers", bias=True),
        _case("lfm_2", (4, 2048, 256), 3, "LFM2 1.2B", activation="none"),
        _case("decode", (4, 4096, 1), 4, "one token", initial_state=True, return_state=True),
        _case("ragged", (3, 37, 301), 8, "no size is a power of two", bias=True, activation="none", return_state=True),
        _case("two_taps", (2, 5, 2), 2, "shorter than most kernels' blocks", bias=True, return_state=True),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.error_bound,
    gradient_error_bound=error_bounds.gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[_case("silu", (2, 4096, 4096), 4), _case("packed", (1, 4096, 8192), 4, sequences=16)],
    sweep=lambda rows, width: {"x": (1, width, rows), "weight": (width, 4), "activation": SILU},
    rows=[
        Rows("sequences", _sequences, {"x": 0, "y": 0, **_STATES}),
        Rows(
            "packed sequences",
            _packed_sequences,
            {"x": 2, "y": 2, **_STATES},
            packed=dict.fromkeys(("x", "y"), "cu_seqlens"),
        ),
    ],
    sharded=(
        "batches and channels",
        "`weight`, `bias` as the channels; `initial_state` as x; `cu_seqlens` replicated",
        "of x and initial_state: as x; of weight and bias: as the channels, with sharded batches `Partial`",
    ),
)
