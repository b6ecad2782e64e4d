"""The Ascend backend: ``npu`` tensors, through torch_npu's kernels. Importing this imports no torch_npu."""

from __future__ import annotations

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
    import torch

    if not torch.npu.is_available():  # pyright: ignore[reportUnknownMemberType,reportAttributeAccessIssue]
        return fusedops.Unavailable(
            "torch_npu is installed, but torch.npu.is_available() is False",
            "check the driver with `npu-smi info`, and that CANN's set_env.sh was sourced",
        )
    return None


def _broken(error: Exception) -> fusedops.Unavailable:
    return fusedops.Unavailable(
        f"import torch_npu raised {type(error).__name__}: {error}",
        "source CANN's set_env.sh, and install the torch_npu that matches this torch",
    )


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
    )
