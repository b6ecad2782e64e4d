"""The choice of rows in which every two options of two axes meet, or every option is, without the product of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, product

Row = tuple[int, ...]  # one option of each axis; 0 is the plain one
_TIMES = 2  # rows with each option, of those in which options do not meet pairwise


def pairwise(sizes: Sequence[int], hiding: Sequence[frozenset[int]], valid: Callable[[Row], bool]) -> list[Row]:
    """Return valid rows, such that every two options of two axes that are valid together are in one of them.

    Greedy and deterministic: a row starts with a pair that no row before it has, every other axis at its plain option,
    and takes on other options for as long as they bring new pairs and the row is valid.

    An option may hide others: with p = 1 a bias is not seen. A row has a hiding option only where its first pair has
    it, and only the pairs with that option then count.

    Args:
        sizes: the number of options of each axis.
        hiding: the options of each axis that hide others.
        valid: returns True for a row that is a call.
    """
    plain: Row = (0,) * len(sizes)
    if not valid(plain):
        return []
    missing = _Missing(sizes)
    rows: list[Row] = [plain]
    missing.cover(plain, hiding)
    for i, j in combinations(range(len(sizes)), 2):
        for a, b in product(range(sizes[i]), range(sizes[j])):
            if not missing.has(i, a, j, b):
                continue
            missing.remove(i, a, j, b)
            row = _replaced(_replaced(plain, i, a), j, b)
            if not valid(row):
                continue
            bits = missing.bits(row)
            for axis in range(len(sizes)):
                if axis in (i, j):
                    continue
                gains = missing.gains(bits, axis)
                options = [o for o in range(1, sizes[axis]) if gains[o] and o not in hiding[axis]]
                for option in sorted(options, key=lambda o: -gains[o]):
                    if valid(changed := _replaced(row, axis, option)):
                        row, bits = changed, missing.bits(changed)
                        break
            missing.cover(row, hiding)
            rows.append(row)
    return rows


def each_option(sizes: Sequence[int], hiding: Sequence[frozenset[int]], valid: Callable[[Row], bool]) -> list[Row]:
    """Return valid rows, such that every option that is in a valid row is in two of them: about a tenth of the pairs'.

    A row starts with an option that is missing, every other axis at its plain option, and takes on others as the rows
    of :func:`pairwise` do. Where the option is not valid alone, it starts with one that makes it valid. A hiding option
    is in one row, and no other option is with it.

    Args:
        sizes: the number of options of each axis.
        hiding: the options of each axis that hide others.
        valid: returns True for a row that is a call.
    """
    plain: Row = (0,) * len(sizes)
    if not valid(plain):
        return []
    rows: list[Row] = [plain]
    left = [[0, *(1 if option in hidden else _TIMES for option in range(1, n))] for n, hidden in zip(sizes, hiding)]
    for i, a in [(axis, option) for axis, size in enumerate(sizes) for option in range(1, size)]:
        while left[i][a]:
            left[i][a] -= 1
            row = _replaced(plain, i, a)
            if not valid(row):
                beside = (_replaced(row, j, b) for j in range(len(sizes)) if j != i for b in range(1, sizes[j]))
                row = next(filter(valid, beside), None)
                if row is None:
                    break
            for axis in range(len(sizes)) if a not in hiding[i] else ():
                if row[axis]:
                    continue
                # the most missing ones first, and in another order in each row: other options meet in the second one
                options = [o for o in range(1, sizes[axis]) if left[axis][o] and o not in hiding[axis]]
                options = options[len(rows) % len(options) :] + options[: len(rows) % len(options)] if options else []
                for option in sorted(options, key=lambda o: -left[axis][o]):
                    if valid(changed := _replaced(row, axis, option)):
                        row = changed
                        left[axis][option] -= 1
                        break
            if row not in rows:
                rows.append(row)
    return rows


def _replaced(row: Row, axis: int, option: int) -> Row:
    return (*row[:axis], option, *row[axis + 1 :])


class _Missing:
    """The pairs that no row has: for each option of an axis, the options of other axes, as the bits of a number."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._first = [0, *accumulate(sizes)]  # the bit of each axis's plain option
        every = (1 << self._first[-1]) - 1
        own = [((1 << size) - 1) << first for size, first in zip(sizes, self._first)]
        self._of = [[every & ~bits] * size for size, bits in zip(sizes, own)]

    def _bit(self, axis: int, option: int) -> int:
        return 1 << (self._first[axis] + option)

    def bits(self, row: Row) -> int:
        """Return the bits of a row's options."""
        return sum(self._bit(axis, option) for axis, option in enumerate(row))

    def has(self, i: int, a: int, j: int, b: int) -> bool:
        """Return True for a pair of option a of axis i and option b of axis j that is missing."""
        return bool(self._of[i][a] & self._bit(j, b))

    def remove(self, i: int, a: int, j: int, b: int) -> None:
        """Remove a pair."""
        self._of[i][a] &= ~self._bit(j, b)
        self._of[j][b] &= ~self._bit(i, a)

    def gains(self, bits: int, axis: int) -> list[int]:
        """Return how many missing pairs each option of an axis makes with the other options of a row, by its bits."""
        return [(missing & bits).bit_count() for missing in self._of[axis]]

    def cover(self, row: Row, hiding: Sequence[frozenset[int]]) -> None:
        """Remove the pairs of a row, where it hides nothing, or the pairs with what hides the others: two at most."""
        seen = [axis for axis, option in enumerate(row) if option in hiding[axis]]
        bits = self.bits(row)
        if len(seen) == 2:
            self.remove(seen[0], row[seen[0]], seen[1], row[seen[1]])
        else:
            for axis, option in enumerate(row):
                of_all = not seen or axis == seen[0]
                self._of[axis][option] &= ~bits if of_all else ~self._bit(seen[0], row[seen[0]])
