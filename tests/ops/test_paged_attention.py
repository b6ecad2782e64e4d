"""paged_attention: pages of any size, codes and their scales, what is never read, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops

LENGTHS, QUERIES = (21, 0, 300, 1), (1, 2, 5, 1)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "cpu", "triton"])


class Paged:
    """The keys of some sequences, and the same in pages of a cache whose other numbers are NaN, or 127 in int8."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32, scales: str = "", heads: int = 2) -> None:
        generator = torch.Generator().manual_seed(3)
        counts = [-(-length // size) for length in LENGTHS]
        pages = sum(counts) + 3
        self.q = torch.randn(sum(QUERIES), 2 * heads, 24, generator=generator)
        shape = {"": (), "head": (heads,), "page": (pages, heads), "token": (pages, size, heads)}[scales]
        self.scales = [torch.rand(shape, generator=generator) / 20 + 0.01 if scales else None for _ in "kv"]
        order = torch.randperm(pages, generator=generator).tolist()
        self.table = torch.full((len(LENGTHS), max(counts) + 2), -1, dtype=torch.int32)
        self.used = torch.tensor(LENGTHS)
        self.bounds = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0).tolist()])
        self.caches, self.dense = [], []
        for scale in self.scales:
            whole = (
                torch.full((pages, size, heads, 24), torch.nan) if not scales else torch.zeros(pages, size, heads, 24)
            )
            cache = (whole + 127 if scales else whole).to(dtype)
            tokens: list[Tensor] = []
            at = 0
            for row, (length, count) in enumerate(zip(LENGTHS, counts)):
                for number in range(count):
                    page = order[at + number]
                    self.table[row, number] = page
                    rows = min(size, length - number * size)
                    # the same numbers for any size of the pages
                    of_page = torch.Generator().manual_seed(1000 * row + 1)
                    numbers = torch.randn(length, heads, 24, generator=of_page)[number * size :][:rows]
                    cache[page, :rows] = (
                        (numbers * 40 if scales else numbers).round(decimals=0 if scales else 6).to(dtype)
                    )
                    factor: Any = 1.0 if scale is None else self._of_page(scale, page, rows)
                    tokens.append(cache[page, :rows].float() * factor)
                at += count
            self.caches.append(cache)
            self.dense.append(torch.cat(tokens))

    @staticmethod
    def _of_page(scale: Tensor, page: int, rows: int) -> Tensor:
        return (scale if scale.dim() == 1 else scale[page] if scale.dim() == 2 else scale[page, :rows])[..., None]

    def call(self, **options: Any) -> Any:
        k_scale, v_scale = self.scales
        tensors = (self.q, *self.caches, self.bounds, self.table, self.used)
        return fusedops.paged_attention(*tensors, k_scale=k_scale, v_scale=v_scale, return_lse=True, **options)

    def expected(self, **options: Any) -> Any:
        bounds = torch.tensor([0, *self.used.cumsum(0).tolist()])
        wide = (self.q.double(), *(each.double() for each in self.dense), self.bounds, bounds)
        return fusedops.varlen_attention(*wide, return_lse=True, backend="eager", **options)


@BACKENDS
@pytest.mark.parametrize("size", [1, 7, 16, 256])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float32, ""),
        (torch.int8, "head"),
        (torch.int8, "token"),
        (torch.float8_e4m3fn, "page"),
        (torch.float8_e4m3fn, "token"),
    ],
)
def test_keys_in_pages_are_those_of_varlen_attention_and_nothing_else_is_read(
    backend: str, size: int, dtype: torch.dtype, scales: str
) -> None:
    paged = Paged(size, dtype, scales)
    for options in ({"causal": "lower_right"}, {"causal": False, "window": (9, 3)}, {"causal": "upper_left"}):
        for computed, expected in zip(paged.call(backend=backend, **options), paged.expected(**options)):
            assert torch.allclose(computed.double(), expected, atol=2e-5, rtol=1e-5)


@BACKENDS
@pytest.mark.parametrize(("dtype", "scales"), [(torch.float32, ""), (torch.int8, "head")])
def test_bits_do_not_depend_on_the_pages_nor_on_the_order_of_heads_in_memory_nor_on_the_other_sequences(
    backend: str, dtype: torch.dtype, scales: str
) -> None:
    several = [Paged(size, dtype, scales) for size in (1, 16, 50, 50)]
    several[-1].caches = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in several[-1].caches]
    whole = [each.call(backend=backend, causal="lower_right") for each in several]
    assert all(torch.equal(a, b) for each in whole[1:] for a, b in zip(whole[0], each))
    paged = Paged(16, dtype, scales)
    k_scale, v_scale = paged.scales
    alone = fusedops.paged_attention(
        *(paged.q[3:8], *paged.caches, torch.tensor([0, 5]), paged.table[2:3], paged.used[2:3]),
        **{"k_scale": k_scale, "v_scale": v_scale, "causal": "lower_right", "backend": backend},
    )
    assert torch.equal(alone, whole[1][0][3:8])


@BACKENDS
def test_what_an_unused_entry_of_the_table_names_and_sequences_without_keys(backend: str) -> None:
    paged = Paged(16)
    paged.table[paged.table < 0] = 10**6
    out, lse = paged.call(backend=backend)
    assert not out[1:3].any()  # a sequence of two queries without keys
    assert lse[1:3].isneginf().all()
    paged.used.zero_()
    out, lse = paged.call(backend=backend)
    assert not out.any()
    assert lse.isneginf().all()


@BACKENDS
def test_errors_name_what_is_wrong(backend: str) -> None:
    paged = Paged(16)
    paged.q.requires_grad_()
    with pytest.raises(fusedops.InvalidInputError, match="requires a gradient, expected none"):
        paged.call(backend=backend)
    paged.q.requires_grad_(False)
    paged.used[0] = 10**4
    with pytest.raises(fusedops.InvalidInputError, match="got seqused_k from 0 to 10000, expected from 0 to"):
        paged.call(backend=backend)
    paged.used[0] = 21
    paged.table[0, 1] = 99
    with pytest.raises(fusedops.InvalidInputError, match=r"page.* block_table"):
        paged.call(backend=backend)
    paged = Paged(16, torch.int8, "head")
    paged.scales[0] = None
    with pytest.raises(fusedops.InvalidInputError, match="k_scale"):
        paged.call(backend=backend)
