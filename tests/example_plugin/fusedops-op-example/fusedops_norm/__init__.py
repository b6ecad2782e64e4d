"""The plugin: an op, and a backend with kernels for it."""

from torch import Tensor

import fusedops
from fusedops_norm.my_rms_norm import OP as OP
from fusedops_norm.my_rms_norm import backward, reference, rstd
from fusedops_norm.my_rms_norm import my_rms_norm as my_rms_norm


@fusedops.kernel(my_rms_norm, source="plain torch")
def forward_kernel(x: Tensor, weight: Tensor, eps: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y, and rstd where a gradient is wanted."""
    return reference(x, weight, eps).contiguous(), rstd(x, eps).contiguous() if save else None


@fusedops.kernel(my_rms_norm, direction="backward", source="plain torch")
def backward_kernel(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and weight, each where it is wanted."""
    return tuple(None if each is None else each.contiguous() for each in backward(grad, x, weight, rstd, needs))


@fusedops.hookimpl
def fusedops_op() -> fusedops.Op:
    """Return the op; fusedops calls this hook before the next one."""
    return OP


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the backend with the kernels of the op."""
    return fusedops.Backend(
        name="norm",
        device_types=("*",),  # every device, as these kernels are plain torch
        priority=-10,
        kernels=(forward_kernel, backward_kernel),
        fusedops_api=2,
    )
