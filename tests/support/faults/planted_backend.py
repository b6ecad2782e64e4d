"""A backend with one fault, named by PLANTED, for the tests of the fuzzer: ``--plugin planted_backend``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from loopback import reference_kernels
from torch import Tensor

import fusedops
from fusedops.testing import OPS

OP = OPS["bias_gelu"]


def right(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return OP.reference(x, bias, approximate).contiguous()


def value(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return a wrong number in the last column of rows of 33 and more, where there is a bias."""
    y = right(x, bias, approximate)
    if bias is not None and y.dim() and y.shape[-1] >= 33:
        y[..., -1] += 0.5
    return y


def written(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Write into the memory between the elements of x."""
    y = right(x, bias, approximate)
    x.detach().as_strided((1,), (1,), x.untyped_storage().nbytes() // x.dtype.itemsize - 1).fill_(5) if x.numel() else 0
    return y


def alias(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return x itself where it is zero."""
    return x if not x.any() and x.is_contiguous() and bias is None else right(x, bias, approximate)


def draw(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    torch.rand(1)
    return right(x, bias, approximate)


def strides(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    y = right(x, bias, approximate)
    return y.mT.contiguous().mT if y.dim() > 1 else y


def unsteady(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return other last bits on every call."""
    y = right(x, bias, approximate)
    return y * (1 + torch.finfo(y.dtype).eps * (time.perf_counter_ns() % 3 - 1))


def raises(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    if not x.is_contiguous():
        raise RuntimeError("the kernel needs contiguous rows")
    return right(x, bias, approximate)


def reads(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Read an element of new memory, and multiply it by 0."""
    return right(x, bias, approximate) + 0 * x.new_empty(1)


def ends(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """End the process where x has one dimension, and never return where its rows have 4096 elements."""
    if x.dim() == 1:
        os.abort()
    if x.shape[-1:] == (4096,):
        time.sleep(3600)
    return right(x, bias, approximate)


FAULTS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (right, value, written, alias, draw, strides, unsteady, raises, reads, ends)
}


@fusedops.hookimpl
def fusedops_backend() -> fusedops.Backend:
    run = FAULTS[os.environ.get("PLANTED", "right")]
    return fusedops.Backend("planted", ("cpu",), -70, (fusedops.kernel(OP.name)(run), reference_kernels(OP)[1]))
