"""The chunks of rows of a linear layer whose logits never exist at once: the three matmuls of each, in plain torch.

On a CPU the arithmetic is in float32 (float64 for float64), weights of 16 bits are widened in blocks of rows, and rows
whose target is ignored are left out of the matmuls. Elsewhere the matmuls run in the promoted dtype of x and weight,
and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, no_autocast, promoted
from fusedops.ops.losses.formulas import Gradients, Wanted, rows_of_chunk

# Rows of a chunk, at least. Each chunk reads and writes the whole gradient of the weight, and a matmul of few rows
# reads the whole weight for little work: of 1024 rows of 576 and 49,152 classes, chunks of 171 rows took as long as of
# 256, and of 128 rows 4 % longer (Intel Xeon, one thread).
LEAST_ROWS = 192
_SLAB = 512 * 1024  # logits of a slab per thread: 2 MiB of float32, which stay in the cache between torch's calls
_WIDENED = 1024 * 1024  # elements of a block of a 16-bit weight in float32

#: Takes the logits of some rows (n, V), in the dtype of the arithmetic, their targets (n,), and their place among all
#: rows, a slice or indices; turns the logits into their gradient in place where one is wanted.
Turn = Callable[[Tensor, Tensor, "slice | Tensor"], None]


def in_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    chunk: int | None,
    wanted: Wanted,
    turn: Turn,
) -> Gradients:
    """Compute the logits of each chunk of rows, and from what ``turn`` makes of them the gradients that are wanted.

    Args:
        x: (N, H).
        weight: (V, H).
        target: (N,), int64. On a CPU ``turn`` gets no ignored row, elsewhere with x of 0.
        bias: (V,) or None.
        ignore_index: the target of rows that are left out.
        chunk: the rows of a chunk, or None.
        wanted: the gradients to compute.
        turn: see :data:`Turn`.
    """
    with no_autocast(x.device.type):
        return _in_chunks(x, weight, target, bias, ignore_index, chunk, wanted, turn)


def _in_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    chunk: int | None,
    wanted: Wanted,
    turn: Turn,
) -> Gradients:
    """Compute :func:`in_chunks`."""
    classes, size = weight.shape
    common = promoted(x, weight)
    wide = compute_dtype(common)
    bias = None if bias is None else bias.to(wide)
    on_cpu = x.device.type == "cpu"
    kept = (target != ignore_index).nonzero().view(-1) if on_cpu else None
    n_rows = x.shape[0] if kept is None else kept.numel()
    every_row = n_rows == x.shape[0]
    dx = (x.new_empty if every_row else x.new_zeros)(x.shape) if wanted.x else None
    dweight = x.new_zeros(weight.shape, dtype=wide) if wanted.weight else None
    dbias = x.new_zeros(classes, dtype=wide) if wanted.bias else None
    product = _Product(weight, wide if on_cpu else common)
    rows = rows_of_chunk(n_rows, size, classes, LEAST_ROWS, chunk)
    memory = x.new_empty((rows, classes), dtype=wide)
    starts = range(0, n_rows, rows)
    for start in starts[:1] if x.is_meta else starts:  # no data: the sizes are those of one chunk
        at: slice | Tensor = slice(start, min(start + rows, n_rows))
        if kept is not None and not every_row:
            at = kept[at]
        x_rows, targets = x[at], target[at]
        if not on_cpu:
            x_rows = x_rows.masked_fill((targets == ignore_index)[:, None], 0)
        x_rows = x_rows.to(product.dtype)
        logits = memory[: x_rows.shape[0]]
        product.logits(x_rows, bias, logits)
        turn(logits, targets, at)
        if not any(wanted):
            continue
        gradient = logits.to(product.dtype)
        if dx is not None:
            dx[at] = product.rows(gradient, x.dtype)
        if dweight is not None:
            product.accumulate(gradient, x_rows, dweight)
        if dbias is not None:
            dbias += logits.sum(0)
    return Gradients(dx, dweight, dbias)


def slabs_of(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of a chunk: on a CPU such that each stays in the cache, elsewhere one."""
    n_rows, classes = logits.shape
    step = n_rows
    if logits.device.type == "cpu":
        step = max(1, _SLAB * torch.get_num_threads() // max(classes, 1))
    for start in range(0, n_rows, max(step, 1)):
        yield slice(start, start + step)


class _Product:
    """The three matmuls with a weight (V, H).

    Args:
        weight: any floating dtype.
        dtype: of the matmuls.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.dtype, self._weight = dtype, weight

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows of the weight in the dtype of the matmuls."""
        classes, size = self._weight.shape
        step = classes if self._weight.dtype is self.dtype else max(64, _WIDENED // max(size, 1))
        for start in range(0, classes, max(step, 1)):
            at = slice(start, min(start + step, classes))
            yield at, self._weight[at].to(self.dtype)

    def logits(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write ``x @ weight.T + bias`` into ``out``."""
        for at, block in self._blocks():
            if out.dtype is not self.dtype:
                out[:, at] = torch.mm(x, block.t())
                if bias is not None:
                    out[:, at] += bias[at]
            elif bias is None:
                torch.mm(x, block.t(), out=out[:, at])
            else:
                torch.addmm(bias[at], x, block.t(), out=out[:, at])

    def rows(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``gradient @ weight``."""
        total: Tensor | None = None
        for at, block in self._blocks():
            total = torch.mm(gradient[:, at], block) if total is None else total.addmm_(gradient[:, at], block)
        return gradient.new_zeros((gradient.shape[0], self._weight.shape[1])) if total is None else total.to(dtype)

    def accumulate(self, gradient: Tensor, x: Tensor, out: Tensor) -> None:
        """Add ``gradient.T @ x`` to ``out``."""
        if out.dtype is self.dtype:
            out.addmm_(gradient.t(), x)
        else:
            out += torch.mm(gradient.t(), x)
