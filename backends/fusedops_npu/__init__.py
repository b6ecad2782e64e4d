"""The Ascend backend: kernels of torch_npu for ``npu`` tensors. Importing this package does not import torch_npu."""

from __future__ import annotations

import re
from importlib import metadata

import torch

import fusedops

_FAMILIES = {  # the ops by folder: each has a module of its name there
    "attention": ("attention", "varlen_attention"),
    "bias": ("bias_gelu",),
    "experts": ("experts", "grouped_matmul"),
    "gated": ("geglu", "swiglu"),
    "group_norm": ("group_norm",),
    "linear_attention": ("linear_attention",),
    "losses": ("cross_entropy",),
    "norms": ("add_rms_norm", "rms_norm"),
    "rotary": ("rotary_embedding",),
    "routing": ("top_k_routing",),
    "softmax": ("scaled_masked_softmax",),
}

_GIB = 2**30
_CHIPS = (
    fusedops.DeviceSpec("npu", "Ascend A2", memory=64 * _GIB),
    fusedops.DeviceSpec("npu", "Ascend A3", memory=64 * _GIB),
    # op-plugin 517f2e7d: 34 of the pages of its 162 functions name this chip; of the functions of these kernels, those
    # below. A page without the name need not mean that the function does not run.
    fusedops.DeviceSpec(
        "npu",
        "Ascend 950",
        documented=(
            "torch_npu.npu_cross_entropy_loss",
            "torch_npu.npu_fusion_attention",
            "torch_npu.npu_scaled_masked_softmax",
        ),
    ),
)


def _probe() -> fusedops.Unavailable | None:
    # find_spec is not enough: without CANN, or with a CUDA build of torch, the import itself raises. So import it and
    # report the error.
    try:
        import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports,reportUnusedImport]
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            return fusedops.Unavailable(
                "torch_npu is not installed", "pip install 'fusedops[npu]' on a machine with CANN"
            )
        return _diagnose(error)
    except Exception as error:
        return _diagnose(error)
    if not torch.npu.is_available():  # pyright: ignore[reportUnknownMemberType,reportAttributeAccessIssue]
        return fusedops.Unavailable(
            "torch_npu is installed, but torch.npu.is_available() is False: it finds no device",
            "check the driver and the devices with `npu-smi info`, check ASCEND_RT_VISIBLE_DEVICES, and check that "
            "CANN's set_env.sh was sourced",
        )
    return None


def _diagnose(error: Exception) -> fusedops.Unavailable:
    """Return the known cause of a failed import of torch_npu, with its fix."""
    raised = f"import torch_npu raised {type(error).__name__}: {error}"
    built_for, installed = _release(_version()), _release(torch.__version__)
    if built_for and built_for != installed:
        return fusedops.Unavailable(
            f"torch_npu {_version()} is for torch {built_for}, and this is torch {torch.__version__}: {raised}",
            f"install torch {built_for}, or the torch_npu for torch {installed}: version {installed}*",
        )
    if torch.version.cuda is not None:
        return fusedops.Unavailable(
            f"torch_npu is installed beside a CUDA build of torch, {torch.__version__}: {raised}",
            f"install the CPU build of torch {installed}, which torch_npu is built against",
        )
    if isinstance(error, ImportError) and "cannot open shared object file" in str(error):
        library = str(error).partition(":")[0]
        return fusedops.Unavailable(
            f"torch_npu is installed, but CANN's {library} is not found: {raised}",
            "install CANN (toolkit and kernels), and source its set_env.sh in this shell",
        )
    return fusedops.Unavailable(
        raised, "source CANN's set_env.sh, and install the torch_npu version that matches this torch"
    )


def _version() -> str:
    try:
        return metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> str:
    """Return the release part of a version: ``2.7.1`` for ``2.7.1.post4`` and for ``2.7.1+cpu``."""
    match = re.match(r"\d+\.\d+\.\d+", version)
    return match[0] if match else ""


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """Return the description of this backend; fusedops calls this hook."""
    return fusedops.Backend(
        name="npu",
        device_types=("npu",),
        priority=100,
        kernels=fusedops.kernels_of(
            **{op: f"fusedops_npu.{family}.{op}" for family, ops in _FAMILIES.items() for op in ops}
        ),
        probe=_probe,
        needs="torch_npu, CANN and an Ascend device",
        packages=("torch-npu",),
        tools=("npu-smi",),
        chips=_CHIPS,
    )
