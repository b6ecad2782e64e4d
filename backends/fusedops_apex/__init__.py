"""The apex backend: RMSNorm of NVIDIA's apex, where its CUDA extension is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops import ops
from fusedops.constraints import DType, Present, SameDType


def _unavailable() -> fusedops.Unavailable | None:
    if importlib.util.find_spec("fused_layer_norm_cuda") is None:
        return fusedops.Unavailable(
            "the extension fused_layer_norm_cuda is not installed", "build apex with --cuda_ext"
        )
    return None


@fusedops.kernel(
    ops.rms_norm,
    DType("x", torch.float16, torch.bfloat16, torch.float32),
    Present("weight"),
    SameDType("weight", "x"),
    source="apex, csrc/layer_norm_cuda.cpp, rms_forward_affine",
)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor]:
    """Compute the op, with the offset in the weight."""
    extension: Any = importlib.import_module("fused_layer_norm_cuda")
    y, rstd = extension.rms_forward_affine(x.contiguous(), x.shape[-1:], weight + offset, eps)
    return y, rstd.view(x.shape[:-1])


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="apex",
        device_types=("cuda",),
        priority=80,
        kernels=(rms_norm,),
        probe=_unavailable,
        needs="apex with its CUDA extensions, and an NVIDIA GPU",
        packages=("apex",),
    )
