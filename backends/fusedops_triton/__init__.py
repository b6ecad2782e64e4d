"""The Triton backend: NVIDIA and AMD GPUs, and CPU tensors under TRITON_INTERPRET=1 for tests and debugging.

Importing this package does not import triton: ``kernels.py`` names the functions, and the first call imports them.
"""

from __future__ import annotations

import os
from typing import Any

import fusedops

_GIB = 2**30
_CHIPS = (
    fusedops.DeviceSpec("cuda", "NVIDIA A100", (8, 0), 80 * _GIB),
    fusedops.DeviceSpec("cuda", "NVIDIA H100", (9, 0), 80 * _GIB),
    fusedops.DeviceSpec("cuda", "NVIDIA H200", (9, 0), 141 * _GIB),
    fusedops.DeviceSpec("cuda", "NVIDIA B200", (10, 0), 180 * _GIB),
)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _release(module: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


def _probe() -> fusedops.Unavailable | None:
    import torch

    # first: without a GPU, triton would be installed in vain
    if not torch.cuda.is_available() and not _interpreted():
        return fusedops.Unavailable(
            "torch.cuda.is_available() is False",
            "install a CUDA or ROCm build of torch on a machine with a GPU, or set TRITON_INTERPRET=1 to run on a CPU",
        )
    try:
        import triton
    except Exception as error:  # a broken installation can raise other errors than ImportError
        return fusedops.Unavailable(
            f"import triton raised {type(error).__name__}: {error}", "pip install 'fusedops[triton]'"
        )
    if _interpreted() and _release(triton) < (3, 7):
        import numpy

        if _release(numpy) >= (2, 4):  # triton-lang/triton#9171
            return fusedops.Unavailable(
                f"the interpreter of Triton {triton.__version__} cannot loop with NumPy {numpy.__version__}",
                "pip install 'numpy<2.4', or 'triton>=3.7'",
            )
    return None


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    interpreted = _interpreted()
    return fusedops.Backend(
        name="triton",
        device_types=("cuda", "cpu") if interpreted else ("cuda",),
        # the interpreter is thousands of times slower than eager, so it is selected only if a policy names it
        priority=-100 if interpreted else 100,
        kernels=fusedops.kernels_of("fusedops_triton.kernels:KERNELS"),
        probe=_probe,
        needs="triton and an NVIDIA or AMD GPU",
        packages=("triton",),
        tools=("nvidia-smi", "rocm-smi"),
        chips=_CHIPS,
    )
