"""Autograd and torch.func: every op, the numbers of its reference, by the public function and the registered op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import (
    OPTIONS,
    arguments,
    batched,
    call_registered,
    close,
    every_op,
    gradients,
    growing,
    inputs,
    loss,
    noting_backend,
    on_backends,
    outputs,
    public,
    reference,
    registered,
    samples,
    shapes,
    stacked,
    takes,
    with_gradient,
)
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import fusedops
from fusedops.testing import OPS
from fusedops.testing._roles import rounded

every_way = pytest.mark.parametrize("way", [public, registered], ids=["fusedops", "torch.ops"])
Way = Callable[[str], Callable[..., Tensor]]


def of_differentiable(
    op: str, function: Callable[..., Any], tensors: list[Tensor]
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """``function`` as one of the tensors with a gradient alone, without outputs of integers, and those tensors."""
    places = with_gradient(op)

    def run(*changed: Tensor) -> Any:
        whole = list(tensors)
        for place, tensor in zip(places, changed):
            whole[place] = tensor
        ys = outputs(function(*whole))
        return ys if len(ys) > 1 else ys[0]

    return run, tuple(tensors[place] for place in places)


def one(op: str, tensors: list[Tensor], sample: int) -> list[Tensor]:
    """The tensors of one sample; a bias serves all."""
    return [tensor[sample] if first else tensor for tensor, first in zip(tensors, batched(tensors))]


# ------------------------------------------------------------------------------------------------------------- autograd


WAYS = [
    (op, way, backend)
    for op in OPTIONS
    for way, backend in ((public, "eager"), (registered, "loopback"), (public, "triton"))
    if takes(backend, op)
]
# a second derivative is made of what the kernel saved, if anything
OF_SAVED = [each for each in WAYS if each[2] != "triton" or OPS[each[0]].required_saved]


@pytest.mark.parametrize(("op", "way", "backend"), OF_SAVED)
def test_gradcheck_and_gradgradcheck(op: str, way: Way, backend: str) -> None:
    """Along one direction: the kit compares each element of a gradient."""
    function, xs = of_differentiable(op, way(op), inputs(op, length=3, batch=2))
    xs = tuple(x.clone().requires_grad_() for x in xs)
    with fusedops.use(backend, fallback="raise"):
        assert rounded(OPS[op]) or gradcheck(function, xs, fast_mode=True)  # the gradient is as if nothing was rounded
        assert gradgradcheck(function, xs, fast_mode=True)


@pytest.mark.parametrize(("op", "way", "backend"), WAYS)
def test_batched_gradients_are_those_of_a_loop(op: str, way: Way, backend: str) -> None:
    tensors = growing(op, inputs(op))
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    with fusedops.use(backend, fallback="raise"):
        ys = outputs(way(op)(*tensors))
        several = [tuple(torch.randn_like(y) for y in ys) for _ in range(3)]
        got = torch.autograd.grad(ys, wanted, stacked(several), is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(ys, wanted, grads, retain_graph=True) for grads in several]
    for place, found in enumerate(got):
        close(found, torch.stack([grads[place] for grads in each]))


@on_backends("eager", "cpu")
def test_batched_gradients_of_one_output_alone(op: str, backend: str) -> None:
    tensors = [tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs(op)]
    tensors = growing(op, tensors)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    with fusedops.use(f"{backend},eager", fallback="silent"):
        for y in outputs(public(op)(*tensors)):
            if not y.requires_grad:
                continue
            several = torch.randn(3, *y.shape)
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            got = torch.autograd.grad(y, wanted, several, is_grads_batched=True, **options)
            each = [torch.autograd.grad(y, wanted, grad, **options) for grad in several]
            for place, found in enumerate(got):
                want = torch.stack([grads[place] for grads in each])
                torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


INTERLEAVED: dict[str, Callable[[Tensor], Any]] = {
    "swiglu": lambda x: fusedops.swiglu(x, interleaved=True),
    "geglu": lambda x: fusedops.geglu(x, interleaved=True),
    "rotary": lambda x: fusedops.rotary_embedding(x[None], x[None], x[0, :, :2], x[0, :, :2], interleaved=True)[1],
    "lse": lambda x: fusedops.attention(x[None], x[None], x[None], causal=True, return_lse=True)[1],
}


@pytest.mark.parametrize("function", INTERLEAVED.values(), ids=INTERLEAVED)
def test_batched_gradients_of_other_layouts(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = function(x)
    several = torch.randn(3, *y.shape)
    (got,) = torch.autograd.grad(y, x, several, is_grads_batched=True, retain_graph=True)
    want = torch.stack([torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in several])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@every_op
@every_way
def test_only_the_gradients_that_are_wanted_are_computed(op: str, way: Way) -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend(op, "noting", ran)
    differentiable = OPS[op].differentiable
    names = [*differentiable, *([OPS[op].passed_through] if OPS[op].passed_through else [])]
    given = [*shapes(op)]
    for wanted in filter(given.__contains__, names):  # factors of LoRA are not given
        tensors = inputs(op)
        at = given.index(wanted)
        tensors[at].requires_grad_()
        ran.clear()
        with fusedops.use("noting"):
            loss(way(op)(*tensors)).backward()
        assert tensors[at].grad is not None
        assert [who for who, _ in ran] == ["noting", *(["noting backward"] if wanted in differentiable else [])]
        if wanted in differentiable and "needs" in OPS[op].backward_parameters:
            assert [*ran[1][1][-1]] == [name == wanted for name in differentiable]


P_0, EVALUATION = {"p": 0.0}, {"p": 0.5, "training": False}


@pytest.mark.parametrize(
    ("op", "form", "nothing_dropped"),
    [
        ("bias_dropout", "fusedops", P_0),
        ("bias_dropout", "torch.ops", EVALUATION),
        ("bias_dropout_add", "fusedops", EVALUATION),
        ("bias_dropout_add", "torch.ops", P_0),
        ("bias_dropout_add", "compiled", P_0),
    ],
)
def test_where_nothing_is_dropped_the_gradient_of_x_is_the_one_given(
    op: str, form: str, nothing_dropped: dict[str, Any]
) -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend(op, "noting", ran)
    function = getattr(torch.ops.fusedops if form == "torch.ops" else fusedops, op)
    x, bias, *residual = inputs(op)[: OPS[op].parameters.index("p")]

    def call(x: Tensor, bias: Tensor | None) -> Tensor:
        return function(x, bias, *residual, **{"p": 0.5, **nothing_dropped})

    if form == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    for wanted, narrow in (("x", False), ("x and bias", False), ("x", True)):
        torch._dynamo.reset()
        ran.clear()
        given = x.detach().to(torch.bfloat16 if narrow else x.dtype).requires_grad_()
        other = bias.clone().requires_grad_(wanted == "x and bias")
        with fusedops.use("noting"):
            y = call(given, other)
            grad = torch.randn_like(y)
            y.backward(grad)
        backwards = [args[-1] for who, args in ran if who == "noting backward"]
        if narrow:  # a gradient in another dtype is made by a kernel
            assert [*map(tuple, backwards)] == [(True, False)]
            close(given.grad, grad.bfloat16())
            continue
        assert [*map(tuple, backwards)] == ([(False, True)] if wanted == "x and bias" else [])
        assert torch.equal(given.grad, grad)
        if wanted == "x and bias":
            close(other.grad, grad.sum_to_size(bias.shape))


@pytest.mark.parametrize("op", [op for op in OPTIONS if OPS[op].addend])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_gradient_of_a_sum_is_computed_once_for_its_summands(op: str, narrow: bool) -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend(op, "noting", ran)
    x, residual, *rest = inputs(op)
    given = x.detach().to(torch.bfloat16 if narrow else x.dtype).requires_grad_()
    other = residual.detach().clone().requires_grad_()
    with fusedops.use("noting"):
        y, s = getattr(fusedops, op)(given, other, *rest)
    grads = torch.randn_like(y), torch.randn_like(s)
    torch.autograd.backward((y, s), grads)
    (needs,) = (args[-1] for who, args in ran if who == "noting backward")
    assert tuple(needs[:2]) == (True, narrow)  # of two dtypes, both are computed
    wanted = torch.autograd.grad(reference(op)(given, other, *rest), (given, other), grads)
    for tensor, grad in zip((given, other), wanted):
        close(tensor.grad, grad)
    given.grad += 1
    close(other.grad, wanted[1])


@every_op
@every_way
def test_the_graph_is_kept_and_freed_as_torch_does(op: str, way: Way) -> None:
    tensors = growing(op, inputs(op))
    y = way(op)(*tensors)
    first = gradients(y, tensors, retain_graph=True)
    close(gradients(y, tensors), first)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(y, tensors)


@every_op
@every_way
@pytest.mark.filterwarnings("always")  # anomaly mode reports by a warning where forward ran
def test_anomaly_mode_names_the_line_of_forward(op: str, way: Way, recwarn: pytest.WarningsRecorder) -> None:
    tensors = growing(op, inputs(op))
    with torch.autograd.detect_anomaly(check_nan=True):
        y = way(op)(*tensors)
        with pytest.raises(RuntimeError, match="returned nan values in its 0th output"):
            outputs(y)[0].backward(torch.full_like(outputs(y)[0], float("nan")))
    assert any("y = way(op)(*tensors)" in str(warning.message) for warning in recwarn)


@every_op
@every_way
def test_saved_tensors_hooks_see_what_is_kept(op: str, way: Way) -> None:
    tensors = growing(op, inputs(op))
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place]):
        y = way(op)(*tensors)
    kept = len(packed)
    found = gradients(y, tensors)
    assert kept == sum(isinstance(value, Tensor) for value in kept_for_backward(op, tensors))
    close(found, gradients(reference(op)(*tensors), tensors))


def kept_for_backward(op: str, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return the arguments of backward that forward keeps; the first tensor stands for outputs and saved values."""
    contract, args = OPS[op], arguments(op, tensors)
    results = [args[0]] * len(contract.outputs) + [None if value.optional else args[0] for value in contract.saved]
    grads = [None] * len(contract.outputs)
    return contract.backward_arguments(grads, results, args, ())[len(grads) :]


@pytest.mark.parametrize("op", [op for op in OPTIONS if OPS[op].required_saved])
def test_saved_values_of_the_registered_op(op: str) -> None:
    """Empty without ``save``; with it, differentiable, as a graph with a gradient in it may be differentiated again."""
    contract, function = OPS[op], getattr(torch.ops.fusedops, op)
    tensors, others = growing(op, inputs(op)), growing(op, inputs(op))
    count = len(contract.outputs)
    for given in (tensors, inputs(op)):
        assert [value.shape for value in function(*arguments(op, given))[count:]] == [(0,)] * len(
            contract.required_saved
        )
    found = function(*arguments(op, tensors), save=True)[count:]
    args = arguments(op, others)
    by_reference = contract.saved_references(args, contract.as_tuple(contract.reference(*args)))
    want = [value for value, declared in zip(by_reference, contract.saved) if not declared.optional]
    close(found, want)
    close(function(*arguments(op, inputs(op)), save=True)[count:], want)
    for values in (found, want):
        growing_values = [value for value in values if value.requires_grad]
        if growing_values:
            torch.autograd.backward(growing_values, [torch.ones_like(value) for value in growing_values])
    for ours, theirs in zip(tensors, others):
        # a gradient of 0 may be None
        close(*[torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (ours, theirs)])


@every_op
@every_way
def test_a_kept_tensor_changed_in_place_is_torchs_own_error(op: str, way: Way) -> None:
    tensors = growing(op, inputs(op))
    args = arguments(op, [tensor * 1.0 if tensor.requires_grad else tensor for tensor in tensors])  # torch lets no leaf
    contract = OPS[op]
    y = contract.call_public(*args) if way is public else call_registered(op, *args)
    at_hand = dict(zip((*contract.parameters, *contract.outputs), (*args, *contract.as_tuple(y))))
    kept = next(name for name in contract.backward_call.kept_tensors if isinstance(at_hand.get(name), Tensor))
    with torch.no_grad():  # the softmax keeps y, GELU keeps x, dropout keeps the seed
        at_hand[kept].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(y).backward()


@every_op
@every_way
def test_no_grad_and_inference_mode(op: str, way: Way) -> None:
    want = reference(op)(*inputs(op))
    for mode in (torch.no_grad, torch.inference_mode):
        tensors = growing(op, inputs(op))
        with mode():
            y = way(op)(*tensors)
            inside = [tensor.clone() for tensor in inputs(op)]
        assert not any(each.requires_grad for each in outputs(y))
        assert all(each.is_inference() is (mode is torch.inference_mode) for each in outputs(y))
        close(y, want)
        close(way(op)(*inside), want)  # tensors made there serve outside it


# ----------------------------------------------------------------------------------------------------------- torch.func


@every_op
@every_way
def test_jvp_and_forward_mode(op: str, way: Way) -> None:
    function, xs = of_differentiable(op, way(op), inputs(op))
    plain = of_differentiable(op, reference(op), inputs(op))[0]
    along = tuple(x.flip(0) + 1 for x in xs)
    want = torch.func.jvp(plain, xs, along)
    assert all(tangent.abs().max() > 0.01 for tangent in outputs(want[1]))  # a tangent that got lost would be zero
    close(torch.func.jvp(function, xs, along), want)
    with forward_ad.dual_level():
        y = function(*(forward_ad.make_dual(x, t) for x, t in zip(xs, along)))
        duals = [tuple(forward_ad.unpack_dual(each)) for each in outputs(y)]
        close(duals, [*zip(*map(outputs, want))])
    # a dual gradient in backward, and one that was made with a graph: forward over reverse
    grown = tuple(x.clone().requires_grad_() for x in xs)
    ys, gs = outputs(function(*grown)), [torch.randn_like(each) for each in outputs(want[0])]
    with forward_ad.dual_level():
        found = torch.autograd.grad(ys, grown, [forward_ad.make_dual(g, g + 1) for g in gs])
        tangents = [forward_ad.unpack_dual(t).tangent for t in found]
    close(tangents, list(torch.autograd.grad(outputs(plain(*grown)), grown, [g + 1 for g in gs])))


@every_op
@every_way
def test_grad_vjp_and_hessian(op: str, way: Way) -> None:
    function, xs = of_differentiable(op, way(op), inputs(op, length=2, batch=1))
    plain = of_differentiable(op, reference(op), inputs(op, length=2, batch=1))[0]
    every = tuple(range(len(xs)))
    grads = [torch.func.grad(lambda *a, f=f: loss(f(*a)), every)(*xs) for f in (function, plain)]
    close(*grads)
    y, pullback = torch.func.vjp(function, *xs)
    close(pullback(2 * y if isinstance(y, Tensor) else tuple(2 * each for each in y)), grads[1])
    hessians = [torch.func.hessian(lambda x, f=f: loss(f(x, *xs[1:])))(xs[0]) for f in (function, plain)]
    close(*hessians)
    close(torch.func.jacrev(function)(*xs), torch.func.jacfwd(function)(*xs))


@every_op
@every_way
def test_vmap_is_a_loop(op: str, way: Way) -> None:
    tensors, dims = samples(op)
    loop = stacked([reference(op)(*one(op, tensors, sample)) for sample in range(len(tensors[0]))])
    close(torch.vmap(way(op), dims)(*tensors), loop)
    # another dimension, only x batched, and vmap in vmap
    moved = [tensor.movedim(0, -1) if dim == 0 else tensor for tensor, dim in zip(tensors, dims)]
    close(torch.vmap(way(op), tuple(dim and -1 if dim is None else -1 for dim in dims))(*moved), loop)
    first = one(op, tensors, 0)
    alone = torch.vmap(lambda x: way(op)(x, *first[1:]))(tensors[0])
    close(alone, stacked([reference(op)(x, *first[1:]) for x in tensors[0]]))
    twice = torch.vmap(torch.vmap(lambda x: way(op)(x, *first[1:])))(torch.stack([tensors[0], tensors[0] + 1]))
    close([each[0] for each in outputs(twice)], [*outputs(alone)])


@every_op
@every_way
def test_gradients_of_each_sample(op: str, way: Way) -> None:
    tensors, dims = samples(op)
    wanted = tuple(with_gradient(op))
    got = torch.vmap(torch.func.grad(lambda *a: loss(way(op)(*a)), wanted), dims)(*tensors)
    for sample in range(3):
        grown = growing(op, one(op, tensors, sample))
        close([found[sample] for found in got], gradients(public(op)(*grown), grown))


@pytest.mark.parametrize("op", ["bias_dropout", "bias_dropout_add"])
def test_the_masks_of_vmap(op: str) -> None:
    """A given seed: every sample's mask, as in a loop. None: by vmap's ``randomness``, as for torch's own dropout."""
    x, *rest = [torch.ones_like(tensor) for tensor in one(op, inputs(op), 0)]
    batch = torch.stack([x] * 4)

    def call(x: Tensor, seed: Any = None) -> Tensor:
        return getattr(fusedops, op)(x, *rest, p=0.5, seed=seed)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(batch)
    same = torch.vmap(call, randomness="same")(batch)
    assert all(torch.equal(sample, same[0]) for sample in same)
    different = torch.vmap(call, randomness="different")(batch)
    assert len({sample.numpy().tobytes() for sample in different}) == 4
    seeds = torch.arange(4)
    close(torch.vmap(call)(batch, seeds), torch.stack([call(x, seed) for seed in seeds]))
    close(torch.vmap(lambda x: call(x, 7))(batch), torch.stack([call(x, 7)] * 4))
