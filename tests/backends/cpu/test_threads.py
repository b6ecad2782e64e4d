"""Threads: results do not depend on their number, torch's setting is obeyed, the GIL is released."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu", "threads")


def _gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def _softmax(x: Tensor, bias: Tensor) -> list[Tensor]:
    return _gradients(fusedops.scaled_masked_softmax(x, bias > 0, 0.5, causal=True), x)


def _gelu(x: Tensor, bias: Tensor) -> list[Tensor]:
    return _gradients(fusedops.bias_gelu(x, bias), x, bias)


def _dropout(x: Tensor, bias: Tensor) -> list[Tensor]:
    return _gradients(fusedops.bias_dropout_add(x, bias, x.detach(), 0.3, seed=4), x, bias)


def _rms_norm(x: Tensor, bias: Tensor) -> list[Tensor]:
    return _gradients(fusedops.rms_norm(x, bias), x, bias)


def _add_layer_norm(x: Tensor, bias: Tensor) -> list[Tensor]:
    y, s = fusedops.add_layer_norm(x, x.detach(), bias, bias)
    return [y.detach(), s.detach(), *torch.autograd.grad((y, s), (x, bias), (s.detach(), y.detach()))]


def _swiglu(x: Tensor, bias: Tensor) -> list[Tensor]:
    return _gradients(fusedops.swiglu(x, x.flip(0)), x)


def _cross_entropy(x: Tensor, bias: Tensor) -> list[Tensor]:
    target = torch.arange(x.shape[0]) % x.shape[1]
    target[::3] = -100
    rows = fusedops.cross_entropy(x, target, reduction="none", label_smoothing=0.1)
    return [*_gradients(fusedops.cross_entropy(x, target, z_loss=0.1), x), *_gradients(rows, x)]


def _rotary_embedding(x: Tensor, bias: Tensor) -> list[Tensor]:
    angles = x.detach()[:, : x.shape[1] // 2]
    results: list[Tensor] = []
    for interleaved in (False, True):
        y, _ = fusedops.rotary_embedding(x[None], None, angles, angles.flip(0), interleaved=interleaved)
        results += _gradients(y, x)
    return results


RUNS = [_softmax, _gelu, _dropout, _rms_norm, _add_layer_norm, _swiglu, _cross_entropy, _rotary_embedding]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", [(700, 511), (3, 50_000), (40_000, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_equal_for_any_number(
    run: Callable[[Tensor, Tensor], list[Tensor]], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(shape[-1], generator=generator).to(dtype).requires_grad_()
    torch.set_num_threads(1)
    wanted = run(x, bias)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert all(torch.equal(a, b) for a, b in zip(run(x, bias), wanted, strict=True)), count


def test_callers_side_by_side_do_not_disturb_each_other() -> None:
    x = torch.randn(300, 511, requires_grad=True)
    bias = torch.randn(511, requires_grad=True)
    wanted = _gelu(x, bias)
    wrong: list[int] = []

    def call(number: int) -> None:
        with fusedops.use("cpu", fallback="raise"):
            for _ in range(5):
                if not all(torch.equal(a, b) for a, b in zip(_gelu(x, bias), wanted, strict=True)):
                    wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_the_gil_is_released() -> None:
    torch.set_num_threads(1)
    x = torch.randn(4096, 4096)
    started, done = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        for _ in range(4):
            fusedops.bias_gelu(x, backend="cpu")
        done.set()

    caller = threading.Thread(target=call)
    caller.start()
    started.wait()
    turns = 0
    while not done.is_set():  # a turn of a caller that held the GIL for a whole kernel would take 10 ms or more
        time.sleep(0.001)
        turns += 1
    caller.join()
    assert turns > 4 * 2
