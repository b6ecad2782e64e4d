"""The check of inputs: no call writes one, in any way, and none is held after it."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedops._report.direction import Direction
from fusedops.testing._calls import Call, dtype_name, in_dtype, tensors
from fusedops.testing._check_forms import results_of
from fusedops.testing._in_child import ended_by_memory
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial


def inputs(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield one case for each dtype, one in memory that cannot be written, and one whose tensors are dropped after it.

    In a brief run no dtype: every other check of a kernel sees what it writes too.

    Linux ends a process that writes such memory: what a kernel writes and puts back is not seen otherwise.
    """
    for base in subject.bases(direction)[:1]:
        for dtype in () if subject.brief else subject.op.evidence.tolerance:
            call = in_dtype(base, dtype)
            if subject.takes(call, direction):
                yield Trial(dtype_name(dtype), partial(results_of, subject, direction, call))
        if sys.platform == "linux" and subject.device_of_tensors.type == "cpu":
            yield Trial("read-only memory", partial(_check_read_only, subject, direction, base))
        yield Trial("dropped after the call", partial(_check_dropped, subject, direction, base))


# ------------------------------------------------------------------------------------------- memory that is read


def _check_read_only(subject: Subject, direction: Direction, base: Call) -> None:
    args = tuple(tensors(subject.op, base).values())
    writable = subject.plain_call(direction, args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of memory that cannot be written
        read_only = subject.plain_call(direction, args, _mapped)
        if ended_by_memory(writable, read_only):
            raise AssertionError(
                "got a write into the memory of an input, expected none, not even one that is taken back: weights may "
                "be in a file that is mapped read-only"
            )


def _mapped(tensor: Tensor) -> Tensor:
    """Return a copy in memory of a file that cannot be written."""
    if not tensor.numel():
        return tensor
    whole = tensor.detach().contiguous()
    count = whole.numel() * whole.itemsize
    with tempfile.NamedTemporaryFile() as file:
        os.truncate(file.name, count)
        torch.from_file(file.name, shared=True, size=count, dtype=torch.uint8).copy_(whole.view(-1).view(torch.uint8))
        memory = mmap.mmap(file.fileno(), count, prot=mmap.PROT_READ)
    return torch.frombuffer(memory, dtype=whole.dtype).view(whole.shape)


# ------------------------------------------------------------------------------------------------ memory that is held


def _check_dropped(subject: Subject, direction: Direction, base: Call) -> None:
    storages = _storages_of_call(subject, direction, base)
    if _alive(storages):
        gc.collect()
    if alive := _alive(storages):
        raise AssertionError(
            f"got {' and '.join(alive)} of a call held after it, with no other reference to it, expected it freed"
        )


def _alive(storages: dict[str, StorageWeakRef]) -> list[str]:
    return [name for name, storage in storages.items() if not storage.expired()]


def _storages_of_call(subject: Subject, direction: Direction, base: Call) -> dict[str, StorageWeakRef]:
    """Make a call, and return the storages of its arguments and results, which nothing else holds then."""
    args = tuple(tensors(subject.op, base).values())
    names = [name for name, value in subject.given_to(direction, args).items() if isinstance(value, Tensor)]
    given: list[StorageWeakRef] = []

    def copied(tensor: Tensor) -> Tensor:
        own = tensor.clone()
        given.append(StorageWeakRef(own.untyped_storage()))
        return own

    results = subject.plain_call(direction, args, copied)()
    storages = dict(zip(names, given))
    for number, result in enumerate(results):
        if isinstance(result, Tensor):
            storages[f"result {number}"] = StorageWeakRef(result.untyped_storage())
    return storages
