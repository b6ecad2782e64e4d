"""FUSEDOPS_AUTOTUNE=1: what is tuned, when, what is kept and where. Timers are stubs, kernels interpreted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.errors import OutOfResources

from fusedops import FusedOpsWarning
from fusedops_triton import _autotune, _launch, _settings
from fusedops_triton._bias_dropout import dropout_backward, dropout_forward
from fusedops_triton._bias_gelu import gelu_backward, gelu_forward
from fusedops_triton._launch import Launch
from fusedops_triton._settings import CHIPS, Plan, Tile, neighbours, plan, tile
from fusedops_triton._softmax import softmax_backward, softmax_forward

X = torch.randn(3, 5, 40)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Nothing is known from before, or for after."""
    forget()
    yield
    forget()


def forget() -> None:
    _autotune.forget()
    _launch.forget_layouts()


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of the files, not yet there; autotuning is asked for, for tensors of any size."""
    monkeypatch.setenv("FUSEDOPS_AUTOTUNE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_autotune, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "fusedops"


class Timer:
    """Says that the last setting is the quickest, and notes how many it was asked about."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, calls: Sequence[Callable[[], object]], home: Tensor) -> list[float]:
        for call in calls:
            call()
        self.asked.append(len(calls))
        return [float(len(calls) - at) for at in range(len(calls))]


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    stub = Timer()
    monkeypatch.setattr(_autotune, "timer", stub)
    return stub


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every launch: kernel, programs, warps."""
    seen: list[tuple[str, int, int]] = []
    through = Launch._through_triton

    def noting(self: Launch, args: tuple[Any, ...]) -> Any:
        seen.append((self.kernel.fn.__name__, self.grid[0], self.warps))
        return through(self, args)

    monkeypatch.setattr(Launch, "_through_triton", noting)
    return seen


def only(folder: pathlib.Path) -> pathlib.Path:
    (file,) = folder.iterdir()
    return file


def said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.category is FusedOpsWarning for w in caught)
    return [str(w.message) for w in caught]


def softmax(x: Tensor = X) -> Tensor:
    return softmax_forward(x, None, 0.3, False)


# ------------------------------------------------------------------------------------------------------------ in memory


def test_the_first_call_tunes_and_the_second_does_not(
    cache: pathlib.Path, timer: Timer, launched: list[tuple[str, int, int]]
) -> None:
    want = torch.softmax(0.3 * X, -1)
    table = plan(40, 4, 1)
    settings = [table, *neighbours(table)]
    torch.testing.assert_close(softmax(), want)
    assert timer.asked == [len(settings)] == [4]
    # each is tried once, then timed; then the last, which the timer liked best, serves the call
    best = ("_forward_on_chip", _settings.ceil_div(15, settings[-1].rows), settings[-1].warps)
    assert len(set(launched)) >= 3
    assert len(launched) == 2 * len(settings) + 1
    assert launched[-1] == best
    launched.clear()
    torch.testing.assert_close(softmax(), want)
    assert launched == [best]
    assert len(timer.asked) == 1


def test_what_is_known_serves_other_shapes_of_the_same_width(cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    softmax(torch.randn(2, 64))
    softmax_forward(X, torch.zeros(5, 40, dtype=torch.bool), 1.0, True)
    assert len(timer.asked) == 1
    softmax(torch.randn(2, 65))
    softmax(X.double())
    softmax_backward(X, X, 0.3, False)
    assert len(timer.asked) == 4
    names = json.loads(only(cache).read_text())["settings"]
    assert list(names) == [
        "_softmax._forward_on_chip 64 4",
        "_softmax._forward_on_chip 128 4",
        "_softmax._forward_on_chip 64 8",
        "_softmax._backward_on_chip 64 4",
    ]


def test_flat_kernels_are_tuned_to_the_same_bits(cache: pathlib.Path, timer: Timer, monkeypatch: Any) -> None:
    x, bias, seed = torch.randn(4, 600), torch.randn(600), torch.tensor([5])
    calls: list[Callable[[], Any]] = [
        lambda: gelu_forward(x, bias, "tanh"),
        lambda: gelu_backward(x, x, bias, "tanh", (True, False))[0],
        lambda: dropout_forward(x, bias, x, 0.3, True, seed),
        lambda: dropout_backward(x, seed, bias, 0.3, True, x.dtype, (True, False))[0],
    ]
    tuned = [call() for call in calls]
    assert len(timer.asked) == 4
    monkeypatch.delenv("FUSEDOPS_AUTOTUNE")
    forget()
    for call, once in zip(calls, tuned, strict=True):
        assert torch.equal(call(), once)
    assert len(timer.asked) == 4


def test_the_sums_for_a_bias_are_never_tuned(cache: pathlib.Path, timer: Timer) -> None:
    x, bias, seed = torch.randn(100, 48), torch.randn(48), torch.tensor([5])
    gelu_backward(x, x, bias, "tanh", (True, True))
    dropout_backward(x, seed, bias, 0.3, True, x.dtype, (True, True))
    assert timer.asked == []
    assert not cache.exists()


def test_a_small_call_is_not_timed_and_a_larger_one_later_is(
    cache: pathlib.Path, timer: Timer, launched: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autotune, "LEAST_BYTES", X.nbytes)
    softmax(X[:1])
    table = plan(40, 4, 1)
    assert launched == [("_forward_on_chip", 1, table.warps)]
    assert timer.asked == []
    softmax()
    assert len(timer.asked) == 1
    launched.clear()
    softmax(X[:1])
    assert launched[-1][2] == neighbours(table)[-1].warps
    assert len(launched) == 1


def test_under_graph_capture_the_table_serves_and_nothing_is_decided(
    cache: pathlib.Path, timer: Timer, launched: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autotune, "_capturing", lambda home: True)
    softmax()
    assert launched == [("_forward_on_chip", 1, plan(40, 4, 1).warps)]
    assert timer.asked == []
    monkeypatch.setattr(_autotune, "_capturing", lambda home: False)
    softmax()
    assert len(timer.asked) == 1


def test_settings_that_spill_or_do_not_fit_are_left_out(
    cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled:
        n_spills = 0

    table = plan(40, 4, 1)
    outcomes: dict[int, Any] = {}
    monkeypatch.setattr(Launch, "_through_triton", lambda self, args: outcomes[self.warps](self))

    def spills(launch: Launch) -> Compiled:
        compiled = Compiled()
        compiled.n_spills = 4
        return compiled

    def does_not_fit(launch: Launch) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    outcomes = {table.warps: lambda launch: Compiled(), table.warps * 2: spills, table.warps // 2: does_not_fit}
    same = [one for one in (table, *neighbours(table)) if one.warps == table.warps]
    softmax()
    assert timer.asked == [len(same)] == [3]
    outcomes = {table.warps: spills, table.warps * 2: does_not_fit}
    timer.asked.clear()
    forget()
    softmax(X[..., :20])
    assert timer.asked == [1], "the table's own is always there"


def test_an_error_of_a_kernel_is_not_swallowed(
    cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Launch, args: tuple[Any, ...]) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(Launch, "_through_triton", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        softmax()
    assert not cache.exists()


def test_the_timer_takes_medians_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            assert self.at >= 0

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def takes(name: str, usual: float) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            clock[0] += 100.0 if order.count(name) == 3 else usual  # once something else had the GPU

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    times = _autotune.cuda_milliseconds([takes("slow", 3.0), takes("quick", 2.0)], X)
    assert times == [3.0, 2.0]
    assert order == ["slow", "quick"] * _autotune.TURNS


# ------------------------------------------------------------------------------------------------------------- the file


def test_the_file_says_what_it_is_of(cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    content = json.loads(only(cache).read_text())
    table = plan(40, 4, 1)
    assert content["settings"] == {"_softmax._forward_on_chip 64 4": list(neighbours(table)[-1])}
    assert content["key"] == {
        "device": "cpu interpreter",
        "torch": torch.__version__,
        "triton": content["key"]["triton"],
        "sources": content["key"]["sources"],
    }
    assert len(content["key"]["sources"]) == 64
    assert only(cache).name.startswith("autotune-cpu-interpreter-")


SCRIPT = """
import json, warnings
import torch
torch.set_num_threads(1)
from fusedops_triton import _autotune
from fusedops_triton._softmax import softmax_forward
asked = []
def timer(calls, home):
    asked.append(len(calls))
    return [float(-at) for at in range(len(calls))]
_autotune.timer, _autotune.LEAST_BYTES = timer, 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for width in {widths}:
        softmax_forward(torch.zeros(3, 5, width), None, 0.3, False)
print(json.dumps([len(asked), [str(w.message) for w in caught]]))
"""


@pytest.fixture
def process(python: Callable[..., Any], cache: pathlib.Path) -> Callable[..., Any]:
    """Another process, which calls softmax for each width: how often it tuned, and what it warned of."""

    def run(*widths: int, before: str = "", **environ: str) -> Any:
        environ = {"TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(cache.parent), "FUSEDOPS_AUTOTUNE": "1", **environ}
        return python(before + SCRIPT.replace("{widths}", repr(widths)), *sys.path, **environ)

    return run


def test_another_process_reads_the_file(process: Callable[..., Any], cache: pathlib.Path) -> None:
    assert process(40) == [1, []]
    assert process(40) == [0, []]
    assert process(40, 70) == [1, []]
    assert process(40, 70) == [0, []]
    assert len(list(cache.iterdir())) == 1, "no temporary file is left"


@pytest.mark.parametrize(
    "before",
    [
        "import triton; triton.__version__ = '3.6.1'\n",
        "import torch; torch.__version__ = '2.11.0'\n",
        "import fusedops_triton._autotune as a; a._device_name = lambda home: 'NVIDIA H100'\n",
        "import pathlib; p = pathlib.Path; r = p.read_bytes; p.read_bytes = lambda self: r(self) + b'#'\n",
    ],
    ids=["triton", "torch", "device", "sources"],
)
def test_another_key_is_another_file(before: str, process: Callable[..., Any], cache: pathlib.Path) -> None:
    assert process(40) == [1, []]
    assert process(40, before=before) == [1, []]
    assert len(list(cache.iterdir())) == 2
    assert process(40) == [0, []]


def test_a_file_with_anothers_key_is_ignored(cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    file = only(cache)
    content = json.loads(file.read_text())
    content["key"]["triton"] = "3.0.0"
    file.write_text(json.dumps(content))
    forget()
    (text,) = said(softmax)
    assert "ValueError: it is of {'device': 'cpu interpreter', " in text
    assert len(timer.asked) == 2


def test_two_processes_keep_each_others_settings(cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    file = only(cache)
    content = json.loads(file.read_text())
    content["settings"]["_softmax._forward_on_chip 8 4"] = [128, 8, 1, True]  # another process's, meanwhile
    file.write_text(json.dumps(content))
    softmax(torch.randn(2, 9))
    assert list(json.loads(file.read_text())["settings"]) == [
        "_softmax._forward_on_chip 64 4",
        "_softmax._forward_on_chip 8 4",
        "_softmax._forward_on_chip 16 4",
    ]


def test_processes_that_write_at_once_leave_a_whole_file(process: Callable[..., Any], cache: pathlib.Path) -> None:
    widths = [(8, 40), (16, 70), (40, 300)]
    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(lambda some: process(*some), widths))
    assert all(said == [] for _, said in outcomes), outcomes
    settings = json.loads(only(cache).read_text())["settings"]
    possible = {f"_softmax._forward_on_chip {width} 4" for width in (8, 16, 64, 128, 512)}
    assert set(settings) <= possible
    assert len(settings) >= 2, "the last to write keeps its own"


BROKEN = {
    "": "JSONDecodeError: ",
    '{"key": {"device": "cpu inter': "JSONDecodeError: ",
    "[]": "TypeError: ",
    "{}": "KeyError: 'key'",
    "\udcff": "UnicodeDecodeError: ",
    '"settings": 3': "AttributeError: ",
    '"settings": {"_softmax._forward_on_chip 64 4": 7}': "TypeError: settings are no lists",
    '"settings": {"_softmax._forward_on_chip 64 4": [3, 64, 1, true]}': "[3, 64, 1, True] for _softmax._forward_on_",
}


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_ignored_with_one_warning(content: str, cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    file = only(cache)
    key = json.dumps(json.loads(file.read_text())["key"])
    text = f'{{"key": {key}, {content}}}' if content.startswith('"settings"') else content
    file.write_bytes(text.encode(errors="surrogateescape"))
    forget()
    (warning,) = said(lambda: [softmax(), softmax(), softmax(torch.randn(2, 9)), softmax()])
    assert warning.startswith(f"{file}: {BROKEN[content]}")
    assert warning.endswith(
        ". Without it every process tunes its launch settings anew; delete the file, and the next run writes a new one"
    )
    assert timer.asked == [4, 4, len([0, *neighbours(plan(9, 4, 1))])]
    assert file.read_bytes() == text.encode(errors="surrogateescape"), "it is left as it is"
    file.unlink()
    forget()
    assert said(softmax) == []
    assert only(cache) == file


def test_a_file_that_may_not_be_read(cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    file = only(cache)
    file.unlink()
    file.mkdir()  # what no user may read, root included
    forget()
    (warning,) = said(lambda: [softmax(), softmax(torch.randn(2, 9))])
    assert warning.startswith(f"{file}: IsADirectoryError: ")
    assert warning.endswith("make it readable, or delete it")


def test_a_folder_that_cannot_be_made(cache: pathlib.Path, timer: Timer) -> None:
    cache.parent.write_text("a file, where the folder should be")
    (warning,) = said(lambda: [softmax(), softmax(), softmax(torch.randn(2, 9))])
    assert warning.startswith(f"{cache}/autotune-cpu-interpreter-")
    assert "cannot be written: " in warning
    assert warning.endswith("let XDG_CACHE_HOME name a folder that can be written, or unset FUSEDOPS_AUTOTUNE")
    assert len(timer.asked) == 2


def test_a_read_only_folder(cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)

    def refused(dir: pathlib.Path, suffix: str) -> None:  # as by a folder of mode 555, which does not stop root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    (warning,) = said(lambda: [softmax(), softmax(), softmax(torch.randn(2, 9))])
    assert f"cannot be written: PermissionError: [Errno 13] Permission denied: '{cache}'. Without it every" in warning
    assert len(timer.asked) == 2
    assert list(cache.iterdir()) == []


def test_a_full_disk_leaves_the_file_as_it_was(
    cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    softmax()
    before = only(cache).read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", full)
    (warning,) = said(lambda: softmax(torch.randn(2, 9)))
    assert "cannot be written: OSError: [Errno 28] No space left on device. " in warning
    assert only(cache).read_bytes() == before, "and no temporary file is left"


# ------------------------------------------------------------------------------------------------------- when not asked


@pytest.mark.parametrize("value", [None, "", "0", " "])
def test_not_asked_for_nothing_is_timed_and_no_file_is_touched(
    value: str | None, cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSEDOPS_AUTOTUNE")
    if value is not None:
        monkeypatch.setenv("FUSEDOPS_AUTOTUNE", value)
    monkeypatch.setattr(_autotune, "Store", None)  # whoever would look at a file fails
    assert type(_autotune.tuned(lambda setting: "a launch", tile(4), 0, 4)) is str
    softmax()
    gelu_forward(X, None, "tanh")
    assert timer.asked == []
    assert not cache.parent.exists()


def test_another_value_is_warned_of_once(cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_AUTOTUNE", "yes")
    assert said(lambda: [softmax(), softmax(torch.randn(2, 9))]) == [
        "FUSEDOPS_AUTOTUNE='yes' has no effect; set it to 1 to have launch settings tuned, or unset it"
    ]
    assert timer.asked == []


def test_the_folder_is_the_users(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("", "relative/folder"):  # which the XDG specification has ignored
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert _autotune.Store("a GPU").path.parent == tmp_path / ".cache" / "fusedops"


# ------------------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("element_size", [2, 4, 8])
def test_settings_keep_the_limits_of_each_chip(chip: str, element_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = CHIPS[chip]
    monkeypatch.setattr(_settings, "chip", limits)
    settings: list[Plan | Tile] = [tile(element_size)]
    settings += [plan(1 << bits, element_size, inputs) for bits in range(21) for inputs in (1, 2)]
    for setting in settings:
        assert 1 <= setting.warps * limits.lanes <= limits.threads
        # a multiple of 16 bytes for each thread of a row, where there are so many
        rows = 1 if isinstance(setting, Tile) else setting.rows
        each = rows * setting.block / (setting.warps * limits.lanes)
        assert each * element_size >= 16 or setting.block * rows <= 128 * limits.lanes
        assert setting not in neighbours(setting)
        for other in neighbours(setting):
            assert 1 <= other.warps * limits.lanes <= limits.threads
            assert other.block & (other.block - 1) == 0
            assert not isinstance(other, Tile) or other.block <= _settings.LARGEST_TILE
            if isinstance(other, Plan) and isinstance(setting, Plan):
                assert other.rows <= _settings.SHORT_ROWS
                assert other.on_chip == setting.on_chip
                assert other.block == setting.block or not setting.on_chip, "a row on chip fits"
