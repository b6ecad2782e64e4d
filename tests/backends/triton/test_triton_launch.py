"""The short way of launching: the same launches as Triton's own, whatever a call looks like; and when it is not taken.

Programs of their own run the calls, with a stub driver (``triton_launches.py``): here kernels are interpreted.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repository import ROOT

pytest.importorskip("triton", reason="triton is not installed")

from fusedops_triton.launch import launcher
from fusedops_triton.softmax import _softmax

pytestmark = pytest.mark.slow  # Triton's compiler

if not (ROOT / "benchmarks").exists():
    pytest.skip("needs benchmarks/launch.py, which is not beside the tests here", allow_module_level=True)

START = """
import json
import torch
import triton_launches as made
from triton import knobs
from fusedops_triton.launch.launcher import fast_path

def ways(call):
    with made.recorded() as launches, made.counted() as through:
        call()
    return [len(launches), len(through)]

x = torch.zeros(2, 3, 8, 32)
softmax = lambda: made.softmax_forward(x, None, 0.3, False)
"""
PRETEND = START + "made.pretend_to_compile()\n"


# ------------------------------------------------------------------------------------------------------ the same launch


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_a_short_launch_is_the_launch_that_triton_makes(target: str, program: Callable[[str], Any]) -> None:
    code = """
from triton.backends.compiler import GPUTarget
made.driver.get_current_target = lambda: GPUTarget("hip", "gfx942", 64)
from fusedops_triton.launch import settings
settings.chip = settings.CHIPS["gfx942"]  # as with a torch for ROCm
""" * (target == "hip")
    found = program(PRETEND + code + "print(json.dumps(made.compare(2000, 1)))")
    assert found["differ"] == []
    assert found["short"] > 600
    assert sorted(".".join(name.split(".")[-2:]) for name in found["kernels"]) == [
        "_bias._add_sums",
        *(f"_bias_dropout.{kernel}" for kernel in ("_backward_columns", "_backward_flat", "_forward")),
        *(f"_bias_gelu.{kernel}" for kernel in ("_backward_columns", "_backward_flat", "_forward")),
        "_cross_entropy._forward",
        *("_softmax._backward_on_chip", "_softmax._forward_on_chip"),
        *("_softmax_long.backward_long", "_softmax_long.forward_long", "_softmax_packed.forward_packed"),
    ]


@pytest.mark.parametrize(
    "blunt", ["0", "(answer[0],)", "(answer[0][0], answer[1])", "0 if type(argument) is int else answer"]
)
def test_a_key_that_is_too_coarse_would_be_seen(blunt: str, program: Callable[[str], Any]) -> None:
    code = f"""
way = fast_path(made.JITFunction)
def specialize(backend, argument, *flags):
    answer = way.specialize(backend, argument, *flags)
    return {blunt}
made.launcher.fast_path = lambda kernel_type: way._replace(specialize=specialize)
print(json.dumps(made.compare(600, 3)))
"""
    assert program(PRETEND + code)["differ"]


def test_really_compiled(program: Callable[[str], Any]) -> None:
    """Triton's own compiled kernels, for sm_90: handles, metadata and arguments are the same."""
    code = """
bias, seed = torch.zeros(32), torch.zeros(1, dtype=torch.int64)
shifted = torch.zeros(x.numel() + 1)[1:].view(x.shape)
calls = [
    softmax, lambda: made.softmax_forward(shifted, None, 0.3, False), lambda: made.softmax_backward(x, x, 0.3, True),
    lambda: made.gelu_backward(x, x, bias, "tanh", (True, True)),
    lambda: made.dropout_forward(x, bias, None, 0.1, True, seed),
]
same, ready = [], []
given = [x, shifted, bias, seed]
for call in calls:
    with made.through_triton(), made.recorded() as want:
        call()
    call()
    with made.recorded() as got, made.counted() as through:
        call()
    same.append([made.plain(one, given) for one in got] == [made.plain(one, given) for one in want])
    ready.append([len(got), len(through)])
    assert all(one[6:9] == (None, None, None) for one in got), "no metadata for hooks, and no hooks"
print(json.dumps([same, ready, got[0][4]]))
"""
    same, ready, function = program(START + code)
    assert same == [True] * 5
    assert ready == [[1, 0], [1, 0], [1, 0], [2, 0], [1, 0]]  # the sums for a bias are added up by a second kernel
    assert function == ["fusedops_bias_dropout_forward", 0]


def test_a_launcher_calls_no_more_functions_than_a_bare_launch_and_5(program: Callable[[str], Any]) -> None:
    """Including the allocation of what it returns; a launcher that goes through Triton calls 25 to 47 more.

    benchmarks/launch.py measures times, which depend on what else the machine does.
    """
    code = """
import sys
from benchmarks.launch import bare, calls

def functions_called(function):
    count = 0
    def count_call(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")
    sys.setprofile(count_call)
    function()
    sys.setprofile(None)
    return count

counts = {}
for name, launcher in calls("cpu").items():
    plain = bare(launcher)
    for function in (plain, launcher):  # compiled, and remembered
        function()
        function()
    counts[name] = [functions_called(plain), functions_called(launcher)]
print(json.dumps(counts))
"""
    counts = program(START + code)
    assert len(counts) == 8
    assert {name: (plain, whole) for name, (plain, whole) in counts.items() if whole > plain + 5} == {}


def test_large_memory_is_another_key_on_amd(program: Callable[[str], Any]) -> None:
    # AMD's compiler addresses memory of less than 2 GB with 32 bits: the same layout in a larger piece needs another
    code = """
from triton.backends.compiler import GPUTarget
made.driver.get_current_target = lambda: GPUTarget("hip", "gfx942", 64)
large = torch.empty(2**31 + 4096, dtype=torch.uint8).view(torch.float32)[:32].view(1, 32)  # its pages are not touched
small = torch.zeros(1, 32)
names = []
for t in (small, small, large, large, small):
    with made.recorded() as launches:
        made.softmax_forward(t, None, 0.3, False)
    names.append(launches[0][4][1])
print(json.dumps([[name == names[0] for name in names], ways(lambda: made.softmax_forward(large, None, 0.3, False))]))
"""
    same, counts = program(PRETEND + code)
    assert same == [True, True, False, False, True]
    assert counts == [1, 0]


# -------------------------------------------------------------------------------------------------- devices and streams


def test_the_current_device_and_stream_are_followed(program: Callable[[str], Any]) -> None:
    code = """
seen = []
for device, stream in ((0, 100), (0, 100), (0, 200), (1, 200), (1, 100), (0, 300)):
    made.driver.device, made.driver.stream = device, stream
    with made.recorded() as launches, made.counted() as through:
        softmax()
    seen.append([launches[0][3], launches[0][4][1], len(through)])
print(json.dumps(seen))
"""
    # handles are by device; a new stream costs nothing, a new device goes through Triton once
    assert program(START + code) == [[100, 0, 1], [100, 0, 0], [200, 0, 0], [201, 1, 1], [101, 1, 0], [300, 0, 0]]


def test_a_launch_goes_to_the_device_of_its_tensors(program: Callable[[str], Any]) -> None:
    code = """
import contextlib
from types import SimpleNamespace

@contextlib.contextmanager
def on(device):
    before, made.driver.device = made.driver.device, device
    yield
    made.driver.device = before

torch.cuda.device = on
from fusedops_triton.softmax._softmax import _forward_launch
launch, y = _forward_launch(x.shape, x.stride(), x.dtype, None, None, False), torch.empty_like(x)
seen = []
for device in (1, 1, 0, 2):
    home = SimpleNamespace(is_cuda=True, get_device=lambda: device, device=device)
    with made.recorded() as launches:
        launch(home, y, x, None, 0.3)
    seen.append([launches[0][3], launches[0][4][1], made.driver.device])
print(json.dumps(seen))
"""
    assert program(START + code) == [[101, 1, 0], [101, 1, 0], [100, 0, 0], [102, 2, 0]]


# ------------------------------------------------------------------------------------------------- when it is not taken


def test_who_looks_at_launches_sees_them(program: Callable[[str], Any]) -> None:
    code = """
from fusedops_triton.softmax import _softmax
runtime, seen, found = knobs.runtime, [], {}
softmax()
found["no hook"] = ways(softmax)

runtime.launch_enter_hook.add(seen.append)
found["enter hook"] = ways(softmax)
runtime.launch_enter_hook.remove(seen.append)

runtime.launch_exit_hook.add(seen.append)
found["exit hook"] = ways(softmax)
runtime.launch_exit_hook.remove(seen.append)

chain, runtime.launch_enter_hook = runtime.launch_enter_hook, seen.append
found["a hook that is no chain"] = ways(softmax)
runtime.launch_enter_hook = None
found["None"] = ways(softmax)
runtime.launch_enter_hook = chain

hooks = _softmax._forward_on_chip.pre_run_hooks
hooks.append(lambda *args, **kwargs: seen.append("ran"))
found["a kernel's own hook"] = ways(softmax) + [seen.count("ran")]
hooks.clear()

runtime.debug = True
found["debug"] = ways(softmax)
runtime.debug = False

knobs.compilation.instrumentation_mode = "consan"
found["instrumentation"] = ways(softmax)
del knobs.compilation.instrumentation_mode
found["no hook again"] = ways(softmax)
print(json.dumps(found))
"""
    assert program(PRETEND + code) == {
        "no hook": [1, 0],
        "enter hook": [1, 1],
        "exit hook": [1, 1],
        "a hook that is no chain": [1, 1],
        "None": [1, 0],
        "a kernel's own hook": [1, 1, 1],
        "debug": [1, 1],
        "instrumentation": [1, 1],
        "no hook again": [1, 0],
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("import triton; triton.__version__ = '3.10.0'", "ValueError: expected one of 3.6, 3.7, 3.8, 3.9, "),
        ("import triton._C.libtriton as c; del c.native_specialize_impl", "ImportError: cannot import name"),
        ("import triton._C.libtriton as c; c.native_specialize_impl = lambda x: x", "TypeError: "),
        (
            "import triton._C.libtriton as c; c.native_specialize_impl = lambda *x: ('i32', 0)",
            "ValueError: native_spec",
        ),
        ("made.CompiledKernel.run = None; del made.CompiledKernel.run", "AttributeError: "),
        ("del made.StubDriver.get_current_stream", "AttributeError: "),
        ("", "repeated launches bypass JITFunction.run of Triton 3."),
    ],
)
def test_with_another_triton_each_launch_goes_through_it(change: str, text: str, program: Callable[[str], Any]) -> None:
    code = f"""
import logging
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("fusedops.triton").addHandler(handler)
logging.getLogger("fusedops.triton").setLevel("DEBUG")
{change}
way = [fast_path(made.JITFunction) is not None for _ in range(3)]
print(json.dumps([way, lines]))
"""
    way, lines = program(PRETEND + code)
    assert way == [change == ""] * 3
    assert len(lines) == 1, "decided once"
    assert text in lines[0]


def test_what_is_not_the_short_way_is_plain_triton(program: Callable[[str], Any]) -> None:
    code = """
import triton
triton.__version__ = "3.10.0"
print(json.dumps([ways(softmax), ways(softmax)]))
"""
    assert program(PRETEND + code) == [[1, 1], [1, 1]]


def test_the_interpreter_is_plain_triton(log_of: Callable[..., list[logging.LogRecord]]) -> None:
    launcher.fast_path.cache_clear()
    log = log_of("fusedops.triton", logging.DEBUG)
    for _ in range(2):
        _softmax.softmax_forward(torch.randn(2, 5), None, 1.0, False)
    (line,) = [record.getMessage() for record in log]
    assert line.startswith("each launch goes through Triton 3.")
    assert "InterpretedFunction, as under TRITON_INTERPRET=1, expected JITFunction" in line


# ------------------------------------------------------------------------------------------------------------- layouts


def _joined(t: torch.Tensor, strides: tuple[int, ...], full: tuple[int, ...]) -> torch.Tensor:
    """Return what a kernel reads through these strides."""
    batch = math.prod(full[:-3])
    return t.as_strided((batch, *((1, 1, 1, *full)[-3:])), strides, t.storage_offset()).reshape(full)


def test_rows_are_found_however_a_tensor_lies() -> None:
    choose = random.Random(1)
    ways = {"walked": 0, "copied": 0}
    for _ in range(2000):
        full = tuple(choose.choice((1, 2, 3)) for _ in range(choose.randrange(2, 8)))
        own = tuple(choose.choice((1, size)) for size in full)[choose.randrange(len(full)) :]
        order = choose.sample(range(len(own)), len(own)) if choose.random() < 0.4 else range(len(own))
        t = torch.randn([own[at] for at in order]).permute([list(order).index(at) for at in range(len(own))])
        assert tuple(t.shape) == own
        walkable = _softmax._make_supported(t, torch.Size(full))
        strides = _softmax._walk(tuple(walkable.shape), walkable.stride(), full)
        assert strides is not None
        assert strides[-1] in (0, 1)
        assert torch.equal(_joined(walkable, strides, full), t.expand(full))
        ways["walked" if walkable is t else "copied"] += 1
    assert min(ways.values()) > 200


def test_a_profiler_sees_whose_kernel_it_is_and_its_bytes(program: Callable[[str], Any]) -> None:
    code = """
knobs.runtime.launch_enter_hook.add(print)  # the stub driver does not call it
with made.recorded() as launches:
    made.softmax_forward(x.bfloat16(), None, 0.3, False)
seen = [launch[6].get() for launch in launches]
print(json.dumps([[each["name"], each["bytes"]] for each in seen]))
"""
    assert program(START + code) == [["fusedops_softmax_forward_on_chip", 2 * 2 * 2 * 3 * 8 * 32]]
