"""fusedops.losses where numbers are far, infinite or NaN: limits in place of 0 times infinity, and masked places."""

from __future__ import annotations

from itertools import product
from math import inf, nan
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from fusedops.losses import dpo_loss, grpo_loss, kl_divergence
from tests.integrations.test_losses import LEVELS, OPTIONS, PAIRS, SMOOTHED, of_pair, of_tokens

DTYPES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
LOG_RATIOS = (0.05, 100.0, -100.0, 1e4, -1e4, inf, -inf)
#: what else a call has, as a function of log probabilities, of those of the policy that sampled, and of advantages
SETTINGS: dict[str, Any] = {
    "alone": lambda logp, old, a: {},
    "delta": lambda logp, old, a: {"delta": 1.2, "ref_logp": logp.clamp(min=-9) + 0.3, "beta": 0.05},
    "each token its advantage": lambda logp, old, a: {"advantages": a[:, None] * torch.tensor([-1.0, 1, 1, nan]).to(a)},
    "correction 0": lambda logp, old, a: {"sampling_ratio": torch.tensor([[1.0, 0, 1, nan]] * 3).to(logp)},
    "correction inf": lambda logp, old, a: {"sampling_ratio": torch.tensor([[1.0, inf, 1, nan]] * 3).to(logp)},
    "far from the reference": lambda logp, old, a: {"ref_logp": old, "beta": 0.05},
    "k3 with the ratio": lambda logp, old, a: {
        "ref_logp": old if float(logp[0, 1]) < float(old[0, 1]) else logp,
        "beta": 0.05, "use_bias_correction_kl": True,
    },
}  # fmt: skip


def _same(got: Any, want: Any, dtype: torch.dtype) -> bool:
    want = torch.as_tensor(want, dtype=torch.float64).to(got.dtype)
    return torch.allclose(got, want, rtol=DTYPES[dtype], atol=DTYPES[dtype] / 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "level"), LEVELS)
def test_a_policy_gradient_far_from_the_old_policy_is_its_limit(kind: str, level: str, dtype: torch.dtype) -> None:
    """A far token beside two others, a sequence without one, and masked tokens of NaN, one sequence of them alone."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    wrong: list[Any] = []
    for log_ratio, a, (name, setting) in product(LOG_RATIOS, (-0.5, 0.0, 0.75), SETTINGS.items()):
        infinite_less_infinite = {
            "correction inf": a != 0,
            "k3 with the ratio": abs(log_ratio) > (100 if level == "sequence" else 1e4),
        }.get(name, kind == "vespo" and log_ratio == -inf and name in ("delta", "far from the reference"))
        if infinite_less_infinite:
            continue
        logp = torch.tensor([[-0.5, -0.25, -1, nan], [-0.75, -0.5, nan, nan], [nan] * 4], dtype=dtype)
        old = logp + torch.tensor([0.125, -0.25, 0.0625, 0]).to(dtype)
        logp[0, 1], old[0, 1] = (-inf, -0.5) if log_ratio == -inf else (-0.5, -0.5 - log_ratio)
        advantages = torch.tensor([a, 0.7, nan], dtype=dtype)
        given = {"advantages": advantages, "old_logp": old, **setting(logp, old, advantages)}
        given |= {"logp": logp.requires_grad_(), "mask": mask}
        got = grpo_loss(
            **given, loss_type=kind, importance_sampling_level=level, epsilon_low=0.1, epsilon_high=0.3,
            max_completion_length=10,
        )  # fmt: skip
        (slope,) = torch.autograd.grad(got, logp)
        tokens = {key: value.detach() for key, value in given.items() if isinstance(value, Tensor)}
        options = (given.get("delta"), given.get("beta", 0.0), "use_bias_correction_kl" in given)
        want, slopes = of_tokens(kind, level, tokens, *options)
        if not (_same(got, want, dtype) and _same(slope, slopes, dtype)):
            wrong.append((log_ratio, a, name, got.tolist(), want, slope.tolist(), slopes))
    assert not wrong, wrong[0]


@pytest.mark.parametrize(("kind", "level"), LEVELS)
def test_no_number_of_a_masked_token_reaches_a_policy_gradient(kind: str, level: str) -> None:
    """The same bits, whatever the number, of each argument alone and of all."""
    mask = torch.arange(5) < torch.tensor([5, 3, 0])[:, None]
    clean = {"logp": -torch.rand(3, 5), "old_logp": -torch.rand(3, 5), "ref_logp": -torch.rand(3, 5)}
    clean |= {"advantages": torch.randn(3, 5), "sampling_ratio": torch.rand(3, 5) + 0.5}
    of_rows = {"advantages": torch.randn(3), "sampling_ratio": torch.rand(3, 1) + 0.5}
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16)

    def results(tokens: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
        logp = tokens["logp"].clone().requires_grad_()
        loss = grpo_loss(
            **{**tokens, "logp": logp, "mask": mask.to(dtype)}, loss_type=kind, importance_sampling_level=level,
            use_bias_correction_kl=True, **OPTIONS,
        )  # fmt: skip
        return [loss.detach(), *torch.autograd.grad(loss, logp)]

    for tokens, dtype in product((clean, {**clean, **of_rows}), dtypes):
        want = results(tokens, dtype)
        for number, names in product((nan, inf, -inf, 1e38, 0.0), [[name] for name in tokens] + [list(tokens)]):
            broken = dict(tokens)
            for name in names:
                kept = mask if tokens[name].shape == mask.shape else mask.any(-1).view(tokens[name].shape)
                broken[name] = tokens[name].masked_fill(~kept, number)
            got = results(broken, dtype)
            assert all(map(torch.equal, got, want)), (number, names, dtype, got, want)
        assert (want[1][~mask] == 0).all()


@pytest.mark.parametrize(("kind", "level"), LEVELS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_a_policy_gradient_of_no_token_is_0(kind: str, level: str, shape: tuple[int, int]) -> None:
    logp = torch.randn(shape).requires_grad_()
    options = {**OPTIONS, "loss_type": kind, "importance_sampling_level": level}
    for count in (None, 0, torch.tensor(0)):
        loss = grpo_loss(logp, torch.randn(shape[0]), torch.zeros(shape), ref_logp=logp, num_items=count, **options)
        assert loss.item() == 0
        assert (torch.autograd.grad(loss, logp)[0] == 0).all()


@pytest.mark.parametrize("kind", [*PAIRS, "aot", "aot_unpaired"])
def test_a_far_preference_is_its_limit(kind: str) -> None:
    """Infinite sums are as 1e30, and results beyond 1e20 infinite."""
    far = (0.5, 100.0, -100.0, 1e4, -1e4, inf, -inf)
    wrong: list[Any] = []
    for c, r, smoothing in product(far, far, {SMOOTHED.get(kind, 0.0), 0.0 if kind != "exo_pair" else 0.3}):
        if c == r and abs(c) == inf:
            continue  # whose difference is not a number

        def of(c: Any, r: Any, smoothing: float = smoothing) -> Any:
            return of_pair(kind, c, r, 0.1, smoothing, (1, 1))

        with mpmath.workdps(80):
            exact = [mpmath.mpf(max(min(each, 1e30), -1e30)) for each in (c, r)]
            numbers = [of(*exact), *(mpmath.diff(of, tuple(exact), order) for order in ((1, 0), (0, 1)))]
        want = [inf * mpmath.sign(each) if abs(each) > 1e20 else each for each in numbers]
        for dtype in (torch.float32, torch.float64):
            pair = [torch.tensor([each], dtype=dtype).requires_grad_() for each in (c, r)]
            lengths = {f"{name}_lengths": torch.ones(1, dtype=torch.long) for name in ("chosen", "rejected")}
            loss = dpo_loss(*pair, reduction="sum", loss_type=kind, label_smoothing=smoothing, **lengths)
            got = torch.stack(
                [loss.detach(), *(each[0] for each in torch.autograd.grad(loss, pair, materialize_grads=True))]
            )
            if not _same(got, [float(each) for each in want], dtype):
                wrong.append((c, r, smoothing, dtype, got.tolist(), want))
    assert not wrong, wrong[0]


def test_a_preference_of_no_pair_is_0() -> None:
    assert float(dpo_loss(torch.ones(0), torch.ones(0))) == 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("out", [-inf, -1e4])
def test_a_class_that_both_leave_out_is_as_none(beta: float, out: float) -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(5)
    teacher_x, teacher_weight, teacher_bias = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(5)
    bias[1], teacher_bias[1] = (out, -inf) if beta else (-inf, out)
    results: list[list[Tensor]] = []
    for classes in (torch.arange(5), torch.tensor([0, 2, 3, 4])):
        student = [each.clone().requires_grad_() for each in (x, weight[classes], bias[classes])]
        teacher = (teacher_x, teacher_weight[classes])
        loss = kl_divergence(*student[:2], *teacher, student[2], teacher_bias[classes], beta=beta, reduction="none")
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), student)])
    kept = [each[classes] if each.shape[0] == 5 else each for each in results[0]]
    torch.testing.assert_close(kept, results[1])
    assert all((each[1] == 0).all() for each in results[0][2:])


@pytest.mark.parametrize("number", [nan, inf, -inf, 1e38])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_no_number_of_a_masked_row_reaches_a_divergence(beta: float, number: float) -> None:
    mask, weight, teacher_weight = torch.tensor([True, False, True, False]), torch.randn(5, 3), torch.randn(5, 2)
    x, teacher_x = torch.randn(4, 3), torch.randn(4, 2)
    results: list[list[Tensor]] = []
    for own, other in ((x, teacher_x), (each.masked_fill(~mask[:, None], number) for each in (x, teacher_x))):
        student = [own.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = kl_divergence(*student, other, teacher_weight, mask=mask, beta=beta)
        results.append([loss.detach(), *torch.autograd.grad(loss, student)])
    assert all(map(torch.equal, *results))
