"""The cpu backend's kernels without the constraints by which they leave a call to torch, which is faster there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import fusedops
import fusedops_cpu


def of_any_size(kernel: fusedops.Kernel) -> fusedops.Kernel:
    """Return the kernel without its constraints for speed."""
    kept = tuple(each for each in kernel.constraints if each not in kernel.for_speed)
    return replace(kernel, constraints=kept, for_speed=())


@contextmanager
def cpu_of_any_size() -> Iterator[None]:
    """Register a copy of the cpu backend whose kernels take calls of any size, on any processor."""
    backend = fusedops_cpu.fusedops_backend()
    fusedops.register(replace(backend, name="cpu_of_any_size", kernels=tuple(map(of_any_size, backend.kernels))))
    try:
        yield
    finally:
        fusedops.unregister("cpu_of_any_size")
