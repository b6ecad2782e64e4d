"""Evidence of linear_attention: cases, bytes, the unfused form, tolerances."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows
from fusedops.ops.linear_attention import error_bounds, formulas
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs


def unfused(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops for few positions: one after another, in float32."""
    return formulas.forward(a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens)


def min_bytes(a: LinearAttentionArgs) -> Mapping[Any, int]:
    """Read q, k, v, decay, beta and the state, write out and a state. Backward: read these with the gradients of out
    and of the state, write a gradient of each.
    """
    inputs = sum(_bytes(each) for each in (a.q, a.k, a.v, a.decay, a.beta, a.initial_state))
    count = a.v.shape[0] if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
    results = _bytes(a.v) + 4 * count * a.v.shape[2] * a.q.shape[3] * a.v.shape[3]
    return {"forward": inputs + results, "backward": 2 * inputs + results}


def _bytes(tensor: Any) -> int:
    return 0 if tensor is None else prod(tensor.shape) * tensor.dtype.itemsize


def _sizes(b: int, s: int, hk: int, hv: int, dk: int, dv: int, kind: str, **options: Any) -> dict[str, Any]:
    """Return a call with what ``kind`` names: "decay" (of heads), "rows" (a decay of each row), "beta", "state"."""
    call: dict[str, Any] = {"q": (b, s, hk, dk), "k": (b, s, hk, dk), "v": (b, s, hv, dv)}
    if "decay" in kind:
        call["decay"] = (b, s, hv)
    if "rows" in kind:
        call["decay"] = (b, s, hv, dk)
    if "beta" in kind:
        call["beta"] = (b, s, hv)
    call |= {"normalize": True} if "normalize" in kind else {}
    packed = options.get("cu_seqlens")
    if "state" in kind:
        call |= {"initial_state": (packed[0] - 1 if packed else b, hv, dk, dv), "return_state": True}
    return {**call, **options}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    return _sizes(batch, length, 4, 8, 3, 2, "decay beta normalize state", scale=0.7)


_DELTA = "decay beta normalize state"
_PEERS = """
| peer | devices | heads of q and k | state | scale | packed sequences |
|---|---|---|---|---|---|
| transformers, `torch_chunk_gated_delta_rule` | any | as those of v | (B, H, Dk, Dv) | 1 / sqrt(Dk) | no |
| flash-linear-attention, `chunk_gated_delta_rule` | CUDA, ROCm | as those of v | (N, H, Dk, Dv) | any | `cu_seqlens` |
| mamba_ssm, `mamba_chunk_scan_combined` | CUDA, ROCm | fewer than those of v | (B, H, Dv, Dk) | 1 | `seq_idx` |
| torch_npu, `npu_recurrent_gated_delta_rule` | Ascend | fewer than those of v | (N, Hv, Dv, Dk) | any | yes |
| fusedops | any | fewer than those of v | (N, Hv, Dk, Dv) | any | `cu_seqlens` |
"""


_POSITIONS = ("q", "k", "v", "decay", "beta", "out")
_STATES = dict.fromkeys(("initial_state", "state"), 0)


def _packed_sequences(count: int) -> Mapping[str, Any]:
    return _sizes(1, 20 * count, 1, 2, 16, 12, _DELTA, cu_seqlens=(count + 1,))


def _sequences(kind: str, count: int) -> Mapping[str, Any]:
    return _sizes(count, 70, 1, 2, 16, 12, kind)


LINEAR_ATTENTION = Evidence(
    formula="scale * H.T @ q, H = exp(decay) * H + outer(k, u), u = v or beta * (v - H.T @ k)",
    cases=[
        Case("every", _sizes(2, 6, 2, 4, 8, 3, _DELTA, scale=0.4), "every argument but packed sequences, small"),
        Case("packed_rows", _sizes(1, 40, 2, 2, 8, 8, "rows", cu_seqlens=(7,)), "packed sequences, GLA"),
        Case("packed", _sizes(1, 90, 1, 2, 8, 8, "decay beta normalize", cu_seqlens=(5,)), "packed sequences"),
        Case("linear", _sizes(2, 66, 2, 2, 8, 8, "state", scale=1.0), "linear attention: no decay"),
        Case("gla", _sizes(1, 70, 2, 2, 8, 12, "rows state"), "GLA: a decay of each row"),
        Case("mamba2", _sizes(1, 66, 1, 4, 16, 8, "decay state", scale=1.0), "Mamba-2: one head of q and k"),
        Case("deltanet", _sizes(1, 67, 2, 2, 16, 8, "beta normalize state"), "DeltaNet"),
        Case("qwen3_next", _sizes(1, 131, 2, 4, 16, 16, _DELTA), "Qwen3-Next: gated DeltaNet, smaller"),
        Case("kda", _sizes(1, 65, 2, 2, 16, 16, "rows beta normalize state"), "Kimi Linear: KDA, smaller"),
        Case("decode", _sizes(3, 1, 2, 4, 32, 32, _DELTA), "one position"),
        Case("ragged", _sizes(2, 33, 1, 3, 13, 5, "beta normalize", scale=0.3), "no size is a power of two"),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.TOLERANCE,
    error_bound=error_bounds.error_bound,
    gradient_error_bound=error_bounds.gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[
        Case("qwen3-next, one position", _sizes(1, 1, 16, 32, 128, 128, _DELTA)),
        Case("qwen3-next, 512 positions", _sizes(1, 512, 16, 32, 128, 128, _DELTA)),
    ],
    sweep=lambda rows, width: _sizes(1, rows, 2, 4, width, width, _DELTA),
    rows=[
        Rows(name, partial(_sequences, kind), {**dict.fromkeys(_POSITIONS, 0), **_STATES})
        for name, kind in (("sequences", _DELTA), ("sequences, a decay of each row", "rows state"))
    ]
    + [
        Rows(
            "packed sequences",
            _packed_sequences,
            {**dict.fromkeys(_POSITIONS, 1), **_STATES},
            packed=dict.fromkeys(_POSITIONS, "cu_seqlens"),
        )
    ],
    peers=_PEERS,
    sharded=(
        "`q`: batch and heads, of packed sequences heads",
        "the others: batch and heads likewise, whole key heads on each rank; `cu_seqlens` replicated",
        "as the tensors",
    ),
)
