"""The eager backend: plain torch, any device, any shape. Fast on a CPU."""

import fusedops
from fusedops_eager import (
    attention,
    bias,
    convolution,
    experts,
    gated,
    linear_attention,
    losses,
    norms,
    quantized,
    rotary,
    routing,
    softmax,
)

_FAMILIES = (
    attention,
    bias,
    convolution,
    experts,
    gated,
    linear_attention,
    losses,
    norms,
    quantized,
    rotary,
    routing,
    softmax,
)


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="eager",
        device_types=("*",),
        priority=0,
        kernels=tuple(kernel for family in _FAMILIES for kernel in family.KERNELS),
        aliases=("torch",),
        needs="torch",
    )
