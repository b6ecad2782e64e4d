"""The products around the logits of a linear layer, of which a chunk of rows exists at a time.

Between the products a function of the library turns a chunk of logits into its own gradient. The products are the
library's in float32: torch's matmul packs a weight once for each thread, and 192 rows are few for that. A row of such a
product has the same bits whatever the other rows are. Where the processor multiplies bfloat16, products of bfloat16 are
torch's, which promise nothing: a policy that asks for such rows gets those in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.dtypes import no_autocast
from fusedops.ops.losses.formulas import Gradients, Wanted, rows_of_chunk
from fusedops_cpu._calls import LibraryCall, results_of
from fusedops_cpu._library import DTYPE_CODES, dense, library

# Rows of a chunk, at least. Each chunk packs the whole weight, and reads and writes its whole gradient: the products of
# rows of 512 and 32,000 classes took 1.01 times the time in chunks of 192 as in chunks of 256 (AMD EPYC, 2 threads).
LEAST_ROWS = 192
_BLOCK = 1024 * 1024  # elements of a block of the gradient of weight, which stays in the caches until it is added
_in_float32 = ContextVar("in_float32", default=False)


class Rows(NamedTuple):
    """A chunk of rows.

    Attributes:
        at: where they are, a slice or the numbers of the rows.
        target: their targets, contiguous.
        logits: (n, V), contiguous, float32 or the dtype of x; without the bias.
    """

    at: slice | Tensor
    target: Tensor
    logits: Tensor


def through_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    chunk: int | None,
    wanted: Wanted,
    between: Callable[[Rows], None],
    rounds: bool = True,
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
        rounds: True where the logits of bfloat16 may be rounded to it.
    """
    classes, size = weight.shape
    kept = target != ignore_index
    places = None if bool(kept.all()) else kept.nonzero().view(-1)
    n_rows = target.numel() if places is None else places.numel()
    with no_autocast("cpu"):
        product = _product(weight) if rounds else _Float32Product(weight)
        dx = (torch.empty_like if places is None else torch.zeros_like)(x, memory_format=torch.contiguous_format)
        dx = dx if wanted.x else None
        dweight = x.new_empty(weight.shape, dtype=torch.float32) if wanted.weight else None
        dbias = x.new_zeros(classes, dtype=torch.float32) if wanted.bias else None
        rows = rows_of_chunk(n_rows, size, classes, LEAST_ROWS, chunk)
        memory = x.new_empty((rows, classes), dtype=product.dtype)
        for start in range(0, n_rows, rows):
            at: slice | Tensor = slice(start, min(start + rows, n_rows))
            if places is not None:
                at = places[at]
            x_rows = dense(x[at])
            chunk_rows = Rows(at, target[at], memory[: x_rows.shape[0]])
            product.logits(x_rows, chunk_rows.logits)
            between(chunk_rows)
            if dx is not None:
                dx[at] = product.of_rows(chunk_rows.logits).to(dx.dtype)
            if dweight is not None:
                product.accumulate(chunk_rows.logits, x_rows, dweight, start == 0)
            if dbias is not None:
                dbias += chunk_rows.logits.sum(0, dtype=torch.float32)
    if dweight is not None and n_rows == 0:
        dweight.zero_()
    return Gradients(dx, dweight, dbias)


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with products in float32 alone."""

    def call(*args: Any) -> Any:
        token = _in_float32.set(True)
        try:
            return function(*args)
        finally:
            _in_float32.reset(token)

    return call


@cache
def multiplies_bfloat16() -> bool:
    """Return True where the processor has products of bfloat16, which are then torch's."""
    abilities = torch.cpu.get_capabilities()
    return any(abilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


class _Float32Product:
    """The products of a weight (V, H) in float32, in the compiled library, which reads x and weight in their dtype."""

    dtype = torch.float32

    def __init__(self, weight: Tensor) -> None:
        self._weight = dense(weight) if weight.is_neg() or 1 not in weight.stride() else weight

    def logits(self, x: Tensor, out: Tensor) -> None:
        """Write ``x @ weight.T`` into ``out``."""
        _multiply(x, self._weight, out, False)

    def of_rows(self, gradient: Tensor) -> Tensor:
        """Return ``gradient @ weight``."""
        result = gradient.new_empty((gradient.shape[0], self._weight.shape[1]))
        _multiply(gradient, self._weight.t(), result, False)
        return result

    def accumulate(self, gradient: Tensor, x: Tensor, out: Tensor, first: bool) -> None:
        """Add ``gradient.T @ x`` to ``out``, or write it there the first time."""
        _multiply(gradient.t(), x.t(), out, not first)


def _multiply(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> None:
    """Write ``a @ b.T`` into ``out``, contiguous, or add it; a and b have a dim of stride 1."""
    fields = (a, b, out, *out.shape, a.shape[1], *_operand(a), *_operand(b), adds)
    results_of(LibraryCall(library().linear_product, fields, out))


def _operand(matrix: Tensor) -> tuple[int, int, bool]:
    """Return the code of the dtype, the larger stride, and True where a row is contiguous."""
    by_rows = matrix.stride(1) == 1
    return DTYPE_CODES[matrix.dtype], matrix.stride(0 if by_rows else 1), by_rows


class _BFloat16Product:
    """The same where all is bfloat16: torch sums in float32 and rounds each result; chunks are added in float32."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._step = max(64, _BLOCK // max(weight.shape[1], 1))

    def logits(self, x: Tensor, out: Tensor) -> None:
        """Write ``x @ weight.T`` into ``out``."""
        torch.mm(x, self._weight.t(), out=out)

    def of_rows(self, gradient: Tensor) -> Tensor:
        """Return ``gradient @ weight``."""
        return torch.mm(gradient, self._weight)

    def accumulate(self, gradient: Tensor, x: Tensor, out: Tensor, first: bool) -> None:
        """Add ``gradient.T @ x`` to ``out``, or write it there the first time; a block stays in the caches."""
        for start in range(0, out.shape[0], self._step):
            at = slice(start, start + self._step)
            part = torch.mm(gradient[:, at].t(), x)
            if first:
                out[at] = part
            else:
                out[at] += part


def _product(weight: Tensor) -> _Float32Product | _BFloat16Product:
    """Return the products of a weight on this processor."""
    narrow = weight.dtype is torch.bfloat16 and multiplies_bfloat16() and not _in_float32.get()
    return _BFloat16Product(weight) if narrow else _Float32Product(weight)
