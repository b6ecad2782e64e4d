"""The kernels, each with its constraints."""

import torch
from torch import Tensor

from fusedops import Deviation, kernel, ops
from fusedops.constraints import Dim, DType
from fusedops_example.constraints import PowerOfTwo


@kernel(
    ops.scaled_masked_softmax,
    DType("x", torch.float32, torch.float64),
    Dim("x", (-1,), at_most=1024),
    PowerOfTwo("scale"),
    source="plain torch, masked as vendors' kernels do it",
    deviations=(
        Deviation("finite-fill", "masked scores become -10000, so a row of scores far below that comes out as 0"),
    ),
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute softmax of ``scale * x`` where not masked."""
    masked = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if mask is not None:
        masked |= mask.bool()
    if causal:
        masked |= torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    y = torch.softmax((x * scale).masked_fill(masked, -10000.0), dim=-1)
    # corrected to the contract: 0 where masked. Without this line a fully masked row is uniform
    return y.masked_fill(masked, 0.0).contiguous()


@kernel(ops.scaled_masked_softmax, Dim("y", (-1,), at_most=1024), direction="backward", source="plain torch")
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of x from the output y of forward."""
    wide = torch.promote_types(y.dtype, torch.float32)  # sums of float16 are taken in float32
    g, p = grad.to(wide), y.to(wide)
    return ((g - (g * p).sum(-1, keepdim=True)) * p * scale).to(y.dtype).contiguous()
