"""The launches of linear_attention that ``triton_aot.py`` compiles."""

from __future__ import annotations

from typing import Any

import torch


def launch_linear_attention(case: dict[str, Any]) -> None:
    """Make the launches of a case. op: "linear_attention", or with " backward"; shape (B, S, Hk, Hv, Dk, Dv), dtype,
    and maybe plain (no decay, no beta, no state), beta (False: none), sequences (N packed ones).
    """
    from fusedops_triton.linear_attention._linear_attention import linear_attention_forward
    from fusedops_triton.linear_attention._linear_attention_backward import linear_attention_gradients
    from fusedops_triton.linear_attention._linear_attention_parts import call_of

    (batch, positions, key_heads, heads, size_k, size_v), dtype = case["shape"], getattr(torch, case["dtype"])
    count = case.get("sequences", batch)

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    q, v = empty(batch, positions, key_heads, size_k), empty(batch, positions, heads, size_v)
    state = empty(count, heads, size_k, size_v, of=torch.float32)
    decay, beta = empty(batch, positions, heads, of=torch.float32), empty(batch, positions, heads)
    beta = beta if case.get("beta", True) else None
    bounds = empty(count + 1, of=torch.int32) if "sequences" in case else None
    if case.get("plain"):
        call = call_of(q, q, v, None, None, None, False, None, bounds)
    else:
        call = call_of(q, q, v, decay, beta, None, True, state, bounds)
    if case["op"].endswith("backward"):
        linear_attention_gradients(call, v, state, (True,) * 6)
    else:
        linear_attention_forward(call)
