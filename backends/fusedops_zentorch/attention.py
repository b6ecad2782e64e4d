"""attention by zentorch in bfloat16, with its lse.

zentorch writes lse only where one of its tensors requires a gradient. Without one it returns memory that it has not
written, and takes 10 to 20 % less time. The op's lse may be read by a backward that runs later, so the function is
always called with a query that requires a gradient. In float32 that takes as long as torch's own kernel; such calls are
refused, and so are heads of less than 32, where it is slower in bfloat16 too. Corrections and limits:

- A mask is refused: the lse of a fully masked row is finite.
- A scale of 0 is taken for none given, and a negative one with a causal mask gives NaN.
- A tensor without elements raises, and so does one whose last dim has another stride than 1.
- Of an expanded tensor, whose rows overlap, no product is computed, with a line on stderr alone: it is copied.

Source: zentorch 2.13.0.2, ``zentorch_sdpa``; the limits were found by running it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops import Deviation, kernel, ops
from fusedops.constraints import Alignment, Dim, DType, Finite, Present, SameDims
from fusedops.ops.attention.arguments import AttentionArgs
from fusedops_zentorch._library import NOT_PROMISED, function
from fusedops_zentorch._norm import NO_BACKWARD


@kernel(
    ops.attention,
    DType("q", torch.bfloat16),
    Present("mask", False, fix="pass what it masks by causal where that can, else leave it to another backend"),
    Present("window", False, fix="leave it to another backend"),
    SameDims("v", "q", (3,)),
    Alignment("causal", "q", "k", "upper_left"),
    Finite("scale", 1e-30, optional=True),
    source="zentorch::zentorch_sdpa",
    deviations=(
        NO_BACKWARD,
        Deviation("nonfinite-under-mask", "NaN or inf at a key that causal hides may reach rows before it"),
    ),
    rows_independent=NOT_PROMISED,
    for_speed=(Dim("q", (3,), at_least=32),),
    extra_error=lambda *_: (None, 2e-4),  # of lse: the exp is shorter than that of float32
)
def attention(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in bfloat16 for one head size, without a mask, the diagonal at the upper left."""
    if not (a.q.numel() and a.k.numel()):
        return torch.zeros_like(a.q), a.q.new_full(a.q.shape[:3], -math.inf, dtype=torch.float32)
    with torch.enable_grad():
        query = _rows(a.q.detach()).requires_grad_()
        out, lse = function("zentorch_sdpa")(query, _rows(a.k), _rows(a.v), 0.0, a.causal != "none", scale=a.scale)
    return out.detach(), lse.detach().contiguous()


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dim has stride 1, and whose rows do not overlap."""
    tensor = tensor.resolve_neg()
    fits = tensor.stride(3) == 1 and tensor.stride(2) >= tensor.shape[3]
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
