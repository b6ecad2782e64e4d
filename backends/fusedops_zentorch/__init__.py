"""The zentorch backend: kernels of AMD's library zentorch for x86-64 processors with AVX-512, where it is installed.

Importing this package does not import zentorch. The probe loads its compiled library, and not its Python package, whose
import takes two seconds, imports torch's compiler and registers lowerings in it.
"""

from __future__ import annotations

import fusedops
from fusedops_zentorch import _library

_OPS = ("add_rms_norm", "attention", "gated_rms_norm", "linear_attention", "rms_norm")


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="zentorch",
        device_types=("cpu",),
        # after cpu, which is faster for most norms; before sdpa, whose attention takes longer in bfloat16
        priority=7,
        kernels=fusedops.kernels_of(**{op: f"fusedops_zentorch.{op}" for op in _OPS}),
        probe=_library.unavailable,
        needs="zentorch of this torch's release, and an x86-64 processor with AVX-512",
        packages=("zentorch",),
        optional=True,  # other backends serve the calls with a mask or in float16, as any program expects
        fusedops_api=2,
    )
