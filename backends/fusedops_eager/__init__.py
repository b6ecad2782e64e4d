"""The eager backend: plain torch, any device, any shape, at the speed of torch's own functions."""

import fusedops


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="eager",
        device_types=("*",),
        priority=0,
        kernels=fusedops.kernels_of("fusedops_eager.kernels:KERNELS"),
        aliases=("torch",),
        needs="torch",
    )
