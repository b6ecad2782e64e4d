"""The eager backend: plain torch, any device, any shape, at the speed of torch's own functions."""

import fusedops
from fusedops_eager.kernels import KERNELS


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="eager",
        device_types=("*",),
        priority=0,
        kernels=KERNELS,
        aliases=("torch",),
        needs="torch",
    )
