"""Results of the cpu kernels where the conformance kit does not go: long rows, many rows, many dimensions, scales."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpu_values import CALLS, DTYPES, assert_close, call_of, rounded
from right import assert_right
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu")

LONG_AND_MANY = list(itertools.product(CALLS, [(3, 40_001), (1100, 70)]))


@pytest.mark.parametrize(("call", "dtype"), list(zip(LONG_AND_MANY, itertools.cycle(DTYPES))), ids=str)
def test_long_rows_and_many_rows(call: tuple[str, tuple[int, int]], dtype: torch.dtype) -> None:
    """Rows beyond the caches nearest to a core, and sums of more rows than a block has, for several blocks.

    In one dtype each: the kit has all of them, and they differ in how a number is read and written.
    """
    op, args, options = call_of(*call, dtype)
    assert_right(op, *args, **options)


def test_many_dimensions() -> None:
    x = rounded((2, *[1] * 20, 3, 5), torch.float32)
    assert_right("scaled_masked_softmax", x, rounded((2, *[1] * 21, 5), torch.float32, 1) > 0)


@pytest.mark.parametrize("scale", [0.0, -2.0, 3e38, -3e38, 2**62])
def test_scales(scale: float) -> None:
    x = rounded((3, 21), torch.float32)
    wanted = torch.softmax(x * scale, -1).double()
    assert_close(fusedops.scaled_masked_softmax(x, None, scale), wanted)


def test_a_mean_far_from_zero() -> None:
    """The variance is that of the differences from the mean: the squares of the numbers would cancel."""
    assert_right("layer_norm", rounded((5, 777), torch.float32) + 256)


def test_residuals_of_another_dtype_have_their_gradients() -> None:
    """Eager computes such a forward; the backward kernels take it where s is float32."""
    for dtypes in [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]:
        x, residual = rounded((6, 40), dtypes[0]), rounded((6, 40), dtypes[1], 1)
        grads, results = (rounded((6, 40), dtypes[0], 2), rounded((6, 40), torch.float32, 3)), []
        for backend in ("cpu", "eager"):
            leaves = [t.detach().requires_grad_() for t in (x, residual)]
            y, s = fusedops.add_layer_norm(*leaves, backend="eager")
            with fusedops.use(backend, fallback="raise"):
                results.append(torch.autograd.grad((y, s), leaves, grads))
        for ours, theirs in zip(*results, strict=True):
            assert ours.dtype is theirs.dtype
            assert_close(ours, theirs.double(), 4.0)


@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_views_are_read_where_they_are(seq_dim: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a projection of q, k and v: transposed, cut, expanded. Its rows are contiguous."""
    packed = rounded((2, 9, 8, 32), torch.bfloat16)
    q, k = packed[..., :4, :], packed[..., 4:5, :].expand(2, 9, 2, 32)
    if seq_dim == -2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = rounded((9, 40), torch.float32)[:, 4:16], rounded((1, 9, 12), torch.bfloat16).expand(2, 9, 12)
    cos = cos.expand(2, 9, 12)
    wanted = fusedops.rotary_embedding(q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous(),
                                       interleaved=interleaved, seq_dim=seq_dim)  # fmt: skip
    monkeypatch.setattr(Tensor, "contiguous", None)
    got = fusedops.rotary_embedding(q, k, cos, sin, interleaved=interleaved, seq_dim=seq_dim)
    assert all(map(torch.equal, got, wanted))
    monkeypatch.undo()
    assert_right("rotary_embedding", q, k, cos, sin, interleaved=interleaved, seq_dim=seq_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("form", ["transposed", "every other element", "expanded"])
def test_rotary_rows_whose_elements_are_apart_in_memory_are_read_in_place(
    dtype: torch.dtype, seq_dim: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(heads: int) -> Tensor:
        if form == "transposed":
            x = rounded((2, heads, 24, 150), dtype).mT  # more positions than a block has
        else:
            x = rounded((2, heads, 150, 1), dtype).expand(-1, -1, -1, 24)
            x = rounded((2, heads, 150, 48), dtype)[..., ::2] if form == "every other element" else x
        return x if seq_dim == -2 else x.transpose(1, 2)

    q, k, cos, sin = apart(3), apart(1), rounded((150, 10), torch.float32), rounded((150, 10), torch.float32)
    wanted = fusedops.rotary_embedding(q.contiguous(), k.contiguous(), cos, sin, seq_dim=seq_dim)
    monkeypatch.setattr(Tensor, "contiguous", None)
    assert all(map(torch.equal, fusedops.rotary_embedding(q, k, cos, sin, seq_dim=seq_dim), wanted))
    mixed = fusedops.rotary_embedding(q, wanted[1], cos, sin, seq_dim=seq_dim)  # a tensor of each kind
    again = fusedops.rotary_embedding(wanted[0], wanted[1], cos, sin, seq_dim=seq_dim)
    assert torch.equal(mixed[0], wanted[0])
    assert torch.equal(mixed[1], again[1])
