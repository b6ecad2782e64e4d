"""top_k_routing on Ascend: the vendor's calls, and what is corrected of their results."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate, nothing_waits
from torch import Tensor

import fusedops
from fusedops import TensorSpec, top_k_routing

NAME = "npu_moe_gating_top_k"
INF, NAN = math.inf, math.nan


def run(logits: Tensor, k: int = 3, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the weights and the index, from npu."""
    given = {name: each.to("npu") if isinstance(each, Tensor) else each for name, each in options.items()}
    with fusedops.use("npu", fallback="raise"):
        weights, index = top_k_routing(logits.to("npu"), k, **given)
    return weights.cpu(), index.cpu()


def assert_as_eager(logits: Tensor, k: int = 3, **options: Any) -> None:
    for got, wanted in zip(run(logits, k, **options), top_k_routing(logits, k, **options, backend="eager")):
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("groups", [1, 4], ids="{} groups".format)
def test_weights_and_ties(score: str, normalize: bool, groups: int) -> None:
    """The vendor divides by the sum for sigmoid alone; of few different numbers most are ties, also of groups."""
    logits = torch.randn(50, 16).round()
    options: dict[str, Any] = {"score": score, "normalize": normalize, "groups": groups, "eps": 0.5, "scale": 2.5}
    for bias in (None, torch.randn(16).round() / 4):
        for top_groups, group_score in ((1, "max"), (min(2, groups), "top2"), (groups, "top2")):
            assert_as_eager(logits, bias=bias, top_groups=top_groups, group_score=group_score, **options)


def test_the_vendors_calls(torch_npu: ModuleType) -> None:
    """One for each call of the op, in float32; groups that all take part are none to the vendor."""
    logits, bias = torch.randn(2, 5, 12).bfloat16(), torch.randn(12, dtype=torch.float16)
    options: dict[str, Any] = {"score": "sigmoid", "bias": bias, "normalize": True, "scale": 2.5}
    run(logits, groups=4, top_groups=2, **options)
    run(logits, groups=4, top_groups=4, **options)
    run(logits, normalize=True, scale=2.5)
    assert [each.name for each in torch_npu.calls] == [NAME] * 3
    assert [each.shapes for each in torch_npu.calls] == [((10, 12), (12,)), ((10, 12), (12,)), ((10, 12),)]
    assert {dtype for each in torch_npu.calls for dtype in each.dtypes} == {torch.float32}
    assert [each.options["group_count"] for each in torch_npu.calls] == [4, 1, 1]
    assert [each.options["k_group"] for each in torch_npu.calls] == [2, 1, 1]
    assert [each.options["scale"] for each in torch_npu.calls] == [2.5, 2.5, 1.0]


@pytest.mark.usefixtures("torch_npu")
def test_rows_that_are_not_finite() -> None:
    """By softmax they are as the op has them. By sigmoid rows with NaN have the first experts, with weights of NaN."""
    logits = torch.randn(6, 12)
    logits[1, 7], logits[2, 4], logits[3], logits[4, :9] = NAN, INF, -INF, -INF
    assert_as_eager(logits)
    assert_as_eager(logits, bias=torch.randn(12), groups=4, top_groups=2)
    others = [0, 2, 3, 4, 5]
    options: dict[str, Any] = {"score": "sigmoid", "bias": torch.randn(12), "groups": 4, "top_groups": 2}
    weights, index = run(logits, **options)
    assert bool(weights[1].isnan().all())
    assert index[1].tolist() == [0, 1, 2]
    for got, wanted in zip((weights, index), top_k_routing(logits, 3, **options, backend="eager")):
        torch.testing.assert_close(got[others], wanted[others], equal_nan=True)


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bias_that_is_not_finite(value: float) -> None:
    """One of -inf is not as low as the experts of the other groups."""
    bias = torch.zeros(12)
    bias[6:9] = value
    assert_as_eager(torch.randn(20, 12), 6, bias=bias, score="sigmoid")
    low = torch.full((12,), value if value < 0 else 0.0)
    assert_as_eager(torch.randn(20, 12), 6, bias=low, score="sigmoid", groups=4, top_groups=2)


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient(score: str) -> None:
    logits, g = torch.randn(5, 16), torch.randn(5, 3)
    gradients: list[Tensor] = []
    for backend in ("npu", "eager"):
        leaf = logits.to("npu" if backend == "npu" else "cpu").requires_grad_()
        with fusedops.use(backend, fallback="raise"):
            weights, _ = top_k_routing(leaf, 3, score=score, normalize=True, scale=2.5)
            (gradient,) = torch.autograd.grad(weights, leaf, g.to(leaf.device))
        gradients.append(gradient.cpu())
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nothing_waits_for_the_device(score: str) -> None:
    logits, bias = torch.randn(5, 16).to("npu").requires_grad_(), torch.randn(16).to("npu")
    g = torch.randn(5, 3).to("npu")
    with nothing_waits():
        top_k_routing(logits, 3, score=score, bias=bias, groups=4, top_groups=2)[0].backward(g)


def test_no_rows_are_not_passed_on(torch_npu: ModuleType) -> None:
    weights, index = run(torch.randn(0, 16))
    assert (weights.shape, weights.dtype, index.shape, index.dtype) == ((0, 3), torch.float32, (0, 3), torch.int64)
    assert not torch_npu.calls


@pytest.mark.usefixtures("torch_npu")
def test_limits_and_costs() -> None:
    def npu_of(shape: tuple[int, ...] = (64, 32), k: int = 4, **changes: Any) -> Any:
        return candidate(top_k_routing, TensorSpec(shape, torch.bfloat16, "npu"), k, **changes)

    assert not npu_of().reasons
    assert {(each.name, each.direction): each.bytes for each in npu_of().adaptations} == {("rows", "forward"): 8192}
    assert not npu_of((8, 2048)).reasons
    assert not npu_of((8, 192), groups=64, top_groups=2).reasons
    assert not npu_of((8, 195), groups=65, top_groups=65).reasons
    refused = [
        npu_of((8, 2), 1),
        npu_of((8, 2049)),
        npu_of(score="topk_softmax"),
        npu_of(score="sqrt_softplus"),
        npu_of(index=TensorSpec((64, 4), torch.int64, "npu")),
        npu_of((8, 195), groups=65, top_groups=2),
        npu_of((8, 8), groups=4, top_groups=2),
    ]
    assert all(each.reasons for each in refused)
    assert str(refused[-2].reasons[0]) == (
        "got 65 groups of 3 experts, expected groups of at least 3, at most 2048 once each is filled up to a multiple "
        "of 32; to fix: use fewer groups, or another backend"
    )


def test_the_fake_does_not_choose_among_nan(torch_npu: ModuleType) -> None:
    x = torch.zeros(2, 4)
    x[1, 2] = NAN
    y, index, _ = (each.cpu() for each in torch_npu.npu_moe_gating_top_k(x.to("npu"), 2, norm_type=1))
    assert index.tolist() == [[0, 1], [4, 4]]
    assert y.isnan().tolist() == [[False] * 2, [True] * 2]


X = torch.ones(4, 12)
RULES: dict[str, dict[str, Any]] = {  # the sentence of a refusal, and the arguments that are refused
    "x must be 2-D": {"x": X[0]},
    "float16, bfloat16 or float32": {"x": X.double()},
    "empty tensors": {"x": X[:0]},
    "bias must have the dtype of x": {"bias": X[0].half()},
    "one element for each expert": {"bias": X[0, :3]},
    "at most 2048 experts": {"x": torch.ones(1, 2049)},
    "k_group must be from 1 to group_count": {"k_group": 2},
    "groups of more than 2": {"group_count": 6},
    "must divide the experts": {"group_count": 5},
    "filled up to multiples of 32": {"x": torch.ones(1, 195), "group_count": 65},
    "k must be from 1 to 12": {"k": 13},
    "no hash mode": {"input_ids": torch.zeros(4, dtype=torch.int64), "tid2eid": torch.zeros(9, 2, dtype=torch.int64)},
    "renorm must be 0": {"renorm": 1},
    "norm_type": {"norm_type": 2},
}


@pytest.mark.parametrize("sentence", RULES)
def test_each_rule_of_the_fake(torch_npu: ModuleType, sentence: str) -> None:
    options = {"x": X, "k": 2, **RULES[sentence]}
    given = {name: each.to("npu") if isinstance(each, Tensor) else each for name, each in options.items()}
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_moe_gating_top_k(**given)
    assert not torch_npu.calls
