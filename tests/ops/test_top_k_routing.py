"""top_k_routing: ties, NaN, groups, given experts, and what verify accepts of a choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from calls import has_kernels
from loopback import registered, with_parameters
from torch import Tensor

import fusedops
from fusedops import MismatchError, testing

OP = testing.OPS["top_k_routing"]
SCORES = ("softmax", "sigmoid", "sqrt_softplus", "topk_softmax")
BACKENDS = [name for name in ("eager", "cpu", "triton") if has_kernels(name, OP.name)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def by_rows(logits: Tensor, k: int, score: str, bias: Tensor | None, groups: int, top: int, by: str) -> list[list[int]]:
    """Choose one row after another, by Python's sort of (choice, index)."""
    z = logits.double()
    scores = {
        "softmax": torch.softmax(z, -1),
        "sigmoid": torch.sigmoid(z),
        "sqrt_softplus": torch.nn.functional.softplus(z, threshold=50.0).sqrt(),
        "topk_softmax": z,
    }[score]
    rows: list[list[float]] = (scores if bias is None else scores + bias.double()).round(decimals=9).tolist()
    found: list[list[int]] = []
    for row in rows:
        width = len(row) // groups
        parts = [range(start, start + width) for start in range(0, len(row), width)]
        best = [sum(sorted((row[e] for e in part), reverse=True)[: 2 if by == "top2" else 1]) for part in parts]
        kept = sorted(range(groups), key=lambda g: (-round(best[g], 8), g))[:top]
        experts = [e for g in kept for e in parts[g]]
        found.append(sorted(experts, key=lambda e: (-row[e], e))[:k])
    return found


@every_backend
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("experts", [8, 33, 64])
def test_ties_go_to_the_lowest_index(backend: str, score: str, experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    values = torch.tensor([0.3, 1.1, 1.7, -0.9, 2.6])
    logits = values[torch.randint(5, (40, experts), generator=generator)]
    bias = torch.randint(-1, 2, (experts,), generator=generator) * 0.5
    for given in (None, bias):
        for groups, top in ((1, 1), (4, 2)):
            if experts % groups:
                continue
            for by in ("top2", "max"):
                if given is not None and by == "top2" and groups > 1:
                    continue  # two sums of the same numbers in another order
                options: dict[str, Any] = {"score": score, "bias": given, "groups": groups, "top_groups": top}
                _, index = fusedops.top_k_routing(logits, 4, group_score=by, **options, backend=backend)
                assert index.tolist() == by_rows(logits, 4, score, given, groups, top, by)


@every_backend
@pytest.mark.parametrize("score", SCORES)
def test_equal_logits(backend: str, score: str) -> None:
    values = torch.tensor([[0.0], [0.3], [-2.7], [11.0], [-80.0], [200.0]])
    for size in (1, 2, 7, 31, 100):
        weights, index = fusedops.top_k_routing(values.repeat(1, size), size, score=score, backend=backend)
        assert index.tolist() == [[*range(size)]] * len(values)
        assert (weights == weights[:, :1]).all(), "equal logits have equal scores"


@every_backend
def test_nan_is_larger_than_any_number(backend: str) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, nan, inf, nan, 2.0], [-inf, -inf, nan, -inf, 3.0], [-nan, inf, inf, 0.0, nan]])
    for score in ("sigmoid", "topk_softmax"):
        index = fusedops.top_k_routing(logits, 4, score=score, backend=backend)[1]
        assert index.tolist() == [[1, 3, 2, 4], [2, 4, 0, 1], [0, 4, 1, 2]]
    weights, index = fusedops.top_k_routing(logits, 2, backend=backend)  # a softmax of NaN
    assert index.tolist() == [[0, 1]] * 3
    assert weights.isnan().all()


@every_backend
def test_given_experts(backend: str) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    index = torch.tensor([[5, 5], [0, 1], [3, 3], [2, 4]], dtype=torch.int32)
    options: dict[str, Any] = {"score": "sigmoid", "normalize": True, "scale": 2.5, "backend": backend}
    weights, used = fusedops.top_k_routing(logits, 2, index=index, **options)
    assert (used.dtype, used.tolist()) == (torch.int64, index.tolist())
    wide = logits.detach().double().requires_grad_()
    scores = torch.sigmoid(wide).gather(-1, index.long())
    want = 2.5 * scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, want.float())
    grad = torch.tensor([[1.0, 2.0]]).expand(4, 2)
    (got,) = torch.autograd.grad(weights, logits, grad)
    torch.testing.assert_close(got, torch.autograd.grad(want, wide, grad.double())[0].float(), atol=1e-6, rtol=1e-5)


@every_backend
def test_a_number_of_no_expert_makes_its_row_nan(backend: str) -> None:
    for score in SCORES:
        logits = torch.randn(3, 5).requires_grad_()
        index = torch.tensor([[0, 5], [1, 2], [-1, 3]])
        weights, used = fusedops.top_k_routing(logits, 2, score=score, index=index, backend=backend)
        assert used.tolist() == index.tolist()
        (grad,) = torch.autograd.grad(weights.sum(), logits)
        for result in (weights, grad):
            assert result.isnan().all(-1).tolist() == [True, False, True]
            assert result[1].isfinite().all()


def test_the_bias_and_the_index_have_no_gradient() -> None:
    bias = torch.zeros(8, requires_grad=True)
    weights, index = fusedops.top_k_routing(torch.randn(2, 8), 2, bias=bias)
    assert not weights.requires_grad
    weights, index = fusedops.top_k_routing(torch.randn(2, 8, requires_grad=True), 2, bias=bias)
    assert not index.requires_grad
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(weights.sum(), bias)


@contextmanager
def choosing(forward: Any) -> Iterator[None]:
    """Serve calls by a forward kernel."""
    run = with_parameters(forward, *OP.parameters)
    backend = fusedops.Backend("choosing", ("cpu",), -50, [fusedops.kernel(OP.name)(run)])
    with registered(backend), fusedops.use("choosing"):
        yield


ROW = torch.tensor([[1.0, 2.0, 2.0 + 2e-7, -3.0]])


@pytest.mark.parametrize(
    ("chosen", "logits", "options", "right"),
    [
        ([2, 1], ROW, {"score": "sigmoid"}, True),
        ([1, 2], ROW, {"score": "sigmoid"}, True),  # within the error of a sigmoid in float32
        ([2, 1], ROW, {"score": "topk_softmax"}, True),
        ([1, 2], ROW, {"score": "topk_softmax"}, False),  # logits have no error
        ([1, 0], ROW, {"score": "sigmoid"}, False),  # 2 may not be left out
        ([1, 1], ROW, {"score": "sigmoid"}, False),
        ([1, 4], ROW, {"score": "sigmoid"}, False),  # no expert
        ([-1, 1], ROW, {"score": "sigmoid"}, False),
        ([2, 1], ROW.round(), {"score": "sigmoid"}, False),  # a tie
        ([0, 1], torch.tensor([[90.0, 95.0, 20.0]]), {"score": "sigmoid"}, True),  # 1.0 in float32
        ([1, 0], torch.tensor([[90.0, 95.0, 20.0]]), {"score": "sigmoid"}, True),
        ([0, 1], torch.tensor([[90.0, 95.0, 1.0]]), {"score": "softmax"}, False),
        ([0, 1], torch.ones(1, 8), {"groups": 4, "top_groups": 2}, True),
        ([2, 3], torch.ones(1, 8), {"groups": 4, "top_groups": 2}, False),  # a tie of groups
        ([0, 2], torch.ones(1, 8), {"groups": 4, "top_groups": 2}, False),
        ([4, 5], torch.cat((ROW, ROW.flip(-1)), -1), {"groups": 2, "score": "sigmoid"}, False),
        ([1, 2], torch.cat((ROW, ROW.flip(-1)), -1), {"groups": 2, "score": "sigmoid"}, True),
        ([4, 5], torch.cat((ROW, ROW + 1e-7), -1), {"groups": 2, "score": "sigmoid", "group_score": "max"}, False),
        ([6, 5], torch.cat((ROW, ROW + 1e-7), -1), {"groups": 2, "score": "sigmoid", "group_score": "max"}, True),
    ],
)
def test_verify_accepts_a_choice_within_the_error_of_scores(
    chosen: list[int], logits: Tensor, options: dict[str, Any], right: bool
) -> None:
    """The results of a kernel that makes this choice, with right weights for it."""
    index = torch.tensor([chosen])

    def forward(*args: Any) -> Any:
        return OP.reference(*args[:-1], index)[0].nan_to_num(nan=0.5), index.clone()

    for against in ("reference", "eager"):
        raised = nullcontext() if right else pytest.raises(MismatchError, match=r"chosen|weights")
        with choosing(forward), fusedops.verify(against), raised:
            fusedops.top_k_routing(logits, 2, **options)


def test_verify_compares_the_weights_of_the_choice() -> None:
    def forward(*args: Any) -> Any:
        weights, index = OP.reference(*args)
        return weights.flip(-1), index

    with choosing(forward), fusedops.verify("reference"), pytest.raises(MismatchError, match="weights"):
        fusedops.top_k_routing(torch.randn(3, 8), 2)


def test_verify_accepts_what_a_sum_of_scores_that_underflows_gives() -> None:
    """0 / 0 in float32, in float64 a number; also where the scale is 0."""
    logits = torch.tensor([[0.0, -500.0, -500.0]]).requires_grad_()
    bias = torch.tensor([0.0, 2.0, 2.0])
    for scale in (0.0, 1.0):
        with fusedops.verify("reference"):
            weights, index = fusedops.top_k_routing(logits, 2, bias=bias, normalize=True, scale=scale, backend="eager")
            weights.sum().backward()
        assert index.tolist() == [[1, 2]]
        assert weights.isnan().all()
