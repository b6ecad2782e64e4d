"""The sdpa backend: torch's fused attention kernel on a CPU, and none of torch's paths that keep the scores."""

import fusedops
from fusedops_sdpa.attention import attention, attention_backward


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="sdpa",
        device_types=("cpu",),
        priority=50,
        kernels=(attention, attention_backward),
        needs="torch",
        packages=("torch",),
        optional=True,  # eager serves the rest on a CPU, in chunks, as any program expects
    )
