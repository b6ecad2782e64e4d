"""linear_cross_entropy: torch's chain, the reductions, gradients, ignored rows, targets out of range, its module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import linear_call
from pairwise import pairwise
from standin import installed
from torch import Tensor
from torch.nn import functional

import fusedops
from fusedops import InvalidInputError
from fusedops.ops import linear_cross_entropy

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def of_torch(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """Compute the loss by torch, in float32 or float64."""
    wide = torch.promote_types(x.dtype, F32)
    logits = functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    loss = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


@pytest.mark.parametrize(
    ("dtype", "reduction", "smoothing", "with_bias", "chunk"),
    pairwise([F32, BF16, F64], ["mean", "sum", "none"], [0.0, 0.1], [True, False], [None, 4, 1]),
    ids=str,
)
def test_it_is_torchs_chain(
    dtype: torch.dtype, reduction: str, smoothing: float, with_bias: bool, chunk: int | None
) -> None:
    x, weight, target, bias = linear_call(dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, *([bias] if with_bias else []))]
    args = (x, weight, target, bias if with_bias else None)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    loss, want = linear_cross_entropy(*args, **options, chunk=chunk), of_torch(*args, **options)
    assert loss.dtype == torch.promote_types(dtype, F32)
    rounding = (
        1e-2 if dtype == BF16 else 2e-6
    )  # torch.mm rounds logits to bfloat16 where the processor has its products
    torch.testing.assert_close(loss, want, rtol=rounding, atol=1e-6)
    grad = torch.randn_like(loss)
    relative = 2e-2 if dtype == BF16 else 1e-4
    for got, wanted in zip(torch.autograd.grad(loss, leaves, grad), torch.autograd.grad(want, leaves, grad)):
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=relative, atol=relative * float(wanted.abs().max()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradients_are_those_of_differences(reduction: str) -> None:
    x, weight, target, bias = linear_call(F64, (5,), 4, 6)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"z_loss": 0.1, "softcap": 3.0, "label_smoothing": 0.2, "reduction": reduction}
        return linear_cross_entropy(x, weight, target, bias, chunk=2, **options)

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_gives_the_same_bits_and_no_input_is_written(reduction: str) -> None:
    x, weight, target, bias = linear_call()
    before = [tensor.clone() for tensor in (x, weight, target, bias)]
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction, chunk=4)
    grad = torch.full_like(loss, 3.0)
    given = grad.clone()
    first = torch.autograd.grad(loss, leaves, grad, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, leaves, grad)  # keeps no graph: the saved gradients may be changed
    assert all(map(torch.equal, kept, first)), "the second backward wrote into the gradients of the first"
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(tensor, other) for tensor, other in zip((x, weight, target, bias, grad), (*before, given)))


def test_a_hook_that_keeps_the_saved_tensors_finds_them_unchanged() -> None:
    x, weight, target, _ = linear_call()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), target)
    before = [tensor.clone() for tensor in kept]
    (3 * loss).backward()
    assert len(kept) >= 4
    assert all(map(torch.equal, kept, before))


def test_gradients_that_are_not_wanted_are_not_computed() -> None:
    """With a frozen weight, as in fine-tuning by LoRA, forward saves no gradient of its size."""
    x, weight, target, _ = linear_call()
    sizes: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_cross_entropy(x.requires_grad_(), weight, target)
    assert sizes.count(weight.shape) == 1  # the weight itself
    (got,) = torch.autograd.grad(loss, [x])
    (wanted,) = torch.autograd.grad(of_torch(x, weight, target, None), [x])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored_is_0_with_gradient_0(reduction: str) -> None:
    """torch's mean of no rows is NaN, which ends a run."""
    x, weight, target, bias = linear_call()
    target.fill_(-100)
    x[0, 0] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    assert (loss == 0).all()
    for gradient in torch.autograd.grad(loss.sum(), leaves):
        assert (gradient == 0).all()
    assert of_torch(torch.ones_like(x), weight, target, bias).isnan()


def test_nan_in_an_ignored_row_reaches_nothing() -> None:
    x, weight, target, bias = linear_call()
    broken = x.clone()
    broken[target == -100] = float("nan")
    for one, other in zip(_results(x, weight, target, bias), _results(broken, weight, target, bias)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_gradient_of_an_ignored_row_is_open_beside_a_weight_of_nan(backend: str) -> None:
    x, weight, target, _ = linear_call()
    weight[3, 5] = float("nan")
    with fusedops.verify("reference"):  # 0 where the product leaves the row out, else NaN
        loss = linear_cross_entropy(x.requires_grad_(), weight, target, backend=backend)
        torch.autograd.grad(loss, x)


def _results(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, leaves[2])
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("wrong", [-1, 57, 2**40])
@pytest.mark.parametrize("op", [linear_cross_entropy, fusedops.linear_log_probs])
def test_a_target_out_of_range_is_an_error_on_a_cpu(op: Any, wrong: int) -> None:
    x, weight, target, _ = linear_call()
    target[0, 0] = wrong
    text = rf"{op.__name__}: got target {wrong}, expected one in \[0, 57\) or ignore_index"
    with pytest.raises(InvalidInputError, match=text):
        op(x, weight, target)
    target[target == -100] = wrong
    assert op(x, weight, target, ignore_index=wrong).isfinite().all()


def test_a_denominator_is_a_number_or_a_tensor() -> None:
    x, weight, target, _ = linear_call()
    total = linear_cross_entropy(x, weight, target, reduction="sum")
    for denominator in (8, 8.0, torch.tensor(8.0), torch.tensor([8.0], dtype=F64)):
        torch.testing.assert_close(linear_cross_entropy(x, weight, target, denominator=denominator), total / 8)
    with pytest.raises(InvalidInputError, match="denominator"):
        linear_cross_entropy(x, weight, target, denominator=8, reduction="sum")


def test_accumulated_parts_are_the_whole() -> None:
    """With the count of the whole batch as denominator, the losses of its parts add up to the mean."""
    x, weight, target, bias = linear_call(rows=(12,))
    count = (target != -100).sum().float()
    whole = linear_cross_entropy(x, weight, target, bias)
    parts = [
        linear_cross_entropy(x[at], weight, target[at], bias, denominator=count) for at in (slice(5), slice(5, 12))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_a_scaled_loss_of_float16_keeps_its_small_gradients() -> None:
    """The gradients of a mean over many rows are below float16's numbers before a loss scale is multiplied in."""
    x, weight, target, _ = linear_call(torch.float16, (4096,), 8, 57)
    scaled = 2.0**16 * linear_cross_entropy(x.requires_grad_(), weight / 256, target)
    (got,) = torch.autograd.grad(scaled, [x])
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(2.0**16 * of_torch(wide, (weight / 256).double(), target, None), [wide])
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < 2e-3


def test_the_module_is_linear_with_the_loss() -> None:
    x, _, target, _ = linear_call()
    linear = torch.nn.Linear(33, 57)
    module = fusedops.nn.LinearCrossEntropyLoss(33, 57, bias=True, label_smoothing=0.1, chunk=4)
    module.load_state_dict(linear.state_dict())
    torch.testing.assert_close(module(x, target), of_torch(x, linear.weight, target, linear.bias, label_smoothing=0.1))
    assert repr(module) == "LinearCrossEntropyLoss(33, 57, bias=True, label_smoothing=0.1, chunk=4)"
    torch.testing.assert_close(module(x, target, 100.0) * 100, module(x, target, 50.0) * 50)
    assert fusedops.nn.LinearCrossEntropyLoss(33, 57).bias is None


def test_verify_takes_the_op_in_training() -> None:
    x, weight, target, bias = linear_call()
    with fusedops.verify("reference") as report:
        for leaves in ((x, weight, bias), (x,), (weight,)):
            for tensor in (x, weight, bias):
                tensor.requires_grad_(any(tensor is leaf for leaf in leaves))
            linear_cross_entropy(x, weight, target, bias).backward()
    assert report.mismatches == 0


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_smoothing_below_the_normal_numbers_of_float32(dtype: torch.dtype, backend: str) -> None:
    gradients: list[Tensor] = []
    for smoothing in (0.0, 1e-40):
        x, weight, target, _ = linear_call(dtype)
        weight.requires_grad_()
        loss = linear_cross_entropy(x, weight, target, label_smoothing=smoothing, backend=backend)
        gradients += torch.autograd.grad(loss, weight)
    assert torch.equal(*gradients)


def test_the_arithmetic_of_a_float64_x_and_a_float32_weight_is_in_float64_off_the_cpu_too() -> None:
    (x, weight, target, bias), results = linear_call(F64), []
    with installed():
        for device in ("cpu", "npu"):
            tensors = [each.to(device) for each in (x, weight.float(), target, bias)]
            results.append(linear_cross_entropy(*tensors, backend="eager").cpu())
    torch.testing.assert_close(*results, rtol=1e-14, atol=0)


@pytest.mark.parametrize("backend", ["eager", "cpu", "triton"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_step_without_a_target_and_with_a_denominator_of_0_has_gradients_of_0(
    backend: str, create_graph: bool
) -> None:
    """transformers' Trainer passes 0 for such a step, whose loss is NaN in torch too: the weights must survive it."""
    leaves = [tensor.requires_grad_() for tensor in (torch.randn(4, 8), torch.randn(23, 8), torch.randn(23))]
    target = torch.full((4,), -100)
    with fusedops.use(backend):
        loss = linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], denominator=0.0)
        gradients = torch.autograd.grad(loss, leaves, create_graph=create_graph)
    assert not any(gradient.any() for gradient in gradients)
