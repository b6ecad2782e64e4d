"""Kernels called again for arguments like earlier ones, without their launchers, give what the launchers give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from any_size import of_any_size
from calls import arguments, inputs
from torch import Tensor

import fusedops
import fusedops_cpu
from fusedops.ops import OPS
from fusedops_cpu.launch import native
from fusedops_cpu.launch.calls import prepared, results_of

pytestmark = [
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.skipif(isinstance(native.loaded(), str), reason="needs launchers that remember calls"),
]

KERNELS = fusedops_cpu.fusedops_backend().kernels
# (op, options), with each form that a launcher treats by itself
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{op: (op, {}) for op in OPS if any(k.op == op and k.prepare for k in fusedops_cpu.fusedops_backend().kernels)},
    "softmax, causal": ("scaled_masked_softmax", {"mask": None, "causal": True}),
    "gelu, no bias": ("bias_gelu", {"bias": None}),
    "dropout, evaluation": ("bias_dropout", {"training": False}),
    "dropout_add, training": ("bias_dropout_add", {"training": True, "p": 0.5}),
    "swiglu, halves": ("swiglu", {"up": None}),
    "swiglu, pairs": ("swiglu", {"up": None, "interleaved": True}),
    "geglu, pairs": ("geglu", {"up": None, "interleaved": True}),
    "rms_norm, no weight": ("rms_norm", {"weight": None}),
    "gated_rms_norm, gate first": ("gated_rms_norm", {"weight": None, "gate_first": True, "activation": "sigmoid"}),
    "causal_conv1d, y alone": ("causal_conv1d", {"bias": None, "initial_state": None, "return_state": False}),
    "layer_norm, no bias": ("layer_norm", {"bias": None}),
    "rotary, one tensor": ("rotary_embedding", {"k": None}),
    "cross_entropy, none": ("cross_entropy", {"reduction": "none", "denominator": None}),
    "cross_entropy, denominator": ("cross_entropy", {"reduction": "mean", "denominator": 3.0}),
    "linear_attention, v alone": ("linear_attention", dict.fromkeys(("decay", "beta", "initial_state"))),
    "quantized_linear, no bias": ("quantized_linear", {"bias": None}),
}
# a value in memory is a field of the struct; torch sums the gradient of the bias
NEVER = {"cross_entropy, denominator", "int8_linear", "linear", "quantized_experts", "quantized_linear"}
WIDENED = {"linear_attention"}  # 16-bit decays are copied to float32: such a call is not remembered


class Launcher:
    """A kernel's launcher that is counted, and the function that runs its calls."""

    def __init__(self, kernel: fusedops.Kernel) -> None:
        self.direction, self.function = kernel.direction, kernel.function
        self.count = 0
        self.run: Any = None

    def counted(self, *args: Any) -> Any:
        self.count += 1
        return self.function(*args)


class Recorder:
    """The kernels of the backend with launchers that are counted, and the arguments of their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Launcher, tuple[Any, ...]]] = []

    def counted(self, kernel: fusedops.Kernel) -> fusedops.Kernel:
        launcher = Launcher(kernel)

        @wraps(kernel.function)
        def function(*args: Any) -> Any:
            return launcher.counted(*args)

        def prepare(checked: Any) -> Any:
            launcher.run = prepared(checked)

            def recorded(*args: Any) -> Any:
                self.calls.append((launcher, args))
                return launcher.run(*args)

            return recorded

        return replace(kernel, function=function, prepare=prepare)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made, backend = Recorder(), fusedops_cpu.fusedops_backend()
    kernels = tuple(made.counted(of_any_size(kernel)) for kernel in backend.kernels)
    fusedops.register(replace(backend, name="recorder", kernels=kernels))
    yield made
    fusedops.unregister("recorder")


def call(form: str, dtype: torch.dtype, seed: int) -> None:
    """Make the call with a gradient, and the one without."""
    op, given = FORMS[form]
    tensors = inputs(op, 4, dtype, seed=seed, batch=2)
    args = [given.get(name, arg) for name, arg in zip(OPS[op].parameters, arguments(op, tensors))]
    leaves = [arg.requires_grad_() for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    with fusedops.use(fallback="silent"):  # to eager, for the gradients of an op without a backward kernel here
        outputs = OPS[op].as_tuple(OPS[op].call_public(*args, backend="recorder"))
        if OPS[op].has_gradient:
            sum(y.float().square().sum() for y in outputs if y is not None).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert any(leaf.grad is not None for leaf in leaves) == OPS[op].has_gradient
    with torch.no_grad():
        OPS[op].call_public(*args, backend="recorder")


def other(arg: Any) -> Any:
    """Return a tensor like another, of the same strides, with its values in another order."""
    if not isinstance(arg, Tensor):
        return arg
    like = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype)
    return like.copy_(arg.detach().flip([*range(arg.dim())]))


def assert_equal(got: Any, want: Any) -> None:
    if not isinstance(want, Sequence):
        got, want = [got], [want]
    for mine, theirs in zip(got, want, strict=True):
        if not isinstance(theirs, Tensor):
            assert mine == theirs
        else:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
            assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_called_again(form: str, dtype: torch.dtype, recorder: Recorder) -> None:
    if form == "linear" and dtype is not torch.float32:
        pytest.skip("the kernel takes float32 alone")
    call(form, dtype, seed=0)
    directions = {launcher.direction for launcher, _ in recorder.calls}
    assert directions == {each.direction for each in KERNELS if each.op == FORMS[form][0]}
    for launcher, args in recorder.calls:
        for changed in (other, lambda arg: arg, other):
            given = [changed(arg) for arg in args]
            before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in given]
            count = launcher.count
            got = launcher.run(*given)
            if form not in NEVER and (dtype is torch.float32 or form not in WIDENED):
                assert launcher.count == count, f"{form} {launcher.direction} ran its launcher"
            assert_equal(got, results_of(launcher.function(*given)))
            assert_equal(given, before)


@pytest.mark.parametrize("form", FORMS)
def test_one_tensor_for_several_parameters_and_then_several_tensors(form: str, recorder: Recorder) -> None:
    """As in swiglu(x, x): what is remembered of it does not serve swiglu(gate, up)."""
    call(form, torch.float32, seed=4)
    for launcher, args in list(recorder.calls):
        same: dict[Any, Tensor] = {}  # one tensor for all that are alike
        shared = [
            same.setdefault((arg.dtype, arg.shape, arg.stride()), arg) if isinstance(arg, Tensor) else arg
            for arg in args
        ]
        fresh = prepared(launcher.function)
        for given in (shared, args, shared, [other(arg) for arg in args]):
            assert_equal(fresh(*given), results_of(launcher.function(*given)))


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_called_again_with_other_layouts(form: str, recorder: Recorder) -> None:
    """Views of every kind, in turns: what one call needs is not done, or left out, for another."""
    call(form, torch.float32, seed=1)
    seen = list(recorder.calls)

    def negative(arg: Any) -> Any:
        floating = isinstance(arg, Tensor) and arg.is_floating_point()
        return torch._neg_view(-arg.detach()) if floating else arg  # pyright: ignore[reportPrivateUsage]

    def strided(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or arg.dim() < 2:
            return arg
        wide = arg.new_empty((*arg.shape[:-1], 2 * arg.shape[-1]))[..., ::2]
        return wide.copy_(arg.detach())

    for launcher, args in seen:
        want = results_of(launcher.function(*args))
        for change in (strided, negative, lambda arg: arg, negative, strided, strided, lambda arg: arg):
            got = launcher.run(*map(change, args))
            assert_equal(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_a_storage_that_was_freed_is_an_error_also_for_a_remembered_call(form: str, recorder: Recorder) -> None:
    call(form, torch.float32, seed=2)
    for launcher, args in list(recorder.calls):
        freed = [other(arg) for arg in args]
        freed[0].untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(fusedops.InvalidInputError, match="without memory"):
                launcher.run(*freed)
        assert_equal(launcher.run(*args), results_of(launcher.function(*args)))
