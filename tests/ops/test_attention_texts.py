"""Every text of an InvalidInputError of attention and of the masks, and of its constraints' refusals, word for word."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_calls import INVALID, NO_BACKEND, made
from error_texts import Table

import fusedops
from fusedops import masks
from fusedops.constraints import Alignment, DimMultiple, NotLarger

TABLE = Table(__file__)
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


pin("a size", call(Q, K[..., :4]), INVALID, "dim 3 of k = 4", "expected that of q, 8", "one size of dim 3")
pin("heads", call(Q[:, :3]), INVALID, "dim 1 of q = 3", "a multiple of 2", "divides 3")
pin("a mask", call(Q, K, K, torch.ones(3, 4) > 0), INVALID, "(3, 4)", "broadcasts to (1, 4, 3, 5)", "or 1")
pin("a bare True", call(causal=True), INVALID, "3 queries and 5 keys", "'upper_left'", "'lower_right'")
pin("an alignment", call(causal="left"), INVALID, "'left'", "False, 'upper_left'", "one of the two texts")
pin("a window", call(causal="upper_left", window=(-1, 0)), INVALID, "(-1, 0)", "two ints", "(127, 0)")
pin(
    "a kernel's alignment",
    refused(Alignment("causal", "q", "k", "upper_left"), causal="lower_right"),
    NO_BACKEND,
    "causal = 'lower_right' with 3 queries and 5 keys",
    "expected 'none' or 'upper_left', or Sq == Sk",
    "the causal mask as a mask",
)
pin("a kernel's heads", refused(DimMultiple("q", "k", 1, 1)), NO_BACKEND, "= 4", "expected 2, as in k", "divides 4")
pin(
    "a kernel's groups",
    refused(DimMultiple("q", "k", 1, 3), q=torch.ones(1, 8, 3, 8)),
    NO_BACKEND,
    "= 8",
    "at most 3 times",
    "divides 8",
)
pin(
    "a kernel's lengths",
    refused(NotLarger("q", "k", 2), q=torch.ones(1, 4, 6, 8)),
    NO_BACKEND,
    "dim 2 of q = 6",
    "at most that of k, 5",
    "a size of dim 2 of at most 5",
)
LOWEST = torch.finfo(torch.float32).min
pin(
    "from_sdpa",
    lambda: masks.from_sdpa(torch.ones(2, dtype=torch.int64)),
    INVALID,
    "a mask of int64",
    "bool or a floating",
    "mask == 0",
)
pin("from_additive", lambda: masks.from_additive(torch.ones(2) > 0), INVALID, "of bool", "a floating", "use from_sdpa")
pin(
    "a bias",
    lambda: masks.from_additive(torch.tensor([0.0, -10000.0, -math.inf])),
    INVALID,
    "-10000 in the mask",
    "0, -inf or",
    "pass mask < 0",
)
pin(
    "a row of the lowest number",
    lambda: masks.from_additive(torch.tensor([[0.0, LOWEST], [LOWEST, LOWEST]])),
    INVALID,
    "a row with the lowest",
    "-inf in a fully",
    "pass mask < 0",
)
pin(
    "from_lengths",
    lambda: masks.from_lengths(torch.ones(1), 3),
    INVALID,
    "of float32",
    "int32 or int64",
    "lengths.int()",
)
pin(
    "padding",
    lambda: masks.from_lengths(torch.tensor([1]), 3, padding="top"),
    INVALID,
    "'top'",
    "'left' or 'right'",
    "one of these",
)
pin(
    "from_cu_seqlens",
    lambda: masks.from_cu_seqlens(torch.tensor([0, 1]), 3, torch.tensor([0, 1, 2]), 4),
    INVALID,
    "cu_q of 2",
    "one number of sequences",
    "an entry for each",
)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
