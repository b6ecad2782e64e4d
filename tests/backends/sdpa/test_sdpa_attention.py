"""The sdpa backend: what it takes and refuses, its corrections of torch's kernel, and its memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from eager_memory import peak

import fusedops
from fusedops import attention

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
Q, K, V = (
    torch.randn(2, n, s, 8, generator=torch.Generator().manual_seed(n + s)) for n, s in ((4, 20), (2, 20), (2, 20))
)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"v": V[..., :4]}, "dim 3 of v = 4, expected that of q, 8"),
        ({"causal": True, "window": (3, 0)}, "a window, expected no window"),
        ({"q": Q[:, :, :5], "causal": "lower_right"}, "expected 'none' or 'upper_left', or Sq == Sk"),
        ({"causal": True, "scale": 0.0}, "scale = 0.0, expected a Python number of at least 1e-30, finite in float32"),
        ({"q": Q[..., :0], "k": K[..., :0], "v": V[..., :0]}, "dim 3 of q = 0, expected a size of at least 1"),
    ],
    ids=["widths", "window", "alignment", "scale", "no elements"],
)
def test_what_it_refuses_is_served_by_another(changes: dict[str, Any], text: str) -> None:
    call = {"q": Q, "k": K, "v": V, **changes}
    with fusedops.use("sdpa,eager"):
        decision = fusedops.explain(attention, **call)
    assert decision.backend == "eager"
    assert text in str(decision)
    with fusedops.use(fallback="raise"):  # sdpa is optional: no fallback is reported
        attention(**call)
    with pytest.raises(fusedops.NoBackendError, match="sdpa"), fusedops.use("sdpa", fallback="raise"):
        attention(**call)


def test_vectors_without_elements_have_equal_scores() -> None:
    _, lse = attention(Q[..., :0], K[..., :0], V[..., :0], return_lse=True)
    assert torch.equal(lse, torch.full_like(lse, math.log(K.shape[2])))


def test_it_has_no_gradient_of_lse() -> None:
    with fusedops.use("sdpa,eager"):
        decision = fusedops.explain(attention, Q, K, V, causal=True)
        with_lse = fusedops.explain(attention, Q.clone().requires_grad_(), K, V, return_lse=True)
    assert (decision.backend, decision.backward) == ("sdpa", "sdpa")
    assert (with_lse.backend, with_lse.backward) == ("sdpa", "eager")


def test_torch_still_has_what_is_corrected() -> None:
    """A correction that torch no longer needs is to be removed."""
    heads = V.repeat_interleave(2, 1)
    bias = torch.zeros(1, 1, 20, 20)
    bias[:, :, 2] = -math.inf
    assert bool((KERNEL(Q, heads, heads, attn_mask=bias)[1][:, :, 2] == 0).all())
    dirty = torch.cat((heads[:, :, :5], torch.full_like(heads[:, :, 5:], math.nan)), 2)
    assert bool(KERNEL(Q, heads, dirty, 0.0, True)[0][:, :, 0].isnan().any())
    assert bool(KERNEL(Q, heads, heads, 0.0, True, scale=0.0)[0].isnan().any())
    strided = Q.mT.contiguous().mT
    assert not torch.allclose(KERNEL(strided, heads, heads)[0], KERNEL(Q, heads, heads)[0])


@pytest.mark.parametrize("masked", ["causal", "padded", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_holds_no_more_than_torch(masked: str, dtype: torch.dtype) -> None:
    """Beside what a direct call holds: the result where torch's is transposed, lse, the mask."""
    q, k, v = (torch.randn(2, 8, 512, 64).to(dtype) for _ in range(3))
    mask = fusedops.masks.from_lengths(torch.tensor([500, 400]), 512) if masked == "padded" else None
    causal = masked == "causal"
    seen = None if mask is None else ~mask
    size = q.nbytes
    function = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        direct = peak(lambda: function(q, k, v, seen, is_causal=causal), size)
        ours = peak(lambda: attention(q, k, v, mask, causal=causal, backend="sdpa"), size)
    assert ours <= 1.1 * direct + 0.05
