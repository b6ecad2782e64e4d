"""adapt="pad": a call refused for a size alone is padded, run and cropped, whichever backend has such a limit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state import forget_warnings, isolated
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import FallbackWarning, NoBackendError, TensorSpec, tensor_cache, testing
from fusedops.constraints import Constraint, Dim, DType, Present, Rank

OP = testing.OPS["scaled_masked_softmax"]
FLOATS = (torch.float32, torch.float64)


def stepped(*more: Constraint, at_least: int | None = None, at_most: int | None = 64) -> list[Any]:
    """A backend that takes only multiples of 8; returns the sizes of x, or of y, that its kernels were given."""
    given: list[Any] = []

    dims = {name: Dim(name, (-2, -1), at_least, at_most, 8) for name in ("x", "y")}

    def forward(x: Any, mask: Any, scale: float, causal: bool) -> Any:
        given.append(tuple(x.shape[-2:]))
        return OP.reference(x, mask, scale, causal)

    def backward(grad: Any, y: Any, scale: float, causal: bool) -> Any:
        given.append(tuple(y.shape[-2:]))
        return OP.backward(grad, y, scale, causal)

    kernels = (
        fusedops.kernel(OP.name, DType("x", *FLOATS), dims["x"], *more)(forward),
        fusedops.kernel(OP.name, DType("y", *FLOATS), dims["y"], direction="backward")(backward),
    )
    fusedops.register(fusedops.Backend("stepped", ("cpu",), 60, kernels))
    return given


@pytest.fixture
def sizes(fakes: Any) -> list[Any]:
    return stepped()


def gradient(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and x's gradient of the sum of its squares."""
    leaf = x.detach().requires_grad_()
    y = fusedops.scaled_masked_softmax(leaf, *args, **kwargs)
    return y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]


def masks(shape: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """Every shape that broadcasts to the last two of ``shape``, and one with a leading size."""
    sq, sk = shape[-2:]
    return [None, (), (1,), (sk,), (1, 1), (1, sk), (sq, 1), (sq, sk), (shape[0], *(1,) * (len(shape) - 2), sk)]


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    st.integers(0, 8),
    st.sampled_from([torch.bool, torch.uint8]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_the_numbers_are_those_of_the_whole_call(
    shape: tuple[int, ...], which: int, dtype: torch.dtype, causal: bool, seed: int
) -> None:
    with isolated():
        sizes = stepped()
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        made = masks(shape)[which]
        mask = None if made is None else ((torch.rand(made, generator=generator) < 0.4) * 3).to(dtype)
        with fusedops.use("stepped", fallback="raise", adapt="pad"):
            got = gradient(x, mask, 0.7, causal=causal)
        want = gradient(x, mask, 0.7, causal=causal, backend="eager")
        for mine, theirs in zip(got, want):
            assert mine.shape == theirs.shape
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, theirs, atol=1e-14, rtol=1e-12)
        padded = tuple(-(-size // 8) * 8 for size in shape[-2:])
        assert sizes == [padded, padded]


def test_compiled_and_registered_and_checkpointed(sizes: list[Any]) -> None:
    x, mask = torch.randn(2, 5, 12, dtype=torch.float64), torch.rand(2, 1, 12) < 0.3
    want = gradient(x, mask, 0.5, backend="eager")
    ways = {
        "registered": lambda x: torch.ops.fusedops.scaled_masked_softmax(x, mask, 0.5),
        "compiled": torch.compile(
            lambda x: fusedops.scaled_masked_softmax(x, mask, 0.5), fullgraph=True, backend="aot_eager"
        ),
        "checkpointed": lambda x: checkpoint(
            fusedops.scaled_masked_softmax,
            x,
            mask,
            0.5,
            use_reentrant=False,
            context_fn=fusedops.checkpoint_contexts,
        ),
    }
    for name, function in ways.items():
        sizes.clear()
        with fusedops.use("stepped", fallback="raise", adapt="pad"):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            (dx,) = torch.autograd.grad(y.square().sum(), leaf)
        assert sizes == [(8, 16)] * (3 if name == "checkpointed" else 2), name
        torch.testing.assert_close((y.detach(), dx), want, atol=1e-14, rtol=1e-12)


@tensor_cache.reuse()
def test_a_padded_mask_is_made_once(sizes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: seen.append(1) or real(*args, **kwargs))
    mask = torch.rand(5, 12) < 0.3
    with fusedops.use("stepped", adapt="pad"):
        for _ in range(24):
            fusedops.scaled_masked_softmax(torch.randn(2, 5, 12), mask[:])
        assert len(seen) == 1
        mask[0] = True
        y = fusedops.scaled_masked_softmax(torch.randn(2, 5, 12), mask)
    assert len(seen) == 2
    assert (y[:, 0] == 0).all()


@pytest.mark.parametrize("write", ["numpy", "data", "dlpack", "storage"])
def test_without_a_block_a_change_that_torch_misses_is_in_effect(sizes: list[Any], write: str) -> None:
    mask = torch.zeros(5, 12, dtype=torch.bool)
    x, memory = torch.randn(2, 5, 12), mask.numpy()
    with fusedops.use("stepped", adapt="pad"):
        fusedops.scaled_masked_softmax(x, mask)
        if write == "numpy":
            memory[:, 3:] = True
        elif write == "dlpack":
            torch.from_dlpack(mask.view(torch.uint8).detach())[:, 3:] = 1
        elif write == "storage":
            mask.untyped_storage().copy_((torch.arange(12) >= 3).expand(5, 12).contiguous().untyped_storage())
        else:
            mask.data[:, 3:] = True
        y = fusedops.scaled_masked_softmax(x, mask)
    assert (y[..., 3:] == 0).all()


def test_a_call_that_fits_is_not_touched(sizes: list[Any]) -> None:
    x = torch.randn(2, 8, 16)
    with fusedops.use("stepped", adapt="pad"):
        fusedops.scaled_masked_softmax(x)
        (candidate,) = [c for c in fusedops.explain(OP.name, x).candidates if c.backend == "stepped"]
    assert sizes == [(8, 16)]
    assert candidate.adaptations == ()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 8, 65), torch.float32),
        ((2, 5, 12), torch.float16),
        ((2, 0, 12), torch.float32),
        ((0, 5, 12), torch.float32),
    ],
    ids=["too long even so", "another constraint too", "no rows", "empty"],
)
def test_what_padding_does_not_help_falls_back_and_is_not_offered_it(
    sizes: list[Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.zeros(shape, dtype=dtype)
    for adapt in ("none", "pad"):
        with fusedops.use("stepped", adapt=adapt):
            forget_warnings()
            with pytest.warns(FallbackWarning) as caught:
                fusedops.scaled_masked_softmax(x)
            assert "adapt" not in str(fusedops.explain(OP.name, x)).replace("adapt     pad", "")
        assert [str(w.message).partition(":")[0] for w in caught] == [f"{OP.name} runs on eager, not on stepped"]
        assert 'adapt="pad"' not in str(caught[0].message)
    assert sizes == []


def test_all_constraints_hold_for_the_padded_call(fakes: Any) -> None:
    sizes = stepped(Present("mask", present=False), Rank("x", 3), at_most=20)
    with fusedops.use("stepped", fallback="raise", adapt="pad"):
        fusedops.scaled_masked_softmax(torch.randn(2, 5, 8))
        assert sizes == [(8, 8)]
        for refused in ((2, 5, 12), (2, 5, 20), (5, 8)):  # a mask would be needed; 24 is too long; another rank
            with pytest.raises(NoBackendError):
                fusedops.scaled_masked_softmax(torch.randn(refused))
    assert sizes == [(8, 8)]


def test_sizes_below_the_least_are_padded_to_it(fakes: Any) -> None:
    sizes = stepped(at_least=20)
    with fusedops.use("stepped", fallback="raise", adapt="pad"):
        fusedops.scaled_masked_softmax(torch.randn(3, 7))
    assert sizes == [(24, 24)]


def test_the_refusal_offers_it_where_it_would_help(sizes: list[Any]) -> None:
    x = torch.zeros(2, 5, 12)
    with pytest.raises(NoBackendError) as error, fusedops.use("stepped", fallback="raise"):
        fusedops.scaled_masked_softmax(x)
    assert str(error.value).endswith(
        'to fix    stepped: pad dim -2 of x from 5 to 8; pad dim -1 of x from 12 to 16, or allow adapt="pad"'
    )
    with pytest.warns(FallbackWarning, match='pad dim -2 of x from 5 to 8, or allow adapt="pad"'):
        fusedops.scaled_masked_softmax(x, backend="stepped")


def test_explain_states_the_bytes(sizes: list[Any]) -> None:
    x, mask = TensorSpec((2, 5, 12), torch.float32), TensorSpec((2, 1, 12), torch.bool)
    with fusedops.use("stepped", adapt="pad"):
        decision = fusedops.explain(OP.name, x, mask)
    assert (decision.backend, decision.backward, decision.adapt) == ("stepped", "stepped", "pad")
    (candidate,) = [c for c in decision.candidates if c.backend == "stepped"]
    assert (candidate.status, candidate.reasons) == ("selected", ())
    tensor = 2 * 8 * 16 * 4
    assert [(a.name, a.direction, a.bytes) for a in candidate.adaptations] == [
        ("pad", "forward", 2 * tensor + 2 * 16),  # x, the mask, and y before it is cropped
        ("pad", "backward", 3 * tensor),  # the gradients of y and x, and y
    ]
    table = str(decision)
    assert "  adapt     pad\n" in table
    assert (
        "adapts: pad: padded to sizes that the kernel takes, with the added part masked out, and the result cropped: "
        f"{2 * tensor + 32:,} bytes\n" in table
    )
    assert "adapts: pad (backward): " in table
    assert f"{3 * tensor:,} bytes" in table


def test_it_is_not_a_fallback(sizes: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fusedops.use("stepped", adapt="pad"):
            gradient(torch.randn(2, 5, 12))


# ---------------------------------------------------------------------------------------------------- the adapt setting


def test_the_innermost_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_ADAPT", "pad")
    assert fusedops.get_policy().adapt == "pad"
    assert str(fusedops.get_policy()) == (
        "auto (nothing set); fallback warn (default); adapt pad (from FUSEDOPS_ADAPT)"
    )
    fusedops.set_policy(adapt="none")
    assert fusedops.get_policy().adapt == "none"
    with fusedops.use("eager", adapt="pad"):
        assert fusedops.get_policy().adapt == "pad"
        with fusedops.use(fallback="silent"):
            assert fusedops.get_policy().adapt == "pad"
            carried = fusedops.get_policy()
        with fusedops.use(adapt="none"):
            assert fusedops.get_policy().adapt == "none"
    with fusedops.use(carried):
        assert (fusedops.get_policy().adapt, fusedops.get_policy().fallback) == ("pad", "silent")
    with fusedops.use(carried, adapt="none"):
        assert (fusedops.get_policy().adapt, fusedops.get_policy().fallback) == ("none", "silent")


def test_the_setting_decides_from_each_channel(sizes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 12)

    def runs() -> bool:
        sizes.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            fusedops.scaled_masked_softmax(x, backend="stepped")
        return sizes == [(8, 16)]

    assert not runs()
    fusedops.set_policy(adapt="pad")
    assert runs()
    with fusedops.use(adapt="none"):
        assert not runs()
    fusedops.set_policy(None)
    assert not runs()
    monkeypatch.setenv("FUSEDOPS_ADAPT", "pad")
    fusedops.set_policy(None)
    assert runs()
