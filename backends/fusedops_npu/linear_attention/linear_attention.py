"""linear_attention on Ascend: the delta rule of up to 8 positions, which is a step of generation.

    normalize q and k in float32, turn the state to (Dv, Dk), the vendor's function, turn the state back

- The vendor's function writes a state after each position, in place, each in a block of its own: B * S blocks are
  allocated here. The first block of a sequence has the state before it, the last one the state after it.
- The vendor's state is of bfloat16. The one after the last position is within the op's tolerance; an initial state of
  float32, rounded first, would not always be, so it is refused: a caller can round it.
- The decay of a head is the vendor's g, that of each row its gk; both are logarithms. Without beta the op is no delta
  rule, and beta = 1 would still be one: such calls are refused.
- CANN's page bounds q and k by 1, so only calls with ``normalize`` are taken.
- Packed sequences are refused. The vendor takes lengths from 1 to 8, all positions in one of the sequences; the bounds
  stay on the device, which is not waited for, so that a longer or an empty sequence would not be seen.
- More positions are refused too. npu_chunk_gated_delta_rule computes them for decays from -1 to 0 alone: lower ones may
  overflow. Models have lower ones, and a constraint cannot see them without waiting for the device.

The vendor's function is for inference and has no derivative; the op's gradients need the inputs alone, and are eager's.

Source: torch_npu.npu_recurrent_gated_delta_rule, from the page of op-plugin and of CANN's aclnnRecurrentGatedDeltaRule
for Atlas A2 and A3: bfloat16, g and gk float32, up to 256 heads, Dk and Dv up to 512. Its kernel computes the
recurrence in float32. Newer pages of CANN also have a state of float32; that of torch_npu does not.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Dim, DType, Present
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs
from fusedops.ops.linear_attention.formulas import rnorm_of, scale_of
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.linear_attention._delta_limits import Normalized, Unpacked, ValueHeads


def _state_cost(q: Any, k: Any, v: Any, *rest: Any) -> int:
    """Return the bytes of a state in bfloat16 for each position, and of the normalized q and k."""
    return 2 * (prod(v.shape) * q.shape[3] + prod(q.shape) + prod(k.shape))


_STATE = Adaptation(
    "state",
    "the state is turned to (Dv, Dk), one for each position is written, and q and k are normalized",
    _state_cost,
)
_DEVIATIONS = (
    Deviation("no-backward", "the gradients are those of eager"),
    Deviation(
        "unchecked-ranges",
        "CANN documents decays below 0 and a beta between 0 and 1; others are passed on, and its source has the same "
        "formula for them",
    ),
)


@kernel(
    ops.linear_attention,
    DType("q", torch.bfloat16),
    DType("k", torch.bfloat16),
    DType("v", torch.bfloat16),
    DType("beta", torch.bfloat16),
    DType("initial_state", torch.bfloat16),
    DType("decay", torch.float16, torch.bfloat16, torch.float32),
    Dim("q", (1,), at_most=8, fix="use another backend for a prompt: this kernel is for the steps of generation"),
    ValueHeads(),
    Dim("q", (3,), at_most=512),
    Dim("v", (3,), at_most=512),
    Present("beta", fix="use another backend for calls without the delta rule"),
    Normalized("normalize"),
    Unpacked("cu_seqlens"),
    source="torch_npu.npu_recurrent_gated_delta_rule",
    deviations=_DEVIATIONS,
    adapts=(_STATE,),
    rows_independent=NOT_PROMISED,
)
def linear_attention(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute a few positions by the vendor's function, on a new state."""
    assert a.beta is not None  # by a constraint
    batch, positions, heads, columns = a.v.shape
    if 0 in (*a.q.shape, *a.v.shape):
        return a.v.new_zeros(a.v.shape), _wide_state(a.initial_state, (batch, heads, a.q.shape[3], columns), a.v)
    states = a.v.new_empty((batch * positions, heads, columns, a.q.shape[3]))
    if a.initial_state is None:
        states[::positions].zero_()
    else:
        states[::positions].copy_(a.initial_state.mT)
    wide = None if a.decay is None else a.decay.float().flatten(0, 1)
    by_row = wide is not None and wide.dim() == 3
    out = _vendor(
        _normalized(a.q),
        _normalized(a.k),
        a.v.flatten(0, 1),
        states,
        a.beta.flatten(0, 1),
        scale_of(a.q, a.scale),
        positions,
        None if by_row else wide,
        wide if by_row else None,
    )
    after = states[positions - 1 :: positions].mT
    return out.view(a.v.shape), after.to(torch.float32, memory_format=torch.contiguous_format)


def _wide_state(initial_state: Tensor | None, shape: tuple[int, ...], v: Tensor) -> Tensor:
    """Return the state of a call without positions or without elements: the one before it, or zeros."""
    state = v.new_zeros(shape, dtype=torch.float32)
    return state if initial_state is None else state.copy_(initial_state)


def _normalized(x: Tensor) -> Tensor:
    """Return the normalized rows, (B * S, H, D), rounded once."""
    wide = x.flatten(0, 1).float()
    return (wide * rnorm_of(wide)).to(x.dtype)


def _vendor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    beta: Tensor,
    scale: float,
    positions: int,
    g: Tensor | None,
    gk: Tensor | None,
) -> Tensor:
    """Return out, (T, Hv, Dv), of T = B * ``positions``; ``states`` (T, Hv, Dv, Dk) is read and written."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    index = torch.arange(v.shape[0], dtype=torch.int32, device=v.device)
    lengths = torch.full((v.shape[0] // positions,), positions, dtype=torch.int32, device=v.device)
    return vendor.npu_recurrent_gated_delta_rule(
        q,
        k,
        v,
        states,
        beta=beta,
        scale=scale,
        actual_seq_lengths=lengths,
        ssm_state_indices=index,
        num_accepted_tokens=torch.ones_like(lengths),  # the state before a sequence is in its first block
        g=g,
        gk=gk,
    )
