"""linear_attention in the compiled library: chunks beside float64, bits with any number of threads, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu", "one_thread")

INF = float("inf")


def tensors(kind: str, shape: tuple[int, int, int, int, int, int]) -> dict[str, Any]:
    """Return the arguments of a call in float64, of (B, S, Hk, Hv, Dk, Dv); some decays are -inf."""
    batch, positions, key_heads, heads, rows, columns = shape
    generator = torch.Generator().manual_seed(positions)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    call: dict[str, Any] = {name: normal(batch, positions, key_heads, rows) for name in ("q", "k")}
    call["v"], call["initial_state"] = normal(batch, positions, heads, columns), normal(batch, heads, rows, columns)
    if "decay" in kind:
        own = (rows,) * ("rows" in kind)
        decay = -normal(batch, positions, heads, *own).exp()
        call["decay"] = decay.masked_fill(decay < -6, -INF)
    if "beta" in kind:
        call["beta"] = normal(batch, positions, heads).sigmoid()
    return {**call, "normalize": "beta" in kind, "return_state": True}


def results(backend: str, dtype: torch.dtype, call: dict[str, Any]) -> dict[str, Tensor]:
    """Return the outputs and all gradients."""
    leaves: dict[str, Any] = {n: x.to(dtype).requires_grad_() for n, x in call.items() if isinstance(x, Tensor)}
    generator = torch.Generator().manual_seed(1)
    with fusedops.use(backend, fallback="raise"):
        outputs: tuple[Tensor, ...] = fusedops.linear_attention(**{**call, **leaves})
        grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves.values()], grads)
    return dict(zip(("out", "state", *leaves), (*outputs, *gradients)))


SHAPES = [
    (1, 200, 1, 1, 24, 40),  # seven chunks
    (2, 65, 2, 4, 33, 17),  # whole vectors and parts
    (1, 9, 1, 40, 5, 7),  # parts of the value heads of one key head
    (1, 64, 1, 2, 130, 70),  # more terms than a panel
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["", "beta", "decay", "decay, beta", "decay, rows", "decay, rows, beta"])
def test_chunks_give_what_the_recurrence_gives(kind: str, shape: tuple[int, int, int, int, int, int]) -> None:
    call = tensors(kind, shape)
    wanted = results("eager", torch.float64, call)
    for name, got in results("cpu", torch.float32, call).items():
        error = (got.double() - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < 5e-6, name


@pytest.mark.parametrize("kind", ["decay, beta", "decay, rows"])
def test_the_bits_do_not_depend_on_threads(kind: str) -> None:
    call = tensors(kind, (1, 70, 2, 24, 32, 32))
    wanted = results("cpu", torch.float32, call)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        got = results("cpu", torch.float32, call)
        assert all(torch.equal(got[name], value) for name, value in wanted.items()), count


def test_a_decay_of_minus_infinity_stops_gradients_exactly() -> None:
    call = tensors("decay, beta", (1, 70, 1, 1, 8, 8))
    call["decay"] = call["decay"].clamp(min=-1.0)
    call["decay"][:, 66] = -INF
    generator = torch.randn(1, 70, 1, 8)
    generator[:, :66] = 0.0
    leaves: dict[str, Any] = {name: x.float().requires_grad_() for name, x in call.items() if isinstance(x, Tensor)}
    out, _ = fusedops.linear_attention(**{**call, **leaves})
    gradients = dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], generator)))
    assert not gradients.pop("initial_state").any()
    for name, gradient in gradients.items():
        assert not gradient[:, :66].any(), name
        assert gradient.isfinite().all(), name
    assert not gradients["decay"][:, 66].any()
