"""The choice of cases for parametrized tests: every pair, few cases, the same on every run."""

from __future__ import annotations

import itertools

import pytest
from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3, 4), (5, 4, 3, 2), (1, 3, 3), (4, 4, 4, 4), (7, 1)])
def test_every_pair_is_covered(sizes: tuple[int, ...]) -> None:
    rows = pairwise(*map(range, sizes))
    for one, other in itertools.combinations(range(len(sizes)), 2):
        wanted = set(itertools.product(range(sizes[one]), range(sizes[other])))
        assert {(row[one], row[other]) for row in rows} == wanted
    assert len(rows) == len(set(rows))


def test_far_fewer_than_the_product() -> None:
    assert len(pairwise(*[range(4)] * 4)) <= 24
    assert len(pairwise(range(5), range(4), range(3), range(2))) <= 22


def test_the_choice_is_deterministic() -> None:
    assert pairwise("abc", [1, 2], [True, False]) == pairwise("abc", [1, 2], [True, False])


def test_one_parameter_and_none() -> None:
    assert pairwise("ab") == [("a",), ("b",)]
    assert pairwise() == []
    assert pairwise("ab", []) == []
