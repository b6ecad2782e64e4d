"""The decays of a chunk of linear attention, and products of its rows that they weight.

No exponential has a positive argument where decays are at most 0: each is of a sum of the decays between two positions.
Such a sum is never the difference of two others, so that -inf gives 0 and no NaN. Tensors of a chunk are
(B, G, R, C, ...): key heads, the value heads of each, positions.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

_DIM = -2  # of the positions of rows (..., C, D)


def _after(x: Tensor) -> Tensor:
    """Return the sum from each position to the last, by row."""
    return x.flip(_DIM).cumsum(_DIM).flip(_DIM)


def _strictly_before(x: Tensor) -> Tensor:
    """Return the sum of the positions before each one, by row."""
    return pad(x.cumsum(_DIM)[..., :-1, :], (0, 0, 1, 0))


def _strictly_after(x: Tensor) -> Tensor:
    """Return the sum of the positions after each one, by row."""
    return pad(_after(x)[..., 1:, :], (0, 0, 0, 1))


class NoDecay:
    """The decays of a chunk without any."""

    def started(self, x: Tensor) -> Tensor:
        """Return rows with the decays up to each position."""
        return x

    def ended(self, x: Tensor) -> Tensor:
        """Return rows with the decays after each position."""
        return x

    def passed(self, state: Tensor) -> Tensor:
        """Return a state (..., Dk, Dv) with the decays of the chunk."""
        return state

    def products(self, x: Tensor, k: Tensor, diagonal: int = 0) -> Tensor:
        """Return the products of the rows of x with those of k before them, (..., C, C), and with their own.

        Args:
            x: (..., C, Dk).
            k: (..., C, Dk).
            diagonal: -1 leaves out a row's own.
        """
        return (x @ k.mT).tril(diagonal)

    def products_gradient(self, grad: Tensor, products: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and k, and add to that of the decays. ``grad`` is 0 above the diagonal."""
        return grad @ k, grad.mT @ x

    def add_gradient(self, started: Tensor, ended: Tensor, whole: Tensor) -> None:
        """Add to the gradient of the decays.

        Args:
            started: :meth:`started` rows times their gradient, (..., C, Dk).
            ended: :meth:`ended` rows times theirs.
            whole: the :meth:`passed` state times its gradient, (..., Dk, Dv).
        """

    def gradient(self) -> Tensor | None:
        """Return the gradient of the decays."""
        return None


class HeadDecay(NoDecay):
    """One decay for all rows of a state.

    Args:
        logs: (B, G, R, C).
    """

    def __init__(self, logs: Tensor) -> None:
        size = logs.shape[-1]
        # at (t, s) the sum of the decays after s, up to t
        spans = logs[..., None].expand(*logs.shape, size).tril(-1).cumsum(-2)
        self.weights = spans.exp_().tril_()
        self.start = logs.cumsum(-1).exp_()[..., None]
        self.end = self.weights[..., -1, :, None]
        self.between = torch.zeros_like(self.weights[..., :0, :0])  # products times their gradients
        self.grad = torch.zeros_like(logs)

    def started(self, x: Tensor) -> Tensor:
        return x * self.start

    def ended(self, x: Tensor) -> Tensor:
        return x * self.end

    def passed(self, state: Tensor) -> Tensor:
        return state * self.start[..., -1:, :]

    def products(self, x: Tensor, k: Tensor, diagonal: int = 0) -> Tensor:
        return (x @ k.mT * self.weights).tril_(diagonal)

    def products_gradient(self, grad: Tensor, products: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        of_pairs = grad * products
        self.between = self.between + of_pairs if self.between.numel() else of_pairs
        weighted = (grad * self.weights).tril_()
        return weighted @ k, weighted.mT @ x

    def add_gradient(self, started: Tensor, ended: Tensor, whole: Tensor) -> None:
        rows = _after(started.sum(-1, keepdim=True)) + _strictly_before(ended.sum(-1, keepdim=True))
        self.grad = self.grad + rows[..., 0] + whole.sum((-2, -1))[..., None]

    def gradient(self) -> Tensor:
        """Return the gradient, (B, G, R, C): of each pair, that of the decays between its two positions."""
        if not self.between.numel():
            return self.grad
        before = pad(self.between.cumsum(-1)[..., :-1], (1, 0))  # pairs whose first position is before a decay's
        return self.grad + before.tril_().sum(-2)


class _Half(NamedTuple):
    """Blocks of 2h positions, each with the decays between its two halves, (..., C / 2h, h, Dk).

    Attributes:
        size: h.
        first: exp of the decays after each position of the first half, up to the middle.
        second: exp of the decays from the middle up to each position of the second half.
    """

    size: int
    first: Tensor
    second: Tensor


class RowDecay(NoDecay):
    """A decay for each row of a state. A pair of positions is in two halves of one block of 2, 4, 8 ... positions.

    Args:
        logs: (B, G, R, C, Dk), C a power of two.
    """

    def __init__(self, logs: Tensor) -> None:
        self.halves: list[_Half] = []
        size = 1
        while size < logs.shape[_DIM]:
            first, second = _in_halves(logs, size)
            self.halves.append(_Half(size, _strictly_after(first).exp_(), second.cumsum(_DIM).exp_()))
            size *= 2
        self.start = logs.cumsum(_DIM).exp_()
        self.end = _strictly_after(logs).exp_()
        self.grad = torch.zeros_like(logs)

    def started(self, x: Tensor) -> Tensor:
        return x * self.start

    def ended(self, x: Tensor) -> Tensor:
        return x * self.end

    def passed(self, state: Tensor) -> Tensor:
        return state * self.start[..., -1, :, None]

    def products(self, x: Tensor, k: Tensor, diagonal: int = 0) -> Tensor:
        size = self.grad.shape[_DIM]
        out = self.grad.new_zeros(*self.grad.shape[:-1], size)
        if diagonal == 0:
            out.diagonal(dim1=-2, dim2=-1).copy_((x * k).sum(-1))
        for half in self.halves:
            later, earlier = _in_halves(x, half.size)[1] * half.second, _in_halves(k, half.size)[0] * half.first
            _blocks(out, half.size).copy_((later @ earlier.mT).movedim(-3, -1))
        return out

    def products_gradient(self, grad: Tensor, products: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        own = grad.diagonal(dim1=-2, dim2=-1)[..., None]
        dx, dk = own * k, own * x
        for half in self.halves:
            later, earlier = _in_halves(x, half.size)[1] * half.second, _in_halves(k, half.size)[0] * half.first
            block = _blocks(grad, half.size).movedim(-1, -3)
            dlater, dearlier = block @ earlier, block.mT @ later
            _in_halves(self.grad, half.size)[1].add_(_after(later * dlater))
            _in_halves(self.grad, half.size)[0].add_(_strictly_before(earlier * dearlier))
            _in_halves(dx, half.size)[1].add_(dlater * half.second)
            _in_halves(dk, half.size)[0].add_(dearlier * half.first)
        return dx, dk

    def add_gradient(self, started: Tensor, ended: Tensor, whole: Tensor) -> None:
        self.grad += _after(started) + _strictly_before(ended) + whole.sum(-1).unsqueeze(_DIM)

    def gradient(self) -> Tensor:
        """Return the gradient, (B, G, R, C, Dk)."""
        return self.grad


def _in_halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of the first and second halves of blocks of 2 * size rows: (..., C / (2 * size), size, D)."""
    blocks = cast("Tensor", x.unflatten(_DIM, (-1, 2, size)))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """Return a view of the second half's rows and the first half's columns of each block: (..., size, size, blocks)."""
    count = matrix.shape[-1] // (2 * size)
    tiles = matrix.view(*matrix.shape[:-2], count, 2 * size, count, 2 * size).diagonal(dim1=-4, dim2=-2)
    return tiles[..., size:, :size, :]
