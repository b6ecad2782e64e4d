"""Values cached with a tensor: computed once for each state of it, shared by its views, and freed with it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from thread_cases import together
from torch import Tensor

from fusedops import tensor_cache
from fusedops.tensor_cache import cached_for as cached


@pytest.fixture(autouse=True)
def block(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test in a block of ``reuse``, unless it is about the code outside of one."""
    with nullcontext() if "outside" in request.node.name else tensor_cache.reuse():
        yield


def test_outside_of_a_block_nothing_is_kept() -> None:
    count, mask = Counting(), torch.zeros(4, dtype=torch.bool)
    assert [count(mask), count(mask), count.times] == [0, 0, 2]
    with tensor_cache.reuse():
        assert [count(mask), count(mask), count.times] == [0, 0, 3]
    mask.data[0] = True  # torch's version counter misses it
    with tensor_cache.reuse():
        assert count(mask) == 1


class Counting:
    """Count the elements are set, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, mask: Tensor, key: object = "set") -> int:
        def compute() -> int:
            self.times += 1
            return int(mask.sum())

        return cached(mask, key, compute)


def test_once_for_each_key_and_each_state() -> None:
    count, mask = Counting(), torch.zeros(4, 4, dtype=torch.bool)
    assert [count(mask), count(mask), count(mask, "other"), count(mask, "other")] == [0] * 4
    assert count.times == 2
    mask[1] = True
    assert [count(mask), count(mask), count.times] == [4, 4, 3]
    mask.view(-1)[0] = True  # a change through a view is one of the tensor
    assert [count(mask), count.times] == [5, 4]


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "mask[:]": (lambda m: m[:], True),
    "view of a view": (lambda m: m[None][0][:], True),
    "other sizes": (lambda m: m[:2], False),
    "another offset": (lambda m: m[1:][:3], False),
    "other strides": (lambda m: m.t(), False),
    "another dtype": (lambda m: m.view(torch.uint8), False),
    "a copy": (lambda m: m.clone(), False),
}


@pytest.mark.parametrize(("view", "shared"), VIEWS.values(), ids=VIEWS.keys())
def test_views_share_what_is_the_same_place(view: Callable[[Tensor], Tensor], shared: bool) -> None:
    count, mask = Counting(), torch.rand(4, 4) < 0.5
    assert count(mask) == int(mask.sum())
    for _ in range(3):
        looked = view(mask)
        assert count(looked) == int(looked.sum())
    # a new copy is another tensor each time; another place in the same one is looked at once
    assert count.times == 1 if shared else count.times == (4 if looked._base is None else 2)
    mask.logical_not_()
    looked = view(mask)
    assert count(looked) == int(looked.sum())


def test_a_state_that_cannot_be_recognized_is_inspected_each_time() -> None:
    count, mask = Counting(), torch.zeros(4, dtype=torch.bool)
    for value in (False, True, False):
        mask.fill_(value)
        assert count(mask.data) == count(mask.detach()) == (4 if value else 0)  # counters of their own, or no base
    with torch.inference_mode():
        made = torch.zeros(4, dtype=torch.bool)
        assert count(made) == 0
        made.fill_(True)
        assert count(made) == 4


def test_what_is_made_in_inference_mode_outlives_it() -> None:
    mask = torch.zeros(4, dtype=torch.bool)
    with torch.inference_mode():
        made = cached(mask, "not", lambda: ~mask)
    assert not made.is_inference()
    assert cached(mask, "not", lambda: mask) is made


def test_a_tensor_and_its_cached_values_are_freed() -> None:
    mask = torch.zeros(4, dtype=torch.bool)
    made = weakref.ref(cached(mask[:], "one", lambda: torch.ones(4)))
    gc.collect()
    assert made() is not None
    gone, before = weakref.ref(mask), len(tensor_cache._block.get())
    del mask
    gc.collect()
    assert gone() is None
    assert made() is None
    assert len(tensor_cache._block.get()) == before - 1


def test_a_buffer_cut_to_a_new_length_each_step_keeps_a_few_values() -> None:
    count, mask = Counting(), torch.zeros(64, 64, dtype=torch.bool)
    for length in range(1, 65):
        assert count(mask[:length, :length]) == 0
    assert len(tensor_cache._block.get()[mask]) == tensor_cache._CAPACITY
    assert count(mask[:64, :64]) == 0
    assert count.times == 64


def test_threads() -> None:
    masks = [torch.rand(8, 8) < 0.5 for _ in range(8)]

    def work(n: int) -> None:
        count = Counting()
        with tensor_cache.reuse():
            for turn in range(200):
                mask = masks[turn % 8]
                assert count(mask[turn % 4 :]) == int(mask[turn % 4 :].sum())

    together(work, 8)


def test_data_that_is_assigned_again_and_again_is_noticed() -> None:
    """A storage that nothing holds is freed, and its address is that of a later one."""
    generator = random.Random(0)
    with tensor_cache.reuse():
        mask = torch.tensor([True, False])
        for _ in range(500):
            value = generator.random() < 0.5
            mask.data = torch.tensor([value, value])
            assert tensor_cache.cached_for(mask, "any", lambda: bool(mask.any())) is value
