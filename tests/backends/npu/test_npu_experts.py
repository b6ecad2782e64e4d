"""experts on Ascend: the vendor's calls, and what of sentinels and of experts without tokens reaches the results."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate, nothing_waits, on_npu
from torch import Tensor

import fusedops
from fusedops import TensorSpec, experts

NAN = math.nan
T, K, E, H, I = 5, 2, 4, 6, 3  # noqa: E741
INDEX = ((0, 3), (3, 3), (-1, 0), (7, 4), (3, 0))  # expert 1 and 2 have no token, the fourth token has no expert
GMM = "npu_grouped_matmul"
NAMES = ("x", "weights", "up", "down", "up_bias", "down_bias")


def tensors(dtype: torch.dtype = torch.float32, gated: bool = True, transposed: bool = False) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    rows = 2 * I if gated else I
    up, down = ((E, H, rows), (E, I, H)) if transposed else ((E, rows, H), (E, H, I))
    shapes = ((T, H), (T, K), up, down, (E, rows), (E, H))
    call: dict[str, Any] = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in zip(NAMES, shapes)}
    return {**call, "index": torch.tensor(INDEX), "transposed": transposed}


def run(call: dict[str, Any], grad: Tensor, backend: str = "npu") -> dict[str, Tensor]:
    """Return y and the gradients by name, on the CPU."""
    device = "npu" if backend == "npu" else "cpu"
    leaves = {
        name: each.to(device, copy=True).requires_grad_(each.is_floating_point()) if isinstance(each, Tensor) else each
        for name, each in call.items()
    }
    with fusedops.use(backend, fallback="raise"):
        y = experts(**leaves)
        y.backward(grad.to(device))
    return {"y": y.detach().cpu(), **{name: leaves[name].grad.cpu() for name in NAMES}}


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_of_a_sentinel_reaches_a_result(transposed: bool) -> None:
    """Nor of a token and a gradient that no expert has, where they are not finite."""
    call, grad = tensors(transposed=transposed), torch.randn(T, H)
    finite = run(call, grad)
    for name, wanted in run(call, grad, "eager").items():
        torch.testing.assert_close(finite[name], wanted)
    for name in ("up", "down", "up_bias", "down_bias"):
        assert not finite[name][[1, 2]].any()
        assert bool(finite[name][[0, 3]].any())
    assert not finite["y"][3].any()
    assert not finite["x"][3].any()
    assert bool((finite["weights"] == 0).equal((call["index"] < 0) | (call["index"] >= E)))
    call["weights"][2, 0] = call["weights"][3, 1] = NAN
    call["x"][3], grad[3] = NAN, math.inf
    for name, got in run(call, grad).items():
        torch.testing.assert_close(got, finite[name], rtol=0, atol=0)


def test_the_vendors_calls(torch_npu: ModuleType) -> None:
    """Two products forward, five backward and one for each bias; the activation is the vendor's where it has it."""
    run(tensors(), torch.ones(T, H))
    assert [each.name for each in torch_npu.calls] == [
        *(GMM, "npu_swiglu", GMM),
        *("npu_swiglu", GMM, GMM, GMM, "npu_swiglu_backward", GMM, GMM, GMM),
    ]
    products = [each for each in torch_npu.calls if each.name == GMM]
    assert [each.options["group_type"] for each in products] == [0, 0, 2, 2, 0, 0, 2, 2]
    assert [each.shapes[0] for each in products[:2]] == [(T * K, H), (T * K, I)]


@pytest.mark.parametrize(
    ("options", "vendors"),
    [
        ({}, "npu_swiglu"),
        ({"activation": "geglu"}, "npu_geglu"),
        ({"activation": "geglu_tanh"}, "npu_geglu"),
        ({"interleaved": True}, None),
        ({"activation": "geglu", "interleaved": True}, None),
        ({"limit": 7.0, "alpha": 1.702, "offset": 1.0}, None),
        ({"activation": "gelu"}, None),
        ({"activation": "relu2"}, None),
    ],
    ids=str,
)
def test_the_activation(torch_npu: ModuleType, options: dict[str, Any], vendors: str | None) -> None:
    """As on eager, by the vendor's function for halves; and nothing waits for the device."""
    gated = options.get("activation", "swiglu") not in ("gelu", "relu2")
    call, grad = {**tensors(gated=gated), **options}, torch.randn(T, H)
    results = run(call, grad)
    for name, wanted in run(call, grad, "eager").items():
        torch.testing.assert_close(results[name], wanted)
    assert {each.name for each in torch_npu.calls if each.name in ("npu_swiglu", "npu_geglu")} == {vendors} - {None}


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "silu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_waits_for_the_device(activation: str, transposed: bool) -> None:
    leaves = on_npu(tensors(torch.bfloat16, activation != "silu", transposed), grow=True)
    grad = torch.ones(T, H, dtype=torch.bfloat16).to("npu")
    with nothing_waits():
        experts(**leaves, activation=activation).backward(grad)


def test_one_gradient_alone(torch_npu: ModuleType) -> None:
    """What is not wanted is not computed: of one gradient there is one product, or two behind the activation."""
    grad, calls = torch.ones(T, H).to("npu"), {"down": 1, "weights": 1, "down_bias": 1, "x": 2, "up": 2, "up_bias": 2}
    for name, count in calls.items():
        leaves = {key: each.to("npu") if isinstance(each, Tensor) else each for key, each in tensors().items()}
        leaves[name].requires_grad_()
        with fusedops.use("npu", fallback="raise"):
            y = experts(**leaves)
            torch_npu.calls.clear()
            y.backward(grad)
        assert sum(each.name == GMM for each in torch_npu.calls) == count, name


@pytest.mark.usefixtures("torch_npu")
def test_limits_and_costs() -> None:
    bf16 = torch.bfloat16

    def npu_of(**changes: Any) -> Any:
        call: dict[str, Any] = {
            "x": TensorSpec((64, 32), bf16, "npu"),
            "index": TensorSpec((64, 4), torch.int64, "npu"),
            "weights": TensorSpec((64, 4), torch.float32, "npu"),
            "up": TensorSpec((8, 48, 32), bf16, "npu"),
            "down": TensorSpec((8, 32, 24), bf16, "npu"),
        }
        return candidate(experts, **call | changes)

    assert not npu_of().reasons
    costs = {(each.name, each.direction): each.bytes for each in npu_of().adaptations}
    assert costs == {("rows", "forward"): 64 * 4 * 32 * 2, ("rows", "backward"): 2 * 64 * 4 * 32 * 2}
    many = {"up": TensorSpec((1024, 48, 32), bf16, "npu"), "down": TensorSpec((1024, 32, 24), bf16, "npu")}
    wide = {"up": TensorSpec((8, 65536, 32), bf16, "npu"), "down": TensorSpec((8, 32, 32768), bf16, "npu")}
    for changes in (
        {"up": TensorSpec((8, 48, 32), torch.float32, "npu")},
        {"down": TensorSpec((8, 32, 24), torch.float16, "npu")},
        {"weights": TensorSpec((64, 4), torch.float64, "npu")},
        {"up_bias": TensorSpec((8, 48), torch.float64, "npu")},
        {"down_bias": TensorSpec((8, 32), torch.float64, "npu")},
        many,
        wide,
    ):
        assert npu_of(**changes).reasons, changes
