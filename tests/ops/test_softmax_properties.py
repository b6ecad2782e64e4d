"""scaled_masked_softmax on eager and on triton (interpreted), over random shapes, masks, dtypes, strides and values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedops
from fusedops import testing

OP = testing.OPS["scaled_masked_softmax"]


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, float, bool]:
    """x of any rank, layout and dtype, and a mask that broadcasts to it, with NaN and inf where it masks."""
    rank = draw(st.integers(2, 6))
    shape = [draw(st.sampled_from([0, 1, 2, 3])) for _ in range(rank - 2)]
    shape += [draw(st.sampled_from([0, 1, 3, 8])), draw(st.sampled_from([0, 1, 5, 16, 33]))]
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]))
    if layout == "transposed":
        x = torch.randn([*shape[:-2], shape[-1], shape[-2]], generator=generator).to(dtype).transpose(-1, -2)
    elif layout == "sliced":
        x = torch.randn([*shape[:-1], 2 * shape[-1] + 1], generator=generator).to(dtype)[..., 1::2]
    elif layout == "expanded":
        x = torch.randn([1, *shape[1:]], generator=generator).to(dtype).expand(shape)
    else:
        x = torch.randn(shape, generator=generator).to(dtype)
    mask = None
    if draw(st.booleans()):
        small = [size if draw(st.booleans()) else 1 for size in shape][draw(st.integers(0, rank)) :]
        mask = torch.rand(small, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))
        poison = draw(st.sampled_from([None, math.nan, math.inf, -math.inf]))
        if poison is not None and layout != "expanded":
            x = x.masked_fill(mask, poison) if layout == "contiguous" else x
        if draw(st.booleans()):
            mask = mask.to(torch.uint8) * draw(st.sampled_from([1, 7, 255]))
    return x, mask, draw(st.sampled_from([1.0, 0.125, -0.7])), draw(st.booleans())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("backend", ["eager", "triton"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(call=calls())
def test_any_call_means_the_same(backend: str, call: tuple[torch.Tensor, torch.Tensor | None, float, bool]) -> None:
    x, mask, scale, causal = call
    answer = testing.expected(OP, call)
    before = x.clone(), None if mask is None else mask.clone()
    leaf = x.detach().requires_grad_()
    with fusedops.use(backend, fallback="raise"):
        y = fusedops.scaled_masked_softmax(leaf, mask, scale, causal=causal)
    (dx,) = torch.autograd.grad(y, leaf, answer.grad.to(y.dtype))
    assert (y.dtype, y.shape, dx.shape) == (x.dtype, x.shape, x.shape)
    testing.assert_within(y, answer.y, OP.evidence.tolerance[x.dtype], "y")
    testing.assert_within(dx, answer.gradients["x"], OP.evidence.gradient_tolerance[x.dtype], "dx")
    masked = torch.zeros(x.shape, dtype=torch.bool) if mask is None else mask.bool().expand(x.shape)
    if causal:
        masked = masked | torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    assert (y[masked] == 0).all(), "a masked position is exactly 0, a fully masked row with it"
    dead = masked.all(-1)
    assert (dx[dead] == 0).all(), "the gradient of a fully masked row is exactly 0"
    assert torch.equal(x.nan_to_num(), before[0].nan_to_num()), "x was written"
    if mask is not None:
        assert torch.equal(mask, before[1]), "mask was written"
