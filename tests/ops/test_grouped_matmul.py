"""grouped_matmul: what its contract says about groups, beside a loop over the rows in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops import InvalidInputError, testing
from fusedops.testing import OPS
from fusedops_eager.experts import _grouped

N, K = 8, 16


def tensors(rows: int, experts: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return random tensors of a call."""
    generator = torch.Generator().manual_seed(experts + 10 * rows)
    shapes = {"x": (rows, K), "weight": (experts, N, K), "bias": (experts, N)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def by_row(offsets: list[int], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the op one row after another."""
    rows: list[Tensor] = []
    for i in range(len(x)):
        e = sum(end <= i for end in offsets)
        rows.append(weight[e] @ x[i] + bias[e] if e < len(weight) else 0.0 * x[i] @ weight.sum(0).T * 0.0)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "offsets",
    [
        [2, 5, 9],
        [3, 3, 7],  # a group without rows, and a tail
        [0, 0, 4],
        [9, 9, 9],  # all rows in the first group
        [0, 0, 9],
        [0, 0, 0],  # no row has a group
        [6],
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_groups(offsets: list[int], transposed: bool) -> None:
    given = tensors(9, len(offsets))
    call = {**given, "weight": given["weight"].mT} if transposed else given
    y = fusedops.grouped_matmul(offsets=torch.tensor(offsets), transposed=transposed, **call)
    expected = by_row(offsets, **given)
    torch.testing.assert_close(y, expected)
    assert not y[offsets[-1] :].any()
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, list(given.values()), grad, materialize_grads=True)
    got = torch.autograd.grad(y, list(given.values()), grad)
    for name, one, other in zip(given, got, wanted):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    assert not got[0][offsets[-1] :].any()
    for e, (start, end) in enumerate(zip([0, *offsets], offsets)):
        assert start < end or not (got[1][e].any() or got[2][e].any()), "a group without rows has a gradient of 0"


@pytest.mark.parametrize(("rows", "experts"), [(0, 2), (3, 0)])
def test_nothing_is_multiplied(rows: int, experts: int) -> None:
    given = tensors(rows, experts)
    y = fusedops.grouped_matmul(offsets=torch.zeros(experts, dtype=torch.int32), **given)
    assert y.shape == (rows, N)
    assert not y.any()
    y.sum().backward()
    assert all(not each.grad.any() for each in given.values())


def test_a_number_that_is_not_finite_stays_in_its_group() -> None:
    given = tensors(6, 3)
    with torch.no_grad():
        given["x"][0], given["x"][5], given["weight"][1] = float("nan"), float("inf"), float("inf")
    grad = torch.ones(6, N, dtype=torch.float64)
    grad[5] = float("nan")  # the tail, as its row of x is
    y = fusedops.grouped_matmul(offsets=torch.tensor([2, 4, 5]), **given)
    assert y[[1, 4]].isfinite().all()
    assert not y[5].any()
    dx, dweight, dbias = torch.autograd.grad(y, list(given.values()), grad)
    assert dx[[0, 1, 4]].isfinite().all()
    assert not dx[5].any()
    assert dweight[1:].isfinite().all()
    assert dbias.isfinite().all()


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([4, 3], r"got offsets\[1\] = 3 after 4, expected the end of a group from 4 to 9, .* as in counts.cumsum\(0\)"),
        ([4, 10], r"got offsets\[1\] = 10 after 4, expected .* from 4 to 9"),
        ([-1, 9], r"got offsets\[0\] = -1, expected .* from 0 to 9"),
    ],
)
def test_wrong_ends_are_an_error_on_a_cpu(offsets: list[int], text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"grouped_matmul: {text}"):
        fusedops.grouped_matmul(offsets=torch.tensor(offsets), **tensors(9, 2))


def test_the_reference_clamps_wrong_ends() -> None:
    given = {name: each.detach() for name, each in tensors(9, 4).items()}
    wrong, right = torch.tensor([-2, 5, 3, 12]), torch.tensor([0, 5, 5, 9])
    x, weight, bias = given.values()
    got, want = (OPS["grouped_matmul"].reference(x, weight, each, bias, False) for each in (wrong, right))
    assert torch.equal(got, want)


def test_a_bias_is_added_before_the_rounding() -> None:
    x, weight = torch.full((1, 1), 1.0, dtype=torch.bfloat16), torch.full((1, 1, 1), 1.0)
    bias = torch.full((1, 1), 2.0**-8 + 2.0**-16)  # more than half of the distance to the next bfloat16
    y = fusedops.grouped_matmul(x, weight, torch.tensor([1]), bias)
    assert y.dtype is torch.bfloat16
    assert float(y) == 1.0078125


class _Garbage:
    """Stands for grouped_mm on CUDA: what it leaves uninitialised is NaN here."""

    def __call__(self, one: Tensor, other: Tensor, offs: Tensor) -> Tensor:
        assert offs.dtype is torch.int32
        assert all(each.stride(-1) == 1 or each.stride(-2) == 1 for each in (one, other))
        starts = [0, *offs.tolist()]
        groups = [(e, slice(*ends)) for e, ends in enumerate(pairwise(starts)) if ends[0] < ends[1]]
        if other.dim() == 3:
            out = torch.full((len(one), other.shape[2]), float("nan"), dtype=one.dtype)
            for e, rows in groups:
                out[rows] = one[rows] @ other[e]
        else:
            out = torch.full((len(offs), len(one), other.shape[1]), float("nan"), dtype=one.dtype)
            for e, rows in groups:
                out[e] = one[:, rows] @ other[rows]
        return out


@pytest.mark.parametrize("product", [_Garbage(), _grouped._grouped_mm], ids=["stand-in", "torch"])
@pytest.mark.parametrize("transposed", [False, True])
def test_all_groups_at_once(product: Any, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA on CPU tensors: what grouped_mm leaves uninitialised is 0, and wrong ends are clamped."""
    if product is None:
        pytest.skip("torch has no grouped_mm")
    monkeypatch.setattr(_grouped, "_grouped_mm", product)
    x, weight, bias = (each.detach() for each in tensors(24, 5, torch.bfloat16).values())
    weight = weight.mT if transposed else weight  # not contiguous, as a model's may be
    wrong, right = torch.tensor([3, 3, 20, 8, 21]), torch.tensor([3, 3, 20, 20, 21])
    for of_bias in (bias, bias.float(), None):
        want = testing.expected(OPS["grouped_matmul"], (x, weight, right, of_bias, transposed))
        y = _grouped.forward_at_once(x, weight, wrong, of_bias, transposed)
        assert (y.dtype, y.is_contiguous()) == (x.dtype, True)
        testing.assert_within(y, want.y, want.limits["output y"], "y")
        assert not y[21:].any()
        gradients = _grouped.backward_at_once(
            want.grad.to(x.dtype), x, weight, wrong, of_bias, transposed, (True, True, True)
        )
        for name, like, got in zip(("x", "weight", "bias"), (x, weight, of_bias), gradients, strict=True):
            if like is None:
                assert got is None
                continue
            assert (got.dtype, got.is_contiguous()) == (like.dtype, True)
            testing.assert_within(got, want.gradients[name], want.limits[f"gradient of {name}"], name)
            assert not got[21:].any() if name == "x" else not got[[1, 3]].any()
    nothing = (False, False, False)
    assert _grouped.backward_at_once(x, x, weight, right, None, transposed, nothing) == (None, None, None)


def test_grouped_mm_has_aligned_bfloat16_alone() -> None:
    x, weight, _ = (each.detach() for each in tensors(4, 2, torch.bfloat16).values())
    assert _grouped.are_aligned(x, weight)
    assert not _grouped.takes(x, weight), "on a CPU each group is one product of float32"
    assert not _grouped.are_aligned(x.half(), weight.half())
    assert not _grouped.are_aligned(x, weight.float())
    assert not _grouped.are_aligned(x[:, :12].contiguous(), weight[..., :12].contiguous())
    assert not _grouped.are_aligned(x[:0], weight)
    shifted = torch.empty(65, dtype=torch.bfloat16)[1:].view(4, 16)
    assert not _grouped.are_aligned(shifted, weight)


def test_a_meta_tensor_has_the_shape() -> None:
    given = {name: each.detach().to("meta") for name, each in tensors(9, 2).items()}
    y = fusedops.grouped_matmul(offsets=torch.empty(2, dtype=torch.int32, device="meta"), **given)
    assert (y.shape, y.is_meta) == ((9, N), True)
