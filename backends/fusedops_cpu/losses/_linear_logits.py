"""The products around the logits of a linear layer, of which a chunk of rows exists at a time.

Between the products a function of the library turns a chunk of logits, in float32, into its own gradient. The products
are the library's too: torch's matmul packs a weight once for each thread, and 192 rows are few for that. A row of such
a product has the same bits whatever the other rows are. They are products of float32; of tensors of bfloat16, products
of bfloat16 with sums in float32 where the processor has an instruction for them, and then the gradient of the logits is
rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.dtypes import no_autocast
from fusedops.ops.losses.formulas import Gradients, Wanted, rows_of_chunk
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import Field
from fusedops_cpu.linear.products import multiply

# Rows of a chunk, at least. Each chunk packs the whole weight, and reads and writes its whole gradient: the products of
# rows of 512 and 32,000 classes took 1.01 times the time in chunks of 192 as in chunks of 256 (AMD EPYC, 2 threads);
# those of bfloat16 1.05 times (1 thread).
LEAST_ROWS = 192
LEAST_ROWS_OF_BFLOAT16 = 256  # whose logits take less than the sum for the gradient of weight does anyway


class Rows(NamedTuple):
    """A chunk of rows.

    Attributes:
        at: where they are, a slice or the numbers of the rows.
        target: their targets, contiguous.
        logits: (n, V), contiguous, float32; without the bias.
        gradient: (n, V): the memory of their gradient, which replaces them. float32, or bfloat16 in the first half of
            each row.
    """

    at: slice | Tensor
    target: Tensor
    logits: Tensor
    gradient: Tensor

    def fields(self, bias: Tensor | None, softcap: float | None) -> tuple[Field, ...]:
        """Return the fields of ``LogitRows`` in ``src/api.h``, with the bias in float32."""
        code = DTYPE_CODES[self.gradient.dtype]
        return (self.logits, bias, self.target, code, *self.logits.shape, softcap or 0.0)


def multiplies_bfloat16() -> bool:
    """Return True where the processor multiplies bfloat16."""
    return library().multiplies_bfloat16


def through_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    chunk: int | None,
    wanted: Wanted,
    between: Callable[[Rows], None],
) -> Gradients:
    """Compute the logits chunk by chunk, and the gradients from theirs.

    Args:
        x: (N, H).
        weight: (V, H), the dtype of x.
        target: (N,), int64, contiguous. Ignored rows are left out of the products.
        ignore_index: the target of ignored rows.
        chunk: the rows of a chunk, or None.
        wanted: the gradients to compute.
        between: called with each chunk; it replaces the logits by their gradient where any is wanted.
    """
    classes, size = weight.shape
    kept = target != ignore_index
    places = None if bool(kept.all()) else kept.nonzero().view(-1)
    n_rows = target.numel() if places is None else places.numel()
    narrow = weight.dtype is torch.bfloat16 and multiplies_bfloat16()
    if weight.is_neg() or 1 not in weight.stride():
        weight = dense(weight)
    with no_autocast("cpu"):
        dx = (torch.empty_like if places is None else torch.zeros_like)(x, memory_format=torch.contiguous_format)
        dx = dx if wanted.x else None
        dweight = x.new_empty(weight.shape, dtype=torch.float32) if wanted.weight else None
        dbias = x.new_zeros(classes, dtype=torch.float32) if wanted.bias else None
        rows = rows_of_chunk(n_rows, size, classes, LEAST_ROWS_OF_BFLOAT16 if narrow else LEAST_ROWS, chunk)
        memory = x.new_empty((rows, classes), dtype=torch.float32)
        for start in range(0, n_rows, rows):
            at: slice | Tensor = slice(start, min(start + rows, n_rows))
            if places is not None:
                at = places[at]
            x_rows = dense(x[at])
            logits = memory[: x_rows.shape[0]]
            gradient = logits.view(torch.bfloat16)[:, :classes] if narrow else logits
            multiply(x_rows, weight, logits, narrow)
            between(Rows(at, target[at], logits, gradient))
            if dx is not None:
                of_rows = gradient.new_empty(x_rows.shape, dtype=torch.float32)
                multiply(gradient, weight.t(), of_rows, narrow)
                dx[at] = of_rows.to(dx.dtype)
            if dweight is not None:
                multiply(gradient.t(), x_rows.t(), dweight, narrow, adds=start > 0)
            if dbias is not None:
                dbias += gradient.sum(0, dtype=torch.float32)
    if dweight is not None and n_rows == 0:
        dweight.zero_()
    return Gradients(dx, dweight, dbias)
