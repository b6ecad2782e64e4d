"""grouped_matmul on Ascend: the vendor's calls, and the numbers that its function leaves undefined."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate, nothing_waits, on_npu
from torch import Tensor

import fusedops
from fusedops import TensorSpec, grouped_matmul

NAME = "npu_grouped_matmul"
ENDS = (2, 2, 5)  # of 7 rows: group 1 is empty, and two rows have no group
ROWS, K, N = 7, 4, 6


def tensors(dtype: torch.dtype = torch.float32, transposed: bool = False, bias: bool = True) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    shape = (len(ENDS), K, N) if transposed else (len(ENDS), N, K)
    return {
        "x": torch.randn(ROWS, K, generator=g).to(dtype),
        "weight": torch.randn(shape, generator=g).to(dtype),
        "offsets": torch.tensor(ENDS),
        "bias": torch.randn(len(ENDS), N, generator=g).to(dtype) if bias else None,
        "transposed": transposed,
    }


def run(call: dict[str, Any], grad: Tensor) -> tuple[Tensor, ...]:
    """Return y and the gradients of x, weight and a bias, from npu."""
    leaves = on_npu(call, grow=True)
    with fusedops.use("npu", fallback="raise"):
        y = grouped_matmul(**leaves)
        y.backward(grad.to("npu"))
    of = [leaves[name].grad for name in ("x", "weight", "bias") if leaves[name] is not None]
    return y.detach().cpu(), *(each.cpu() for each in of)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_a_group_and_groups_without_rows(
    torch_npu: ModuleType, dtype: torch.dtype, transposed: bool
) -> None:
    """Also where the rows past the last end, and their gradients, are not finite."""
    call, grad = tensors(dtype, transposed), torch.randn(ROWS, N).to(dtype)
    finite = run(call, grad)
    call["x"][5:], grad[5:] = math.inf, math.nan
    for result, wanted in zip(run(call, grad), finite):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    y, dx, dweight, dbias = finite
    assert bool((y[5:] == 0).all() and (dx[5:] == 0).all())
    assert bool((dweight[1] == 0).all() and (dbias[1] == 0).all())
    assert bool((y[:5] != 0).any() and (dweight[[0, 2]] != 0).any() and (dbias[[0, 2]] != 0).any())
    sums = torch.stack([grad[:2].float().sum(0), grad[2:5].float().sum(0)]).to(dtype)
    torch.testing.assert_close(dbias[[0, 2]], sums)


def test_the_vendors_calls(torch_npu: ModuleType) -> None:
    """One for each product: no copy of a weight or of a list of tensors, and the ends are those that it takes."""
    run(tensors(), torch.ones(ROWS, N))
    assert [each.name for each in torch_npu.calls] == [NAME] * 4
    assert [each.options["group_type"] for each in torch_npu.calls] == [0, 0, 2, 2]
    assert [each.shapes[0] for each in torch_npu.calls] == [(ROWS, K), (ROWS, N), (N, ROWS), (1, ROWS)]
    assert [each.shapes[2] for each in torch_npu.calls] == [(3,), (3,), (4,), (4,)]


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_waits_for_the_device(transposed: bool) -> None:
    leaves, grad = (
        on_npu(tensors(torch.bfloat16, transposed), grow=True),
        torch.ones(ROWS, N, dtype=torch.bfloat16).to("npu"),
    )
    with nothing_waits():
        grouped_matmul(**leaves).backward(grad)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 5), (1, 5, 1), (5, 1, 1), (2, 1, 3), (2, 3, 1), (4, 1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_sizes_of_one(torch_npu: ModuleType, sizes: tuple[int, int, int], transposed: bool) -> None:
    """The vendor reads from the strides which tensor is a transpose; torch accepts any stride of a size of 1."""
    rows, k, n = sizes
    shape = (2, k, n) if transposed else (2, n, k)
    call: dict[str, Any] = {
        "x": torch.randn(k, rows).to("npu").t(),
        "weight": torch.randn(shape[0], shape[2], shape[1]).to("npu").mT,
        "offsets": torch.tensor([rows // 2, rows]).to("npu"),
        "transposed": transposed,
    }
    for name in ("x", "weight"):
        call[name].requires_grad_()
    grad = torch.randn(n, rows).to("npu").t()
    with fusedops.use("npu", fallback="raise"):
        y = grouped_matmul(**call)
        results = (y, *torch.autograd.grad(y, (call["x"], call["weight"]), grad))
    call = {name: each.detach().cpu() if isinstance(each, Tensor) else each for name, each in call.items()}
    for name in ("x", "weight"):
        call[name].requires_grad_()
    y = grouped_matmul(**call, backend="eager")
    for result, wanted in zip(results, (y, *torch.autograd.grad(y, (call["x"], call["weight"]), grad.cpu()))):
        torch.testing.assert_close(result.cpu(), wanted)
    assert {each.options["group_type"] for each in torch_npu.calls} == {0, 2}


@pytest.mark.parametrize(
    ("rows", "experts", "k", "n"), [(0, 3, 4, 6), (7, 0, 4, 6), (7, 3, 0, 6), (7, 3, 4, 0)], ids=str
)
def test_an_empty_tensor_is_not_passed_on(torch_npu: ModuleType, rows: int, experts: int, k: int, n: int) -> None:
    ends = torch.tensor([0, min(2, rows), min(5, rows)][:experts], dtype=torch.int64)
    call = {"x": torch.randn(rows, k), "weight": torch.randn(experts, n, k), "offsets": ends}
    call |= {"bias": torch.randn(experts, n), "transposed": False}
    y, dx, dweight, dbias = run(call, torch.ones(rows, n))
    if k == 0:  # the bias is left
        torch.testing.assert_close(y[:5], call["bias"][[1, 1, 2, 2, 2]])
        torch.testing.assert_close(dbias[:, 0], torch.tensor([0.0, 2.0, 3.0]))
    else:
        assert not y.any()
        assert not dbias.any()
    assert bool((y[5:] == 0).all())
    assert (dx.shape, dweight.shape) == (call["x"].shape, call["weight"].shape)
    assert not dx.any()
    assert not dweight.any()
    assert len(torch_npu.calls) == (k == 0)  # the sums of the bias' gradient


@pytest.mark.usefixtures("torch_npu")
def test_limits_and_costs() -> None:
    def npu_of(**changes: Any) -> Any:
        call: dict[str, Any] = {
            "x": TensorSpec((64, 32), torch.bfloat16, "npu"),
            "weight": TensorSpec((8, 16, 32), torch.bfloat16, "npu"),
            "offsets": TensorSpec((8,), torch.int64, "npu"),
            "bias": TensorSpec((8, 16), torch.float32, "npu"),
        }
        return candidate(grouped_matmul, **call | changes)

    costs = {(each.name, each.direction): each.bytes for each in npu_of().adaptations}
    assert costs == {
        ("bias", "forward"): 64 * 16 * 4,
        ("group", "backward"): 16 * 32 * 2,
        ("float32", "backward"): 64 * 16 * 4,
    }
    wide = {"x": TensorSpec((64, 65536), torch.bfloat16, "npu"), "bias": None}
    for changes in (
        {"weight": TensorSpec((8, 16, 32), torch.float16, "npu")},
        {"bias": TensorSpec((8, 16), torch.float64, "npu")},
        {**wide, "weight": TensorSpec((8, 16, 65536), torch.bfloat16, "npu")},
        {
            "weight": TensorSpec((1024, 16, 32), torch.bfloat16, "npu"),
            "offsets": TensorSpec((1024,), torch.int64, "npu"),
            "bias": None,
        },
    ):
        assert npu_of(**changes).reasons, changes


X = torch.ones(ROWS, K)
RULES: dict[str, dict[str, Any]] = {  # the sentence of a refusal, and the argument that is refused
    "split_item 2 or 3": {"split_item": 0},
    "group_type 0 and 2": {"group_type": 1},
    "ends as group_list": {"group_list_type": 1},
    "the default of the other arguments": {"bias": [X]},
    "the last must be the size of their axis": {"ends": (2, 2, 5)},
    "the ends must not fall": {"ends": (2, 1, 7)},
    "one element for each group": {"ends": (2, 7)},
    "must not be for groups of rows": {"x": lambda: torch.ones(K, ROWS).to("npu").t()},
    "x must be contiguous": {"x": lambda: torch.ones(ROWS, 2 * K).to("npu")[:, ::2]},
    "x must be on an npu device": {"x": lambda: X},
    "the sizes of the sum must be equal": {"x": lambda: torch.ones(ROWS, 5).to("npu")},
    "alike, of float16, bfloat16 or float32": {"x": lambda: X.half().to("npu")},
    "empty tensors": {"x": lambda: torch.ones(0, K).to("npu")},
    "the last size of weight": {"weight": lambda: torch.ones(3, K, 65536).to("npu")},
    "x must be transposed": {"group_type": 2, "x": lambda: X.t().contiguous().to("npu")},
    "weight must not be transposed": {"group_type": 2, "weight": lambda: torch.ones(N, ROWS).to("npu").t()},
}


@pytest.mark.parametrize("sentence", RULES)
def test_each_rule_of_the_fake(torch_npu: ModuleType, sentence: str) -> None:
    change = dict(RULES[sentence])
    ends = torch.tensor(change.pop("ends", (2, 2, 7))).to("npu")
    options: dict[str, Any] = {"split_item": 3, "group_type": 0, "group_list": ends}
    if change.get("group_type") == 2:
        first, second = X.to("npu").t(), torch.ones(ROWS, N).to("npu")
    else:
        first, second = X.to("npu"), torch.ones(3, K, N).to("npu")
    first, second = (
        change.pop(name, lambda given=given: given)() for name, given in (("x", first), ("weight", second))
    )
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_grouped_matmul([first], [second], **options | change)
    assert not torch_npu.calls
