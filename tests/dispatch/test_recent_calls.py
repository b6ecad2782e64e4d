"""A call like a recent one of its plan is not checked again, and every other call is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from thread_cases import together
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops import InvalidInputError
from fusedops._contract import comparison
from fusedops._dispatch import serve
from fusedops._dispatch.selection import recent
from fusedops.ops import OPS


class Checks:
    """The calls whose arguments the compiled check of an op saw."""

    def __init__(self, name: str) -> None:
        self.check, self.count = OPS[name].check, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.check(*args)


@pytest.fixture(params=["cpu", "eager"])
def checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Checks]]:
    def of(name: str) -> Checks:
        counting = Checks(name)
        monkeypatch.setattr(OPS[name], "check", counting)
        return counting

    with fusedops.use(f"{request.param},eager"):  # a new block has no recent calls
        yield of


class Subclass(Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch's
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def rms_norm(x: Any = None, weight: Any = None, eps: Any = 1e-6, offset: Any = 0.0) -> Tensor:
    x = torch.randn(4, 8) if x is None else x
    return fusedops.rms_norm(x, torch.ones(8) if weight is None else weight, eps, offset=offset)


ALIKE: dict[str, Callable[[], Any]] = {
    "values": rms_norm,
    "an equal number": lambda: rms_norm(eps=float("1e-6")),
    "a part of a tensor": lambda: rms_norm(torch.randn(9, 8)[3:7]),
    "no gradients": torch.no_grad()(rms_norm),
}
DIFFERENT: dict[str, Callable[[], Any]] = {
    "sizes": lambda: rms_norm(torch.randn(5, 8)),
    "dims": lambda: rms_norm(torch.randn(4, 1, 8)),
    "strides": lambda: rms_norm(torch.randn(8, 4).t()),
    "dtype": lambda: rms_norm(torch.randn(4, 8, dtype=torch.bfloat16)),
    "parameter": lambda: rms_norm(weight=torch.nn.Parameter(torch.ones(8), requires_grad=False)),
    "requires_grad": lambda: rms_norm(torch.randn(4, 8, requires_grad=True)),
    "negative view": lambda: rms_norm(torch._neg_view(torch.randn(4, 8))),  # pyright: ignore[reportPrivateUsage]
    "None": lambda: fusedops.rms_norm(torch.randn(4, 8)),
    "number": lambda: rms_norm(eps=1e-5),
    "sign of zero": lambda: rms_norm(offset=-0.0),
    "integer": lambda: rms_norm(offset=0),
    "inference mode": torch.inference_mode()(rms_norm),
    "autocast": torch.autocast("cpu")(rms_norm),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_call_like_a_recent_one_is_not_checked(name: str, checks: Callable[[str], Checks]) -> None:
    rms_norm()
    rms_norm()  # kept when it comes the second time
    seen = checks("rms_norm")
    ALIKE[name]()
    assert seen.count == 0


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_call_is_checked(name: str, checks: Callable[[str], Checks]) -> None:
    rms_norm()
    rms_norm()
    seen = checks("rms_norm")
    DIFFERENT[name]()
    assert seen.count >= 1


WRONG: dict[str, Callable[[], Any]] = {
    "nested x": lambda: rms_norm(nested()),
    "nested weight": lambda: rms_norm(weight=nested()),
    "sparse": lambda: rms_norm(torch.ones(4, 8).to_sparse()),
    "text": lambda: rms_norm("x"),
    "text for weight": lambda: rms_norm(weight="x"),
    "text for a number": lambda: rms_norm(offset="0"),
    "size of weight": lambda: rms_norm(weight=torch.ones(7)),
    "another device": lambda: rms_norm(weight=torch.ones(8, device="meta")),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("checks")
def test_an_invalid_call_beside_recent_ones(name: str) -> None:
    rms_norm()
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=r"^rms_norm: got"):
            WRONG[name]()
    rms_norm()


def test_modes_and_transforms_in_effect(checks: Callable[[str], Checks]) -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    want = rms_norm(x, weight)
    seen = checks("rms_norm")
    with Mode():
        assert torch.equal(rms_norm(x, weight), want)
    assert seen.count >= 1
    torch.testing.assert_close(torch.func.vmap(lambda each: rms_norm(each, weight))(x), want)
    gradient = torch.func.grad(lambda scale: (rms_norm(x, weight) * scale).sum())(torch.tensor(1.0))
    torch.testing.assert_close(gradient, want.sum())
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(rms_norm(forward_ad.make_dual(x, x), weight)).tangent
        assert tangent is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of torch.jit
        assert "fusedops::rms_norm" in str(torch.jit.trace(lambda a: rms_norm(a, weight), (x,)).graph)
    graph = torch.fx.symbolic_trace(lambda a: rms_norm(a, weight))
    assert torch.equal(graph(x), want)
    labelled = rms_norm(x.as_subclass(Subclass), weight)
    assert torch.equal(labelled.as_subclass(Tensor), want)


def test_one_tensor_for_two_parameters(checks: Callable[[str], Checks]) -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for _ in range(2):
        one, two = fusedops.swiglu(x, x), fusedops.swiglu(x, y)
    seen = checks("swiglu")
    assert torch.equal(fusedops.swiglu(x, x), one)
    assert torch.equal(fusedops.swiglu(x, y), two)
    assert seen.count == 0


def test_gradients_follow_the_call(checks: Callable[[str], Checks]) -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        assert rms_norm(leaf).requires_grad
        assert not rms_norm(leaf.detach()).requires_grad
        with torch.no_grad():
            assert not rms_norm(leaf).requires_grad
    seen = checks("rms_norm")
    (gradient,) = torch.autograd.grad(rms_norm(leaf).sum(), leaf)
    assert seen.count == 0
    assert gradient.shape == leaf.shape


def test_the_kernel_of_the_gradient_is_selected_once(
    checks: Callable[[str], Checks], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    want = [torch.autograd.grad(rms_norm(leaf).sum(), leaf) for _ in range(2)]
    monkeypatch.setattr(serve, "_backward_kernel", lambda *args: pytest.fail("selected again"))
    assert torch.equal(torch.autograd.grad(rms_norm(leaf).sum(), leaf)[0], want[0][0])


def test_the_kernel_of_the_gradient_is_selected_after_calls_without_it(checks: Callable[[str], Checks]) -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            rms_norm(leaf)
    (gradient,) = torch.autograd.grad(rms_norm(leaf).sum(), leaf)
    assert gradient.shape == leaf.shape


def test_as_many_calls_are_kept_as_stated(checks: Callable[[str], Checks]) -> None:
    for size in range(1, recent.MOST + 2):
        rms_norm(torch.randn(size, 8))
        rms_norm(torch.randn(size, 8))
    seen = checks("rms_norm")
    for size in range(recent.MOST + 1, 1, -1):
        rms_norm(torch.randn(size, 8))
    assert seen.count == 0
    rms_norm(torch.randn(1, 8))
    assert seen.count == 1


def test_calls_of_ever_other_shapes_are_not_kept(
    checks: Callable[[str], Checks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "tensor_guard", lambda tensors: pytest.fail("kept"))
    for size in (*range(1, 9), *range(1, 9)):
        rms_norm(torch.randn(size, 8))


def test_without_torchs_guards_every_call_is_checked(
    checks: Callable[[str], Checks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "tensor_guard", lambda tensors: None)
    seen = checks("rms_norm")
    for count in (1, 2, 3):
        rms_norm()
        assert seen.count == count


@pytest.mark.usefixtures("checks")
def test_threads() -> None:
    def work(offset: int) -> None:
        for call in range(200):
            size = 1 + (call * 7 + offset) % 11
            x = torch.randn(size, 8)
            assert torch.allclose(rms_norm(x), torch.nn.functional.rms_norm(x, (8,), None, 1e-6), atol=1e-5)

    together(work, 6)


@pytest.mark.parametrize(
    ("value", "kept", "same"),
    [
        (2.5, 2.5, True), ((1, 2.5, None), (1, 2.5, None), True), ("a", "".join(["a"]), True), (1, True, False),
        (1, 1.0, False), ((1, 0), (True, False), False), ((1,), (1, 2), False), (-0.0, 0.0, False),
        ((-0.0,), (0.0,), False), (float("nan"), float("nan"), False), (torch.float16, torch.half, True),
    ],
)  # fmt: skip
def test_values(value: Any, kept: Any, same: bool) -> None:
    assert comparison.is_same(value, kept) is same


def test_a_tensor_of_a_transform_that_has_ended_is_like_no_recent_one(checks: Callable[[str], Checks]) -> None:
    kept: list[Tensor] = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(torch.randn(4, 8))  # type: ignore[func-returns-value]
    weight = torch.randn(8, requires_grad=True)
    seen = checks("rms_norm")
    for _ in range(4):
        (gradient,) = torch.autograd.grad(rms_norm(kept[0], weight).sum(), weight)
        assert gradient.shape == weight.shape
    assert seen.count == 4
