"""The backend: what it is called, what it serves, and whether it can run here."""

import platform

import fusedops
from fusedops_example.softmax import scaled_masked_softmax, scaled_masked_softmax_backward


def probe() -> fusedops.Unavailable | None:
    """Whether this machine can run it: the place to import a vendor's library. Called once, when first needed."""
    if platform.python_implementation() != "CPython":
        return fusedops.Unavailable("this Python is not CPython", "run it on CPython")
    return None


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """The hook by which fusedops asks for the backend."""
    return fusedops.Backend(
        name="example",
        device_types=("cpu",),
        priority=-10,  # after eager's 0: it serves those who name it. A backend for a device of its own takes 100
        kernels=(scaled_masked_softmax, scaled_masked_softmax_backward),
        probe=probe,
        needs="CPython",
        fusedops_api=">=0.1,<0.2",
    )
