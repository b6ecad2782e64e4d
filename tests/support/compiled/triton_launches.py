"""Launches of the triton backend without a GPU, recorded: which compiled kernel, grid, stream and arguments.

Not a test: ``test_triton_launch.py`` runs programs that import this, because ``TRITON_INTERPRET``, which the other
tests need, holds for a whole process. A stub driver takes the launches. ``pretend_to_compile`` leaves compilers out, so
that thousands of specialisations cost nothing: what was to be compiled is then the compiled kernel's identity.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.compiler
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from benchmarks.launch import StubDriver
from fusedops.ops.losses.formulas import LossOptions
from fusedops_triton._jit._bias import add_sums
from fusedops_triton.bias._bias_dropout import dropout_backward, dropout_forward
from fusedops_triton.bias._bias_gelu import gelu_backward, gelu_forward
from fusedops_triton.launch import launcher
from fusedops_triton.losses._cross_entropy import cross_entropy_forward
from fusedops_triton.softmax._softmax import softmax_backward, softmax_forward

torch.set_num_threads(1)
driver = StubDriver()
triton.runtime.driver.set_active(driver)


class Pretended(CompiledKernel):
    """The result of ``triton.compile``; its handle contains all that it was compiled from."""

    def __init__(self, source: Any, target: Any = None, options: Any = None) -> None:
        self.src, self.name, self.module, self.metadata = source, source.fn.__name__, None, None
        made_of = (source.signature, source.constants, source.attrs, {**options, "extern_libs": None}, target)
        self.function = (f"{source.fn.__module__}.{self.name}", repr(made_of))
        self.packed_metadata = (options["num_warps"], hash(self.function))
        self._run = driver.launcher_cls(source, None)

    def _init_handles(self) -> None:
        pass


def pretend_to_compile() -> None:
    triton.compiler.compile = Pretended


@contextmanager
def recorded() -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of each launch, as Triton's own launchers take them."""
    driver.launches = []
    yield driver.launches
    driver.launches = None


@contextmanager
def through_triton() -> Iterator[None]:
    """Each launch by ``kernel[grid](...)``."""
    way, launcher.fast_path = launcher.fast_path, lambda kernel_type: None
    yield
    launcher.fast_path = way


@contextmanager
def counted() -> Iterator[list[str]]:
    """The kernels that went through ``JITFunction.run``."""
    run, seen = JITFunction.run, []

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.__name__)
        return run(self, *args, **kwargs)

    JITFunction.run = counting
    yield seen
    JITFunction.run = run


def plain(launch: tuple[Any, ...], given: list[Tensor]) -> tuple[Any, ...]:
    """A recorded launch in values that may be compared; memory that the call was not given is only "new"."""
    known = {t.data_ptr() for t in given}

    def of(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            at = arg.data_ptr()
            return (at if at in known else "new", at % 16, tuple(arg.shape), str(arg.dtype))
        return (type(arg).__name__, repr(arg))  # 1, 1.0 and True are equal, and not the same argument

    x, y, z, stream, function, metadata, _, _, _, *args = launch
    return (x, y, z, stream, function, metadata, [of(arg) for arg in args])


# --------------------------------------------------------------------------------------------------------------- calls

SIZES = (1, 2, 3, 8, 16, 17, 32, 48, 100, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALES = (0.0, 1.0, 0.125, 0.3, 1e-320)
PLAIN, IGNORED = LossOptions(-100, 0.0, 0.0, None, "none", None), (-100, 2**40)  # of 32 bits, and of 64


def laid(choose: random.Random, vary: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in one of the possible layouts; with ``vary`` not always at a multiple of 16 bytes."""
    how = choose.choice(("plain", "plain", "plain", "rows apart", "every other", "turned", "expanded"))
    t = torch.zeros(shape)
    if how == "rows apart":
        t = torch.zeros(*shape[:-1], shape[-1] + choose.choice((1, 16)))[..., : shape[-1]]
    elif how == "every other":
        t = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif how == "turned" and len(shape) > 1:
        t = torch.zeros(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    elif how == "expanded":
        t = torch.zeros(1, *shape[1:]).expand(shape)
    behind = vary.choice((0, 0, 1))
    memory = torch.zeros(t.untyped_storage().nbytes() // 4 + 1, dtype=dtype)
    return memory.as_strided(t.shape, t.stride(), behind)


def broadcast(choose: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to ``shape``."""
    return tuple(choose.choice((1, size)) for size in shape)[choose.randrange(len(shape)) :]


def a_call(choose: random.Random, vary: random.Random) -> tuple[list[Tensor], Callable[[], Any]]:
    """One call of a launcher, and the tensors it is given. ``choose`` its layout, ``vary`` the rest."""
    shape = tuple(choose.choice(SIZES[:4]) for _ in range(choose.choice((1, 1, 2, 2, 3, 4))))
    shape = (2, 40_000) if choose.random() < 0.1 else (*shape, choose.choice(SIZES))
    dtype, scale, causal = choose.choice(DTYPES), vary.choice(SCALES), choose.random() < 0.5
    x, other = laid(choose, vary, shape, dtype), laid(choose, vary, shape, dtype)
    biases = [None, *[laid(choose, vary, broadcast(choose, shape), kind) for kind in (dtype, torch.float32)]]
    bias = choose.choice(biases)
    seed = torch.zeros(3, dtype=torch.int64)[vary.randrange(3) :][:1]
    p, training = vary.choice((0.0, 1e-12, 0.1, 0.5, 0.9, 1.0)), vary.random() < 0.9
    needs = vary.choice(((True, True), (True, False), (False, True)))
    given = [t for t in (x, other, bias, seed) if t is not None]
    what = choose.randrange(9)
    if what == 0:
        mask = laid(choose, vary, broadcast(choose, shape), torch.bool)
        given.append(mask)
        return given, lambda: softmax_forward(x, mask, scale, causal)
    if what == 1:
        return given, lambda: softmax_forward(x, None, scale, causal)
    if what == 2:
        return given, lambda: softmax_backward(x, other, scale, causal)
    if what == 3:
        return given, lambda: gelu_forward(x, bias, "tanh" if causal else "none")
    if what == 4:
        return given, lambda: gelu_backward(other, x, bias, "tanh" if causal else "none", needs)
    if what == 5:
        residual = other.to(torch.float32) if causal else other
        return [*given, residual], lambda: dropout_forward(x, bias, residual if needs[0] else None, p, training, seed)
    if what == 6:
        return given, lambda: dropout_backward(x, seed, bias, p, training, dtype, needs)
    if what == 7:
        target, options = (
            torch.zeros(x.shape[:-1], dtype=torch.int64),
            PLAIN._replace(ignore_index=vary.choice(IGNORED)),
        )
        return [x, target], lambda: cross_entropy_forward(x, target, options, causal)
    sums, dbias = torch.zeros(choose.choice(SIZES[1:]), shape[-1]), torch.zeros(shape[-1], dtype=dtype)
    return [sums, dbias], lambda: add_sums(dbias, sums)


def compare(calls: int, seed: int) -> dict[str, Any]:
    """Make random calls both ways, of few layouts. How many launches there were, past Triton, and which differed."""
    vary = random.Random(seed)
    launches, short, differ, kernels = 0, 0, [], set()
    for number in range(calls):
        driver.device, driver.stream = vary.choice((0, 0, 0, 1)), vary.choice((0, 100))
        given, call = a_call(random.Random(vary.randrange(calls // 8)), vary)
        with through_triton(), recorded() as want:
            call()
        with recorded() as got, counted() as seen:
            call()
        launches, short = launches + len(got), short + len(got) - len(seen)
        kernels |= {launch[4][0] for launch in got}
        if [plain(one, given) for one in got] != [plain(one, given) for one in want]:
            differ.append(number)
    return {"launches": launches, "short": short, "differ": differ, "kernels": sorted(kernels)}
