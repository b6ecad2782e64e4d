"""Observations of a run: the kernels that ran, the bytes of tensors, the layout of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from fusedops._dispatch.stats import stats
from fusedops._report.direction import Direction
from fusedops.testing._calls import dtype_name


def kernel_runs() -> Counter[str]:
    """Return how often each backend's kernels have run: a kernel can call an op, and so another backend, itself."""
    runs: Counter[str] = Counter()
    for count in stats().counts:
        runs[_kernel(count.backend, count.op, count.direction)] += count.calls
    return runs


def check_runs(runs: Counter[str], backend: str, op: str, expected_runs: Mapping[Direction, int]) -> None:
    """Raise AssertionError unless these kernels of the backend ran, and no other."""
    needed = Counter({_kernel(backend, op, direction): count for direction, count in expected_runs.items()})
    if runs != needed:
        raise AssertionError(f"got runs of {_listed(runs)}, expected {_listed(needed)} and no other kernel")


def _kernel(backend: str, op: str, direction: str) -> str:
    return f"{backend}'s {op} {direction}"


def _listed(runs: Counter[str]) -> str:
    texts = [name + (f" {count} times" if count > 1 else "") for name, count in sorted(runs.items())]
    return " and ".join(texts) or "no kernel"


def contents(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's elements, as bytes on the CPU."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def check_layout(result: Tensor, what: str, like: Tensor, device: torch.device) -> None:
    """Raise AssertionError unless a result is contiguous, on the device, of the dtype and shape of ``like``."""
    got = (dtype_name(result.dtype), tuple(result.shape), str(result.device), result.is_contiguous())
    needed = (dtype_name(like.dtype), tuple(like.shape), str(device), True)
    if got != needed:
        strides = "contiguous" if got[3] else f"with strides {tuple(result.stride())}"
        raise AssertionError(
            f"got {what} as {got[0]} {got[1]} on {got[2]}, {strides}; expected {needed[0]} {needed[1]} on {needed[2]}, "
            f"contiguous"
        )
