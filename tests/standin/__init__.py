"""A stand-in for an Ascend machine: a device in plain Python, and a strict fake of ``torch_npu``.

The context managers define the result of ``import torch_npu``::

    with installed() as torch_npu: ...          # the fake; torch.npu.is_available() is True
    with installed(), no_device(): ...          # torch_npu without hardware
    with broken(ImportError("libhccl.so: cannot open shared object file")): ...   # torch_npu without CANN
    with absent(): ...                          # torch_npu not installed

Call ``npu_device.register()`` before the first backward of the process, for example in a conftest: the first backward
counts the devices. If the device is registered later, backward on it works only in the registering thread.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator

import torch

from . import npu_device
from .npu_device import no_device

# One module object for both names that tests import: a second copy could not register the device again.
for _alias in ("standin", "tests.standin"):
    sys.modules.setdefault(_alias, sys.modules[__name__])
    sys.modules.setdefault(f"{_alias}.npu_device", npu_device)

__all__ = ["absent", "broken", "installed", "no_device", "npu_device"]

_HERE = str(pathlib.Path(__file__).parent)
_NAME = "torch_npu"
_loaded: dict[str, types.ModuleType] = {}


def _is_torch_npu(name: str) -> bool:
    return name == _NAME or name.startswith(_NAME + ".")


def _pop_modules() -> dict[str, types.ModuleType]:
    """Remove torch_npu and its submodules from ``sys.modules``, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_torch_npu(name)}


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore torch_npu's entries of ``sys.modules``, ``sys.path``, ``sys.meta_path`` and ``torch.npu`` on exit."""
    modules, path, finders, device_module = _pop_modules(), sys.path[:], sys.meta_path[:], getattr(torch, "npu", None)
    try:
        yield
    finally:
        _pop_modules()
        sys.modules.update(modules)
        sys.path[:], sys.meta_path[:] = path, finders
        if device_module is not None:
            _set_device_module(device_module)
        importlib.invalidate_caches()


def _set_device_module(device_module: types.ModuleType) -> None:
    torch.npu = sys.modules["torch.npu"] = device_module


def _remove_device_module() -> None:
    """Remove ``torch.npu``, which only a working torch_npu creates."""
    sys.modules.pop("torch.npu", None)
    if hasattr(torch, "npu"):
        del torch.npu


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Make ``import torch_npu`` return the fake, with a device. Yield the fake, with an empty log of calls."""
    device_module = npu_device.register()
    with _restored():
        _set_device_module(device_module)
        sys.path.insert(0, _HERE)
        importlib.invalidate_caches()
        # Registered ops cannot be removed; a second execution of the file would define them twice.
        sys.modules.update(_loaded)
        module = importlib.import_module(_NAME)
        _loaded.update({name: loaded for name, loaded in sys.modules.items() if _is_torch_npu(name)})
        module.calls.clear()
        npu_device.reset()
        yield module


class _BrokenLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader of a torch_npu that ``find_spec`` finds, and whose execution raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname == _NAME else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        # The real package leaves the submodules that it imported before it failed.
        for name in ("torch_npu.version", "torch_npu.utils"):
            sys.modules[name] = types.ModuleType(name)
        raise self.error


@contextlib.contextmanager
def broken(error: Exception) -> Iterator[None]:
    """Install a torch_npu that ``find_spec`` finds; importing it raises ``error`` and leaves partial modules."""
    with _restored():
        _remove_device_module()
        sys.meta_path.insert(0, _BrokenLoader(error))
        importlib.invalidate_caches()
        yield


@contextlib.contextmanager
def absent() -> Iterator[None]:
    """Hide torch_npu: importing it raises ModuleNotFoundError."""
    with _restored():
        _remove_device_module()
        sys.path[:] = [entry for entry in sys.path if entry != _HERE]
        importlib.invalidate_caches()
        if importlib.util.find_spec(_NAME) is not None:
            sys.modules[_NAME] = None  # hides a real torch_npu
        yield
