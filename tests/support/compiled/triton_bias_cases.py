"""Inputs, definitions and comparisons shared by the tests of the triton kernels with a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops.dropout import bias_dropout, bias_dropout_add
from fusedops.ops.gelu import bias_gelu
from fusedops_triton._bias_dropout import dropout_backward, dropout_forward
from fusedops_triton._bias_gelu import gelu_backward, gelu_forward

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# bfloat16: a whole last place, as the interpreter does not round to it. float64: the reference loses digits itself
RTOL = {
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float32: 2e-6,
    torch.float64: 4e-14,
}

ATOL = {torch.float16: 6e-8, torch.bfloat16: 0.0, torch.float32: 0.0, torch.float64: 0.0}


def near(got: Tensor, want: Tensor, size: Tensor | float = 0.0, dtype: torch.dtype | None = None) -> None:
    """Asserts that got is want, within rounding of it and of terms of ``size`` that it is a sum of."""
    allowed = RTOL[dtype or got.dtype] * (want.abs() + size) + ATOL[dtype or got.dtype]
    off = (got.double() - want).abs() - allowed
    assert off.numel() == 0 or off.max() <= 0, f"off by {(got.double() - want).abs().max():.2e}"


def seed_of(number: int) -> Tensor:
    return torch.tensor([number])


def wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def check_gradients(
    got: tuple[Tensor | None, Tensor | None],
    du: Tensor,
    x_dtype: torch.dtype,
    bias: Tensor | None,
    needs: tuple[bool, bool],
    coarsest: torch.dtype,
) -> None:
    """dx and dbias against du, the gradient of each element in float64 and as large as its terms."""
    dx, dbias = got
    assert (dx is not None) == needs[0]
    assert (dbias is not None) == (needs[1] and bias is not None)
    if dx is not None:
        assert dx.dtype == x_dtype
        assert dx.shape == du.shape
        assert dx.is_contiguous()
        near(dx, du, du.abs() + 0.2, coarsest)
    if dbias is not None and bias is not None:
        assert dbias.dtype == bias.dtype
        assert dbias.shape == bias.shape
        assert dbias.is_contiguous()
        near(dbias, du.sum_to_size(bias.shape), (du.abs() + 0.2).sum_to_size(bias.shape), coarsest)
        assert dx is None or dx.data_ptr() != dbias.data_ptr()


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that rounds most."""
    return max(dtypes, key=lambda dtype: RTOL[dtype])


NEEDS = ((True, True), (True, False), (False, True), (False, False))


def check_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    approximate: str = "tanh",
    all_needs: tuple[tuple[bool, bool], ...] = NEEDS[:1],
    grad: Tensor | None = None,
) -> Tensor:
    y = gelu_forward(x, bias, approximate)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    near(y, bias_gelu.OP.reference(x.double(), wide(bias), approximate), 1.0)
    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    before = [None if t is None else t.clone() for t in (x, bias, grad)]
    (du, _) = bias_gelu.OP.backward(grad.double(), x.double(), wide(bias), approximate, (True, False))
    for needs in all_needs:
        got = gelu_backward(grad, x, bias, approximate, needs)
        check_gradients(got, du, x.dtype, bias, needs, coarser(x.dtype, dtype if bias is None else bias.dtype))
    for now, then in zip((x, bias, grad), before, strict=True):
        assert now is None or torch.equal(now, then), "an input was written"
    return y


def check_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.5,
    training: bool = True,
    seed: int | None = 7,
    all_needs: tuple[tuple[bool, bool], ...] = NEEDS[:1],
    grad: Tensor | None = None,
) -> Tensor:
    at = None if seed is None else seed_of(seed)
    y = dropout_forward(x, bias, residual, p, training, at)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    inputs: tuple[Tensor | None, ...] = (x, bias)
    if residual is None:
        want = bias_dropout.OP.reference(x.double(), wide(bias), p, training, at)
    else:
        dtype = residual.dtype
        inputs = (x.to(dtype), None if bias is None else bias.to(dtype), residual)
        want = bias_dropout_add.OP.reference(*map(wide, inputs), p, training, at)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    size = sum((t.double().abs() for t in inputs if t is not None), torch.zeros(x.shape, dtype=torch.float64))
    near(
        y,
        want,
        size / (1 - p) if training and p < 1 else size,
        coarser(dtype, x.dtype, x.dtype if bias is None else bias.dtype),
    )

    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    before = [None if t is None else t.clone() for t in (x, bias, residual, grad, at)]
    (du, _) = bias_dropout.OP.backward(grad.double(), at, None, p, training, torch.float64, (True, False))
    for needs in all_needs:
        got = dropout_backward(grad, at, bias, p, training, x.dtype, needs)
        check_gradients(got, du, x.dtype, bias, needs, coarser(x.dtype, dtype, x.dtype if bias is None else bias.dtype))
    for now, then in zip((x, bias, residual, grad, at), before, strict=True):
        assert now is None or torch.equal(now, then), "an input was written"
    return y
