"""The conformance kit on the backends of this project."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from any_size import cpu_of_any_size
from ascend import ascend
from flash_attn_standin import flash_attn
from loopback import loopback
from sdpa_standin import sdpa_on_cuda

import fusedops
import fusedops_cpu
from fusedops import testing
from fusedops.testing._new_memory import filled_memory

# triton by its interpreter, which takes a second for 10^5 elements; npu on the stand-in device, flash_attn on the
# stand-in for its package, and the kernels of sdpa for CUDA on the one for torch's functions
# cpu's kernels that leave small calls, and some processors, to torch: without these constraints for speed
BACKENDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "eager": nullcontext,
    "cpu": nullcontext,
    "sdpa": nullcontext,
    "cpu_of_any_size": cpu_of_any_size,
    "zentorch": nullcontext,  # no check where it is not installed
    "triton": nullcontext,
    "npu": ascend,
    "flash_attn_on_cpu": flash_attn,
    "sdpa_cuda_on_cpu": sdpa_on_cuda,
    "loopback": loopback,
}
ELEMENTS = {
    "eager": 2**13,
    "cpu": 2**13,
    "cpu_of_any_size": 2**13,
    "sdpa": 2**13,
    "zentorch": 2**13,
    "triton": 2**11,
    "npu": 2**13,
    "flash_attn_on_cpu": 2**13,
    "sdpa_cuda_on_cpu": 2**13,
    "loopback": 2**11,
}
# What these run is torch's arithmetic, that of eager: a call that has an argument shows whether they pass it, in what
# form and to whom. Every two values meet in the calls of eager, and of cpu and triton, whose kernels are written here.
BRIEF = ("sdpa", "npu", "flash_attn_on_cpu", "sdpa_cuda_on_cpu", "loopback")
# With every backend: eager's values do not depend on the dtype, in which torch rounds; those of triton, which has every
# dtype of every size in "calls" too, are those of float32. What writes an input in another dtype all checks see.
CPU = ("cpu", "cpu_of_any_size")
BRIEF_CHECKS = {
    **dict.fromkeys(
        ("autograd", "dtypes", "float64", "kernel", "saved", "shared", "sizes", "strides"), ("eager", "triton")
    ),
    "inputs": ("eager", *CPU, "triton"),
    "infinite": ("triton",),
    "needs": ("triton",),
    "written": ("eager",),
}
# What a call leaves behind, in a buffer or in the process, depends on what the call is, and not on two of its values: a
# few of the calls of "calls" show it, whose list is made once then. Where "calls" is slow, and on triton, a brief list.
OF_CALLS = ("history", "memory")
# And not made with a backend of BRIEF: no kernel there is cut into blocks, so that sizes beside 64 and 128 are as
# others; and the registered op, by which graphs are made and which the other backends show, calls any kernel alike. The
# stand-in device fills new memory in every check.
NOT_BRIEF = ("sizes", "opcheck", "compile", "written")


FOR_SPEED = {kernel.op for kernel in fusedops_cpu.fusedops_backend().kernels if kernel.for_speed}


# What the ops' own references are checked for: results. The other checks are about what a kernel keeps from call to
# call, about torch and the process: eager, which is plain torch too, shows that they raise no false alarm. And "calls"
# would compare a reference with itself in float64 for every argument that a kernel may read wrong, as "sizes",
# "special" and "strides" do for a part of them.
OF_REFERENCES = ("dropout", "dtypes", "empty", "float64", "infinite", "masked_rows", "needs", "saved")
# The eager kernels that go through their tensors in blocks. No size is special for the others, torch's functions.
IN_BLOCKS = (
    "attention",
    "cross_entropy",
    "experts",
    "grouped_matmul",
    "linear_attention",
    "linear_cross_entropy",
    "linear_log_probs",
    "quantized_linear",
    "select_keys",
    "sparse_attention",
    "varlen_attention",
)
# A graph that torch.compile makes is of the registered op, by autograd's formulas of the op: it is that of eager on all
# backends, whose kernels "opcheck" and "autograd" call by the same registered op, and test_pytorch_compile.py compiles
# every op. So with each backend these ops alone are compiled here: of several outputs and saved values, of optional
# ones, and of those that sdpa has. Nor does "fake" depend on a kernel: the registered op puts results in the order of
# the fake ones, and every check compares their shapes and dtypes.
COMPILED = ("add_rms_norm", "attention")
# The interpreter runs the programs of a launch one after another: two runs differ by what they read alone. What a
# launch keeps from call to call, its layout, "calls" compares with float64 in any order.
# And for "rows", which is many calls, test_rows_check.py has fewer of them.
NOT_INTERPRETED = ("determinism", "history", "rows")
# Nor, of ops whose passes and products are those of experts and quantized_linear, or whose gradients are a program for
# each key, or whose kernels are those of gated_add and modulated_norm: their situations are of the launches that all
# kernels share.
OF_OTHER_KERNELS = ("gated_add_modulated_norm",)
OF_SHARED_LAUNCHES = (*OF_OTHER_KERNELS, "quantized_experts", "sparse_attention")
OF_LAUNCHES = ("memory", "state", "swapped")
# What a launch keeps for the next one, of any thread, all kernels of triton keep in one class: so with one and with
# several launches a call.
THREADED = ("cross_entropy", "experts", "rms_norm")
# The sizes around those of blocks are in test_triton_linear_attention.py and test_sample.py: a row of sample is read 35
# times, and is a program. That two arguments are one tensor changes nothing in any launch.
OF_OWN_TESTS = {"linear_attention": ("sizes",), "sample": ("shared", "sizes")}
# With these backends "calls" and "sizes" fill new memory, which is what "written" repeats them for.
FILLED, WHILE_FILLED = (*CPU, "triton"), ("calls", "sizes")
# With pytest.mark.slow: the calls of pairwise arguments, in the interpreter, and of large products; of ops with many
# loads or loops in the interpreter, all but the form and the values of their results.
OF_PAIRWISE = ("calls", "memory")
# Every two values meet in the calls of those ops on cpu alone: on triton they take a minute and a half. So it is with
# OF_OTHER_KERNELS, in the calls of the ops whose kernels they are.
# And what is many calls, of eager, whose kernels are torch's.
OF_MANY_CALLS = ("rows",)
SLOW_BACKEND = "triton"
SLOW_OPS = (
    "experts",
    "linear_attention",
    "linear_cross_entropy",
    "linear_log_probs",
    "paged_attention",
    "quantized_experts",
    "sample",
    "select_keys",
    "sparse_attention",
)
LONG = (
    *SLOW_OPS,
    *OF_OTHER_KERNELS,
    "causal_conv1d",
    "cross_entropy",
    "gated_rms_norm",
    "grouped_matmul",
    "merge_attention",
    "quantized_linear",
    "rotary_embedding",
)
# Each row of sample is read 35 times, and sparse_attention has a program for each key: their own tests have the values
# on triton.
OF_MANY_READS = ("sample", "sparse_attention")
OF_LOOPS = ("between", "constraints", "infinite", "memory", "shared", "state", "swapped")
OF_LONG = ("dtypes", "empty", "float64", "kernel", "masked_rows", "saved", "special", "strides")


def every_check(slow: Container[str]) -> pytest.MarkDecorator:
    """Run a test with the checks of each kernel that is installed, as ``checks``: one test costs as much as a check.

    A slow check is a test of its own. slow: the names of more slow ones.

    A fixture ``installed`` of the module gets the backend's name and the op's. It registers the backend once for all
    checks of an op: the kit keeps the calls that a kernel takes for as long as the kernel is registered. And it keeps
    the answers of one op, so that all backends' checks of an op follow each other: pytest, which puts tests of one
    parameter together, must not find the backend's name alone.
    """
    quick: dict[tuple[str, str, str], list[testing.Check]] = {}
    params: list[Any] = []
    for backend in BACKENDS:
        for check in _checks(backend):
            name = f"{backend}-{check.id}"
            if name in slow or _is_slow(check):
                marks = [pytest.mark.slow, *([pytest.mark.long] if _is_long(check) else [])]
                params.append(pytest.param((backend, check.op), [check], id=name, marks=marks))
            else:
                quick.setdefault((backend, check.op, check.direction), []).append(check)
    params += [pytest.param(key[:2], checks, id=f"{key[0]}-{key[1]}/{key[2]}") for key, checks in quick.items()]
    params.sort(key=lambda param: (param.values[0][1], list(BACKENDS).index(param.values[0][0])))
    return pytest.mark.parametrize(("installed", "checks"), params, indirect=["installed"], scope="module")


def _checks(backend: str) -> Iterable[testing.Check]:
    with BACKENDS[backend]():
        (info,) = [info for info in fusedops.backends() if info.name == backend]
        for check in testing.checks(backend, elements=ELEMENTS[backend]) if info.state != "unavailable" else ():
            if _can_fail(check):
                yield replace(check, brief=_is_brief(check))


def _is_slow(check: testing.Check) -> bool:
    if check.backend == SLOW_BACKEND and check.op in OF_MANY_READS:
        return check.name != "kernel"
    if check.name in OF_MANY_CALLS:
        return check.backend == "eager"
    if check.backend != SLOW_BACKEND:
        return check.name == "calls" and check.op in SLOW_OPS
    return check.name in OF_PAIRWISE or (check.op in LONG and check.name not in OF_LONG)


def _is_long(check: testing.Check) -> bool:
    """Return True for a check of a loop over the positions, in the interpreter: its situations are of launches that
    experts has too, several a call, and of saved values that all backends have; the others take half a minute. And for
    the limits of kernels with the launches of others.
    """
    if check.backend != SLOW_BACKEND:
        return False
    loops = check.op == "linear_attention" and check.name in OF_LOOPS
    return loops or (check.op in OF_SHARED_LAUNCHES and check.name == "constraints")


def _is_brief(check: testing.Check) -> bool:
    if check.name == "calls" and check.op in SLOW_OPS:
        return check.backend not in CPU
    if check.backend == SLOW_BACKEND and check.name == "calls":
        return check.op in OF_OTHER_KERNELS
    if check.name in OF_CALLS and (check.op in SLOW_OPS or check.backend == SLOW_BACKEND):
        return True
    if check.backend == "eager" and check.name in ("calls", *OF_CALLS):
        return check.op not in IN_BLOCKS
    return check.backend in BRIEF or check.backend in BRIEF_CHECKS.get(check.name, ())


def _can_fail(check: testing.Check) -> bool:
    """Return True for a check that may find what no other check of the backends finds."""
    if check.backend in CPU and (check.op in FOR_SPEED) == (check.backend == "cpu") and check.name != "constraints":
        return False
    if check.backend == "cpu_of_any_size" and check.op not in FOR_SPEED:
        return False
    if check.name == "inputs" and check.backend != "sdpa" and check.backend in BRIEF:  # a stand-in notes its calls
        return False
    if check.backend == "loopback":
        return check.name in OF_REFERENCES
    if check.backend in BRIEF and check.name in NOT_BRIEF:
        return False
    if (check.backend, check.name) == ("eager", "sizes"):
        return check.op in IN_BLOCKS
    if check.name == "compile":
        return check.op in COMPILED
    if check.name == "fake":
        return check.backend == "eager"
    if check.name == "written":
        return check.backend not in FILLED and check.op in IN_BLOCKS
    if check.backend == "triton" and check.name == "threads":
        return check.op in THREADED
    if check.backend == "triton" and check.name in OF_OWN_TESTS.get(check.op, ()):
        return False
    if check.backend == "triton" and check.op in OF_SHARED_LAUNCHES and check.name in OF_LAUNCHES:
        return False
    return check.backend != "triton" or check.name not in NOT_INTERPRETED


def passes(*checks: testing.Check) -> None:
    """Assert that checks pass, with one thread: barriers between threads take ten times as long as small sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = list(map(_result, checks))
    finally:
        torch.set_num_threads(before)
    failed = [str(result) for result in results if result.failures]
    assert not failed, "\n\n".join(failed)
    assert not [result.check.id for result in results if not result.cases and not _has_no_case(result.check)]


def _result(check: testing.Check) -> testing.Result:
    with filled_memory() if check.backend in FILLED and check.name in WHILE_FILLED else nullcontext():
        return check.run()


def _has_no_case(check: testing.Check) -> bool:
    """Return True for a check that may be without a case."""
    # of a kernel that takes one of several tensors alone no dtypes can be mixed, and no gradient wanted alone
    # and where all tensors have one dtype, as those of attention, none can be mixed either; flash-attn and zentorch
    # take no mask, and zentorch's delta rule no tensor without elements
    none = {
        ("npu", "dtypes"),
        *((backend, "dtypes") for backend in CPU),
        ("linear", "constraints"),  # on a processor on which cpu leaves it to torch
        ("npu", "needs"),
        ("linear", "float64"),  # of cpu, which takes float32 alone
        ("attention", "dtypes"),
        ("sparse_attention", "dtypes"),
        ("varlen_attention", "dtypes"),
        ("flash_attn_on_cpu", "masked_rows"),
        ("zentorch", "masked_rows"),
        ("zentorch", "empty"),
    }
    # or where no two tensors of a call that the kernel takes have one shape
    return check.name == "shared" or bool({(check.backend, check.name), (check.op, check.name)} & none)
