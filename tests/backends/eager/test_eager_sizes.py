"""The eager kernels at sizes of models; by any number of threads; on the device meta."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from calls import arguments, inputs
from pairwise import pairwise
from right import assert_right
from torch import Tensor

import fusedops
from fusedops.testing import OPS

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")


def norm(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the tensors of a call of a norm."""
    shapes = {"x": shape, "residual": shape, "weight": shape[-1:], "bias": shape[-1:]}
    return tuple(torch.randn(shapes[each]).to(dtype) for each in OPS[name].parameters if each in shapes)


def masked(x: Tensor, *mask: int) -> tuple[Any, ...]:
    return x, torch.rand(mask) < 0.4 if mask else None


WITH_BIAS = [
    ((3, 65_537), (65_537,)),
    ((131_073,), (1,)),
    ((70, 1111), (1111,)),
    ((70, 1111), (70, 1)),
    ((5, 7, 3011), (7, 3011)),
    ((9000, 7), (7,)),
    ((60, 1000), (60, 1000)),
]


@pytest.mark.parametrize(
    ("shapes", "dtypes"), list(zip(WITH_BIAS, itertools.cycle([(F32, F32), (BF16, BF16), (BF16, F32)]))), ids=str
)
def test_with_a_bias(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtypes: tuple[torch.dtype, ...]) -> None:
    """Sizes that divide nothing."""
    x, bias = (torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes))
    residual = torch.randn(x.shape).to(torch.promote_types(*dtypes))
    with fusedops.use("eager", fallback="raise"):
        assert_right("bias_gelu", x, bias)
        assert_right("bias_dropout", x, bias, 0.1, seed=-3)
        assert_right("bias_dropout_add", x, bias, residual, 0.1, seed=-3)


SHAPES = [(70, 1111), (2, 1, 65_537), (9000, 7), (3, 5, 7001)]


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [(name, SHAPES[(at + turn) % 4], (F32, BF16)[turn]) for at, name in enumerate(NORMS) for turn in range(2)],
    ids=str,
)
def test_norms(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with fusedops.use("eager", fallback="raise"):
        assert_right(name, *norm(name, shape, dtype))


MASKED = [
    ((2, 3, 13, 1030), (2, 1, 13, 1030)),
    ((1, 5, 33, 517), (1, 5, 33, 517)),
    ((1, 1, 3, 65_537), (1, 1, 1, 65_537)),
    ((3, 1, 70, 400), ()),
]
SCALES = [(F32, 0.088), (F64, 0.088), (BF16, 0.125), (F16, 0.3)]


@pytest.mark.parametrize(("shapes", "scaled", "causal"), pairwise(MASKED, SCALES, [False, True]), ids=str)
def test_softmax(shapes: tuple[tuple[int, ...], ...], scaled: tuple[torch.dtype, float], causal: bool) -> None:
    """Rows and heads that divide nothing."""
    (shape, mask), (dtype, scale) = shapes, scaled
    with fusedops.use("eager", fallback="raise"):
        assert_right("scaled_masked_softmax", *masked(torch.randn(shape).to(dtype), *mask), scale, causal=causal)


def test_linear_rounds_once_beside_an_expanded_bias() -> None:
    """The bias takes most of the product away, whose rounding would stay."""
    x, weight = torch.full((1, 6, 1), -0.3984).to(BF16), torch.full((2, 1), 3.8906).to(BF16)
    with fusedops.use("eager", fallback="raise"):
        assert_right("linear", x, weight, torch.tensor(1.1562).to(BF16).expand(2))


class Call(NamedTuple):
    """A call, and the results whose bits do not depend on the threads: all where there is no name."""

    op: str
    args: Callable[[torch.dtype], tuple[Any, ...]]
    result: str = ""


def with_bias(shape: tuple[int, ...], bias: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(shape).to(dtype), torch.randn(bias).to(dtype)


def rotated(dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(2, 8, 300, 128).to(dtype), None, *torch.randn(2, 300, 32)


CALLS = {
    "softmax": Call("scaled_masked_softmax", lambda dtype: masked(torch.randn(5, 333, 517).to(dtype), 333, 517), "y"),
    "gelu, a row": Call("bias_gelu", partial(with_bias, (700, 1111), (1111,)), "bias"),
    "gelu, a column": Call("bias_gelu", partial(with_bias, (700, 1111), (700, 1)), "bias"),
    "gelu, a row that is a slab": Call("bias_gelu", partial(with_bias, (3, 400_000), (3, 1)), "bias"),
    "dropout, a row": Call("bias_dropout", partial(with_bias, (700, 1111), (1111,))),
    "dropout, a column": Call("bias_dropout", partial(with_bias, (700, 1111), (700, 1))),
    "rms_norm": Call("rms_norm", partial(norm, "rms_norm", (3000, 513))),
    "add_rms_norm": Call("add_rms_norm", partial(norm, "add_rms_norm", (3000, 513))),
    "rotary": Call("rotary_embedding", rotated),
}


#: In 16 bits too where another code widens the numbers: one of each shape of a bias.
BITS = [*((name, F32) for name in CALLS), *((name, BF16) for name in ("softmax", "gelu, a row", "rms_norm", "rotary"))]


@pytest.mark.parametrize(("name", "dtype"), BITS, ids=str)
def test_the_bits_do_not_depend_on_the_threads_nor_on_which_gradients_are_wanted(name: str, dtype: torch.dtype) -> None:
    op, args = OPS[CALLS[name].op], CALLS[name].args(dtype)
    options = {"seed": 8} if "seed" in op.parameters else {}
    names = [key for key, arg in zip(op.parameters, args) if key in op.differentiable and arg is not None]
    leaves = [arg.requires_grad_() for key, arg in zip(op.parameters, args) if key in names]
    found: list[dict[str, Tensor]] = []
    for threads in (1, 2, 3):  # two runs with one number: the check "determinism" of the kit
        torch.set_num_threads(threads)
        ys = [y for y in op.as_tuple(op.function(*args, **options, backend="eager")) if y is not None]
        grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) for y in ys]
        gradients = torch.autograd.grad(ys, leaves, grads, retain_graph=True)
        assert torch.equal(torch.autograd.grad(ys, leaves[-1], grads)[0], gradients[-1])
        found.append({**dict(zip(op.outputs, ys)), **dict(zip(names, gradients))})
    for key in [CALLS[name].result] if CALLS[name].result else found[0]:
        assert all(torch.equal(found[0][key], other[key]) for other in found[1:]), key


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", [name for name in OPS if name != "attention"])  # which asks whether k and v are finite
def test_other_devices_are_asked_nothing(name: str, dtype: torch.dtype) -> None:
    """On the meta device any look at the data raises: what runs there synchronises nowhere."""
    kernels = {kernel.direction: kernel.function for kernel in _eager() if kernel.op == name}
    op, args = OPS[name], arguments(name, inputs(name, dtype=dtype))
    outputs = op.as_tuple(op.reference(*args))
    results = [*outputs, *op.saved_references(args, outputs)]
    needs = tuple(args[op.parameters.index(each)] is not None for each in op.differentiable)
    backward = op.backward_arguments(
        [torch.ones_like(y) for y in outputs[: len(op.with_gradient)]], results, args, needs
    )
    arguments_of = {"forward": (*args, True) if op.saved else args, "backward": backward}
    for direction, kernel in kernels.items():
        made = kernel(*(_on_meta(arg) for arg in arguments_of[direction]))
        assert all(each is None or each.is_meta for each in (made if isinstance(made, tuple) else (made,)))


def _eager() -> tuple[fusedops.Kernel, ...]:
    import fusedops_eager

    return fusedops_eager.fusedops_backend().kernels


def _on_meta(arg: Any) -> Any:
    return (
        arg.mT.contiguous().mT.to("meta")
        if isinstance(arg, Tensor) and arg.dim() > 1
        else (arg.to("meta") if isinstance(arg, Tensor) else arg)
    )
