"""The flash_attn backend: the kernels of the package flash-attn for NVIDIA GPUs, where it is installed.

Importing this package does not import flash-attn. The probe does.
"""

from __future__ import annotations

import torch

import fusedops


def _probe() -> fusedops.Unavailable | None:
    from fusedops_flash_attn import _package

    installed = _package.installed()
    if installed.two is None and installed.three is None:
        return fusedops.Unavailable(installed.why, installed.fix)
    if torch.version.hip is not None:
        return fusedops.Unavailable(
            "this torch is a ROCm build, and the backend is for the CUDA kernels of flash-attn",
            "leave attention to the other backends, which need no setting",
        )
    if not torch.cuda.is_available():
        return fusedops.Unavailable(
            "torch.cuda.is_available() is False", "install a CUDA build of torch on a machine with an NVIDIA GPU"
        )
    if installed.two is None:
        others = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())} - {(9, 0)}
        if others:
            found = ", ".join(f"{major}.{minor}" for major, minor in sorted(others))
            return fusedops.Unavailable(
                f"of flash-attn only release 3 is installed, whose kernels are for compute capability 9.0, and a GPU "
                f"here has {found}",
                _package.INSTALL,
            )
    return None


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="flash_attn",
        device_types=("cuda",),
        priority=90,
        kernels=fusedops.kernels_of(
            attention="fusedops_flash_attn.attention", varlen_attention="fusedops_flash_attn.varlen_attention"
        ),
        probe=_probe,
        needs="flash-attn 2.7 or 3.0, or newer, and an NVIDIA GPU",
        packages=("flash-attn", "flash_attn_3"),
        optional=True,  # other backends serve the calls with a mask or in float32, as any program expects
        fusedops_api=2,
    )
