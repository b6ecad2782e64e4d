"""The choice of rows in which every two options of two axes meet, without the product of all axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product

Row = tuple[int, ...]  # one option of each axis; 0 is the plain one
_Pair = tuple[int, int, int, int]  # axis, option, axis, option


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
    missing = dict.fromkeys(
        (i, a, j, b)
        for i, j in combinations(range(len(sizes)), 2)
        for a, b in product(range(sizes[i]), range(sizes[j]))
    )
    rows: list[Row] = [plain]
    _cover(missing, plain, hiding)
    while missing:
        i, a, j, b = pair = next(iter(missing))
        row = _replaced(_replaced(plain, i, a), j, b)
        if not valid(row):
            del missing[pair]
            continue
        for axis in range(len(sizes)):
            if axis in (i, j):
                continue
            options = [option for option in range(1, sizes[axis]) if option not in hiding[axis]]
            gains = {option: _gain(missing, row, axis, option) for option in options}
            for option in sorted((o for o in options if gains[o]), key=lambda o: -gains[o]):
                if valid(changed := _replaced(row, axis, option)):
                    row = changed
                    break
        _cover(missing, row, hiding)
        missing.pop(pair, None)
        rows.append(row)
    return rows


def _replaced(row: Row, axis: int, option: int) -> Row:
    return (*row[:axis], option, *row[axis + 1 :])


def _gain(missing: dict[_Pair, None], row: Row, axis: int, option: int) -> int:
    """Return how many new pairs an option of one axis makes with the row's other options."""
    before = sum((other, row[other], axis, option) in missing for other in range(axis))
    return before + sum((axis, option, other, row[other]) in missing for other in range(axis + 1, len(row)))


def _cover(missing: dict[_Pair, None], row: Row, hiding: Sequence[frozenset[int]]) -> None:
    """Remove the pairs of a row, where it hides nothing, or the pairs with what hides the others."""
    hidden_by = {axis for axis, option in enumerate(row) if option in hiding[axis]}
    for i, j in combinations(range(len(row)), 2):
        if hidden_by <= {i, j}:
            missing.pop((i, row[i], j, row[j]), None)
