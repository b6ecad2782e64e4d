"""Observations of a run: the kernels that ran, the bytes of tensors, the layout of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._report.direction import Direction
from fusedops._verify.result_form import OWN_KIND, is_dense, odd_kind
from fusedops.testing._calls import dtype_name
from fusedops.testing._failures import RuleError

_Kernel = tuple[str, str, Direction]  # backend, op, direction
_ALONE = "the backend's own kernel serves the call, once, and no other kernel runs"
_OWN_MEMORY = "each result is in memory of its own"
_LAYOUT = "each result is a plain, contiguous tensor of the shape, dtype and device that the op gives it"


def check_runs(runs: Mapping[_Kernel, int], backend: str, op: str, expected_runs: Mapping[Direction, int]) -> None:
    """Raise RuleError unless these kernels of the backend ran, and no other: a kernel can call an op, and so another
    backend, itself.
    """
    needed: dict[_Kernel, int] = {
        (backend, op, direction): count for direction, count in expected_runs.items() if count
    }
    if runs != needed:
        raise RuleError(f"got runs of {_listed(runs)}, expected {_listed(needed)} and no other kernel", _ALONE)


def _listed(runs: Mapping[_Kernel, int]) -> str:
    texts = [
        f"{backend}'s {op} {direction}" + (f" {count} times" if count > 1 else "")
        for (backend, op, direction), count in sorted(runs.items())
    ]
    return " and ".join(texts) or "no kernel"


def memory_of(tensor: Tensor) -> Tensor:
    """Return a copy of the memory that a tensor is in, as bytes on the CPU: its elements, and what is between them."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.detach().untyped_storage()).cpu().clone()


def version_of(tensor: Tensor) -> int:
    """Return how often in-place operations of torch have written a tensor's memory; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


def plain_masks(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with masks of the bytes 0 and 1, for which torch's functions, and references, are right."""
    return tuple(
        arg.view(torch.uint8) != 0 if isinstance(arg, Tensor) and arg.dtype == torch.bool else arg for arg in args
    )


def check_own_memory(results: Mapping[str, Tensor | None], arguments: Mapping[str, Any]) -> None:
    """Raise RuleError where a result shares memory with an argument or with another result."""
    owners = {
        value.untyped_storage().data_ptr(): name for name, value in arguments.items() if isinstance(value, Tensor)
    }
    for name, result in results.items():
        if result is None or result.numel() == 0:
            continue
        owner = owners.setdefault(result.untyped_storage().data_ptr(), name)
        if owner != name:
            raise RuleError(f"got {name} in the memory of {owner}, expected memory of its own", _OWN_MEMORY)


def check_layout(result: Tensor, what: str, like: Tensor, device: torch.device, *, permuted: bool = False) -> None:
    """Raise RuleError unless a result is a contiguous tensor on the device, of the dtype and shape of ``like``.

    With ``permuted``, its dims may have another order in memory.
    """
    if not isinstance(result, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(f"got {what} as {type(result).__name__}, expected a tensor", _LAYOUT)
    kind = "" if result.layout is not torch.strided else odd_kind(result)
    if result.layout is not torch.strided or kind:
        raise RuleError(f"got {what} as {kind or result.layout}, expected {OWN_KIND}", _LAYOUT)
    in_order = is_dense(result) if permuted else result.is_contiguous()
    got = (dtype_name(result.dtype), tuple(result.shape), str(result.device), in_order)
    needed = (dtype_name(like.dtype), tuple(like.shape), str(device), True)
    if got != needed:
        strides = "contiguous" if got[3] else f"with strides {tuple(result.stride())}"
        raise RuleError(
            f"got {what} as {got[0]} {got[1]} on {got[2]}, {strides}; expected {needed[0]} {needed[1]} on {needed[2]}, "
            f"contiguous",
            _LAYOUT,
        )


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True where two results are equal, NaN to NaN."""
    return bool(torch.equal(first, second)) or bool(((first == second) | (first.isnan() & second.isnan())).all())
