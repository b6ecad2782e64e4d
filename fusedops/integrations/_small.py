"""Calls so small that an op takes longer than torch's function: they are left to torch.

An op's call looks up its kernel in Python, and the node of its gradient is Python too. Where torch has one native
function for the same, as for LayerNorm and attention, that costs more than a kernel gains on small tensors. Measured on
a CPU alone: on other devices every call is the op's. So it is where a block, ``set_policy`` or the environment chooses
a backend, which torch's function would not honour.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops._dispatch.selection.stats import count_of_others
from fusedops._policy import context
from fusedops._report.event import Refusal
from fusedops._report.reason import Reason, ReasonCode
from fusedops._torch import TENSOR_TYPES, is_traced


class Least(NamedTuple):
    """The sizes from which an op's call takes less time than torch's function, and what they count."""

    with_gradient: int
    without: int
    of: str


#: With LayerNorm and attention left to torch, a training step of models of 4 layers took 0.88 to 0.95 of the time where
#: LayerNorm had 576 to 8,192 elements, and 0.99 to 1.03 where it had 16,384; torch's attention, forward and backward,
#: took 0.5 to 1.1 of the op's time below its number, and 0.8 to 2.1 above. Without a gradient the op took 0.5 to 0.8 of
#: torch's time for one query of 4 to 9 heads of 64; of the models of the tests, of width 32, whose keys grow with each
#: token, torch's takes less. (AMD EPYC with AVX-512, 1 and 2 threads, torch 2.13.)
LEAST = {
    "layer_norm": Least(16_384, 16_384, "elements"),
    "attention": Least(131_072, 4_096, "products of queries and keys"),
}


def is_left_to_torch(op: str, tensor: Tensor, size: int) -> bool:
    """Return True, and count the call, where torch's function is to compute a call of a size.

    >>> import torch, fusedops
    >>> is_left_to_torch("layer_norm", torch.zeros(2, 4), 8)
    True
    >>> with fusedops.use("eager"):
    ...     is_left_to_torch("layer_norm", torch.zeros(2, 4), 8)
    False
    """
    if is_traced():  # first: a comparison of a size would be a guard of a compiled model
        return False
    sizes = LEAST[op]
    least = sizes.with_gradient if tensor.requires_grad and torch.is_grad_enabled() else sizes.without
    if (
        size >= least
        or tensor.dtype is not torch.float32
        or type(tensor) not in TENSOR_TYPES
        or not tensor.is_cpu
        or context.frame.get() is not None
        or (context.process or context.process_policy()).policy.sources
    ):
        return False
    next(_calls(op, least))
    return True


@cache
def _calls(op: str, least: int) -> Iterator[int]:
    given = f"fewer than {least:,} {LEAST[op].of} on a CPU"
    fix = "choose a backend, as with FUSEDOPS_BACKEND=cpu, where its kernel is to compute them too"
    reason = Reason(ReasonCode.SIZE, given, "more", fix, f"{given}, where torch's function takes less time")
    return count_of_others(op, "torch", Refusal("fusedops", given, reason))
