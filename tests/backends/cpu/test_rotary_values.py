"""The results of rotary_embedding on the cpu backend: dtypes, layouts that are not copied, large tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_values import DTYPES, rounded
from pairwise import pairwise
from torch import Tensor

import fusedops
from fusedops import testing

pytestmark = pytest.mark.usefixtures("on_cpu")

OP = testing.OPS["rotary_embedding"]
every_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def check(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> None:
    """Compare outputs and gradients with float64, by the op's error model."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in (q, k)]
    got = fusedops.rotary_embedding(*leaves, cos, sin, **options)
    want = testing.expected(OP, OP.bind((*leaves, cos, sin), options))
    present = [(x, y) for x, y in zip(leaves, got) if x is not None and y is not None]
    grads = [grad.to(y.dtype) for grad, (_, y) in zip(want.grads, present)]
    gradients = torch.autograd.grad([y for _, y in present], [x for x, _ in present], grads)
    for place, ((x, y), gradient) in enumerate(zip(present, gradients)):
        name, output = OP.differentiable[place], OP.outputs[place]
        assert y.is_contiguous()
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        testing.assert_within(y, want.outputs[place], want.limits[f"output {output}"], output)
        testing.assert_within(gradient, want.gradients[name], want.limits[f"gradient of {name}"], name)


@pytest.mark.parametrize(("dtype", "angle_dtype", "interleaved"), pairwise(DTYPES, DTYPES, [False, True]))
def test_sizes(dtype: torch.dtype, angle_dtype: torch.dtype, interleaved: bool) -> None:
    """Pairs that fill vectors and pairs that do not, one block and several."""
    for width, positions, heads in pairwise([2, 7, 16, 33, 64, 100], [1, 5, 700], [1, 3]):
        for pairs in {width // 2, width // 3, 0}:
            q, k = rounded((2, heads, positions, width), dtype), rounded((2, 1, positions, width), dtype, 1)
            cos, sin = rounded((2, positions, pairs), angle_dtype, 2), rounded((2, positions, pairs), angle_dtype, 3)
            check(q, k, cos, sin, interleaved=interleaved)
    check(rounded((2, 5, 3, 24), dtype), None, cos[0, :5, :8], sin[0, :5, :8], interleaved=interleaved, seq_dim=-3)


@pytest.mark.parametrize("seq_dim", [-2, -3])
@every_pairing
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
    check(q, k, cos, sin, interleaved=interleaved, seq_dim=seq_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("pairs", [32, 31])
def test_tensors_beyond_the_caches_have_the_same_bits(dtype: torch.dtype, seq_dim: int, pairs: int) -> None:
    """Above 32 MiB halves are stored past the caches."""
    positions = 2**18 if dtype is torch.float32 else 2**19
    shape = (1, 2, positions // 2, 64) if seq_dim == -2 else (1, positions // 2, 2, 64)
    q, (cos, sin) = rounded(shape, dtype), (rounded((positions // 2, pairs), torch.float32, seed) for seed in (1, 2))
    some = slice(positions // 2 - 20, positions // 2)
    part = q[:, :, some] if seq_dim == -2 else q[:, some]
    large, _ = fusedops.rotary_embedding(q, None, cos, sin, seq_dim=seq_dim)
    small, _ = fusedops.rotary_embedding(part, None, cos[some], sin[some], seq_dim=seq_dim)
    assert torch.equal(large[:, :, some] if seq_dim == -2 else large[:, some], small)


@every_pairing
def test_one_gradient_alone(interleaved: bool) -> None:
    grads, (cos, sin) = [rounded((2, n, 5, 16), torch.float16, n) for n in (3, 1)], torch.rand(2, 5, 8)
    backward = torch.ops.fusedops.rotary_embedding_backward
    both = backward(*grads, cos, sin, interleaved, -2, [True, True])
    assert torch.equal(backward(*grads, cos, sin, interleaved, -2, [True, False])[0], both[0])
    assert torch.equal(backward(*grads, cos, sin, interleaved, -2, [False, True])[1], both[1])
