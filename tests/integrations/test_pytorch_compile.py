"""torch.compile, torch.export, AOTInductor and opcheck: every op, in one graph, compiled once or twice."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import (
    OPTIONS,
    arguments,
    batched,
    close,
    every_op,
    gradients,
    growing,
    inputs,
    loss,
    noting_backend,
    public,
    registered,
    samples,
)
from pairwise import pairwise
from repository import ROOT
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

import fusedops
from fusedops.testing import OPS

LENGTHS = range(5, 25, 2)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graph of another test is found again."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor() -> CompileCounterWithBackend:
    """torch.compile's own backend, which counts what it compiles."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler, which Inductor compiles for a CPU with")
    return CompileCounterWithBackend("inductor")


def same(
    op: str, compiled: Callable[..., Tensor], eager: Callable[..., Tensor], tensors: list[Tensor], training: bool
) -> None:
    if not training:
        with torch.no_grad():
            return close(compiled(*tensors), eager(*tensors))
    ours, theirs = growing(op, tensors), growing(op, tensors)
    got, want = compiled(*ours), eager(*theirs)
    close(got, want)
    return close(gradients(got, ours), gradients(want, theirs))


training = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


@every_op
@pytest.mark.feature("compile static")
def test_compiled_for_one_length(op: str, inductor: CompileCounterWithBackend) -> None:
    """In training; the test below compiles the same calls in inference."""
    compiled = torch.compile(public(op), fullgraph=True, dynamic=False, backend=inductor)
    for seed in range(3):
        same(op, compiled, public(op), inputs(op, seed=seed), training=True)
    assert inductor.frame_count == 1
    assert f"fusedops.{op}" in inductor.graphs[0].code


@every_op
@pytest.mark.feature("compile static")
@pytest.mark.usefixtures("inductor")
def test_compiled_to_reduce_overhead(op: str) -> None:
    """On a CPU the mode has no graphs to capture; on CUDA it captures what is launched (tests/gpu)."""
    compiled = torch.compile(public(op), fullgraph=True, mode="reduce-overhead")
    for seed in range(3):
        same(op, compiled, public(op), inputs(op, seed=seed), training=False)


@pytest.mark.parametrize(("op", "dynamic", "training"), pairwise(list(OPTIONS), [True, None], [False, True]))
@pytest.mark.feature("compile dynamic")
def test_compiled_for_ten_lengths(
    op: str, dynamic: bool | None, training: bool, inductor: CompileCounterWithBackend
) -> None:
    compiled = torch.compile(public(op), fullgraph=True, dynamic=dynamic, backend=inductor)
    for length in LENGTHS:
        same(op, compiled, public(op), inputs(op, length), training)
    assert inductor.frame_count <= 2


@training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # the model's own
def test_the_demos_gpt_for_ten_lengths(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import gpt

    torch.manual_seed(0)
    model = gpt.GPT(65, gpt.FUSED, layers=1, width=32, heads=2).double().train(training)
    counter = CompileCounterWithBackend("aot_eager")  # Inductor takes a minute and a half for the graph of training
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        text = torch.randint(65, (2, length))
        for run in (model, compiled):
            y = run(text, 7)
            found = [y, *(torch.autograd.grad(y.square().sum(), [*model.parameters()]) if training else ())]
            if run is model:
                want = found
        torch.testing.assert_close(found, want, atol=1e-9, rtol=1e-9)
    assert counter.frame_count <= 2
    assert {f"fusedops.{op}" in counter.graphs[-1].code for op in ("attention", "bias_gelu", "bias_dropout_add")} == {
        True
    }
    sys.modules.pop("gpt")


@every_op
def test_a_changed_policy_is_seen_without_compiling_again(op: str) -> None:
    ran: list[tuple[Any, ...]] = []
    for name in ("first", "second"):
        noting_backend(op, name, ran)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(public(op), fullgraph=True, dynamic=True, backend=counter)
    tensors = inputs(op)
    compiled(*tensors)
    before = counter.frame_count
    for name in ("first", "second"):
        with fusedops.use(name):
            compiled(*tensors)
    fusedops.set_policy("first")
    compiled(*tensors)
    assert [who for who, _ in ran] == ["first", "second", "first"]
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


@every_op
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transforms_inside_compiled_code(op: str, transform: str) -> None:
    x, *rest = tensors = samples(op)[0] if transform == "vmap" else inputs(op)
    if transform == "vmap":
        _, *of_samples = batched(tensors)
        rest = [other[0] if first else other for other, first in zip(rest, of_samples)]  # of one sample, for all

    def of_x(x: Tensor) -> Tensor:
        return loss(public(op)(x, *rest))

    run: Callable[..., Any] = {
        "grad": torch.func.grad(of_x),
        "jvp": lambda x: torch.func.jvp(of_x, (x,), (x + 1,))[1],
        "vmap": torch.vmap(torch.func.grad(of_x)),
    }[transform]
    close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


@every_op
@pytest.mark.parametrize("way", [public, registered], ids=["fusedops", "torch.ops"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_compiled_autograd(op: str, way: Callable[[str], Callable[..., Tensor]]) -> None:
    tensors = growing(op, inputs(op))
    want = gradients(public(op)(*tensors), tensors)
    # a plain call's gradient is Python, where the graph breaks; the registered op's is traced whole
    compiler = torch.compile(backend="aot_eager", fullgraph=way is registered)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss(way(op)(*tensors)).backward()
    close([tensor.grad for tensor in tensors if tensor.requires_grad], want)


class Module(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.call = public(op)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call(*tensors)


@every_op
@pytest.mark.feature("export")
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


class EveryOp(torch.nn.Module):
    """Every op, each on its own tensors: a C++ compiler takes ten seconds, for one op or for all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {op: public(op) for op in OPTIONS}

    def forward(self, tensors: dict[str, list[Tensor]]) -> list[Tensor]:
        return [self.calls[op](*tensors[op]) for op in OPTIONS]


@pytest.fixture(scope="module")
def compiled_ahead(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Tensor]]:
    """Compile a module of every op ahead of time, and load it."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler, which Inductor compiles for a CPU with")
    path = str(tmp_path_factory.mktemp("package") / "ops.pt2")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)  # torch's own
        program = torch.export.export(EveryOp(), ({op: inputs(op) for op in OPTIONS},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=path)
        return torch._inductor.aoti_load_package(package)


@every_op
@pytest.mark.feature("AOTInductor")
@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning")  # torch's own
def test_compiled_ahead_of_time(op: str, compiled_ahead: Callable[..., list[Tensor]]) -> None:
    for seed in (0, 1):
        tensors = {each: inputs(each, seed=seed) for each in OPTIONS}
        close(compiled_ahead(tensors)[list(OPTIONS).index(op)], public(op)(*tensors[op]))


@every_op
@pytest.mark.feature("opcheck")
def test_opcheck(op: str) -> None:
    """Forward without a gradient, and backward with one: the kit's check of this name runs forward with one."""
    args = arguments(op, inputs(op))
    contract = OPS[op]
    torch.library.opcheck(getattr(torch.ops.fusedops, op).default, args)
    results = [*contract.each(contract.reference(*args))]
    if contract.saved:
        torch.library.opcheck(getattr(torch.ops.fusedops, f"{op}_with_saved").default, args)
        results += contract.saved_references(args, results)
    results = [result.detach() for result in results]
    needs = tuple(args[contract.parameters.index(name)] is not None for name in contract.differentiable)
    grads = [torch.randn_like(y).requires_grad_() for y in results[: len(contract.outputs)]]
    backward = contract.backward_arguments(grads, results, args, needs)
    torch.library.opcheck(getattr(torch.ops.fusedops, f"{op}_backward").default, backward)


@every_op
@training
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data(op: str, training: bool) -> None:
    first_dims = batched(inputs(op))

    def chosen(*tensors: Tensor) -> Any:
        keep = tensors[0].flatten(1)[:, 0] > 0
        return public(op)(*[tensor[keep] if first else tensor for tensor, first in zip(tensors, first_dims)])

    compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        same(op, compiled, chosen, inputs(op, seed=seed), training)


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
