"""The blocks of attention over a sequence that ranks share: together they are the whole. On ranks: ranks_context.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fusedops import masks
from fusedops.ops.attention.sharding import Block, block_of


def bounds(size: int, ranks: int) -> list[tuple[int, int]]:
    """Return the first element and the end of each rank's shard, as torch.chunk has them."""
    chunk = -(-size // ranks)
    return [(min(rank * chunk, size), min((rank + 1) * chunk, size)) for rank in range(ranks)]


def seen_by(block: Block) -> Tensor:
    """Return which keys each query of a block sees, by the public meaning of causal and window."""
    sizes = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    masked = masks.from_band(*sizes, masks.band(*sizes, block.causal or "none", block.window))
    return torch.ones(sizes, dtype=torch.bool) if masked is None else ~masked


@pytest.mark.parametrize("causal", ["none", "upper_left", "lower_right"])
def test_the_blocks_of_shards_are_the_whole(causal: str) -> None:
    """Every key that a query sees is in one block, none else is, and no block has a row or an end that sees nothing."""
    windows = [None, *itertools.product((0, 1, 3, 9), repeat=2)]
    for queries, keys, ranks, window in itertools.product((1, 4, 5, 7), (1, 3, 5, 8), (2, 3), windows):
        band = masks.band(queries, keys, causal, window)
        masked = masks.from_band(queries, keys, band)
        whole = torch.ones(queries, keys, dtype=torch.bool) if masked is None else ~masked
        what = f"{queries} {keys} {ranks} {causal} {window}"
        for rows, columns in itertools.product(bounds(queries, ranks), bounds(keys, ranks)):
            found = torch.zeros(rows[1] - rows[0], columns[1] - columns[0], dtype=torch.bool)
            block = block_of(rows, columns, band)
            if block is not None:
                seen = seen_by(block)
                assert seen.any(1).all(), what
                assert seen[:, 0].any(), what
                assert seen[:, -1].any(), what
                assert block.window is None or min(block.window) >= 0, what
                found[block.rows, block.keys] = seen
            assert torch.equal(found, whole[rows[0] : rows[1], columns[0] : columns[1]]), what


def test_shards_of_a_causal_square_are_calls_that_most_backends_take() -> None:
    """The whole, the diagonal, or nothing: no window and no mask."""
    blocks = [[block_of(rows, keys, (None, 0)) for keys in bounds(12, 3)] for rows in bounds(12, 3)]
    options = [[block and (block.causal, block.window) for block in row] for row in blocks]
    diagonal, whole = ("upper_left", None), (False, None)
    assert options == [[diagonal, None, None], [whole, diagonal, None], [whole, whole, diagonal]]
