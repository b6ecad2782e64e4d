"""linear_attention on Ascend: the vendor's call, the state beside the caller's, and what is refused."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import nothing_waits, on_npu
from right import assert_right
from torch import Tensor

import fusedops
from fusedops import linear_attention

HALF = torch.bfloat16
FUNCTION = "npu_recurrent_gated_delta_rule"
B, HK, HV, DK, DV = 2, 2, 4, 8, 6


def tensors(positions: int = 3, decay: int = 3, dv: int = DV) -> dict[str, Any]:
    """Return a call; ``decay`` is the rank of its decay, 0 for none."""
    g = torch.Generator().manual_seed(positions)
    shapes = {"q": (B, positions, HK, DK), "k": (B, positions, HK, DK), "v": (B, positions, HV, dv)}
    call: dict[str, Any] = {name: torch.randn(shape, generator=g).to(HALF) for name, shape in shapes.items()}
    call["beta"] = torch.rand(B, positions, HV, generator=g).to(HALF)
    call["initial_state"] = torch.randn(B, HV, DK, dv, generator=g).to(HALF)
    if decay:
        call["decay"] = -torch.rand((B, positions, HV, DK)[:decay], generator=g).exp()
    return {**call, "normalize": True}


@pytest.mark.parametrize("positions", [1, 8])
@pytest.mark.parametrize("decay", [0, 3, 4])
def test_results_and_gradients(torch_npu: ModuleType, positions: int, decay: int) -> None:
    """Within the op's bounds; one call of the vendor's forward, the gradients by eager."""
    call = tensors(positions, decay)
    with fusedops.use("npu", fallback="silent"):
        for scale, state in ((None, call["initial_state"]), (0.7, None)):
            options = {**call, "scale": scale, "initial_state": state, "return_state": True}
            assert_right("linear_attention", **options, device="npu")
    assert [each.name for each in torch_npu.calls] == [FUNCTION] * 2
    assert [each.options["by_row"] for each in torch_npu.calls] == [decay == 4] * 2
    assert torch_npu.calls[0].options["lengths"] == [positions] * B


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("dv", [1, DV])
def test_no_argument_is_written_and_nothing_waits(dv: int) -> None:
    """The vendor's function writes its state; of one column, the turned state has the bytes of the caller's."""
    given = on_npu(tensors(1, dv=dv))
    before = {name: each.clone() for name, each in given.items() if isinstance(each, Tensor)}
    with nothing_waits():
        out, state = linear_attention(**given, return_state=True)
    assert all(torch.equal(given[name].cpu(), each.cpu()) for name, each in before.items())
    assert (out.dtype, state.dtype, out.is_contiguous(), state.is_contiguous()) == (HALF, torch.float32, True, True)


@pytest.mark.usefixtures("torch_npu")
def test_a_decay_of_minus_infinity_forgets_the_state() -> None:
    call = tensors(4)
    call["decay"][:, 2] = -math.inf
    with fusedops.use("npu", fallback="raise"):
        out, state = linear_attention(**on_npu(call), return_state=True)
        parts = {n: e[:, 2:] if isinstance(e, Tensor) and n != "initial_state" else e for n, e in call.items()}
        last, end = linear_attention(**on_npu({**parts, "initial_state": None}), return_state=True)
    assert torch.equal(out[:, 2:].cpu(), last.cpu())
    assert torch.equal(state.cpu(), end.cpu())


REFUSED: dict[str, dict[str, Any]] = {
    "nine positions": tensors(9),
    "no beta": {**tensors(), "beta": None},
    "rows that are not normalized": {**tensors(), "normalize": False},
    "float32": {**tensors(), "v": tensors()["v"].float()},
    "beta of float32": {**tensors(), "beta": tensors()["beta"].float()},
    "a state of float32": {**tensors(), "initial_state": tensors()["initial_state"].float()},
    "a decay of float64": {**tensors(), "decay": tensors()["decay"].double()},
    "packed sequences": {
        **{name: each[:1] if isinstance(each, Tensor) else each for name, each in tensors().items()},
        "cu_seqlens": torch.tensor([0, 3]),
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_calls_are_eagers(torch_npu: ModuleType, kind: str) -> None:
    given = on_npu(REFUSED[kind])
    assert fusedops.explain("linear_attention", **given).backend == "eager"
    with fusedops.use(fallback="silent"):
        linear_attention(**given)
    assert torch_npu.calls == []


@pytest.mark.parametrize("shape", [(2, 0, 2, 8, 6), (0, 2, 2, 8, 6), (2, 2, 2, 0, 6), (2, 2, 2, 8, 0)], ids=str)
def test_without_elements_the_vendor_is_not_called(torch_npu: ModuleType, shape: tuple[int, ...]) -> None:
    batch, positions, heads, dk, dv = shape
    call: dict[str, Any] = {name: torch.ones(batch, positions, heads, dk, dtype=HALF) for name in ("q", "k")}
    call |= {"v": torch.ones(batch, positions, heads, dv, dtype=HALF), "beta": torch.ones(shape[:3], dtype=HALF)}
    call |= {"initial_state": torch.rand(batch, heads, dk, dv).to(HALF), "normalize": True, "return_state": True}
    with fusedops.use("npu", fallback="raise"):
        for state in (call["initial_state"], None):
            results = linear_attention(**on_npu({**call, "initial_state": state}))
            wanted = linear_attention(**{**call, "initial_state": state}, backend="eager")
            for each, want in zip(results, wanted):
                torch.testing.assert_close(each.cpu(), want, rtol=0, atol=0)
    assert torch_npu.calls == []
