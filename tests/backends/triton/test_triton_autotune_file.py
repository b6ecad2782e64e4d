"""FUSEDOPS_AUTOTUNE=1: the file of settings, and when it is not read or written."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import pwd
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fork_server import ForkServer

pytest.importorskip("triton", reason="triton is not installed")
from autotune_cases import AT_ONCE, Timer, X, forget, only, softmax

from fusedops import FusedOpsWarning
from fusedops_triton import _autotune, _own_file, _settings
from fusedops_triton._bias_gelu import gelu_forward
from fusedops_triton._settings import CHIPS, Plan, Tile, neighbours, plan, tile

pytestmark = pytest.mark.usefixtures("nothing_tuned")


def warnings_of(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.category is FusedOpsWarning for w in caught)
    return [str(w.message) for w in caught]


def test_the_file_has_its_key(cache: pathlib.Path, timer: Timer) -> None:
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


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A process that has imported torch, triton and the backend, for interpreted kernels."""
    preload = f"import sys; sys.path[:0] = {sys.path!r}; import torch, triton, fusedops_triton._softmax"
    server = ForkServer(preload, {"TRITON_INTERPRET": "1"})
    yield server
    server.close()


@pytest.fixture
def process(server: ForkServer, cache: pathlib.Path) -> Callable[..., Any]:
    """Call softmax for each width in another process; return how often it tuned, and its warnings."""

    def run(*widths: int, before: str = "", **environ: str) -> Any:
        environ = {"XDG_CACHE_HOME": str(cache.parent), "FUSEDOPS_AUTOTUNE": "1", **environ}
        return server.run(before + SCRIPT.replace("{widths}", repr(widths)), **environ)

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
    (text,) = warnings_of(softmax)
    assert "ValueError: got key {'device': 'cpu interpreter', " in text
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


def test_processes_that_write_at_once_leave_a_whole_file(server: ForkServer, cache: pathlib.Path) -> None:
    scripts = [SCRIPT.replace("{widths}", repr(widths)) for widths in ((8, 40), (16, 70), (40, 300))]
    environ = {"XDG_CACHE_HOME": str(cache.parent), "FUSEDOPS_AUTOTUNE": "1"}
    outcomes = server.run(AT_ONCE.replace("{scripts}", repr(scripts)), **environ)
    assert all(caught == [] for _, caught in outcomes), outcomes
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
    "[" * 200_000: "RecursionError: ",
    '"settings": 3': "AttributeError: ",
    '"settings": {"_softmax._forward_on_chip 64 4": 7}': "TypeError: expected a list for each setting",
    '"settings": {"_softmax._forward_on_chip 64 4": [3, 64, 1, true]}': "got [3, 64, 1, True] for _softmax.",
}


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_ignored_with_one_warning(content: str, cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    file = only(cache)
    key = json.dumps(json.loads(file.read_text())["key"])
    text = f'{{"key": {key}, {content}}}' if content.startswith('"settings"') else content
    file.write_bytes(text.encode(errors="surrogateescape"))
    forget()
    (warning,) = warnings_of(lambda: [softmax(), softmax(), softmax(torch.randn(2, 9)), softmax()])
    assert warning.startswith(f"{file}: {BROKEN[content]}")
    assert warning.endswith(
        ". Without this file, every process tunes launch settings again; to fix: delete the file; the next run "
        "writes a new one"
    )
    assert timer.asked == [4, 4, len([0, *neighbours(plan(9, 4, 1))])]
    assert file.read_bytes() == text.encode(errors="surrogateescape"), "it is left as it is"
    file.unlink()
    forget()
    assert warnings_of(softmax) == []
    assert only(cache) == file


def test_a_file_that_may_not_be_read(cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    file = only(cache)
    file.unlink()
    file.mkdir()  # what no user may read, root included
    forget()
    (warning,) = warnings_of(lambda: [softmax(), softmax(torch.randn(2, 9))])
    assert warning.startswith(f"{file}: got drwx")
    assert "expected a regular file" in warning
    assert warning.endswith("delete the file; the next run writes a new one")


def _symbolic_link(file: pathlib.Path) -> str:
    elsewhere = file.with_name("elsewhere.json")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    return "OSError: [Errno 40] Too many levels of symbolic links"


def _fifo(file: pathlib.Path) -> str:
    file.unlink()
    os.mkfifo(file)
    return "got prw"


def _writable_by_others(file: pathlib.Path) -> str:
    file.chmod(0o666)
    return "got -rw-rw-rw-, expected a file that no other user can write"


def _too_large(file: pathlib.Path) -> str:
    with file.open("ab") as end:
        end.truncate(_autotune.MOST_BYTES + 1)
    return f"got {_autotune.MOST_BYTES + 1} bytes, expected at most {_autotune.MOST_BYTES}"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the error texts are its own")
@pytest.mark.parametrize("change", [_symbolic_link, _fifo, _writable_by_others, _too_large])
def test_a_file_that_another_user_may_have_written_is_ignored_and_left_as_it_is(
    change: Callable[[pathlib.Path], str], cache: pathlib.Path, timer: Timer
) -> None:
    softmax()
    file = only(cache)
    expected = change(file)
    forget()
    before = sorted((path.name, path.lstat().st_mode, path.lstat().st_size) for path in cache.iterdir())
    (warning,) = warnings_of(lambda: [softmax(), softmax(torch.randn(2, 9))])
    assert warning.startswith(f"{file}: {expected}")
    assert warning.endswith(
        "make it readable, or delete it" if "links" in expected else "delete the file; the next run writes a new one"
    )
    assert len(timer.asked) == 3, "the settings were timed, not read"
    assert sorted((path.name, path.lstat().st_mode, path.lstat().st_size) for path in cache.iterdir()) == before


def test_a_file_of_another_user_is_ignored(cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    softmax()
    forget()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    (warning,) = warnings_of(softmax)
    assert f"got a file of user {owner}, expected one of user {owner + 1}. " in warning
    assert warning.endswith("delete the file; the next run writes a new one")


def test_a_file_that_grows_while_it_is_read_is_cut(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    file.chmod(0o600)
    assert _own_file.read_own_file(file, 10) == b"x" * 10
    monkeypatch.setattr(_own_file, "_problem", lambda status, most_bytes: "")
    with pytest.raises(_own_file.NotOwnFileError, match="got more than 9 bytes"):
        _own_file.read_own_file(file, 9)


def test_what_is_written_is_this_users_alone(cache: pathlib.Path, timer: Timer) -> None:
    before = os.umask(0)
    try:
        softmax()
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert only(cache).stat().st_mode & 0o777 == 0o600


def test_without_a_home_folder_settings_are_kept_in_the_process(
    cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)

    def unknown(user: int) -> None:  # as of a container with a user id that has no name
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    (warning,) = warnings_of(lambda: [softmax(), softmax(), softmax(torch.randn(2, 9))])
    assert warning == (
        "FUSEDOPS_AUTOTUNE: got no home folder and no XDG_CACHE_HOME. Without this file, every process tunes launch "
        "settings again; to fix: set XDG_CACHE_HOME to a writable folder, or unset FUSEDOPS_AUTOTUNE"
    )
    assert len(timer.asked) == 2


def test_a_folder_that_cannot_be_made(cache: pathlib.Path, timer: Timer) -> None:
    cache.parent.write_text("a file, where the folder should be")
    (warning,) = warnings_of(lambda: [softmax(), softmax(), softmax(torch.randn(2, 9))])
    assert warning.startswith(f"{cache}/autotune-cpu-interpreter-")
    assert "cannot be written: " in warning
    assert warning.endswith("set XDG_CACHE_HOME to a writable folder, or unset FUSEDOPS_AUTOTUNE")
    assert len(timer.asked) == 2


def test_a_read_only_folder(cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)

    def refused(dir: pathlib.Path, suffix: str) -> None:  # as by a folder of mode 555, which does not stop root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    (warning,) = warnings_of(lambda: [softmax(), softmax(), softmax(torch.randn(2, 9))])
    assert f"cannot be written: PermissionError: [Errno 13] Permission denied: '{cache}'. Without this file" in warning
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
    (warning,) = warnings_of(lambda: softmax(torch.randn(2, 9)))
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
    assert warnings_of(lambda: [softmax(), softmax(torch.randn(2, 9))]) == [
        "FUSEDOPS_AUTOTUNE='yes' has no effect; set it to 1 to tune launch settings, or unset it"
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
def test_settings_keep_the_bounds_of_each_chip(chip: str, element_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        others = neighbours(setting)
        assert setting not in others
        for other in others:
            assert 1 <= other.warps * limits.lanes <= limits.threads
            assert other.block & (other.block - 1) == 0
            assert not isinstance(other, Tile) or other.block <= _settings.LARGEST_TILE
            if isinstance(other, Plan) and isinstance(setting, Plan):
                assert other.rows <= _settings.SHORT_ROWS
                assert other.on_chip == setting.on_chip
                assert other.block == setting.block or not setting.on_chip, "a row on chip fits"
