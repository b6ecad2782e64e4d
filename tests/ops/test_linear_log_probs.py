"""linear_log_probs: torch's log_softmax, the entropy, gradients, ignored rows, classes left out, wrong targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import linear_call
from pairwise import pairwise
from standin import installed
from torch import Tensor

import fusedops
from fusedops import InvalidInputError
from fusedops.ops import linear_log_probs

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def of_torch(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute both results by torch in float64, from all logits."""
    logits = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    each = torch.distributions.Categorical(logits=logits / temperature, validate_args=False)
    kept = target != -100
    entropy = -(each.probs * each.logits.clamp(min=-1e30)).sum(-1)
    return torch.where(kept, each.log_prob(target.clamp(min=0)), 0.0), torch.where(kept, entropy, 0.0)


@pytest.mark.parametrize(
    ("dtype", "temperature", "softcap", "with_bias", "classes", "output"),
    pairwise([F32, BF16, F64], [1.0, 0.6], [None, 20.0], [True, False], [2, 57, 4099], ["both", "logp", "entropy"]),
    ids=str,
)
def test_it_is_torchs_chain(
    dtype: torch.dtype, temperature: float, softcap: float | None, with_bias: bool, classes: int, output: str
) -> None:
    x, weight, target, bias = linear_call(dtype, classes=classes)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, *([bias] if with_bias else []))]
    args = (x, weight, target, bias if with_bias else None)
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap}
    want = of_torch(*args, temperature, softcap)
    if output == "logp":
        results, want = [linear_log_probs(*args, **options)], want[:1]
    else:
        results = [*linear_log_probs(*args, **options, return_entropy=True)]
        results, want = (results, want) if output == "both" else (results[1:], want[1:])
    for got, wanted in zip(results, want, strict=True):
        assert got.dtype == torch.promote_types(dtype, F32)
        torch.testing.assert_close(got.double(), wanted, rtol=4e-6, atol=4e-6)
    grads = [torch.randn_like(got) for got in results]
    relative = 2e-2 if dtype == BF16 else 1e-4
    got_each = torch.autograd.grad(results, leaves, grads)
    for got, wanted in zip(got_each, torch.autograd.grad(want, leaves, [each.double() for each in grads])):
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=relative, atol=relative * float(wanted.abs().max()))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_gradients_are_those_of_differences(softcap: float | None) -> None:
    x, weight, target, bias = linear_call(F64, (5,), 4, 6)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]

    def results(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_log_probs(x, weight, target, bias, temperature=0.7, softcap=softcap, return_entropy=True)

    assert torch.autograd.gradcheck(results, leaves)
    assert torch.autograd.gradgradcheck(results, leaves)


@pytest.mark.parametrize("classes", [50257, 200_003])
def test_a_vocabulary_of_any_size(classes: int) -> None:
    x, weight, target, _ = linear_call(F32, (9,), 8, classes)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    results, want = linear_log_probs(x, weight, target, return_entropy=True), of_torch(x, weight, target, None, 1, None)
    torch.testing.assert_close([each.double() for each in results], [*want], rtol=5e-6, atol=5e-6)
    grads = [torch.randn(9) for _ in range(2)]
    for got, wanted in zip(
        torch.autograd.grad(results, leaves, grads),
        torch.autograd.grad(want, leaves, [each.double() for each in grads]),
    ):
        # a matmul of float32 adds up the classes for x: 200,003 terms, by 7e-5 of their magnitudes
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "cpu", "triton"])
def test_the_largest_vocabulary_with_every_option(backend: str) -> None:
    """Both results and each alone; two rows are ignored."""
    x, weight, target, bias = linear_call(F32, (12,), 8, 200_003)
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    options: dict[str, Any] = {"temperature": 0.6, "softcap": 20.0}
    results = linear_log_probs(x, weight, target, bias, **options, return_entropy=True, backend=backend)
    want = of_torch(x, weight, target, bias, **options)
    torch.testing.assert_close([each.double() for each in results], [*want], rtol=5e-6, atol=5e-6)
    grads = torch.randn(2, 12)
    for some in ([0, 1], [0], [1]):
        pairs = zip(
            torch.autograd.grad([results[at] for at in some], leaves, [*grads[some]], retain_graph=True),
            torch.autograd.grad([want[at] for at in some], leaves, [*grads[some].double()], retain_graph=True),
        )
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3 * float(wanted.abs().max()))
    alone = linear_log_probs(x, weight, target, bias, **options, backend=backend)
    torch.testing.assert_close(alone, results[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_class_that_is_left_out_adds_0(backend: str) -> None:
    """A bias of -inf, as masks of a vocabulary are: p is 0, and p times its logarithm too."""
    x, weight, target, bias = linear_call()
    bias[::2] = -torch.inf
    target = torch.where(target == -100, target, target // 2 * 2 + 1).clamp(max=55)
    target[0, 0] = 2  # left out
    few = [each[1::2].clone().requires_grad_() for each in (weight, bias)]
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    logp, entropy = linear_log_probs(x, weight, target, bias, return_entropy=True, backend=backend)
    assert logp[0, 0] == -torch.inf
    of_few = linear_log_probs(x, few[0], torch.where(target == -100, target, target // 2), few[1], return_entropy=True)
    torch.testing.assert_close(logp.view(-1)[1:], of_few[0].view(-1)[1:])
    torch.testing.assert_close(entropy, of_few[1])
    kept = logp.view(-1)[1:].sum() + 2 * entropy.sum()
    gradients = torch.autograd.grad(kept, leaves)
    wanted = torch.autograd.grad(of_few[0].view(-1)[1:].sum() + 2 * of_few[1].sum(), [x, *few])
    torch.testing.assert_close(gradients[0], wanted[0], rtol=1e-4, atol=1e-5)
    for got, want in zip(gradients[1:], wanted[1:]):
        torch.testing.assert_close(got[1::2], want, rtol=1e-4, atol=1e-5)
        assert (got[::2] == 0).all()


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_an_ignored_row_is_0_and_nothing_in_it_reaches_anything(backend: str) -> None:
    x, weight, target, bias = linear_call()
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    broken = x.detach().clone()
    broken[target == -100] = torch.nan
    each: list[list[Tensor]] = []
    for rows in (x, broken.requires_grad_()):
        results = linear_log_probs(rows, weight, target, bias, return_entropy=True, backend=backend)
        assert all(bool((result[target == -100] == 0).all()) for result in results)
        gradients = torch.autograd.grad([*results], [rows, *leaves[1:]], [torch.ones_like(target, dtype=F32)] * 2)
        assert (gradients[0][target == -100] == 0).all()
        each.append([*results, *gradients])
    assert all(map(torch.equal, *each))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), torch.tensor(1.0), None])
def test_a_temperature_is_a_positive_number(temperature: Any) -> None:
    x, weight, target, _ = linear_call()
    with pytest.raises(InvalidInputError, match="temperature"):
        linear_log_probs(x, weight, target, temperature=temperature)


def test_on_a_device_a_target_out_of_range_is_nan() -> None:
    x, weight, target, bias = linear_call(rows=(5,))
    target[2] = 57
    with installed():
        given = [each.to("npu") for each in (x, weight, target, bias)]
        leaves = [given[at].requires_grad_() for at in (0, 1, 3)]
        results = linear_log_probs(*given, return_entropy=True, backend="eager")
        gradient = torch.autograd.grad(results[0].sum() + results[1].sum(), leaves)[0].cpu()
        outputs = [each.detach().cpu() for each in results]
    target[2] = 0
    want = linear_log_probs(x, weight, target, bias, return_entropy=True)
    for got, wanted in zip(outputs, want):
        assert got[2].isnan()
        torch.testing.assert_close(got[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])
    assert gradient[2].isnan().all()
    assert gradient[[0, 1, 3, 4]].isfinite().all()


def test_the_gradients_of_minus_the_log_probabilities_are_those_of_linear_cross_entropy() -> None:
    x, weight, target, bias = linear_call()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    loss = fusedops.linear_cross_entropy(*leaves[:2], target, bias, softcap=5.0, reduction="sum")
    ours = -linear_log_probs(*leaves[:2], target, bias, softcap=5.0).sum()
    torch.testing.assert_close(ours, loss)
    for got, want in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(loss, leaves)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
