"""An op with two outputs, a required and an optional saved value: backends that save it, and one that does not.

The features of torch are tested with every op: add_layer_norm has two outputs, cross_entropy an optional saved value.
The op is in ``tests/support/standins/two_outputs.py``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import (
    close,
    gradients,
    growing,
    inputs,
    loss,
    public,
    reference,
    reference_kernels,
    registered,
)
from torch import Tensor
from two_outputs import BACKEND, OP, backward_kernel, forward_kernel, two_outputs

import fusedops
from fusedops import Backend, MismatchError, kernel
from fusedops.constraints import DType

NAME = OP.name
Ran = list[tuple[Any, ...]]
every_way = pytest.mark.parametrize("way", [public, registered], ids=["fusedops", "torch.ops"])
every_backend = pytest.mark.parametrize("backend", ["two_outputs", "without_mean", "references"])


@kernel(NAME)
def forward_without_mean(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, save: bool) -> tuple[Any, ...]:
    """Compute the op, and of the saved values the required one alone."""
    return *forward_kernel.function(x, residual, weight, eps, save)[:3], None


WITHOUT_MEAN = Backend("without_mean", ("cpu",), -61, (forward_without_mean, backward_kernel))


@pytest.fixture(autouse=True)
def ran() -> Iterator[Ran]:
    """Register the op and three backends; the calls of "references" are noted."""
    calls: Ran = []
    with two_outputs(BACKEND, WITHOUT_MEAN):
        fusedops.register(Backend("references", ("cpu",), -62, tuple(reference_kernels(NAME, "references", calls))))
        fusedops.reset_stats()
        yield calls
        fusedops.unregister("references")
    fusedops.reset_stats()


def counts() -> dict[tuple[str, str], int]:
    return {(count.direction, count.backend): count.calls for count in fusedops.stats().counts}


# ------------------------------------------------------------------------------------------------------------- autograd


@every_way
@every_backend
def test_outputs_and_gradients_are_those_of_the_reference(way: Any, backend: str) -> None:
    tensors = growing(NAME, inputs(NAME))
    with fusedops.use(backend, fallback="raise"):
        got = way(NAME)(*tensors)
    assert isinstance(got, tuple)
    assert len(got) == 2
    want = reference(NAME)(*tensors)
    close(got, want)
    for losses in (loss, lambda y: y[0].square().sum(), lambda y: y[1].square().sum()):  # of both outputs, or of one
        found = torch.autograd.grad(losses(got), tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
        wanted = torch.autograd.grad(
            losses(want), tensors, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        close(found, wanted)
    assert counts()["backward", backend] == 3


@every_way
def test_values_are_saved_only_where_a_gradient_is_wanted(way: Any, ran: Ran) -> None:
    with fusedops.use("references"):
        way(NAME)(*inputs(NAME))
        with torch.no_grad():
            way(NAME)(*growing(NAME, inputs(NAME)))
        way(NAME)(*growing(NAME, inputs(NAME)))
    assert [args[-1] for _, args in ran] == [False, False, True]


def test_saved_tensors_hooks_see_what_is_kept() -> None:
    tensors, packed = growing(NAME, inputs(NAME)), list[Tensor]()

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    for backend, kept in (("two_outputs", {"rstd", "mean", "s"}), ("without_mean", {"rstd", "s"})):
        packed.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place]),
            fusedops.use(backend, fallback="raise"),
        ):
            y = public(NAME)(*tensors)
        close(gradients(y, tensors), gradients(reference(NAME)(*tensors), tensors))
        assert len(packed) == len({*OP.backward_call.kept_tensors} - {"rstd", "mean", "s"} | kept)


# ------------------------------------------------------------------------------------------------------ fusedops's own


@pytest.mark.parametrize("against", ["reference", "references"])
@every_way
def test_verify_compares_outputs_saved_values_and_gradients(way: Any, against: str) -> None:
    tensors = growing(NAME, inputs(NAME))
    with fusedops.use("two_outputs", fallback="raise"), fusedops.verify(against) as report:
        y = way(NAME)(*tensors)
    gradients(y, tensors)
    results = {row.result for row in report.rows}
    assert {"output y", "output s", "saved rstd", "saved mean"} <= results
    assert {f"gradient of {name}" for name in OP.differentiable} <= results
    assert report.mismatches == 0
    with fusedops.use("without_mean", fallback="raise"), fusedops.verify(against) as report:
        gradients(way(NAME)(*tensors), tensors)
        public(NAME)(*inputs(NAME))
    assert report.mismatches == 0
    assert "saved mean" not in {row.result for row in report.rows}


@pytest.mark.parametrize("place", [0, 1, 2, 3], ids=["y", "s", "rstd", "mean"])
def test_verify_finds_a_wrong_result(place: int) -> None:
    @kernel(NAME)
    def wrong(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, save: bool) -> tuple[Any, ...]:
        results = list(forward_kernel.function(x, residual, weight, eps, save))
        results[place] = results[place] + 0.25
        return tuple(results)

    fusedops.register(Backend("wrong", ("cpu",), -70, (wrong, backward_kernel)))
    label = ["output y", "output s", "saved rstd", "saved mean"][place]
    with (
        fusedops.use("wrong", fallback="raise"),
        pytest.raises(MismatchError, match=f"got the {label} of {NAME} by wrong") as error,
        fusedops.verify("reference"),
    ):
        public(NAME)(*growing(NAME, inputs(NAME)))
    assert error.value.mismatch.result == label
    fusedops.unregister("wrong")


@pytest.mark.parametrize("constraints", [None, (DType("s", torch.float32),)], ids=["no kernel", "refused"])
def test_backward_by_another_backend(constraints: Any, ran: Ran) -> None:
    """By the next in the order, which gets the saved values of the backend that ran forward."""
    kernels = reference_kernels(NAME, "forward", ran, backward=constraints)
    fusedops.register(Backend("forward", ("cpu",), -80, tuple(kernels)))
    tensors = growing(NAME, inputs(NAME))
    with fusedops.use("forward,without_mean", fallback="silent"), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = public(NAME)(*tensors)
    close(gradients(y, tensors), gradients(reference(NAME)(*tensors), tensors))
    assert [label for label, _ in ran] == ["forward"]
    assert counts() == {("forward", "forward"): 1, ("backward", "without_mean"): 1}
    fusedops.unregister("forward")


def test_a_kernel_has_the_op_s_parameters_and_save() -> None:
    def check(function: Callable[..., Any]) -> str:
        with pytest.raises(fusedops.PluginError) as error:
            fusedops.register(Backend("bad", ("cpu",), -90, (kernel(NAME)(function),)))
        return str(error.value)

    text = check(lambda x, residual, weight, eps: None)
    assert "got parameters (x, residual, weight, eps), expected (x, residual, weight, eps, save)" in text
    assert [*inspect.signature(OP.function).parameters] == [*OP.parameters, "backend"]
