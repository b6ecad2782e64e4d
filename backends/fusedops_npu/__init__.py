"""The Ascend backend: ``npu`` tensors, through torch_npu's kernels. Importing this imports no torch_npu."""

from __future__ import annotations

import re
from importlib import metadata

import torch

import fusedops
from fusedops_npu.bias_gelu import bias_gelu, bias_gelu_backward
from fusedops_npu.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_backward


def _probe() -> fusedops.Unavailable | None:
    # find_spec proves nothing: installed without CANN, or beside a CUDA build of torch, the import itself raises; so
    # import it and keep what it said
    try:
        import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports,reportUnusedImport]
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            return fusedops.Unavailable(
                "torch_npu is not installed", "pip install 'fusedops[npu]' on a machine with CANN"
            )
        return _broken(error)
    except Exception as error:
        return _broken(error)
    if not torch.npu.is_available():  # pyright: ignore[reportUnknownMemberType,reportAttributeAccessIssue]
        return fusedops.Unavailable(
            "torch_npu is installed, but torch.npu.is_available() is False: it finds no device",
            "check the driver and the devices with `npu-smi info`, ASCEND_RT_VISIBLE_DEVICES, and that CANN's "
            "set_env.sh was sourced",
        )
    return None


def _broken(error: Exception) -> fusedops.Unavailable:
    """Which of the known ways of being broken it is: each has a cure of its own."""
    raised = f"import torch_npu raised {type(error).__name__}: {error}"
    built_for, here = _release(_version()), _release(torch.__version__)
    if built_for and built_for != here:
        return fusedops.Unavailable(
            f"torch_npu {_version()} is for torch {built_for}, and this is torch {torch.__version__}: {raised}",
            f"install torch {built_for}, or the torch_npu for torch {here}: one that begins with {here}",
        )
    if torch.version.cuda is not None:
        return fusedops.Unavailable(
            f"torch_npu is installed beside a CUDA build of torch, {torch.__version__}: {raised}",
            f"install the CPU build of torch {here}, which torch_npu is built against",
        )
    if isinstance(error, ImportError) and "cannot open shared object file" in str(error):
        library = str(error).partition(":")[0]
        return fusedops.Unavailable(
            f"torch_npu is installed, but CANN's {library} is not found: {raised}",
            "install CANN (toolkit and kernels), and source its set_env.sh in this shell",
        )
    return fusedops.Unavailable(raised, "source CANN's set_env.sh, and install the torch_npu that matches this torch")


def _version() -> str:
    try:
        return metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> str:
    """``2.7.1`` of ``2.7.1.post4`` and of ``2.7.1+cpu``."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else ""


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    """The hook by which fusedops finds this backend."""
    return fusedops.Backend(
        name="npu",
        device_types=("npu",),
        priority=100,
        kernels=(scaled_masked_softmax, scaled_masked_softmax_backward, bias_gelu, bias_gelu_backward),
        probe=_probe,
        needs="torch_npu, CANN and an Ascend device",
        packages=("torch-npu",),
        tools=("npu-smi",),
    )
