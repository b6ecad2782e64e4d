"""An op with two outputs, a required and an optional saved value: every feature of torch and of fusedops.

The op is in ``tests/support/standins/two_outputs.py``. test_distributed.py reports the check of DTensors, in
``ranks_two_outputs.py``.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from calls import (
    call_registered,
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
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from two_outputs import BACKEND, OP, backward_kernel, forward_kernel, two_outputs

import fusedops
from fusedops import Backend, FallbackWarning, InvalidInputError, MismatchError, NoBackendError, kernel
from fusedops.constraints import Dim, DType

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
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_only_the_gradients_that_are_wanted_are_computed(way: Any, wanted: tuple[bool, ...], ran: Ran) -> None:
    tensors = [tensor.requires_grad_(want) for tensor, want in zip(inputs(NAME), wanted)]
    with fusedops.use("references", fallback="raise"):
        found = gradients(way(NAME)(*tensors), tensors)
    close(found, gradients(reference(NAME)(*tensors), tensors))
    assert [label for label, _ in ran] == ["references", "references backward"]
    assert tuple(ran[1][1][-1]) == wanted


@every_way
def test_values_are_saved_only_where_a_gradient_is_wanted(way: Any, ran: Ran) -> None:
    with fusedops.use("references"):
        way(NAME)(*inputs(NAME))
        with torch.no_grad():
            way(NAME)(*growing(NAME, inputs(NAME)))
        way(NAME)(*growing(NAME, inputs(NAME)))
    assert [args[-1] for _, args in ran] == [False, False, True]


@every_way
@every_backend
def test_without_the_optional_argument(way: Any, backend: str) -> None:
    tensors = growing(NAME, inputs(NAME)[:2])
    function = fusedops.ops.OPS[NAME].function if way is public else partial(call_registered, NAME)
    with fusedops.use(backend, fallback="raise"):
        got = function(*tensors)
        found = gradients(got, tensors)
    want = OP.reference(*tensors, None, 1e-5)
    close(got, want)
    close(found, gradients(want, tensors))


@every_way
@every_backend
def test_gradcheck_and_gradgradcheck(way: Any, backend: str) -> None:
    tensors = growing(NAME, inputs(NAME, length=2, batch=2))
    with fusedops.use(backend, fallback="raise"):
        assert gradcheck(way(NAME), tensors)
        assert gradgradcheck(way(NAME), tensors)


@every_way
def test_batched_gradients_are_those_of_a_loop(way: Any) -> None:
    tensors = growing(NAME, inputs(NAME))
    with fusedops.use("two_outputs"):
        results = way(NAME)(*tensors)
        several = tuple(torch.stack([torch.randn_like(y) for _ in range(3)]) for y in results)
        got = torch.autograd.grad(results, tensors, several, is_grads_batched=True, retain_graph=True)
        loop = [torch.autograd.grad(results, tensors, [g[i] for g in several], retain_graph=True) for i in range(3)]
    close(got, tuple(torch.stack(each) for each in zip(*loop)))


@every_way
def test_the_node_has_the_ops_name_and_the_graph_is_freed(way: Any) -> None:
    tensors = growing(NAME, inputs(NAME))
    y, _ = way(NAME)(*tensors)
    assert NAME in y.grad_fn.name()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


# ---------------------------------------------------------------------------------------------- transforms, AMP, memory


@every_way
def test_jvp_and_forward_mode(way: Any) -> None:
    tensors = inputs(NAME)
    along = tuple(tensor.flip(0) + 1 for tensor in tensors)
    want = torch.func.jvp(reference(NAME), tuple(tensors), along)
    close(torch.func.jvp(way(NAME), tuple(tensors), along), want)
    with forward_ad.dual_level():
        results = way(NAME)(*(forward_ad.make_dual(x, t) for x, t in zip(tensors, along)))
        tangents = tuple(forward_ad.unpack_dual(y).tangent for y in results)
    close(tangents, want[1])


@every_way
def test_torch_func_and_vmap(way: Any) -> None:
    tensors = inputs(NAME, length=2, batch=2)
    every = (0, 1, 2)
    for transform in (
        lambda f: torch.func.grad(lambda *a: loss(f(*a)), every)(*tensors),
        lambda f: torch.func.jacrev(f, every)(*tensors),
        lambda f: torch.func.hessian(lambda x: loss(f(x, *tensors[1:])))(tensors[0]),
        lambda f: torch.vmap(f, (0, 0, None))(*tensors),
        lambda f: torch.vmap(torch.func.grad(lambda *a: loss(f(*a)), every), (0, 0, None))(*tensors),
    ):
        close(transform(way(NAME)), transform(reference(NAME)))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype, backend: str) -> None:
    tensors = growing(NAME, inputs(NAME, dtype=dtype))
    with fusedops.use(backend, fallback="raise"):
        plain = public(NAME)(*tensors)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = public(NAME)(*tensors)
    assert [y.dtype for y in mixed] == [dtype] * 2
    assert all(map(torch.equal, mixed, plain))
    found = gradients(mixed, tensors)
    assert [grad.dtype for grad in found] == [dtype] * 3
    assert all(map(torch.equal, found, gradients(plain, tensors)))
    exact = reference(NAME)(*(tensor.detach().double() for tensor in tensors))
    for got, want in zip(plain, exact):
        allowed = OP.evidence.tolerance[dtype]
        torch.testing.assert_close(got.double(), want, atol=allowed.absolute, rtol=allowed.relative)


@every_way
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(way: Any, reentrant: bool) -> None:
    tensors = growing(NAME, inputs(NAME))
    with fusedops.use("two_outputs", fallback="raise"):
        if reentrant:
            y = checkpoint(fusedops.use(fusedops.get_policy())(way(NAME)), *tensors, use_reentrant=True)
        else:
            y = checkpoint(way(NAME), *tensors, use_reentrant=False, context_fn=fusedops.checkpoint_contexts)
    found = gradients(y, tensors) if not reentrant else _by_backward(y, tensors)
    close(found, gradients(reference(NAME)(*tensors), tensors))
    assert counts()["forward", "two_outputs"] == 2


def _by_backward(y: Any, tensors: list[Tensor]) -> list[Any]:
    loss(y).backward()
    return [tensor.grad for tensor in tensors]


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


# ------------------------------------------------------------------------------------------ compile, export, registered


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_in_one_graph(dynamic: bool, training: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(public(NAME), fullgraph=True, dynamic=dynamic, backend=counter)
    compilations = 0
    with fusedops.use("two_outputs", fallback="raise"):
        for length in (5, 7, 4) if dynamic else (5,):
            tensors = growing(NAME, inputs(NAME, length)) if training else inputs(NAME, length)
            got, want = compiled(*tensors), reference(NAME)(*tensors)
            close(got, want)
            if training:
                close(gradients(got, tensors), gradients(want, tensors))
            compilations = compilations or counter.frame_count
    assert counter.frame_count == compilations
    assert f"fusedops.{NAME}" in counter.graphs[-1].code
    assert counts()["forward", "two_outputs"] == (3 if dynamic else 1)
    torch._dynamo.reset()


def test_a_changed_policy_is_seen_without_compiling_again() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(public(NAME), fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    tensors = growing(NAME, inputs(NAME))
    for backend in ("two_outputs", "without_mean", "references"):
        fusedops.reset_stats()
        with fusedops.use(backend, fallback="raise"):
            y = compiled(*tensors)
            gradients(y, tensors)
        assert counts() == {("forward", backend): 1, ("backward", backend): 1}
    torch._dynamo.reset()


class Module(torch.nn.Module):
    def forward(self, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return public(NAME)(x, residual, weight)


def test_exported() -> None:
    tensors = tuple(inputs(NAME))
    dim = torch.export.Dim("length", min=2, max=64)
    shapes = {"x": {1: dim}, "residual": {1: dim}, "weight": None}
    program = torch.export.export(Module(), tensors, dynamic_shapes=shapes)
    assert any(f"fusedops.{NAME}" in str(node.target) for node in program.graph.nodes)
    for length in (5, 8):
        tensors = tuple(inputs(NAME, length))
        close(program.module()(*tensors), reference(NAME)(*tensors))


def test_fake_tensors() -> None:
    tensors = inputs(NAME, dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        fakes = public(NAME)(*[mode.from_tensor(t) for t in tensors])
    for y in fakes:
        assert (y.shape, y.dtype, y.is_contiguous()) == (tensors[0].shape, torch.bfloat16, True)


# ------------------------------------------------------------------------------------------------------ fusedops's own


def test_bind(ran: Ran) -> None:
    tensors = growing(NAME, inputs(NAME))
    bound = fusedops.bind(NAME, *tensors, backend="references")
    y = bound(*tensors)
    close(y, reference(NAME)(*tensors))
    close(gradients(y, tensors), gradients(reference(NAME)(*tensors), tensors))
    assert [label for label, _ in ran] == ["references", "references backward"]
    close(bound(*inputs(NAME)), reference(NAME)(*inputs(NAME)))


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


def test_stats_and_explain() -> None:
    tensors = growing(NAME, inputs(NAME))
    with fusedops.use("two_outputs"):
        gradients(public(NAME)(*tensors), tensors)
    assert counts() == {("forward", "two_outputs"): 1, ("backward", "two_outputs"): 1}
    assert str(fusedops.stats()).splitlines()[0] == f"{NAME}: 1 call"
    decision = fusedops.explain(NAME, *tensors, backend="two_outputs")
    assert (decision.backend, decision.backward) == ("two_outputs", "two_outputs")
    assert decision.given.startswith("x float64[3, 5, 6] on cpu, residual float64[3, 5, 6] on cpu, weight float64[6]")


def test_an_invalid_call_is_an_error_by_every_way() -> None:
    x, residual, weight = inputs(NAME)
    for function in (OP.function, getattr(torch.ops.fusedops, NAME)):
        with pytest.raises(InvalidInputError, match=rf"{NAME}: got residual of shape .*, expected the shape of x"):
            function(x, residual[:1], weight)
        with pytest.raises(InvalidInputError, match=rf"{NAME}: got eps = -1.0, expected a Python number of at"):
            function(x, residual, weight, -1.0)


@every_way
def test_a_refusal_is_a_fallback(way: Any, ran: Ran) -> None:
    short = Dim("x", (-1,), at_most=4)
    fusedops.register(Backend("short", ("cpu",), -80, tuple(reference_kernels(NAME, "short", ran, short))))
    tensors = growing(NAME, inputs(NAME))
    text = f"{NAME} runs on two_outputs, not on short: got dim -1 of x = 6"
    with pytest.warns(FallbackWarning, match=text), fusedops.use("short,two_outputs"):
        y = way(NAME)(*tensors)
    close(y, reference(NAME)(*tensors))
    with fusedops.use("short", fallback="raise"), pytest.raises(NoBackendError, match="got dim -1 of x = 6"):
        way(NAME)(*tensors)
    assert ran == []
    fusedops.unregister("short")


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
