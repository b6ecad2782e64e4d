"""The sdpa backend: torch's fused attention kernels on a CPU and on CUDA, never the path that keeps the scores."""

import torch

import fusedops
from fusedops_sdpa import attention as _cpu
from fusedops_sdpa import attention_cuda as _cuda
from fusedops_sdpa import varlen_attention as _packed
from fusedops_sdpa import varlen_attention_cuda as _packed_cuda


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    has_rocm = torch.version.hip is not None  # "cuda" is ROCm there, with other kernels behind the same functions
    own = (
        _cuda.attention,
        _cuda.attention_backward,
        _packed_cuda.varlen_attention,
        _packed_cuda.varlen_attention_backward,
    )
    on_cuda = () if has_rocm else own
    of_cpu = (_cpu.attention, _cpu.attention_backward, _packed.varlen_attention, _packed.varlen_attention_backward)
    return fusedops.Backend(
        name="sdpa",
        device_types=("cpu",) if has_rocm else ("cpu", "cuda"),
        priority=5,  # below cpu, which takes the attention of few queries on a CPU
        kernels=(*of_cpu, *on_cuda),
        needs="torch",
        packages=("torch",),
        optional=True,  # eager serves the rest, in chunks, as any program expects
    )
