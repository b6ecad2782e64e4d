"""store_kv: what is written and what is not, codes, and how torch sees a call that writes its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops

BACKENDS = pytest.mark.parametrize("backend", ["eager", "cpu", "triton"])
SLOTS = torch.tensor([9, -1, 0, 4])
E4M3 = torch.float8_e4m3fn


def stored(k: Tensor, dtype: torch.dtype, scale: Tensor | None, backend: str | None = None) -> tuple[Tensor, Any]:
    """Return a cache of three pages of four whose slots had the code 1, and its scale, after the tokens are written."""
    cache = torch.ones(3, 4, *k.shape[1:]).to(dtype)
    scale = None if scale is None else scale.clone()
    values = [None if scale is None else scale.clone(), torch.ones_like(cache)]
    slots = SLOTS[: len(k)]
    fusedops.store_kv(k, k, cache, values[1], slots, k_scale=scale, v_scale=values[0], backend=backend)
    assert torch.equal(cache.view(torch.uint8), values[1].view(torch.uint8))
    return cache, scale


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_a_code_is_rounded_half_to_even_and_limited(backend: str, dtype: torch.dtype) -> None:
    # halves between codes, magnitudes beyond the largest, and what no code has
    numbers = [0.5, 1.5, 2.5, -0.5, 126.5, 127.5, -1e9, 1e9, 17.0, 19.0, -18.0, 2**-10, 3 * 2**-10, torch.nan, -0.0]
    k = torch.tensor(numbers).expand(4, 1, 15) * 2
    cache, _ = stored(k, dtype, torch.tensor([2.0]), backend)
    expected = {
        torch.int8: [0, 2, 2, 0, 126, 127, -127, 127, 17, 19, -18, 0, 0, 0, 0],
        E4M3: [0.5, 1.5, 2.5, -0.5, 128, 128, -448, 448, 16, 20, -18, 0, 2**-8, torch.nan, 0],
    }[dtype]
    for page, offset in ((2, 1), (0, 0), (1, 0)):
        torch.testing.assert_close(
            cache[page, offset, 0].float(), torch.tensor(expected).float(), rtol=0, atol=0, equal_nan=True
        )
    assert int((cache.float() == 1).all(-1).sum()) == 9  # every other slot is as before


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_every_number_of_16_bits_has_the_code_of_torch(backend: str, dtype: torch.dtype) -> None:
    k = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(4, 2, -1)
    k = torch.where(k.isnan(), 0, k)
    cache, _ = stored(k, dtype, torch.tensor([1.0, 3.0]), backend)
    wide = k.float() / torch.tensor([1.0, 3.0])[:, None]
    codes = wide.round().clamp(-127, 127) if dtype == torch.int8 else wide.clamp(-448, 448)
    for token, (page, offset) in ((0, (2, 1)), (2, (0, 0)), (3, (1, 0))):
        assert torch.equal(cache[page, offset].view(torch.uint8), codes[token].to(dtype).view(torch.uint8))


@BACKENDS
def test_the_scale_of_a_token_is_written_and_a_token_of_zeros_has_codes_of_0(backend: str) -> None:
    k = torch.randn(4, 2, 24, generator=torch.Generator().manual_seed(0))
    k[2, 1] = 0
    cache, scale = stored(k, torch.int8, torch.full((3, 4, 2), torch.nan), backend)
    assert torch.equal(scale[2, 1], k[0].abs().amax(-1) / 127)
    assert scale[0, 0, 1] == 0
    assert not cache[0, 0, 1].any()
    assert int(scale.isnan().sum()) == 2 * 9
    error = (cache[2, 1] * scale[2, 1][:, None] - k[0]).abs()
    assert bool((error <= scale[2, 1][:, None] / 2 * 1.001).all())


@BACKENDS
def test_what_is_stored_is_what_attention_reads(backend: str) -> None:
    k = torch.randn(4, 2, 24, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    q, tokens = torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(2)), torch.tensor([5, 7, 2, 8])
    codes, scales = torch.zeros(3, 4, 2, 24, dtype=torch.int8), torch.zeros(3, 4, 2)
    values, of_values = codes.clone(), scales.clone()
    fusedops.store_kv(k, -k, codes, values, tokens, k_scale=scales, v_scale=of_values, backend=backend)
    bounds, used = torch.tensor([0, 1]), torch.tensor([4])
    # a table of pages in the order of the tokens: of one token each
    pages = [each.view(12, 1, *each.shape[2:]) for each in (codes, values)]
    of_pages = {"k_scale": scales.view(12, 1, 2), "v_scale": of_values.view(12, 1, 2), "backend": backend}
    got = fusedops.paged_attention(q, *pages, bounds, tokens[None], used, **of_pages)
    want = fusedops.varlen_attention(q, k, -k, bounds, torch.tensor([0, 4]), backend="eager")
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)


def test_the_write_is_seen_by_compiled_code_and_counted_by_autograd() -> None:
    def write(k: Tensor, cache: Tensor, scale: Tensor, slots: Tensor) -> Tensor:
        before = cache.float().sum()
        values = cache.clone()
        fusedops.store_kv(k, 2 * k, cache, values, slots, k_scale=scale, v_scale=scale.clone())
        return before + cache.float().sum() + values.float().sum()

    results: list[Any] = []
    for function in (write, torch.compile(write, fullgraph=True, backend="aot_eager")):
        k = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
        cache, scale = torch.ones(3, 4, 2, 8, dtype=torch.int8), torch.zeros(3, 4, 2)
        version = cache._version
        results.append((function(k, cache, scale, SLOTS), cache, scale))
        assert cache._version > version
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_a_tensor_that_is_kept_for_backward_and_then_written_is_an_error_of_autograd() -> None:
    x, cache = torch.ones(3, 4, 1, 8, requires_grad=True), torch.ones(3, 4, 1, 8)
    y = (x * cache).sum()
    fusedops.store_kv(*[torch.ones(4, 1, 8)] * 2, cache, torch.ones_like(cache), SLOTS, backend="cpu")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@BACKENDS
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_a_cache_without_slots_takes_tokens_that_have_none(backend: str, shape: tuple[int, int]) -> None:
    k, cache = torch.ones(2, 1, 8), torch.zeros(*shape, 1, 8)
    fusedops.store_kv(k, k, cache, cache.clone(), torch.tensor([-1, -1]), backend=backend)


@BACKENDS
def test_nothing_is_written_where_a_slot_is_outside_of_the_cache(backend: str) -> None:
    cache = torch.zeros(3, 4, 1, 8)
    k = torch.ones(4, 1, 8)
    with pytest.raises(fusedops.InvalidInputError, match=r"got (slots from -1 to 12|a slot that is none)"):
        fusedops.store_kv(k, k, cache, cache, torch.tensor([0, 12, -1, 3]), backend=backend)
    assert not cache.any()
