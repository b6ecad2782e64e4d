"""cross_entropy beside torch's own, and where they differ. The conformance kit compares every backend with float64."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fusedops
from fusedops import InvalidInputError, testing

BACKENDS = [
    "eager",
    "cpu",
    pytest.param("triton", marks=pytest.mark.skipif("not __import__('importlib').util.find_spec('triton')")),
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def rows(count: int = 7, classes: int = 33, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return logits and targets of rows, two of which are ignored."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(count, classes, generator=generator) * 4).to(dtype)
    target = torch.randint(classes, (count,), generator=generator)
    target[1], target[4] = -100, -100
    return logits, target


def with_gradient(function: Any, logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the logits, by random gradients of the losses."""
    leaf = logits.clone().requires_grad_()
    loss = function(leaf, target, **options)
    weight = torch.arange(1.0, loss.numel() + 1).view(loss.shape).to(loss.dtype)
    loss.backward(weight)
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@each_backend
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_and_its_gradient_are_torchs(reduction: str, smoothing: float, backend: str) -> None:
    logits, target = rows()
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    loss, gradient = with_gradient(fusedops.cross_entropy, logits, target, backend=backend, **options)
    wanted, wanted_gradient = with_gradient(functional.cross_entropy, logits, target, **options)
    torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=5e-6, atol=1e-6)


def test_the_module_is_torchs() -> None:
    logits, target = rows()
    ours, torchs = (
        module(ignore_index=3, reduction="sum", label_smoothing=0.2)
        for module in (fusedops.nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss)
    )
    target[target == -100] = 3
    torch.testing.assert_close(ours(logits, target), torchs(logits, target))
    assert torch.equal(
        fusedops.nn.CrossEntropyLoss(z_loss=0.1, softcap=5.0)(logits, rows()[1], 3.0),
        fusedops.cross_entropy(logits, rows()[1], z_loss=0.1, softcap=5.0, denominator=3),
    )


# ----------------------------------------------------------------------------------------------- where torch differs


@each_backend
@pytest.mark.parametrize("denominator", [None, 4.0])
def test_all_rows_ignored(denominator: float | None, backend: str) -> None:
    logits, target = rows()
    target.fill_(-100)
    assert functional.cross_entropy(logits, target).isnan()
    options = {"denominator": denominator, "backend": backend}
    loss, gradient = with_gradient(fusedops.cross_entropy, logits, target, **options)
    assert loss == 0
    assert not gradient.any()


@each_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_loss_of_narrow_logits_is_float32(dtype: torch.dtype, backend: str) -> None:
    logits, target = rows(dtype=dtype)
    loss = fusedops.cross_entropy(logits, target, backend=backend)
    assert functional.cross_entropy(logits, target).dtype is dtype
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, functional.cross_entropy(logits.float(), target), rtol=2e-6, atol=0.0)


@each_backend
def test_an_ignored_row_has_no_gradient_with_the_largest_z_loss(backend: str) -> None:
    logits, target = torch.zeros(2, 4), torch.tensor([-100, 1])
    _, gradient = with_gradient(fusedops.cross_entropy, logits, target, z_loss=3e38, backend=backend)
    assert not gradient[0].any()


@each_backend
@pytest.mark.parametrize("z", [-1e5, -3e38, -torch.inf])
def test_a_target_whose_logit_is_far_below_the_others(z: float, backend: str) -> None:
    logits, target = torch.zeros(2, 4), torch.tensor([1, 2])
    logits[0, 1] = z
    _, gradient = with_gradient(fusedops.cross_entropy, logits, target, reduction="sum", backend=backend)
    torch.testing.assert_close(gradient[0], torch.tensor([1 / 3, -1.0, 1 / 3, 1 / 3]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("wrong", [-1, 33, 2**40])
def test_a_target_out_of_range(wrong: int) -> None:
    logits, target = rows()
    target[2] = wrong
    text = rf"^cross_entropy: got target {wrong}, expected one in \[0, 33\) or ignore_index = -100; to fix: "
    leaf = logits.clone().requires_grad_()
    for call in (
        lambda: fusedops.cross_entropy(logits, target),
        lambda: fusedops.cross_entropy(logits, target, backend="eager"),
        lambda: fusedops.cross_entropy(leaf, target),
        lambda: torch.ops.fusedops.cross_entropy(logits, target),
        lambda: torch.compile(fusedops.cross_entropy, backend="eager")(logits, target),
    ):
        with pytest.raises(InvalidInputError, match=text):
            call()
    target[target == -100] = wrong
    assert fusedops.cross_entropy(logits, target, ignore_index=wrong).isfinite()


@each_backend
def test_the_ignored_index_may_be_a_class(backend: str) -> None:
    logits, target = torch.randn(6, 33), torch.tensor([3, 0, 3, 7, 32, 3])
    for reduction in ("none", "mean"):
        found = with_gradient(
            fusedops.cross_entropy, logits, target, ignore_index=3, reduction=reduction, backend=backend
        )
        wanted = with_gradient(functional.cross_entropy, logits, target, ignore_index=3, reduction=reduction)
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other)


@each_backend
@pytest.mark.parametrize("wrong", [-1, 33, 2**40])
def test_a_row_with_a_target_out_of_range_is_nan_where_it_is_not_raised(
    wrong: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels themselves, which on an accelerator get such a target."""
    logits, target = rows()
    target[2] = wrong
    args = (target, -100, 0.1, 0.1, None, "none", None)
    kernels = {kernel.direction: kernel.call for kernel in kernels_of(backend)}
    if backend == "cpu":
        for _ in range(2):  # a first call and a remembered one
            with pytest.raises(InvalidInputError, match=f"got target {wrong}, expected one in"):
                kernels["forward"](logits, *args, True)
        lse = logits.logsumexp(-1)
    else:
        if backend == "eager":  # the kernel checks targets on a CPU
            monkeypatch.setattr("fusedops_eager.losses._cross_entropy.check_targets", lambda *_: None)
        loss, lse, _ = kernels["forward"](logits, *args, True)
        assert loss.isnan().nonzero().flatten().tolist() == [2]
    gradient = kernels["backward"](torch.ones(7), logits, None, lse, *args)
    assert gradient.isnan().all(1).nonzero().flatten().tolist() == [2]
    assert gradient[[0, 1, 3, 4, 5, 6]].isfinite().all()


def kernels_of(backend: str) -> list[fusedops.Kernel]:
    made = importlib.import_module(f"fusedops_{backend}").fusedops_backend()
    return [kernel for kernel in made.kernels if kernel.op == "cross_entropy"]


# ----------------------------------------------------------------------------------------------------------- the rest


@each_backend
def test_z_loss_and_softcap(backend: str) -> None:
    logits, target = rows()

    def spelled_out(x: Tensor, target: Tensor) -> Tensor:
        z = 5.0 * torch.tanh(x / 5.0)
        count = (target != -100).sum()
        extra = (torch.logsumexp(z, -1).square() * (target != -100)).sum() / count
        return functional.cross_entropy(z, target, label_smoothing=0.1) + 0.3 * extra

    options = {"label_smoothing": 0.1, "z_loss": 0.3, "softcap": 5.0, "backend": backend}
    loss, gradient = with_gradient(fusedops.cross_entropy, logits, target, **options)
    wanted, wanted_gradient = with_gradient(spelled_out, logits, target)
    torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-6)


@each_backend
@pytest.mark.parametrize("denominator", [8, 8.0, torch.tensor(8.0), torch.tensor([[8.0]], dtype=torch.bfloat16)])
def test_a_denominator(denominator: Any, backend: str) -> None:
    """Two batches of a step, divided by the count of both, are as one batch."""
    logits, target = rows(14)
    whole, whole_gradient = with_gradient(fusedops.cross_entropy, logits, target, denominator=denominator)
    halves = [
        with_gradient(fusedops.cross_entropy, *half, denominator=denominator, backend=backend)
        for half in ((logits[:7], target[:7]), (logits[7:], target[7:]))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in halves]), whole_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(reduction: str, shape: tuple[int, ...]) -> None:
    logits, target = torch.empty(shape, requires_grad=True), torch.empty(shape[:-1], dtype=torch.int64)
    loss = fusedops.cross_entropy(logits, target, reduction=reduction)
    assert loss.shape == (shape[:-1] if reduction == "none" else ())
    assert loss.sum() == 0
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == shape


def test_a_large_call_on_eager_keeps_no_tensor_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slabs, the numbers are those of one piece."""
    logits, target = torch.randn(64, 40000), torch.randint(40000, (64,))
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype)
        found = with_gradient(fusedops.cross_entropy, x, target, label_smoothing=0.1, backend="eager")
        wanted = with_gradient(functional.cross_entropy, x.double(), target, label_smoothing=0.1)
        torch.testing.assert_close(found[0].double(), wanted[0], rtol=2e-6, atol=0.0)
        unit = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
        torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5 + 1.01 * unit, atol=1e-9)


@each_backend
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_nan_and_inf_in_an_ignored_row_reach_nothing(softcap: float | None, backend: str) -> None:
    logits, target = rows()
    logits[3, 5], logits[1], logits[4, ::2], target[3] = math.nan, math.nan, math.inf, -100
    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with fusedops.verify("reference"):
        fusedops.cross_entropy(leaf, target, softcap=softcap, backend=backend).backward()
    testing.OPS["cross_entropy"].reference(other, target, -100, 0.0, 0.0, softcap, "mean", None).backward()
    for gradient in (leaf.grad, other.grad):
        assert not gradient[[1, 3, 4]].any()
        assert gradient.isfinite().all()


def test_the_probabilities_of_a_long_row_add_up_to_1_in_eager() -> None:
    # torch's log_softmax adds them up in float32: off by 1e-4 (torch 2.13)
    logits = (2 * torch.randn(2, 255_488, generator=torch.Generator().manual_seed(0)).sign()).requires_grad_()
    loss = fusedops.cross_entropy(logits, torch.tensor([5, -100]), backend="eager")
    loss.backward()
    expected = torch.softmax(logits[0].detach().double(), -1)
    assert logits.grad is not None
    assert (logits.grad[0, 6:] / expected[6:] - 1).abs().max() < 1e-5
    assert abs(float(loss.detach()) + float(expected[5].log())) < 1e-5
