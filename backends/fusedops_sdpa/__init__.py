"""The sdpa backend: torch's fused attention kernels on a CPU and on CUDA, never the path that keeps the scores."""

import torch

import fusedops


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    has_rocm = torch.version.hip is not None  # "cuda" is ROCm there, with other kernels behind the same functions
    ends = ("",) if has_rocm else ("", "_cuda")
    return fusedops.Backend(
        name="sdpa",
        device_types=("cpu",) if has_rocm else ("cpu", "cuda"),
        priority=5,  # below cpu, which takes the attention of few queries on a CPU
        kernels=fusedops.kernels_of(
            **{op: [f"fusedops_sdpa.{op}{end}" for end in ends] for op in ("attention", "varlen_attention")}
        ),
        needs="torch",
        packages=("torch",),
        optional=True,  # eager serves the rest, in chunks, as any program expects
    )
