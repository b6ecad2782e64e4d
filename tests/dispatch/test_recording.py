"""A recorded run: made again it has the bits of a new one, and what cannot be made again is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops._dispatch.recording import Recorder, Recording
from fusedops.testing._in_threads import in_threads, torch_threads


def recorded(function: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, Recording, str]:
    recorder = Recorder()
    with torch.no_grad(), recorder:
        result = function(*args)
    return result, recorder.recording(), recorder.reason


def block(x: Tensor, weight: Tensor, slots: Tensor) -> Tensor:
    """Ops of several backends, functions of torch with and without `out`, in place, of several results, and views."""
    y = fusedops.rms_norm(x, weight) + x
    y = fusedops.swiglu(*y.mT.contiguous().mT.split(y.shape[-1] // 2, -1))
    cache = torch.zeros(8, 1, 1, y.shape[-1])
    fusedops.store_kv(y[:, None], y[:, None], cache, cache.clone(), slots)
    y, _ = fusedops.bias_gelu(y, None).sort(-1)
    y.mul_(2)
    y = torch.add(y + 0.5, y, alpha=3) + y[0] + y.to(torch.bfloat16)
    return fusedops.scaled_masked_softmax(y[None, None]).cumsum(-1)[0, 0] + torch.cat([cache[:4, 0, 0], y])[: len(y)]


@pytest.mark.parametrize("policy", ["cpu", "eager", "eager;rms_norm=cpu"])
def test_a_run_that_is_made_again_has_the_bits_of_a_new_one(policy: str) -> None:
    torch.manual_seed(0)
    x, weight, slots = torch.randn(4, 16), torch.randn(16), torch.tensor([1, 0, 3, 2])
    with fusedops.use(policy):
        result, recording, reason = recorded(block, x, weight, slots)
        assert not reason
        for _ in range(3):
            x.normal_()
            weight.normal_()
            slots.copy_(torch.randperm(8)[:4])
            recording.run()
            assert torch.equal(result, block(x, weight, slots))


def test_the_runs_are_counted() -> None:
    x = torch.randn(4, 16)
    _, recording, _ = recorded(lambda x: fusedops.rms_norm(fusedops.rms_norm(x)), x)
    fusedops.reset_stats()
    recording.run()
    assert {(each.op, each.backend): each.calls for each in fusedops.stats().counts} == {("rms_norm", "cpu"): 2}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x * x[0, 0].tolist(), "tolist"),
        (lambda x: x * float(x.numpy()[0, 0]), "numpy"),
        (lambda x: x + 1 if x.sum() > 0 else x, "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x * torch.equal(x, x), "equal"),
    ],
)
def test_a_run_whose_python_reads_values_is_refused(function: Callable[[Tensor], Tensor], name: str) -> None:
    x = torch.rand(4, 16)
    result, _, reason = recorded(function, x)
    assert reason == f"its Python reads the values of a tensor ({name})"
    assert torch.equal(result, function(x))


def test_random_numbers_are_refused() -> None:
    assert recorded(lambda x: x * torch.rand_like(x), torch.ones(3))[2] == "it draws random numbers (rand_like)"


def test_an_index_of_integers_is_no_reading() -> None:
    x, index = torch.randn(4, 3), torch.tensor([2, 0])
    result, recording, reason = recorded(lambda x, i: x[i] * 2, x, index)
    index.copy_(torch.tensor([3, 3]))
    recording.run()
    assert not reason
    assert torch.equal(result, x[index] * 2)


def test_steps_of_several_threads_at_once() -> None:
    """One of them has the threads that stay awake, the others torch's: all have the bits of one thread."""
    weight = torch.randint(0, 256, (4096, 512 // 32 * 34), dtype=torch.uint8, generator=numbers_of(9))
    weight.view(4096, -1, 34)[..., :2] = torch.full((4096, 16, 1), 0.1).half().view(torch.uint8)
    wrong: list[str] = []

    def step(x: Tensor) -> Tensor:
        for _ in range(4):
            x = fusedops.rms_norm(fusedops.quantized_linear(x, weight, format="Q8_0")[:, :512])
        return x

    xs = [torch.randn(1, 512, generator=numbers_of(seed)) for seed in range(3)]
    expected = [step(x) for x in xs]

    def many(x: Tensor, want: Tensor) -> None:
        with torch_threads(3):
            result, recording, reason = recorded(step, x)
            for _ in range(50):
                result.zero_()
                recording.run()
                if reason or not torch.equal(result, want):
                    wrong.append(reason or "other bits")

    in_threads(*(partial(many, x, want) for x, want in zip(xs, expected)))
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_a_forked_child_makes_the_calls_with_threads_of_its_own() -> None:
    x = torch.randn(64, 4096)
    with torch_threads(2):
        result, recording, _ = recorded(lambda x: fusedops.swiglu(fusedops.rms_norm(x), x), x)
        recording.run()
        want = result.numpy().tobytes()
        child = os.fork()
        if not child:  # no large function of torch, whose threads are those of OpenMP
            result[:2].zero_()
            recording.run()
            os._exit(result.numpy().tobytes() != want)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def numbers_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
