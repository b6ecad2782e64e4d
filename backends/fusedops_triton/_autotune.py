"""Autotuning of launch settings, enabled by FUSEDOPS_AUTOTUNE=1. The fastest setting is stored for later runs.

Autotuning runs at the first call of a kernel, width and element size on a device, if the output is large enough to be
timed. It times the default setting (``_settings.py``) and its neighbours on the tensors of the call. Kernels only write
their results, so they can run repeatedly. The fastest setting is cached in the process, and in a JSON file in the
user's cache folder for this GPU, these versions and these sources.

Kernels that sum the gradient of a bias are never tuned: their settings determine the order of the sum, and with it the
bits of the result. The settings of flat tiles do not change any bit. The settings of softmax can change the last place
of the sum of a row, so with autotuning its bits depend on the machine and the file.
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
from fusedops_triton._own_file import NotOwnFileError, cache_folder, read_own_file
from fusedops_triton._settings import Plan, Tile, neighbours

VARIABLE = "FUSEDOPS_AUTOTUNE"

#: The smallest output that is timed. At 3 TB/s, writing and reading it takes 20 us, twice the host time of a launch.
#: With smaller outputs, the host time would be measured.
LEAST_BYTES = 32 * 2**20

#: Number of timed calls of each setting. The settings take turns.
TURNS = 20

#: The largest file that is read. An entry takes about 70 bytes.
MOST_BYTES = 2**20

S = TypeVar("S", Plan, Tile)


def tuned(make_launch: Callable[[S], Launch], default: S, width: int, element_size: int) -> Launch | Tuned:
    """Return a launch with the default setting, or one with the fastest setting if autotuning is enabled.

    Args:
        make_launch: return a launch with the given setting.
        default: the setting from ``_settings.py``.
        width: columns of a row, rounded up to a power of two; 0 for a kernel that does not depend on it.
        element_size: bytes per element.
    """
    launch = make_launch(default)
    return Tuned(make_launch, default, launch, width, element_size) if _enabled() else launch


@functools.cache
def _enabled() -> bool:
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        _warn(f"{VARIABLE}={value!r} has no effect; set it to 1 to tune launch settings, or unset it")
    return value == "1"


class Tuned:
    """A launch whose setting is selected at the first call on each device. It is called like a ``Launch``."""

    def __init__(
        self, make_launch: Callable[[S], Launch], default: S, launch: Launch, width: int, element_size: int
    ) -> None:
        self._make_launch: Callable[[Any], Launch] = make_launch
        self._default: Plan | Tile = default
        self._launch = launch
        kernel: Any = launch.kernel
        module = kernel.fn.__module__.rpartition(".")[2]
        self._name = f"{module}.{kernel.fn.__name__} {width} {element_size}"
        self._selected: dict[int, Launch] = {}

    def __call__(self, device_tensor: Tensor, *args: Any) -> Any:
        """Launch on the device of ``device_tensor``, which has the size of the output."""
        launch = self._selected.get(device_tensor.get_device()) or self._select(device_tensor, args)
        return launch(device_tensor, *args)

    def _select(self, device_tensor: Tensor, args: tuple[Any, ...]) -> Launch:
        store = store_for(_device_name(device_tensor))
        settings = [self._default, *neighbours(self._default)]
        setting = store.get(self._name, settings)
        if setting is None:
            if device_tensor.nbytes < LEAST_BYTES or _capturing(device_tensor):
                return self._launch  # not cached: the next call tries again
            setting = self._time_settings(settings, device_tensor, args)
            store.put(self._name, setting)
        launch = self._launch if setting == self._default else self._make_launch(setting)
        self._selected[device_tensor.get_device()] = launch
        return launch

    def _time_settings(
        self, settings: Sequence[Plan | Tile], device_tensor: Tensor, args: tuple[Any, ...]
    ) -> Plan | Tile:
        """Return the fastest of the settings. A setting other than the default is skipped if registers spill."""
        calls: dict[Plan | Tile, Callable[[], object]] = {}
        for setting in settings:
            launch = self._launch if setting == self._default else self._make_launch(setting)
            try:
                compiled = launch(device_tensor, *args)
            except OutOfResources:  # registers, threads or shared memory
                continue
            if setting == self._default or not getattr(compiled, "n_spills", 0):
                calls[setting] = functools.partial(launch, device_tensor, *args)
        times = timer(list(calls.values()), device_tensor)
        return min(zip(times, calls), key=lambda pair: pair[0])[1]


def cuda_milliseconds(calls: Sequence[Callable[[], object]], device_tensor: Tensor) -> list[float]:
    """Return the median time of each call in ms, measured with events. Calls take turns, so noise affects all."""
    with torch.cuda.device(device_tensor.device):
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(TURNS):
            for call, call_times in zip(calls, times):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                end.synchronize()
                call_times.append(start.elapsed_time(end))
    return [median(call_times) for call_times in times]


#: The function that times settings. Tests replace it.
timer: Callable[[Sequence[Callable[[], object]], Tensor], list[float]] = cuda_milliseconds


def _capturing(device_tensor: Tensor) -> bool:
    return device_tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _device_name(device_tensor: Tensor) -> str:
    if device_tensor.is_cuda:
        return torch.cuda.get_device_name(device_tensor.device)
    return f"{device_tensor.device.type} interpreter"


# ------------------------------------------------------------------------------------------------------------ the file


@functools.cache
def store_for(device: str) -> Store:
    """Return the store of a GPU model, by its name."""
    return Store(device)


class Store:
    """The fastest settings on one GPU model, in this process and in a file.

    Args:
        device: name of the GPU model.
    """

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
        folder = cache_folder()
        self.path = None if folder is None else folder / "fusedops" / f"autotune-{name}-{digest}.json"
        self._writes = True  # False after a read or write failed: one warning is enough
        self._settings = self._read()

    def get(self, name: str, candidates: Sequence[Plan | Tile]) -> Plan | Tile | None:
        """Return the stored setting of a kernel, or None if there is none or it is not one of ``candidates``."""
        values = self._settings.get(name)
        if values is None:
            return None
        stored = next((setting for setting in candidates if list(setting) == values), None)
        if stored is None:
            expected = [list(setting) for setting in candidates]
            self._stop_writing(f"got {values} for {name}, expected one of {expected}", _DELETE)
            del self._settings[name]
        return stored

    def put(self, name: str, setting: Plan | Tile) -> None:
        """Store a setting, and keep the settings that other processes have written to the file.

        If two processes write within the same millisecond, one setting is lost. A later process tunes it again.
        """
        self._settings[name] = list(setting)
        if self._writes:
            self._settings = self._read() | self._settings
        if self._writes:
            self._write()

    def _read(self) -> dict[str, list[Any]]:
        if self.path is None:
            self._stop_writing("got no home folder and no XDG_CACHE_HOME", _SET)
            return {}
        try:
            written = read_own_file(self.path, MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except NotOwnFileError as error:
            self._stop_writing(str(error), _DELETE)
            return {}
        except OSError as error:
            self._stop_writing(f"{type(error).__name__}: {error}", "make it readable, or delete it")
            return {}
        try:
            content: Any = json.loads(written)
            if content["key"] != self._key:
                raise ValueError(f"got key {content['key']}, expected {self._key}")
            settings = cast("dict[str, list[Any]]", content["settings"])
            if not all(type(values) is list for values in settings.values()):
                raise TypeError("expected a list for each setting")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._stop_writing(f"{type(error).__name__}: {error}", _DELETE)
            return {}
        return settings

    def _write(self) -> None:
        # write a temporary file and rename it, so that a reader never gets a partial file. It is this user's alone
        # (mkstemp), and the name is replaced, whatever was there
        assert self.path is not None, "a store without a file is never written"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, written = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"key": self._key, "settings": self._settings}, file, indent=1)
                os.replace(written, self.path)
            except OSError:
                os.unlink(written)
                raise
        except OSError as error:
            self._stop_writing(f"cannot be written: {type(error).__name__}: {error}", _SET)

    def _stop_writing(self, problem: str, fix: str) -> None:
        if self._writes:
            self._writes = False
            where = self.path or VARIABLE
            _warn(f"{where}: {problem}. Without this file, every process tunes launch settings again; to fix: {fix}")


_DELETE = "delete the file; the next run writes a new one"
_SET = f"set XDG_CACHE_HOME to a writable folder, or unset {VARIABLE}"


def _warn(text: str) -> None:
    warnings.warn(text, FusedOpsWarning, stacklevel=2)


def clear_caches() -> None:
    """Clear the caches, so that the environment variable and the files are read again. For tests."""
    _enabled.cache_clear()
    store_for.cache_clear()
