"""Every text of an InvalidInputError of attention and of the masks, and of its constraints' refusals, word for word."""

import math
from collections.abc import Callable
from typing import Any

import torch
from error_calls import INVALID, NO_BACKEND, made
from error_texts import Table

import fusedops
from fusedops import masks
from fusedops.constraints import Alignment, DimMultiple, NotLarger

TABLE = Table(__file__, "fakes")
pin = TABLE.pin

Q, K = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 5, 8)
FORM = "q, k, v, mask, scale, causal, window, return_lse"


def call(q: Any = Q, k: Any = K, v: Any = None, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.attention(q, k, k if v is None else v, *args, **kwargs)


def refused(constraint: Any, **kwargs: Any) -> Callable[[], Any]:
    kernel = made(constraint, op="attention", form=FORM, result="(q, q)")

    def refuse() -> None:
        fusedops.register(fusedops.Backend("mine", ("cpu",), 500, [kernel]))
        with fusedops.use("mine", fallback="raise"):
            call(**kwargs)()

    return refuse


pin("a size", call(Q, K[..., :4]), INVALID)
pin("heads", call(Q[:, :3]), INVALID)
pin("a mask", call(Q, K, K, torch.ones(3, 4) > 0), INVALID)
pin("a bare True", call(causal=True), INVALID)
pin("an alignment", call(causal="left"), INVALID)
pin("a window", call(causal="upper_left", window=(-1, 0)), INVALID)
pin("a kernel's alignment", refused(Alignment("causal", "q", "k", "upper_left"), causal="lower_right"), NO_BACKEND)
pin("a kernel's heads", refused(DimMultiple("q", "k", 1, 1)), NO_BACKEND)
pin("a kernel's groups", refused(DimMultiple("q", "k", 1, 3), q=torch.ones(1, 8, 3, 8)), NO_BACKEND)
pin("a kernel's lengths", refused(NotLarger("q", "k", 2), q=torch.ones(1, 4, 6, 8)), NO_BACKEND)
LOWEST = torch.finfo(torch.float32).min
pin("from_sdpa", lambda: masks.from_sdpa(torch.ones(2, dtype=torch.int64)), INVALID)
pin("from_additive", lambda: masks.from_additive(torch.ones(2) > 0), INVALID)
pin("a bias", lambda: masks.from_additive(torch.tensor([0.0, -10000.0, -math.inf])), INVALID)
pin("a row of the lowest number", lambda: masks.from_additive(torch.tensor([[0.0, LOWEST], [LOWEST, LOWEST]])), INVALID)
pin("from_lengths", lambda: masks.from_lengths(torch.ones(1), 3), INVALID)
pin("padding", lambda: masks.from_lengths(torch.tensor([1]), 3, padding="top"), INVALID)
pin("from_cu_seqlens", lambda: masks.from_cu_seqlens(torch.tensor([0, 1]), 3, torch.tensor([0, 1, 2]), 4), INVALID)
PACKED = torch.ones(3, 4, 8)
pin("a bound that falls", lambda: fusedops.varlen_attention(PACKED, PACKED, PACKED, torch.tensor([0, 2, 1])), INVALID)
pin("lse in 16 bits", lambda: fusedops.merge_attention(PACKED, PACKED[..., 0].half(), PACKED, PACKED[..., 0]), INVALID)


def paged(used: int = 4, **options: Any) -> Callable[[], Any]:
    """Return a call of a token with keys in two pages of a cache of three."""
    cache, one = torch.ones(3, 2, 1, 4), torch.tensor([0, 1])
    q = torch.ones(1, 1, 4, requires_grad=options.pop("requires_grad", False))
    table = torch.tensor([options.pop("pages", [2, 0])])
    return lambda: fusedops.paged_attention(q, cache, cache, one, table, torch.tensor([used]), **options)


pin("more keys than pages", paged(5), INVALID)
pin("a page outside of the cache", paged(pages=[0, 3]), INVALID)
pin("keys in pages with a gradient", paged(requires_grad=True), INVALID)


def stored(slot: int = 0, **changes: Any) -> Callable[[], Any]:
    """Return a call that writes a token into a cache of three pages of two."""
    k, cache = torch.ones(1, 1, 4), torch.zeros(3, 2, 1, 4)
    given = {"k": k, "v": k, "k_cache": cache, "v_cache": cache.clone(), **changes}
    return lambda: fusedops.store_kv(**given, slots=torch.tensor([slot]), backend="eager")


CODES = torch.zeros(3, 2, 1, 4, dtype=torch.int8)
pin("a slot outside of the cache", stored(6), INVALID)
pin("a cache that is written in one place", stored(k_cache=torch.zeros(1, 1, 1, 4).expand(3, 2, 1, 4)), INVALID)
pin("a new key with a gradient", stored(k=torch.ones(1, 1, 4, requires_grad=True)), INVALID)
pin("a scale of no head", stored(k_cache=CODES, v_cache=CODES.clone(), k_scale=torch.ones(2)), INVALID)
with torch.inference_mode():
    MADE_THERE = torch.zeros(3, 2, 1, 4)
pin("a cache that was made in inference mode", stored(k_cache=MADE_THERE), INVALID)
pin("a slot of another dtype", lambda: fusedops.store_kv(Q[0], Q[0], Q, Q, torch.ones(4)), INVALID)


def sparse(indices: Any, **options: Any) -> Callable[[], Any]:
    return call(indices=torch.tensor(indices), backend="eager", **options)


pin("indices of one head for two queries", sparse([[[[0, 1]] * 2]]), INVALID)
pin("an index beyond the keys", sparse([[[0, 5]] * 3]), INVALID)
pin("a key that is chosen twice", sparse([[[0, 2, 0]] * 3]), INVALID)
pin("indices that are no integers", call(indices=torch.ones(1, 3, 2)), INVALID)


def selected(count: Any = 2, k: Any = K[:, 0], **options: Any) -> Callable[[], Any]:
    return lambda: fusedops.select_keys(Q[:, :, :2], k, torch.ones(1, 4, 2), count, **options)


pin("no keys to choose", selected(0), INVALID)
pin("keys of each head of an indexer", selected(k=K), INVALID)
pin("a mask of other keys", selected(mask=torch.ones(4, 4) > 0), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()
