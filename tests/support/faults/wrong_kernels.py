"""Wrong kernels: each is the op's own reference with one fault, and names the check of the kit that must find it.

They stand for faults that kernels of other libraries have had. No check of the kit is about one of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from loopback import contiguous, forward_parameters, reference_kernels, with_parameters
from torch import Tensor

import fusedops
from fusedops import Backend
from fusedops.testing import OPS

Run = Callable[..., Any]  # the right kernel; keywords replace arguments
Fault = Callable[[Run, SimpleNamespace], Any]  # (the right kernel, the arguments by name) -> wrong results
Maker = Callable[[], Fault]  # for a kernel that keeps something between calls: each backend has its own


@dataclass(frozen=True)
class Wrong:
    """One wrong kernel.

    Attributes:
        text: the fault, in one line.
        op: the op's name.
        direction: which of its kernels is wrong.
        check: the kind of check that must find it.
        make: makes the fault.
        checks_storages: True where its backend calls it without the core's check of storages, by ``prepare``.
    """

    text: str
    op: str
    direction: str
    check: str
    make: Maker
    checks_storages: bool = False

    def backend(self, op: fusedops.Op) -> Backend:
        """Return a backend whose other kernel is right."""
        promise = True if self.check == "rows" else None
        right = [replace(each, rows_independent=promise) for each in reference_kernels(op)]
        place = ("forward", "backward").index(self.direction)
        names = forward_parameters(op) if self.direction == "forward" else op.backward_parameters
        function = contiguous(op.reference_with_saved if self.direction == "forward" else op.backward, *names)
        fault = self.make()

        def kernel(*args: Any) -> Any:
            given = dict(zip(names, args))
            return fault(lambda **changes: function(*{**given, **changes}.values()), SimpleNamespace(**given))

        declared = with_parameters(kernel, *names)
        prepare = (lambda checked: declared) if self.checks_storages else None
        wrong = fusedops.kernel(  # pyright: ignore
            op.name, direction=self.direction, prepare=prepare, rows_independent=promise
        )(declared)
        return Backend("wrong", ("cpu",), -50, [wrong if at == place else each for at, each in enumerate(right)])


WRONG: list[Wrong] = []


def wrong(text: str, op: str, direction: str, check: str) -> Callable[[Fault], Fault]:
    """Add a fault to the list."""

    def add(fault: Fault) -> Fault:
        WRONG.append(Wrong(text, op, direction, check, lambda: fault))
        return fault

    return add


def stateful(text: str, op: str, direction: str, check: str) -> Callable[[Maker], Maker]:
    """Add a fault that keeps something between calls."""

    def add(make: Maker) -> Maker:
        WRONG.append(Wrong(text, op, direction, check, make))
        return make

    return add


SOFTMAX, GELU, DROPOUT, ADD, SCALE = (
    "scaled_masked_softmax",
    "bias_gelu",
    "bias_dropout",
    "bias_dropout_add",
    "add_center_scale",
)


# ---------------------------------------------------------------------------------------------------- results


def _buffer() -> Fault:
    buffers: dict[Any, Tensor] = {}

    def fault(run: Run, a: SimpleNamespace) -> Any:
        y = run()
        return buffers.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)

    return fault


for _op in (SOFTMAX, GELU, DROPOUT, ADD):
    stateful("the output is a buffer of its size that the next call uses again", _op, "forward", "memory")(_buffer)
stateful("the gradient is a buffer that the next call uses again", SOFTMAX, "backward", "memory")(_buffer)


@stateful("every output is at the start of one memory", GELU, "forward", "memory")
def _one_memory() -> Fault:
    memory = torch.empty(2**16, dtype=torch.float64)

    def fault(run: Run, a: SimpleNamespace) -> Any:
        y = run()
        return memory.view(y.dtype)[: y.numel()].view(y.shape).copy_(y)

    return fault


@wrong("evaluation without a bias returns x itself", DROPOUT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return a.x if not a.training and a.bias is None and a.x.is_contiguous() else run()


@wrong("p = 0 without a bias returns a view of x", DROPOUT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return a.x.view(a.x.shape) if a.p == 0 and a.bias is None and a.x.is_contiguous() else run()


@wrong("p = 1 returns the residual itself", ADD, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return a.residual if a.training and a.p == 1 and a.residual.is_contiguous() else run()


@wrong("the gradient of x in evaluation is grad itself", DROPOUT, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dbias = run()
    same = not a.training and dx is not None and a.grad.dtype == dx.dtype and a.grad.is_contiguous()
    return a.grad if same else dx, dbias


@wrong("both gradients are one tensor where the bias has the shape of x", GELU, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dbias = run()
    same = dbias is not None and dx is not None and dbias.shape == dx.shape and dbias.dtype == dx.dtype
    return dx, dx if same else dbias


@wrong("the gradients of x and residual are one tensor", SCALE, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dresidual, dweight = run()
    same = dx is not None and dresidual is not None and dx.dtype == dresidual.dtype
    return dx, dx if same else dresidual, dweight


@wrong("the output has the strides of a transposed x", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run().mT.contiguous().mT if a.x.dim() == 5 else run()


@wrong("a bias of float64 does not promote the output", GELU, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run().to(a.x.dtype)


@wrong("the gradient of a 0-d bias has one dimension", GELU, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dbias = run()
    return dx, dbias.view(1) if dbias is not None and dbias.dim() == 0 else dbias


@wrong("the gradient of x has the dtype of the residual", ADD, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dbias = run()
    return None if dx is None else dx.to(a.grad.dtype), dbias


# ------------------------------------------------------------------------------------------------------- masks


@wrong("a uint8 mask masks where its lowest bit is set", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=a.mask & 1) if a.mask is not None and a.mask.dtype == torch.uint8 else run()


@wrong("a mask masks where its byte is 1", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=None if a.mask is None else a.mask.view(torch.uint8) == 1)


@wrong("a mask masks where its byte, as a signed one, is positive", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=None if a.mask is None else a.mask.view(torch.int8) > 0)


@wrong("causal replaces the mask", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=None) if a.causal else run()


@wrong("a mask per head is read as the first head's", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=a.mask[:, :1]) if a.mask is not None and a.mask.dim() == 4 else run()


@wrong("a 1-d mask is dropped", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=None) if a.mask is not None and a.mask.dim() == 1 else run()


@wrong("a mask of one element is dropped", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=None) if a.mask is not None and a.mask.numel() == 1 else run()


@wrong("a 0-d mask is dropped", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(mask=None) if a.mask is not None and a.mask.dim() == 0 else run()


@wrong("a transposed mask is read as a contiguous one", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.mask is None or a.mask.is_contiguous() or a.mask.dim() < 2 or 0 in a.mask.stride():
        return run()
    return run(mask=a.mask.mT.contiguous().view(a.mask.shape))


@wrong("the storage offset of a mask is ignored", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.mask is None or not a.mask.storage_offset():
        return run()
    return run(mask=a.mask.as_strided(a.mask.shape, a.mask.stride(), 0))


# ----------------------------------------------------------------------------------------------------- numbers


@wrong("a scale of 0 is taken as 1", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=a.scale or 1.0)


@wrong("the sign of the scale is ignored", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=abs(a.scale))


@wrong("the sign of the scale is ignored in backward", SOFTMAX, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=abs(a.scale))


@wrong("backward leaves out a scale of 0", SOFTMAX, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=a.scale or 1.0)


@wrong("the scale is rounded to an int where causal", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=int(a.scale)) if a.causal else run()


@wrong("eps of 0 is taken as the default", SCALE, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(eps=a.eps or 1e-2)


@wrong("the form without tanh is quick GELU above rank 4", GELU, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.approximate == "tanh" or a.x.dim() <= 4:
        return run()
    u = a.x if a.bias is None else a.x + a.bias
    return (u * torch.sigmoid(1.702 * u)).contiguous()


@wrong("the exact form is computed as tanh in backward", GELU, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(approximate="tanh")


@wrong("evaluation drops", DROPOUT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(training=True)


@wrong("evaluation drops in backward", ADD, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(training=True) if a.seed is not None else run()


@wrong("p = 0 drops where the word is 0, and scales by p = 0.01", DROPOUT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(p=0.01) if a.p == 0 else run()


@wrong("p = 1 multiplies what is dropped by 0: NaN from inf", DROPOUT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() + a.x * 0 if a.p == 1 and a.training and a.x.dtype == torch.float32 and a.bias is None else run()


@wrong("p = 1 multiplies x by 0 above rank 2: NaN beside the residual", ADD, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return (run() + (a.x * 0).to(a.residual.dtype)).contiguous() if a.p == 1 and a.training and a.x.dim() > 2 else run()


@wrong("the high half of the seed is ignored", DROPOUT, "forward", "dropout")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(seed=None if a.seed is None else a.seed & 0xFFFFFFFF)


@wrong("a negative seed is taken without its sign", ADD, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(seed=None if a.seed is None else a.seed.abs())


@wrong("a 0-d seed is taken as 0", DROPOUT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(seed=a.seed * 0) if a.seed is not None and a.seed.dim() == 0 else run()


# ----------------------------------------------------------------------------------- arguments that are dropped


def _dropped(name: str, when: Callable[[SimpleNamespace], bool]) -> Fault:
    def fault(run: Run, a: SimpleNamespace) -> Any:
        return run(**{name: None}) if getattr(a, name) is not None and when(a) else run()

    return fault


wrong("a 0-d bias is dropped", GELU, "forward", "calls")(_dropped("bias", lambda a: a.bias.dim() == 0))
wrong("a bias of one element is dropped", DROPOUT, "forward", "calls")(_dropped("bias", lambda a: a.bias.numel() == 1))
wrong("a bias of one column is dropped", ADD, "forward", "calls")(
    _dropped("bias", lambda a: a.bias.dim() > 1 and a.bias.shape[-1] == 1 and a.bias.numel() > 1)
)
wrong("the bias is dropped above rank 4", GELU, "forward", "calls")(_dropped("bias", lambda a: a.x.dim() > 4))
wrong("the bias is dropped where x is 0-d", DROPOUT, "forward", "calls")(_dropped("bias", lambda a: a.x.dim() == 0))
wrong("the bias is dropped above 4096 rows", GELU, "forward", "calls")(
    _dropped("bias", lambda a: a.x.numel() // max(a.x.shape[-1] if a.x.dim() else 1, 1) > 4096)
)
wrong("the mask is dropped above 4096 columns", SOFTMAX, "forward", "calls")(
    _dropped("mask", lambda a: a.x.shape[-1] > 4096)
)
wrong("the mask is dropped above rank 4", SOFTMAX, "forward", "calls")(_dropped("mask", lambda a: a.x.dim() > 4))
wrong("the mask is dropped for a single query", SOFTMAX, "forward", "calls")(
    _dropped("mask", lambda a: a.x.shape[-2] == 1)
)
wrong("the weight is dropped where x is 1-d", SCALE, "forward", "calls")(_dropped("weight", lambda a: a.x.dim() == 1))
wrong("a weight of one element is dropped", SCALE, "forward", "calls")(
    _dropped("weight", lambda a: a.weight.numel() == 1)
)


@wrong("the bias is dropped in evaluation", ADD, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.training else run(bias=None)


@wrong("the residual is dropped at p = 1", ADD, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return torch.zeros_like(run()) if a.p == 1 and a.training else run()


@wrong("rows after the 4096th are not computed", GELU, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    y = run()
    if y.dim() > 1:
        y.flatten(0, -2)[4096:] = 0
    return y


@wrong("columns after the 4096th are not summed", SOFTMAX, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx = run()
    dx[..., 4096:] = 0
    return dx


@wrong("a sum over several dimensions leaves the first one out", DROPOUT, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dbias = run()
    if dbias is None or a.grad.dim() < 4:
        return dx, dbias
    return dx, run(grad=torch.cat([a.grad[:1], torch.zeros_like(a.grad[1:])]))[1]


# ------------------------------------------------------------------------------------------------------ causal


@wrong("causal is aligned to the bottom right", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if not a.causal:
        return run()
    rows, columns = a.x.shape[-2:]
    later = torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows)
    return run(mask=later if a.mask is None else a.mask.bool() | later, causal=False)


@wrong("causal is ignored for a single query", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal=a.causal and a.x.shape[-2] > 1)


@wrong("causal is ignored where there are more queries than keys", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal=a.causal and a.x.shape[-2] <= a.x.shape[-1])


@wrong("causal is ignored above rank 4", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal=a.causal and a.x.dim() <= 4)


@wrong("causal leaves the gradient of more queries than keys at 0", SOFTMAX, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx = run()
    if a.causal:
        dx[..., dx.shape[-1] :, :] = 0
    return dx


# ------------------------------------------------------------------------------------------------------ layouts


@wrong("a negative view is read as its memory", GELU, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(x=-a.x) if a.x.is_neg() else run()


@wrong("the gradient of an expanded output is read as contiguous", DROPOUT, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.grad.dim() < 2 or a.grad.stride(-2) != 0 or a.grad.stride(-1) == 0:
        return run()
    return run(grad=torch.cat([a.grad[..., :1, :], torch.zeros_like(a.grad[..., 1:, :])], -2))


@wrong("the offset of a bias is ignored", DROPOUT, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.bias is None or not a.bias.storage_offset():
        return run()
    return run(bias=a.bias.as_strided(a.bias.shape, a.bias.stride(), 0))


# --------------------------------------------------------------------------------------------- effects of a call


@wrong("the mask is joined with the causal one in place", SOFTMAX, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.causal and a.mask is not None and a.mask.shape[-2:] == a.x.shape[-2:] and a.mask.is_contiguous():
        a.mask |= torch.ones(a.x.shape[-2:], dtype=torch.bool).triu(1).to(a.mask.dtype)
    return run()


@wrong("the memory between the elements of a strided x is written", GELU, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    y = run()
    if a.x.dim() and a.x.stride(-1) == 2:
        a.x.as_strided(a.x.shape, a.x.stride(), 1).fill_(1)
    return y


@wrong("grad is overwritten in backward", SOFTMAX, "backward", "inputs")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx = run()
    if a.grad.is_contiguous():
        a.grad.copy_(dx)
    return dx


@wrong("x is written with its own elements", GELU, "forward", "inputs")
def _(run: Run, a: SimpleNamespace) -> Any:
    y = run()
    if a.x.is_contiguous():
        a.x.mul_(1.0)
    return y


@wrong("the seed is advanced", DROPOUT, "forward", "inputs")
def _(run: Run, a: SimpleNamespace) -> Any:
    y = run()
    if a.seed is not None:
        a.seed += 1
    return y


def _effect(effect: Callable[[], Any]) -> Fault:
    def fault(run: Run, a: SimpleNamespace) -> Any:
        result = run()
        effect()
        return result

    return fault


wrong("grad mode is switched on", GELU, "forward", "state")(_effect(lambda: torch.set_grad_enabled(True)))
wrong("grad mode is switched on in backward", SCALE, "backward", "state")(_effect(lambda: torch.set_grad_enabled(True)))
wrong("the default dtype is float64 afterwards", SOFTMAX, "forward", "state")(
    _effect(lambda: torch.set_default_dtype(torch.float64))
)
wrong("the number of threads is changed", DROPOUT, "backward", "state")(_effect(lambda: torch.set_num_threads(2)))
wrong("a random number is drawn", ADD, "forward", "state")(_effect(lambda: torch.rand(1)))
wrong("torch's generator is seeded", DROPOUT, "forward", "state")(_effect(lambda: torch.manual_seed(0)))
wrong("Python's generator is used", GELU, "backward", "state")(_effect(random.random))
wrong("denormals are flushed from here on", GELU, "forward", "state")(_effect(lambda: torch.set_flush_denormal(True)))
wrong("deterministic algorithms are switched on", SOFTMAX, "backward", "state")(
    _effect(lambda: torch.use_deterministic_algorithms(True))
)
wrong("an environment variable is set", ADD, "backward", "state")(_effect(lambda: os.environ.update(MKL_CBWR="AVX2")))


@wrong("the arithmetic of float32 is in the default dtype", GELU, "forward", "state")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() + torch.zeros(1) if a.x.dtype == torch.float32 and a.x.dim() else run()


@wrong("x is rounded to the dtype of autocast", GELU, "forward", "state")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(x=a.x.bfloat16().to(a.x.dtype)) if torch.is_autocast_enabled("cpu") else run()


# -------------------------------------------------------------------------------------- calls that depend on others


@stateful("the mask of the first call is kept by its address", SOFTMAX, "forward", "history")
def _() -> Fault:
    kept: dict[int, Tensor] = {}

    def fault(run: Run, a: SimpleNamespace) -> Any:
        return run() if a.mask is None else run(mask=kept.setdefault(a.mask.data_ptr(), a.mask.clone()))

    return fault


@stateful("the result is kept by the version of x", GELU, "forward", "history")
def _() -> Fault:
    kept: dict[Any, Tensor] = {}

    def fault(run: Run, a: SimpleNamespace) -> Any:
        key = a.x.data_ptr(), a.x._version, a.x.shape, a.x.dtype, a.approximate, a.bias is None
        return kept.setdefault(key, run()).clone()

    return fault


@stateful("the seed is read once a process", DROPOUT, "forward", "calls")
def _() -> Fault:
    kept: list[Tensor] = []

    def fault(run: Run, a: SimpleNamespace) -> Any:
        if a.seed is None:
            return run()
        kept.append(a.seed.clone())
        return run(seed=kept[0])

    return fault


@stateful("the shape of the causal mask is kept by the number of columns", SOFTMAX, "forward", "calls")
def _() -> Fault:
    kept: dict[int, Tensor] = {}

    def fault(run: Run, a: SimpleNamespace) -> Any:
        rows, columns = a.x.shape[-2:]
        if not a.causal:
            return run()
        mask = kept.setdefault(columns, torch.ones(rows, columns, dtype=torch.bool).triu(1))
        mask = torch.nn.functional.pad(mask[:rows], (0, 0, 0, max(rows - len(mask), 0)))
        return run(causal=False, mask=mask if a.mask is None else a.mask.bool() | mask)

    return fault


@stateful("every second call has other bits", ADD, "backward", "determinism")
def _() -> Fault:
    calls: list[int] = []

    def fault(run: Run, a: SimpleNamespace) -> Any:
        dx, dbias = run()
        calls.append(1)
        return None if dx is None else dx * (1 + 1e-7 * (len(calls) % 2)), dbias

    return fault


@stateful("the bits depend on whether the call before was larger", GELU, "forward", "history")
def _() -> Fault:
    sizes = [0]

    def fault(run: Run, a: SimpleNamespace) -> Any:
        y = run()
        before, sizes[0] = sizes[0], y.numel()
        return y * (1 + 3e-7) if before > y.numel() else y

    return fault


# ------------------------------------------------------------------------------------------------- saved values


def _saved(change: Callable[[SimpleNamespace, Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> Fault:
    def fault(run: Run, a: SimpleNamespace) -> Any:
        y, s, rstd, mean = run()
        return (y, s, rstd, mean) if rstd is None else (y, s, *change(a, rstd, mean))

    return fault


wrong("the saved rstd is of the unbiased variance", SCALE, "forward", "saved")(
    _saved(lambda a, rstd, mean: (rstd * 0.99, mean))
)
wrong("the saved mean is of x, without the residual", SCALE, "forward", "saved")(
    _saved(lambda a, rstd, mean: (rstd, a.x.to(mean.dtype).mean(-1, keepdim=True)))
)
wrong("the saved rstd of a 1-d x is 0", SCALE, "forward", "calls")(
    _saved(lambda a, rstd, mean: (rstd * 0 if a.x.dim() == 1 else rstd, mean))
)
wrong("the saved rstd is rounded to bfloat16 beside a weight of bfloat16", SCALE, "forward", "calls")(
    _saved(
        lambda a, rstd, mean: (
            rstd.bfloat16().to(rstd.dtype) if a.weight is not None and a.weight.dtype == torch.bfloat16 else rstd,
            mean,
        )
    )
)
stateful("the saved values are in a buffer that the next call uses again", SCALE, "forward", "memory")(
    lambda: _saved_buffer()
)


def _saved_buffer() -> Fault:
    buffers: dict[Any, Tensor] = {}
    return _saved(
        lambda a, rstd, mean: (
            buffers.setdefault((rstd.shape, rstd.dtype), torch.empty_like(rstd)).copy_(rstd),
            mean,
        )
    )


def every() -> Iterator[tuple[str, Wrong]]:
    """Yield the wrong kernels with a name for each, those of an op after each other: the kit keeps its calls."""
    for each in sorted(WRONG, key=lambda each: each.op):
        yield f"{each.op}-{each.direction}-{each.text.replace(' ', '_')}", each


assert {each.op for each in WRONG} <= {*OPS, SCALE}
