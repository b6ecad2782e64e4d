"""attention: alignment, windows, masks, masked rows, numbers that are not finite, lse and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_calls import explicit
from eager_memory import peak
from torch import Tensor

import fusedops
from fusedops import attention, testing

OP = testing.OPS["attention"]
Q, K, V = (torch.randn(2, n, s, 8, generator=torch.Generator().manual_seed(n + s)) for n, s in ((4, 5), (2, 7), (2, 7)))


def plain(q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention by the definition, in float64, for rows with a visible key."""
    keys, values = (each.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = (q.double() @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(masked, -math.inf)
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("call", [attention, fusedops.explain])
def test_true_is_both_alignments_where_lengths_are_equal(call: Any) -> None:
    args = Q, K[:, :, :5], V[:, :, :5]
    if call is attention:
        one = attention(*args, causal=True)
        assert torch.equal(one, attention(*args, causal="upper_left"))
        assert torch.equal(one, attention(*args, causal="lower_right"))
    else:
        text = str(fusedops.explain(attention, *args, causal=True, window=(2, 0)))
        assert "causal upper_left" in text
        assert "window (2, 0)" in text


@pytest.mark.parametrize("causal", ["none", "upper_left", "lower_right"])
@pytest.mark.parametrize("window", [None, (1, 0), (0, 3), (2**62, 2**62)], ids=str)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6), (1, 9)], ids=str)
def test_alignments_and_windows_are_their_masks(causal: str, window: Any, lengths: tuple[int, int]) -> None:
    sq, sk = lengths
    q, k = torch.randn(1, 2, sq, 8), torch.randn(1, 1, sk, 8)
    masked = explicit({"q": q, "k": k, "mask": None, "causal": causal, "window": window})
    out, lse = attention(q, k, k, causal=causal, window=window, return_lse=True)
    want, want_lse = plain(q, k, k, masked)
    dead = masked.all(-1)
    assert torch.allclose(out.double(), want.masked_fill(dead[..., None], 0.0), atol=1e-5)
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
    assert bool((lse[dead] == -math.inf).all())


def test_one_query_beside_cached_keys_has_nothing_masked() -> None:
    """Decoding: "lower_right" masks nothing there, so kernels without alignments take it. A window still masks."""
    q, other = Q[:, :, :1], {"causal": "lower_right"}
    assert torch.equal(attention(q, K, V, **other), attention(q, K, V))
    for call, text in ((other, "causal none"), ({**other, "window": (2, 0)}, "causal lower_right")):
        assert text in str(fusedops.explain(attention, q, K, V, **call))
    windowed = attention(q, K, V, window=(2, 0), **other)
    assert torch.allclose(windowed, attention(q, K[:, :, -3:], V[:, :, -3:]), atol=1e-6)


def test_torch_and_the_upper_left_alignment_agree() -> None:
    k, v = (each.repeat_interleave(2, 1) for each in (K, V))
    want = torch.nn.functional.scaled_dot_product_attention(Q, k, v, is_causal=True)
    assert torch.allclose(attention(Q, K, V, causal="upper_left"), want, atol=1e-6)
    assert not torch.allclose(attention(Q, K, V, causal="lower_right"), want, atol=1e-2)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.clone().requires_grad_() for each in tensors)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
def test_a_fully_masked_row_is_zero_and_adds_nothing(kind: torch.dtype) -> None:
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[3] = True
    q, k, v = leaves(Q, K, V)
    out, lse = attention(q, k, v, mask.to(kind), return_lse=True)
    assert bool((out[:, :, 3] == 0).all())
    assert bool((lse[:, :, 3] == -math.inf).all())
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad([out, lse], [q, k, v], [grad, grad_lse], retain_graph=True)
    assert bool((gradients[0][:, :, 3] == 0).all())
    # garbage in a row that sees nothing reaches no gradient
    grad[:, :, 3], grad_lse[:, :, 3] = math.nan, math.inf
    for one, other in zip(gradients, torch.autograd.grad([out, lse], [q, k, v], [grad, grad_lse])):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_at_masked_keys_reach_no_row_that_masks_them(value: float) -> None:
    """Key 6 is seen by the last query alone: the rows before are as with any other key, and so is dq."""
    clean = leaves(Q, K, V)
    dirty = leaves(Q, *(torch.cat((each[:, :, :6], torch.full_like(each[:, :, 6:], value)), 2) for each in (K, V)))
    outs = [attention(*each, causal="lower_right")[:, :, :4] for each in (clean, dirty)]
    assert torch.equal(*outs)
    one, other = (torch.autograd.grad(out.sum(), each[0])[0][:, :, :4] for out, each in zip(outs, (clean, dirty)))
    assert torch.allclose(one, other, atol=1e-6)
    assert not attention(*dirty, causal="lower_right")[:, :, 4].isfinite().any()


def test_a_row_with_an_infinite_score_has_an_infinite_lse_on_eager() -> None:
    q, k = torch.ones(1, 1, 2, 1), torch.tensor([math.inf, 0.0])[None, None, :, None]
    out, lse = attention(q, k, k.isinf().float(), return_lse=True, backend="eager")
    assert out.isnan().all()
    assert torch.equal(lse, torch.full_like(lse, math.inf))


def test_the_gradient_of_lse() -> None:
    q, k, v = leaves(Q, K, V)
    _, lse = attention(q, k, v, return_lse=True)
    weights = torch.randn_like(lse)
    gradients = torch.autograd.grad((lse * weights).sum(), [q, k], retain_graph=True)
    _, want = plain(q, k, v, torch.zeros(5, 7, dtype=torch.bool))
    for one, other in zip(gradients, torch.autograd.grad((want * weights).sum(), [q, k])):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("both", [False, True])
def test_second_derivatives(both: bool) -> None:
    q, k, v = (each[:1, :heads, :4, :2].double().requires_grad_() for each, heads in ((Q, 2), (K, 1), (V, 1)))
    mask = torch.tensor([[False, True, False, True], *([[True] * 4] * 2), [False] * 4])

    def call(*tensors: Tensor) -> Any:
        out = attention(*tensors, mask, causal=True, return_lse=both)
        return (out[0], out[1][:, :, [0, 3]]) if both else out

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v))


def test_transforms_of_functorch() -> None:
    def loss(q: Tensor) -> Tensor:
        return attention(q, K[:1], V[:1], causal="lower_right").sum()

    one, two = (torch.func.grad(loss)(each[None]) for each in Q)
    both = torch.func.vmap(torch.func.grad(lambda q: loss(q[None])))(Q)
    assert torch.allclose(both, torch.cat((one, two)), atol=1e-6)


def test_eager_keeps_no_scores_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = pytest.importorskip("fusedops_eager.attention._attention")
    q, k, v = (torch.randn(1, n, 512, 32, requires_grad=True) for n in (4, 2, 2))
    whole = attention(q, k, v, causal=True, backend="eager")
    want = torch.autograd.grad(whole.sum(), [q, k, v])
    monkeypatch.setattr(chunks, "CHUNK", 32 * 1024)  # 128 KiB, where the scores have 4 MiB
    result = 4 * (whole.numel() + whole.numel() // 32)
    with torch.no_grad():
        held = peak(lambda: attention(q, k, v, causal=True, return_lse=True, backend="eager"), result)
    assert held * result <= 1.3 * result + 4 * 128 * 1024
    out = attention(q, k, v, causal=True, backend="eager")
    assert torch.allclose(out, whole, atol=1e-5)
    gradients = 4 * (q.numel() + 2 * k.numel())
    held = peak(lambda: torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True), gradients)
    assert held * gradients <= 1.3 * gradients + 4 * whole.numel() + 8 * 128 * 1024  # the gradient of out too
    for one, other in zip(torch.autograd.grad(out.sum(), [q, k, v]), want):
        assert torch.allclose(one, other, atol=1e-4)


def test_verify_allows_for_equal_roundings_of_equal_rows() -> None:
    q, k = torch.zeros(1, 7, 120, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 3, 1, dtype=torch.bfloat16)
    v = torch.zeros_like(k).requires_grad_()
    with fusedops.use("sdpa"), fusedops.verify("reference"):
        attention(q, k, v).backward(torch.full_like(q, 0.1514))
