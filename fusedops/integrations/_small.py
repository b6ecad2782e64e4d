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
from fusedops._torch import TENSOR_TYPES, is_dynamo_compiling, is_jit_tracing


class Least(NamedTuple):
    """The sizes from which an op's call takes less time than torch's function, and what they count."""

    with_gradient: int
    without: int
    of: str


#: With LayerNorm and attention left to torch, a training step of models of 4 layers took 0.88 to 0.95 of the time where
#: LayerNorm had 576 to 8,192 elements, and 0.99 to 1.03 where it had 16,384; torch's attention, forward and backward,
#: took 0.5 to 1.1 of the op's time below its number, and 0.8 to 2.1 above. Without a gradient the op took 0.5 to 0.8 of
#: torch's time for one query of 4 to 9 heads of 64; in the models of the tests, of width 32 with a growing key cache,
#: torch's is faster. Of one query with a bias and no gradient, two products and the op took 1.3 to 1.0 of the time of
#: torch's attention. (AMD EPYC with AVX-512, 1 and 2 threads, torch 2.13.)
LEAST = {
    "layer_norm": Least(16_384, 16_384, "elements"),
    "attention": Least(131_072, 4_096, "products of queries and keys"),
    "scaled_masked_softmax": Least(0, 16_384, "products of one query and keys with a bias"),
}


def calls_left_to_torch(op: str, tensor: Tensor, size: int) -> Iterator[int] | None:
    """Return the counter of the calls that torch's function is to compute, or None where the op computes this one.

    The caller asks this before it compares a size, which would be a guard of a compiled model, and takes the counter's
    ``next`` for a call that it leaves to torch.

    >>> import torch, fusedops
    >>> calls_left_to_torch("layer_norm", torch.zeros(2, 4), 8) is None
    False
    >>> with fusedops.use("eager"):
    ...     calls_left_to_torch("layer_norm", torch.zeros(2, 4), 8) is None
    True
    """
    # one function: between two layers its code is no longer in the processor's cache, and each call in it would cost.
    # The type first: a tensor of torch.export has another one
    if type(tensor) not in TENSOR_TYPES or is_dynamo_compiling() or is_jit_tracing():
        return None
    sizes = LEAST[op]
    least = sizes.with_gradient if tensor.requires_grad and torch.is_grad_enabled() else sizes.without
    if (
        size >= least
        or tensor.dtype is not torch.float32
        or not tensor.is_cpu
        or context.frame.get() is not None
        or (context.process or context.process_policy()).policy.sources
    ):
        return None
    return _calls(op)


@cache
def _calls(op: str) -> Iterator[int]:
    with_gradient, without, of = LEAST[op]
    given = f"fewer than {with_gradient or without:,} {of}"
    if with_gradient != without:
        given += f", {without:,} without a gradient," if with_gradient else ", without a gradient,"
    given += " on a CPU"
    fix = "choose a backend, as with FUSEDOPS_BACKEND=cpu, where its kernel is to compute them too"
    reason = Reason(ReasonCode.SIZE, given, "more", fix, f"{given}, where torch's function takes less time")
    return count_of_others(op, "torch", Refusal("fusedops", given, reason))
