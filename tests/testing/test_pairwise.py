"""The choice of cases for parametrized tests, and of calls in a brief run of the kit: few, the same on every run."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from pairwise import pairwise

from fusedops.testing._pairwise import each_option


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


def test_each_option_is_in_two_rows_beside_others_where_it_is_valid_and_a_hiding_one_in_a_row_of_its_own() -> None:
    def valid(row: tuple[int, ...]) -> bool:
        return row[0] != 2 and (row[1] == 1) >= (row[2] == 1)  # option 1 of axis 2 needs that of axis 1

    rows = each_option((4, 3, 2, 6), [frozenset(), frozenset(), frozenset(), frozenset({5})], valid)
    assert rows[0] == (0, 0, 0, 0)
    assert all(map(valid, rows))
    counts = Counter((axis, option) for row in rows for axis, option in enumerate(row) if option)
    wanted = {(0, 1), (0, 3), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (3, 3), (3, 4)}
    assert counts.keys() == {*wanted, (3, 5)}
    assert all(counts[each] >= 2 for each in wanted)
    assert [row for row in rows if row[3] == 5] == [(0, 0, 0, 5)]
    assert len(rows) == len({*rows}) < 14
    assert len({row[0] for row in rows if row[3] == 1}) == 2
    assert each_option((2,), [frozenset()], lambda row: False) == []
