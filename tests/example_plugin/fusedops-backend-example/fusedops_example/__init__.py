"""The backend: its name, its kernels, and the check that it can run on this machine."""

import os
import platform

import fusedops
from fusedops_example.softmax import scaled_masked_softmax, scaled_masked_softmax_backward


def probe() -> fusedops.Unavailable | None:
    """Return None, or why the backend cannot run here. Import a vendor's library here; it is called once."""
    if os.environ.get("FUSEDOPS_EXAMPLE") == "off":
        return fusedops.Unavailable("FUSEDOPS_EXAMPLE is off", "unset FUSEDOPS_EXAMPLE")
    if platform.python_implementation() != "CPython":
        return fusedops.Unavailable("this Python is not CPython", "run it on CPython")
    return None


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="example",
        device_types=("cpu",),
        priority=-10,  # after eager, which has 0: it serves calls whose policy names it. A device's own backend has 100
        kernels=(scaled_masked_softmax, scaled_masked_softmax_backward),
        probe=probe,
        needs="CPython",
        variables=(("FUSEDOPS_EXAMPLE", "off makes the backend unavailable."),),
        fusedops_api=2,
    )
