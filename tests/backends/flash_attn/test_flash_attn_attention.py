"""The flash_attn backend on a stand-in for the package: values, what it refuses, and its corrections."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_attn_standin import NAME, Call
from right import assert_right
from torch import Tensor

import fusedops
from fusedops import attention

BF16 = torch.bfloat16
Q, K, V = (
    torch.randn(2, n, s, 16, generator=torch.Generator().manual_seed(n + s)).to(BF16)
    for n, s in ((4, 6), (2, 6), (2, 6))
)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("lengths", [(6, 6), (3, 9), (9, 3), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("window", [None, (0, 0), (2, 0), (1, 5), (3, 3), (2**62, 2**62)], ids=str)
@pytest.mark.parametrize("causal", [False, "lower_right"])
def test_alignment_and_windows_are_their_masks(
    causal: Any, window: Any, lengths: tuple[int, int], log: list[Call]
) -> None:
    sq, sk = lengths
    q, k = torch.randn(1, 4, sq, 8).to(BF16), torch.randn(1, 2, sk, 8).to(BF16)
    if window is not None and not causal and sq > sk:
        with pytest.raises(fusedops.NoBackendError, match=f"got dim 2 of q = {sq}, expected at most that of k, {sk}"):
            attention(q, k, k, causal=causal, window=window)
        return
    assert_right("attention", q, k, k, causal=causal, window=window)
    assert len(log) == 2


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mask": torch.zeros(6, 6) > 0}, "got a mask, expected no mask"),
        ({"q": Q.float(), "k": K.float(), "v": V.float()}, "got q of float32, expected float16 or bfloat16"),
        ({"v": V[..., :8]}, "got dim 3 of v = 8, expected that of q, 16"),
        ({"q": Q[:, :, :4], "causal": "upper_left"}, "with 4 queries and 6 keys, expected 'none' or 'lower_right', or"),
        ({"scale": 0.0}, "got scale = 0.0, expected a Python number of at least 1e-30, finite in float32"),
        ({"scale": -0.5}, "got scale = -0.5, expected a Python number of at least 1e-30, finite in float32"),
        ({"q": Q[..., :12], "k": K[..., :12], "v": V[..., :12]}, "got dim 3 of q = 12, expected a multiple of 8 in"),
        ({name: x.repeat(1, 1, 1, 17) for name, x in (("q", Q), ("k", K), ("v", V))}, "got dim 3 of q = 272"),
        ({name: x[..., :0] for name, x in (("q", Q), ("k", K), ("v", V))}, "got dim 3 of q = 0"),
        ({name: x[:1, :1, :1].expand(65536, 1, 1, 16) for name, x in (("q", Q), ("k", K), ("v", V))}, "= 65536"),
    ],
    ids=["mask", "float32", "values", "upper left", "scale 0", "scale < 0", "head 12", "head 272", "head 0", "batch"],
)
def test_what_the_package_does_not_take_is_refused(changes: dict[str, Any], text: str, log: list[Call]) -> None:
    call = {"q": Q, "k": K, "v": V, **changes}
    with pytest.raises(fusedops.NoBackendError) as error:
        attention(**call)
    assert text in str(error.value)
    assert not log


def test_another_backend_serves_what_is_refused_without_a_report(log: list[Call]) -> None:
    with fusedops.use("auto", fallback="raise"):  # no policy names the backend, which is optional
        decision = fusedops.explain(attention, Q, K, V, torch.zeros(6, 6) > 0)
        assert decision.backend != NAME
        attention(Q, K, V, torch.zeros(6, 6) > 0)
        assert fusedops.explain(attention, Q, K, V).backend == NAME


def test_the_gradient_of_lse_is_another_backends(log: list[Call]) -> None:
    tensors = leaves(Q, K, V)
    with fusedops.use("auto", fallback="raise"):
        out, lse = attention(*tensors, return_lse=True)
        (out.sum() + lse.sum()).backward()
    assert [call.function for call in log] == ["_flash_attn_forward"]
    assert all(tensor.grad is not None for tensor in tensors)


@pytest.mark.parametrize(("capability", "taken"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_the_device_is_of_compute_capability_8_or_newer(capability: tuple[int, int], taken: bool) -> None:
    spec = fusedops.TensorSpec((1, 2, 4, 8), BF16, "cuda", capability=capability)
    constraints = fusedops.backends()  # loads the plugins
    assert constraints
    from fusedops_flash_attn.attention import attention as kernel

    given = {"q": spec, "k": spec, "v": spec, "mask": None, "scale": None, "causal": "none", "window": None}
    reasons = [reason for each in kernel.constraints for reason in each.reasons({**given, "return_lse": False})]
    assert (not reasons) == taken, reasons


# ---------------------------------------------------------------------------------------------------------- corrections


def test_queries_without_a_key_and_keys_without_a_query_are_left_out(log: list[Call]) -> None:
    tensors = Q, K[:, :, :4], V[:, :, :4]
    out, lse = attention(*tensors, causal="lower_right", return_lse=True)
    assert log[0].args[0].shape[1] == 4
    assert bool((out[:, :, :2] == 0).all())
    assert bool((lse[:, :, :2] == -math.inf).all())
    assert bool(lse[:, :, 2:].isfinite().all())
    q, k, v = leaves(*tensors)
    out = attention(q, k, v, causal="lower_right")
    grad = torch.randn(out.shape).to(BF16)
    clean = torch.autograd.grad(out, [q, k, v], grad, retain_graph=True)
    grad[:, :, :2] = math.nan  # reaches no gradient
    for one, other in zip(clean, torch.autograd.grad(out, [q, k, v], grad)):
        assert torch.equal(one, other)
    assert bool((clean[0][:, :, :2] == 0).all())
    # decoding with a window: the oldest keys are seen by no query, whatever they hold
    k, v = (torch.cat((torch.full_like(each[:, :, :2], math.nan), each[:, :, 2:]), 2) for each in (K, V))
    tensors = leaves(Q[:, :, 5:], k, v)
    out = attention(*tensors, causal="lower_right", window=(3, 0))
    assert log[-1].args[1].shape[1] == 4
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert all(bool(each.isfinite().all()) for each in (out, *gradients))
    assert all(bool((each[:, :, :2] == 0).all()) for each in gradients[1:])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_a_score_that_is_not_finite_is_nan_in_backward_too(value: float, log: list[Call]) -> None:
    """lse is inf in release 2 and -inf in release 3: by the one a row adds nothing to dv, by the other nonsense."""
    k = K.clone()
    k[0, 0, 5, 3] = value
    out, lse = attention(Q, k, V, causal=True, return_lse=True)
    rows = (slice(0, 1), slice(0, 2), slice(5, 6))
    assert bool(out[rows].isnan().all())
    assert bool(lse[rows].isnan().all())
    assert bool(lse[1].isfinite().all())
    tensors = leaves(Q, k, V)
    dq, _, dv = torch.autograd.grad(attention(*tensors, causal=True).sum(), tensors)
    assert bool(dv[0, 0].isnan().all())
    assert bool(dq[rows].isnan().all())
    assert bool(dv[:, 1].isfinite().all())


def test_an_expanded_key_is_copied(log: list[Call]) -> None:
    k, v = (each[:, :1].expand(2, 2, 6, 16) for each in (K, V))
    assert torch.equal(attention(Q, k, v), attention(Q, k.contiguous(), v.contiguous()))


def test_contiguous_tensors_are_passed_as_they_are(log: list[Call]) -> None:
    attention(Q, K, V)
    assert [arg.data_ptr() for arg in log[0].args] == [each.data_ptr() for each in (Q, K, V)]


def test_a_deterministic_backward_is_asked_for(log: list[Call]) -> None:
    tensors = leaves(Q, K, V)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            attention(*tensors).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert log[-1].kwargs["deterministic"] is wanted


def test_rows_of_an_odd_length_in_memory(log: list[Call]) -> None:
    assert_right("attention", *(torch.cat((t, t[..., :1]), 3)[..., : t.shape[3]] for t in (Q, K, V)))
