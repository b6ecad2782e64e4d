"""FUSEDOPS_AUTOTUNE=1: the GPU tries a few settings beside the table's, and the quickest is kept, also for later runs.

Only when asked for. The first call of a kernel, width and element size on a device that is large enough to be timed
tries the table's setting (``_settings.py``) and its neighbours, on the call's own tensors: kernels write what they
return and nothing else, so that they may run again. What won is kept in the process, and in a JSON file of the user's
cache folder, for this GPU, these versions and these sources.

Kernels that sum the gradient of a bias are never tuned: their settings are the order of the sum, and so its bits. Those
of the flat tiles cannot change a bit. Softmax's can, in the last place of a row's sum: its bits are then those of one
machine and one file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fusedops import FusedOpsWarning
from fusedops_triton._launch import Launch
from fusedops_triton._settings import Plan, Tile, neighbours

VARIABLE = "FUSEDOPS_AUTOTUNE"

#: The smallest output that is timed. One that is written and read at 3 TB/s takes 20 us then, twice what a launch costs
#: the host: below, the host would be timed.
LEAST_BYTES = 32 * 2**20

#: Calls of each setting that are timed, in turns.
TURNS = 20

S = TypeVar("S", Plan, Tile)


def tuned(make: Callable[[S], Launch], table: S, width: int, element_size: int) -> Launch | Tuned:
    """What to launch: of the table's setting, or where autotuning was asked for, of the best.

    Args:
        make: a launch with a setting.
        table: the table's setting.
        width: columns of a row, as a power of two; 0 where a kernel knows none.
        element_size: bytes.
    """
    launch = make(table)
    return Tuned(make, table, launch, width, element_size) if _asked() else launch


@functools.cache
def _asked() -> bool:
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        _warn(f"{VARIABLE}={value!r} has no effect; set it to 1 to have launch settings tuned, or unset it")
    return value == "1"


class Tuned:
    """A launch whose setting is found by the first call on each device. Called as ``Launch`` is."""

    def __init__(self, make: Callable[[S], Launch], table: S, launch: Launch, width: int, element_size: int) -> None:
        self._make: Callable[[Any], Launch] = make
        self._table: Plan | Tile = table
        self._launch = launch
        kernel: Any = launch.kernel
        module = kernel.fn.__module__.rpartition(".")[2]
        self._name = f"{module}.{kernel.fn.__name__} {width} {element_size}"
        self._found: dict[int, Launch] = {}

    def __call__(self, home: Tensor, *args: Any) -> Any:
        """Launches on the device of ``home``, which is as large as the output."""
        launch = self._found.get(home.get_device()) or self._find(home, args)
        return launch(home, *args)

    def _find(self, home: Tensor, args: tuple[Any, ...]) -> Launch:
        store = store_of(_device_name(home))
        settings = [self._table, *neighbours(self._table)]
        setting = store.get(self._name, settings)
        if setting is None:
            if home.nbytes < LEAST_BYTES or _capturing(home):
                return self._launch  # and the next call asks again
            setting = self._best(settings, home, args)
            store.put(self._name, setting)
        launch = self._launch if setting == self._table else self._make(setting)
        self._found[home.get_device()] = launch
        return launch

    def _best(self, settings: Sequence[Plan | Tile], home: Tensor, args: tuple[Any, ...]) -> Plan | Tile:
        calls: dict[Plan | Tile, Callable[[], object]] = {}
        for setting in settings:
            launch = self._launch if setting == self._table else self._make(setting)
            try:
                compiled = launch(home, *args)
            except OutOfResources:  # more registers, threads or shared memory than there are
                continue
            if setting == self._table or not getattr(compiled, "n_spills", 0):
                calls[setting] = functools.partial(launch, home, *args)
        times = timer(list(calls.values()), home)
        return min(zip(times, calls), key=lambda pair: pair[0])[1]


def cuda_milliseconds(calls: Sequence[Callable[[], object]], home: Tensor) -> list[float]:
    """The median time of each call, by events, in turns so that noise hits all alike."""
    with torch.cuda.device(home.device):
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(TURNS):
            for call, found in zip(calls, times):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end))
    return [median(found) for found in times]


#: What times settings; tests put another here.
timer: Callable[[Sequence[Callable[[], object]], Tensor], list[float]] = cuda_milliseconds


def _capturing(home: Tensor) -> bool:
    return home.is_cuda and torch.cuda.is_current_stream_capturing()


def _device_name(home: Tensor) -> str:
    return torch.cuda.get_device_name(home.device) if home.is_cuda else f"{home.device.type} interpreter"


# ------------------------------------------------------------------------------------------------------------ the file


@functools.cache
def store_of(device: str) -> Store:
    """What is known of a kind of GPU, by its name."""
    return Store(device)


class Store:
    """The settings that won on one kind of GPU, in this process and in its file."""

    def __init__(self, device: str) -> None:
        sources = hashlib.sha256()
        for source in sorted(Path(__file__).parent.glob("_*.py")):
            sources.update(source.read_bytes())
        self._key = {
            "device": device,
            "torch": str(torch.__version__),
            "triton": triton.__version__,
            "sources": sources.hexdigest(),
        }
        name = re.sub(r"\W+", "-", device).strip("-").lower()
        digest = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:12]
        self.path = _cache_folder() / "fusedops" / f"autotune-{name}-{digest}.json"
        self._writes = True  # no more after a file that could not be read or written: one warning is enough
        self._settings = self._read()

    def get(self, name: str, possible: Sequence[Plan | Tile]) -> Plan | Tile | None:
        """The setting that won, or None. One that is not among the ``possible`` is none."""
        values = self._settings.get(name)
        if values is None:
            return None
        found = next((setting for setting in possible if list(setting) == values), None)
        if found is None:
            self._give_up(f"{values} for {name} is none of {[list(setting) for setting in possible]}", _DELETE)
            del self._settings[name]
        return found

    def put(self, name: str, setting: Plan | Tile) -> None:
        """Keeps a setting that won, beside those that other processes have written meanwhile.

        Of two that write in the same millisecond one loses its setting: a later process finds it again.
        """
        self._settings[name] = list(setting)
        if self._writes:
            self._settings = self._read() | self._settings
        if self._writes:
            self._write()

    def _read(self) -> dict[str, list[Any]]:
        try:
            written = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self._give_up(f"{type(error).__name__}: {error}", "make it readable, or delete it")
            return {}
        try:
            content: Any = json.loads(written)
            if content["key"] != self._key:
                raise ValueError(f"it is of {content['key']}, not of {self._key}")
            settings = cast("dict[str, list[Any]]", content["settings"])
            if not all(type(values) is list for values in settings.values()):
                raise TypeError("settings are no lists")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._give_up(f"{type(error).__name__}: {error}", _DELETE)
            return {}
        return settings

    def _write(self) -> None:
        # a file of its own, then renamed: who reads sees the old one or the new one, never a part
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, written = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"key": self._key, "settings": self._settings}, file, indent=1)
                os.replace(written, self.path)
            except OSError:
                os.unlink(written)
                raise
        except OSError as error:
            todo = f"let XDG_CACHE_HOME name a folder that can be written, or unset {VARIABLE}"
            self._give_up(f"cannot be written: {type(error).__name__}: {error}", todo)

    def _give_up(self, what: str, todo: str) -> None:
        if self._writes:
            self._writes = False
            _warn(f"{self.path}: {what}. Without it every process tunes its launch settings anew; {todo}")


_DELETE = "delete the file, and the next run writes a new one"


def _cache_folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"  # as the XDG specification has it


def _warn(text: str) -> None:
    warnings.warn(text, FusedOpsWarning, stacklevel=2)


def forget() -> None:
    """For tests: the variable and the files are read again."""
    _asked.cache_clear()
    store_of.cache_clear()
