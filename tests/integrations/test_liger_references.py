"""What Liger's kernels are compared with in its own tests, in plain torch: the same formulas, shapes and tolerances.

Source: linkedin/Liger-Kernel 0.8, ``test/transformers``: test_rms_norm, test_fused_add_rms_norm, test_layer_norm,
test_geglu, test_swiglu, test_cross_entropy, test_fused_linear_cross_entropy. Its rotary embedding and MLPs are compared
with transformers', as here in test_rotary_embedding and test_gated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops

BF16, F32 = torch.bfloat16, torch.float32
ODD_ROWS = (5, 123, 123)


def same(ours: Callable[..., Any], theirs: Callable[..., Any], tensors: list[Tensor], atol: float, rtol: float) -> None:
    """Assert that two functions of the same tensors have the same outputs and gradients, where outputs' sum to 1."""
    results: list[list[Tensor]] = []
    for function in (ours, theirs):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        grads = [torch.randn(y.shape).to(y.dtype) for y in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for got, want in zip(*results):
        torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=rtol)


def normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


NORMS: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "base": (0.0, lambda x, w: w * normalized(x)),
    "llama": (0.0, lambda x, w: w * normalized(x.float()).to(x.dtype)),
    "gemma": (1.0, lambda x, w: (normalized(x.float()) * (1.0 + w.float())).type_as(x)),
}


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(F32, 1e-4, 1e-6), (BF16, 2e-1, 2e-2)])
@pytest.mark.parametrize("kind", NORMS)
def test_rms_norm(kind: str, dtype: torch.dtype, atol: float, rtol: float) -> None:
    offset, reference = NORMS[kind]
    x, weight = torch.randn(ODD_ROWS).to(dtype), torch.randn(ODD_ROWS[-1]).to(dtype)
    same(lambda x, w: fusedops.rms_norm(x, w, offset=offset), reference, [x, weight], atol, rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(F32, 1e-4, 1e-6), (BF16, 2e-1, 2e-2)])
@pytest.mark.parametrize("kind", NORMS)
def test_add_rms_norm(kind: str, dtype: torch.dtype, atol: float, rtol: float) -> None:
    offset, reference = NORMS[kind]

    def theirs(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return reference(total, w), total

    x, residual, weight = (torch.randn(shape).to(dtype) for shape in (ODD_ROWS, ODD_ROWS, ODD_ROWS[-1:]))
    same(lambda x, r, w: fusedops.add_rms_norm(x, r, w, offset=offset), theirs, [x, residual, weight], atol, rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(F32, 1e-5, 1e-5), (BF16, 1e-1, 1e-2)])
def test_layer_norm(dtype: torch.dtype, atol: float, rtol: float) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((5, 123, 123), (123,), (123,)))
    same(
        lambda x, w, b: fusedops.layer_norm(x, w, b, 1e-6),
        lambda x, w, b: F.layer_norm(x.float(), (123,), w.float(), b.float(), 1e-6).to(x.dtype),
        [x, weight, bias],
        5 * atol,  # our gradients are of independent normal numbers, the sum of 615 rows is 25 times as large
        rtol,
    )


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(F32, 1e-5, 1e-5), (BF16, 1e-2, 5e-2)])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_gated_activations(kind: str, dtype: torch.dtype, atol: float, rtol: float) -> None:
    gate, up = (torch.randn(3, 7, 41).to(dtype) for _ in range(2))
    if kind == "silu":
        same(fusedops.swiglu, lambda a, b: F.silu(a) * b, [gate, up], atol, rtol)
    else:
        same(fusedops.geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, [gate, up], atol, rtol)


def loss_with_z(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Cross entropy in float32, and ``z_loss * logsumexp**2`` of the rows that count."""
    logits = logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ce = F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    counted = target != ignore_index
    z = torch.where(counted, z_loss * torch.logsumexp(logits, -1) ** 2, 0.0)
    return ce + {"mean": z.sum() / counted.sum(), "sum": z.sum(), "none": z}[reduction]


# one option at a time, then all together, as Liger's tests have them
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_index": 2},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "ignore_index": 2},
    {"softcap": 30.0},
    {"z_loss": 1e-4},
    {"z_loss": 1e-4, "ignore_index": 42, "label_smoothing": 0.1, "softcap": 30.0},
]
PLAIN = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}


def targets(rows: int, classes: int, ignored: int) -> Tensor:
    target = torch.randint(0, classes, (rows,))
    target[torch.randperm(rows)[: rows // 3]] = ignored
    return target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(F32, 1e-5, 5e-4), (BF16, 5e-2, 5e-2)])
def test_cross_entropy(options: dict[str, Any], reduction: str, dtype: torch.dtype, atol: float, rtol: float) -> None:
    given = {**PLAIN, **options, "reduction": reduction}
    logits, target = torch.randn(3 * 47, 123).to(dtype) * 3, targets(3 * 47, 123, given["ignore_index"])
    same(
        lambda x: fusedops.cross_entropy(x, target, **given),
        lambda x: loss_with_z(x, target, **given),
        [logits],
        atol,
        rtol,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_cross_entropy(options: dict[str, Any], reduction: str, with_bias: bool) -> None:
    given = {**PLAIN, **options, "reduction": reduction}
    x, weight, bias = torch.randn(4 * 47, 31), torch.randn(123, 31), torch.randn(123)
    target = targets(4 * 47, 123, given["ignore_index"])
    same(
        lambda x, w, *b: fusedops.linear_cross_entropy(x, w, target, *b, **given),
        lambda x, w, *b: loss_with_z(F.linear(x, w, *b), target, **given),
        [x, weight, *[bias] * with_bias],
        1e-3 if reduction == "sum" else 1e-4,
        5e-4,
    )
