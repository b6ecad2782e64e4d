"""torch.compile, torch.export and AOTInductor: every op, in one graph, compiled once or twice."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from calls import (
    OPTIONS,
    batched,
    close,
    ends_of_groups,
    every_op,
    gradients,
    growing,
    inputs,
    loss,
    noting_backend,
    public,
    reference_kernels,
    registered,
    samples,
    shapes,
)
from repository import ROOT
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from two_outputs import two_outputs

import fusedops
from fusedops.ops import OPS

pytestmark = pytest.mark.usefixtures("fresh_compiler")
LENGTHS = (23, *range(5, 23, 2))


training = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


# ------------------------------------------------------------------------------------------------------ by Inductor


class EveryOp(torch.nn.Module):
    """Every op, each on its own tensors: Inductor and a C++ compiler take ten seconds, for one op or for all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {op: public(op) for op in OPTIONS}

    def forward(self, tensors: dict[str, list[Tensor]]) -> list[Tensor]:
        return [self.calls[op](*tensors[op]) for op in OPTIONS]


class Outcome(NamedTuple):
    """What a compiled module of every op did.

    Attributes:
        results: for each call, the outputs and gradients by op.
        expected: the same, of the calls that are not compiled.
        compilations: how often Dynamo compiled.
        code: of the first graph.
    """

    results: list[dict[str, Any]]
    expected: list[dict[str, Any]]
    compilations: int
    code: str


def called(run: Callable[..., list[Any]], inputs_of_ops: dict[str, list[Tensor]], training: bool) -> dict[str, Any]:
    """Return the outputs of every op, and in training the gradients, by op."""
    given = {op: growing(op, each) if training else each for op, each in inputs_of_ops.items()}
    with torch.set_grad_enabled(training):
        ys = dict(zip(given, run(given)))
    if not training:
        return ys
    leaves = [(op, tensor) for op, each in given.items() for tensor in each if tensor.requires_grad]
    total = torch.stack([loss(y) for y in ys.values()]).sum()
    grads = torch.autograd.grad(total, [tensor for _, tensor in leaves])
    return {op: (ys[op], [grad for (of, _), grad in zip(leaves, grads) if of == op]) for op in given}


def compiled(calls: Sequence[dict[str, list[Tensor]]], backend: str, training: bool, **options: Any) -> Outcome:
    """Compile every op in one graph, and make some calls."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(EveryOp(), fullgraph=True, backend=counter, **options)
    results = [called(run, each, training) for each in calls]
    expected = [called(EveryOp(), each, training) for each in calls]
    return Outcome(results, expected, counter.frame_count, counter.graphs[0].code)


# Inductor and its C++ compiler take 15 seconds of a core for each graph. AOTAutograd, which makes the graphs that they
# get, is tried alone where there is no compiler. They compile in training for any length, and in inference for one
# length, ahead of time
by_inductor = pytest.mark.slow


@pytest.fixture(scope="module")
def one_length() -> Outcome:
    calls = [{op: inputs(op, seed=seed) for op in OPTIONS} for seed in range(3)]
    return compiled(calls, "aot_eager", training=True, dynamic=False)


@pytest.fixture(scope="module")
def ten_lengths() -> Outcome:
    calls = [{op: inputs(op, length) for op in OPTIONS} for length in LENGTHS]
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return compiled(calls, "aot_eager", training=True, dynamic=True)
    return compiled(calls, "inductor", training=True, dynamic=True)


@every_op
def test_compiled_for_one_length(op: str, one_length: Outcome) -> None:
    """In training; the tests below compile calls in inference."""
    close([each[op] for each in one_length.results], [each[op] for each in one_length.expected])
    assert one_length.compilations == 1
    assert f"fusedops.{op}" in one_length.code


@by_inductor
@every_op
def test_compiled_for_ten_lengths(op: str, ten_lengths: Outcome) -> None:
    close([each[op] for each in ten_lengths.results], [each[op] for each in ten_lengths.expected])
    assert ten_lengths.compilations <= 1
    assert f"fusedops.{op}" in ten_lengths.code


@by_inductor
def test_what_was_compiled_for_other_registered_ops_is_compiled_again() -> None:
    """A release whose backward has other arguments has the forward's graph, by which torch's caches know both."""

    def misses() -> int:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(fusedops.swiglu)(torch.randn(4, 64, requires_grad=True)).sum().backward()
        return counters["aot_autograd"]["autograd_cache_miss"]

    with torch.compiler.config.patch(cache_key_tag="a user's"):
        found = [misses(), misses()]
        with two_outputs():
            found += [misses(), misses()]
        assert [*found, misses()] == [1, 0, 1, 0, 0]
        assert torch.compiler.config.cache_key_tag.startswith("a user's fusedops ")


# --------------------------------------------------------------------------- by AOTAutograd: what Inductor would get


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # the model's own
def test_the_demos_gpt_for_ten_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import gpt

    torch.manual_seed(0)
    model = gpt.GPT(65, gpt.FUSED, layers=1, width=32, heads=2).double()
    counter = CompileCounterWithBackend("aot_eager")  # Inductor takes a minute and a half for the graph of training
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        text = torch.randint(65, (2, length))
        for run in (model, compiled):
            y = run(text, 7)
            found = [y, *torch.autograd.grad(y.square().sum(), [*model.parameters()])]
            if run is model:
                want = found
        torch.testing.assert_close(found, want, atol=1e-9, rtol=1e-9)
    assert counter.frame_count <= 2
    assert {f"fusedops.{op}" in counter.graphs[-1].code for op in ("attention", "bias_gelu", "bias_dropout_add")} == {
        True
    }
    sys.modules.pop("gpt")


def test_a_changed_policy_is_seen_without_compiling_again() -> None:
    ran: list[tuple[Any, ...]] = []
    op = "add_rms_norm"
    for name in ("first", "second"):
        fusedops.register(fusedops.Backend(name, ("cpu",), -9, tuple(reference_kernels(op, name, ran))))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(public(op), fullgraph=True, dynamic=True, backend=counter)
    tensors = growing(op, inputs(op))
    gradients(run(*tensors), tensors)
    before = counter.frame_count
    for name in ("first", "second"):
        with fusedops.use(name):
            gradients(run(*tensors), tensors)
    fusedops.set_policy("first")
    gradients(run(*tensors), tensors)
    calls = [who for name in ("first", "second", "first") for who in (name, f"{name} backward")]
    assert [who for who, _ in ran] == calls
    assert counter.frame_count == before


def test_use_inside_compiled_code_is_obeyed_at_the_price_of_a_graph_break() -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend("bias_gelu", "noting", ran)

    def inside(x: Tensor) -> Tensor:
        with fusedops.use("noting"):
            return fusedops.bias_gelu(x * 2) + 1

    (x, _) = inputs("bias_gelu")
    close(torch.compile(inside, backend="aot_eager")(x), inside(x))
    assert [who for who, _ in ran] == ["noting"] * 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ContextVar"):
        torch.compile(inside, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["jvp", "vmap"])
def test_transforms_inside_compiled_code(transform: str) -> None:
    runs, xs = [], []
    for op in [*OPTIONS][transform == "vmap" :: 4]:  # a quarter of the ops, each way: the route is that of all
        x, *rest = tensors = samples(op)[0] if transform == "vmap" else inputs(op)
        if transform == "vmap":
            _, *of_samples = batched(tensors)
            rest = [other[0] if first else other for other, first in zip(rest, of_samples)]  # of one sample, for all

        def of_x(x: Tensor, op: str = op, rest: Sequence[Tensor] = rest) -> Tensor:
            return loss(public(op)(x, *rest))

        runs.append(torch.vmap(torch.func.grad(of_x)) if transform == "vmap" else partial(tangent, of_x))
        xs.append(x)

    def all_ops(*xs: Tensor) -> list[Tensor]:
        return [run(x) for run, x in zip(runs, xs)]

    close(torch.compile(all_ops, fullgraph=True, backend="aot_eager")(*xs), all_ops(*xs))


def tangent(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.func.jvp(function, (x,), (x + 1,))[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", [public, registered], ids=["fusedops", "torch.ops"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_compiled_autograd(way: Callable[[str], Callable[..., Tensor]]) -> None:
    """Of two ops: one Function serves them all, and a graph of each one's backward is compiled above."""
    tensors = {op: growing(op, inputs(op)) for op in [*OPTIONS][:2]}
    want = [gradients(public(op)(*each), each) for op, each in tensors.items()]
    # a plain call's gradient is Python, where the graph breaks; the registered op's is traced whole
    compiler = torch.compile(backend="aot_eager", fullgraph=way is registered)
    total = torch.stack([loss(way(op)(*each)) for op, each in tensors.items()]).sum()
    with torch._dynamo.compiled_autograd._enable(compiler):
        total.backward()
    close([[tensor.grad for tensor in each if tensor.requires_grad] for each in tensors.values()], want)


class Module(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.call = public(op)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call(*tensors)


@every_op
def test_exported_saved_and_loaded(op: str) -> None:
    # the softmax's lengths are related, Sk = Sq + 2 here: its batch is what varies
    tensors = inputs(op)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = (tuple({0: batch} if first else None for first in batched(tensors)),)
    program = torch.export.export(Module(op), tuple(tensors), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert any(f"fusedops.{op}" in str(node.target) for node in loaded.graph.nodes)
    for size in (3, 7):
        tensors = inputs(op, batch=size)
        close(loaded.module()(*tensors), public(op)(*tensors))


@pytest.fixture(scope="module")
def compiled_ahead(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Compile a module of every op ahead of time, load it, and make two calls."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler, which Inductor compiles for a CPU with")
    path = str(tmp_path_factory.mktemp("package") / "ops.pt2")
    calls = [{op: inputs(op, seed=seed) for op in OPTIONS} for seed in (0, 1)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)  # torch's own
        program = torch.export.export(EveryOp(), (calls[0],))
        package = torch._inductor.aoti_compile_and_package(program, package_path=path)
        loaded = torch._inductor.aoti_load_package(package)
        results = [called(loaded, each, training=False) for each in calls]
    return Outcome(results, [called(EveryOp(), each, training=False) for each in calls], 1, "")


@by_inductor
@every_op
def test_compiled_ahead_of_time(op: str, compiled_ahead: Outcome) -> None:
    close([each[op] for each in compiled_ahead.results], [each[op] for each in compiled_ahead.expected])


@pytest.mark.slow
@training
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data(training: bool) -> None:
    half = [*OPTIONS][training::2]  # of the ops, each way
    first_dims = {op: batched(inputs(op)) for op in half}

    def chosen(given: dict[str, list[Tensor]]) -> list[Any]:
        ys = []
        for op in half:
            keep = given[op][0].flatten(1)[:, 0] > 0
            tensors = [tensor[keep] if first else tensor for tensor, first in zip(given[op], first_dims[op])]
            ends = [name in ends_of_groups(op) for name in shapes(op)]
            tensors = [tensor.minimum(keep.sum()) if end else tensor for tensor, end in zip(tensors, ends)]
            ys.append(public(op)(*tensors))
        return ys

    run = torch.compile(chosen, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        calls = {op: inputs(op, seed=seed) for op in half}
        assert called(run, calls, training).keys() == {*half}
        close(called(run, calls, training), called(chosen, calls, training))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data_are_compared_when_the_graph_runs() -> None:
    def chosen(x: Tensor) -> Tensor:
        return fusedops.bias_dropout_add(x[x[:, 0] > 0], None, x[x[:, 1] > 0], 0.0)

    compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
    x = torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])
    assert torch.equal(compiled(x), chosen(x))
    with pytest.raises(
        fusedops.InvalidInputError, match=r"residual of shape \(1, 2\), expected the shape of x, \(2, 2\)"
    ):
        compiled(torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]))


def test_an_invalid_call_that_is_traced_has_the_text_of_its_error() -> None:
    compiled = torch.compile(lambda x, bias: fusedops.bias_gelu(x, bias), backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"got bias of shape \(5,\), expected .*; to fix: "):
        compiled(torch.ones(3), torch.ones(5))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_fake_gradient_that_is_not_wanted_is_empty(needs: tuple[bool, bool]) -> None:
    x, weight = torch.randn(2, 4), torch.randn(4)
    y, rstd = torch.ops.fusedops.rms_norm.default(x, weight, 1e-6, 0.0, save=True)
    args = OPS["rms_norm"].backward_arguments((torch.ones(2, 4),), (y, rstd), (x, weight, 1e-6, 0.0), needs)
    backward = torch.ops.fusedops.rms_norm_backward.default
    with torch.device("meta"):
        fake = backward(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
    assert [each.shape for each in fake] == [each.shape for each in backward(*args)]
