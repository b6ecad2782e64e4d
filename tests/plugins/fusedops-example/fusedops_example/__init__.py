"""A whole backend for fusedops: one op, forward and backward, on CPU tensors of up to 1024 columns.

Copy this distribution, change the names, and put your vendor's calls into ``softmax.py``.
"""

from __future__ import annotations

import platform

import fusedops
from fusedops_example.softmax import scaled_masked_softmax, scaled_masked_softmax_backward


def _probe() -> fusedops.Unavailable | None:
    """Whether this machine can run it. The place to import a vendor's library: called once, when first needed."""
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
        probe=_probe,
        needs="CPython",
    )
