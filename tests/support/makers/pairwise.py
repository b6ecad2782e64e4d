"""Choose cases pairwise: every two values of two parameters meet, without the full product."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples, one value of each parameter, such that any two values of two parameters are in one of them.

    The choice is greedy and deterministic: the next tuple is the first of those with the most pairs that no tuple
    before it has.

    >>> pairwise("ab", [1, 2], [True, False])
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    indices = [range(len(values)) for values in parameters]
    if len(parameters) < 2:
        return [(value,) for values in parameters for value in values]
    missing = {pair for product in itertools.product(*indices) for pair in _pairs(product)}
    rows: list[tuple[int, ...]] = []
    candidates = list(itertools.product(*indices))
    while missing:
        best = max(candidates, key=lambda row: sum(pair in missing for pair in _pairs(row)))
        missing.difference_update(_pairs(best))
        rows.append(best)
    return [tuple(values[at] for values, at in zip(parameters, row)) for row in sorted(rows)]


def _pairs(row: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(row), 2))
