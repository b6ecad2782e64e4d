"""The gradients of ``is_grads_batched=True``, which torch.autograd.functional.jacobian(vectorize=True) asks for too.

torch passes the gradients as tensors of its first batching, which has no rule for many functions and no fallback for
views. The batch is taken out of them, and torch.func.vmap computes the op's reference for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from fusedops._contract.op import Op

_torch: Any = torch  # whose stubs lack the functions of the first batching


def run_batched(op: Op, args: Sequence[Any]) -> Any:
    """Compute an op's backward by its reference for batched gradients. Returns what the reference does, batched."""
    level = _torch._C._vmapmode_increment_nesting() - 1
    _torch._C._vmapmode_decrement_nesting()
    given, dims = list(args), cast("list[int | None]", [None] * len(args))
    for at, arg in enumerate(args):
        if isinstance(arg, Tensor) and is_legacy_batchedtensor(arg):
            # the size is that of what is batched; it counts for tensors without a batch of this level alone
            given[at], dims[at] = _torch._remove_batch_dim(arg, level, 1, 0), 0
    tensors = [at for at, arg in enumerate(given) if isinstance(arg, Tensor)]
    absent: list[bool] = []

    def compute(*values: Tensor) -> tuple[Tensor, ...]:
        changed = list(given)
        for at, value in zip(tensors, values):
            changed[at] = value
        results = op.backward(*changed)
        each = (results,) if isinstance(results, Tensor) else tuple(results)
        absent[:] = [gradient is None for gradient in each]
        return tuple(gradient for gradient in each if gradient is not None)

    computed = torch.func.vmap(compute, tuple(dims[at] for at in tensors))(*(given[at] for at in tensors))
    batched = iter([_torch._add_batch_dim(gradient, 0, level) for gradient in computed])
    results = tuple(None if no else next(batched) for no in absent)
    return results if len(op.differentiable) > 1 else results[0]
