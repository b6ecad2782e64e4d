"""The gradients of ``is_grads_batched=True``, which torch.autograd.functional.jacobian(vectorize=True) asks for too.

torch passes the gradients as tensors of its first batching, which has no rule for many functions and no fallback for
views. The batch is taken out of them, and torch.func.vmap computes the op's reference for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._torch import add_batch_dim, is_legacy_batchedtensor, legacy_vmap_level, remove_batch_dim


def run_batched(op: Op, args: Sequence[Any]) -> Any:
    """Compute an op's backward by its reference for batched gradients. Returns what the reference does, batched."""
    level = legacy_vmap_level()
    given, dims = list(args), cast("list[int | None]", [None] * len(args))
    for at, arg in enumerate(args):
        if isinstance(arg, Tensor) and is_legacy_batchedtensor(arg):
            # the size is that of what is batched; it counts for tensors without a batch of this level alone
            given[at], dims[at] = remove_batch_dim(arg, level), 0
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
    batched = iter([add_batch_dim(gradient, level) for gradient in computed])
    results = tuple(None if no else next(batched) for no in absent)
    return results if len(op.differentiable) > 1 else results[0]
