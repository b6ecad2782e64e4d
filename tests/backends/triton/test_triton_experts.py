"""The kernels of experts in Triton's interpreter: the order of rows, tiles of several experts, many choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from triton_cases import needs_loops

import fusedops
from fusedops.ops.experts.formulas import experts_of, order_of
from fusedops_triton.experts import _expert_rows, _grouped
from fusedops_triton.launch import launcher

pytestmark = needs_loops


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(3, 2, 4), (130, 5, 40), (600, 1, 1), (7, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_order_is_the_stable_one(tokens: int, choices: int, experts: int, dtype: torch.dtype) -> None:
    index = torch.randint(-2, experts + 2, (tokens, choices), generator=torch.Generator().manual_seed(tokens))
    if dtype is torch.int64:
        index[0, 0] = 2**40  # of which the lower half is 0
    index = index.to(dtype)
    found = _expert_rows.route(index, experts)
    order, chosen = order_of(index, experts), experts_of(index, experts)
    assert torch.equal(found.order.long(), order)
    assert torch.equal(found.group.long(), chosen[order])
    assert torch.equal(found.ends.long(), (chosen[:, None] <= torch.arange(experts)).sum(0))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    assert torch.equal(found.place.long().view(-1), place.masked_fill(chosen == experts, -1))


def results(call: dict[str, Tensor], backend: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Return the output and the gradients of a call."""
    tensors = {name: each if name == "index" else each.to(dtype).requires_grad_() for name, each in call.items()}
    with fusedops.use(backend, fallback="raise"):
        y = fusedops.experts(**tensors, **options)
        return [
            y.detach(),
            *torch.autograd.grad(y, [each for each in tensors.values() if each.requires_grad], y.detach()),
        ]


def call_of(tokens: int, choices: int, experts: int, width: int, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random tensors; the last expert has no rows, and some rows no expert."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul(shape[-1] ** -0.5).to(dtype)

    index = torch.randint(-1, experts - 1, (tokens, choices), generator=generator)
    index[index.remainder(3) == 1] = 0  # the first expert has most
    tensors = {"x": draw(tokens, width), "weights": draw(tokens, choices), "index": index}
    return {**tensors, "up": draw(experts, 2 * inner, width), "down": draw(experts, width, inner)}


CALLS: dict[str, tuple[int, int, int, int, int, torch.dtype]] = {
    "an expert of several tiles": (150, 2, 4, 32, 16, torch.float16),
    "many choices": (5, 11, 6, 8, 4, torch.float32),
    "more experts than are compared at once": (20, 2, 70, 8, 4, torch.float32),
}


@pytest.mark.parametrize("name", CALLS)
def test_results(name: str) -> None:
    call = call_of(*CALLS[name])
    dtype = CALLS[name][-1]
    unit = torch.finfo(dtype).eps
    for one, other in zip(results(call, "triton", dtype), results(call, "eager", torch.float64), strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=8 * unit, atol=8 * unit * largest)


@pytest.mark.parametrize(("tokens", "experts", "same"), [(1, 16, False), (5, 40, False), (32, 9, True), (32, 4, False)])
@pytest.mark.parametrize("options", [{}, {"interleaved": True, "transposed": True}, {"activation": "relu2"}], ids=str)
def test_few_tokens_without_gradients(tokens: int, experts: int, same: bool, options: dict[str, Any]) -> None:
    """Each expert finds its rows: none, one, more than a tile, and several of a token; by three launches."""
    call = call_of(tokens, 2, experts, 40, 17, torch.float16)
    call["index"][:, 0] = experts // 2 if same else experts  # no expert, or more rows than a tile
    up = call["up"][:, :17] if "activation" in options else call["up"]
    call["up"] = up.mT.contiguous() if "transposed" in options else up.mT.contiguous().mT
    call["down"] = call["down"].mT.contiguous() if "transposed" in options else call["down"]
    call["up_bias"], call["down_bias"] = torch.randn(experts, up.shape[1]).half(), torch.randn(experts, 40).half()
    wide = {name: each if name == "index" else each.double() for name, each in call.items()}
    launched: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        run = launcher.Launch.__call__
        patch.setattr(launcher.Launch, "__call__", lambda self, *a: launched.append(str(self.kernel)) or run(self, *a))
        got = fusedops.experts(**call, **options, backend="triton")
    want = fusedops.experts(**wide, **options, backend="eager")
    torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3)
    assert len(launched) == 3


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_mm_of_torch_gives_the_same(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which has it too: what it leaves uninitialised reaches no result."""
    call = call_of(40, 2, 4, 32, 16, torch.bfloat16)
    if transposed:
        call.update(up=call["up"].mT.contiguous(), down=call["down"].mT.contiguous())
    call["up_bias"], call["down_bias"] = torch.randn(4, 32), torch.randn(4, 32)
    own = results(call, "triton", torch.bfloat16, transposed=transposed)
    taken: list[Tensor] = []

    def grouped_mm(*given: Tensor, offs: Tensor) -> Tensor:
        result: Tensor = torch.nn.functional.grouped_mm(*given, offs=offs)
        taken.append(result)
        sizes = offs.diff(prepend=offs[:1] * 0)
        unwritten = (sizes == 0) if result.dim() == 3 else torch.arange(len(result)) >= offs[-1]
        return result.masked_fill(unwritten.view(-1, *[1] * (result.dim() - 1)), float("nan"))

    monkeypatch.setattr(_grouped, "_FUSED_ROWS", 0)
    monkeypatch.setattr(_grouped, "_is_taken", lambda *_: True)
    monkeypatch.setattr(_grouped, "_grouped_mm", grouped_mm)
    for one, other in zip(results(call, "triton", torch.bfloat16, transposed=transposed), own, strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * largest)
    assert len(taken) == 6
