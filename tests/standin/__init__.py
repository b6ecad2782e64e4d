"""A stand-in for an Ascend machine: a device in plain Python, and a strict fake of ``torch_npu``.

The context managers set what ``import torch_npu`` gives::

    with installed() as torch_npu: ...          # the fake; torch.npu.is_available() is True
    with installed(), no_device(): ...          # torch_npu without hardware
    with broken(ImportError("libhccl.so: cannot open shared object file")): ...   # torch_npu without CANN
    with absent(): ...                          # torch_npu not installed

Call ``npu_device.register()`` before the first backward of the process (a conftest is the place): autograd counts
devices then. Registered later, backward on the device works in the registering thread only.
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

# One module, whichever of the two names a test knows it by: a second copy could not register the device again.
for _alias in ("standin", "tests.standin"):
    sys.modules.setdefault(_alias, sys.modules[__name__])
    sys.modules.setdefault(f"{_alias}.npu_device", npu_device)

__all__ = ["absent", "broken", "installed", "no_device", "npu_device"]

_HERE = str(pathlib.Path(__file__).parent)
_NAME = "torch_npu"
_loaded: dict[str, types.ModuleType] = {}


def _is_vendors(name: str) -> bool:
    return name == _NAME or name.startswith(_NAME + ".")


def _take_out() -> dict[str, types.ModuleType]:
    """Takes torch_npu and its submodules out of ``sys.modules``."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_vendors(name)}


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Gives back ``sys.modules`` (as far as it is torch_npu's), ``sys.path``, ``sys.meta_path`` and ``torch.npu``."""
    modules, path, finders, device_module = _take_out(), sys.path[:], sys.meta_path[:], getattr(torch, "npu", None)
    try:
        yield
    finally:
        _take_out()
        sys.modules.update(modules)
        sys.path[:], sys.meta_path[:] = path, finders
        if device_module is not None:
            _show(device_module)
        importlib.invalidate_caches()


def _show(device_module: types.ModuleType) -> None:
    torch.npu = sys.modules["torch.npu"] = device_module


def _hide_device_module() -> None:
    """Without a working torch_npu there is no ``torch.npu``."""
    sys.modules.pop("torch.npu", None)
    if hasattr(torch, "npu"):
        del torch.npu


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """``import torch_npu`` finds the fake, and there is a device. Yields the fake, its log of calls emptied."""
    device_module = npu_device.register()
    with _restored():
        _show(device_module)
        sys.path.insert(0, _HERE)
        importlib.invalidate_caches()
        # Its ops, once registered, stay; a second execution of the file would define them twice.
        sys.modules.update(_loaded)
        module = importlib.import_module(_NAME)
        _loaded.update({name: found for name, found in sys.modules.items() if _is_vendors(name)})
        module.calls.clear()
        npu_device.reset()
        yield module


class _Breaking(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch_npu, so that ``find_spec`` is content, and raises when it is executed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname == _NAME else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        # The real one leaves the submodules it had imported before it failed.
        for name in ("torch_npu.version", "torch_npu.utils"):
            sys.modules[name] = types.ModuleType(name)
        raise self.error


@contextlib.contextmanager
def broken(error: Exception) -> Iterator[None]:
    """torch_npu is installed, ``find_spec`` finds it, and importing it raises ``error`` and leaves partial modules."""
    with _restored():
        _hide_device_module()
        sys.meta_path.insert(0, _Breaking(error))
        importlib.invalidate_caches()
        yield


@contextlib.contextmanager
def absent() -> Iterator[None]:
    """torch_npu is not installed: importing it raises ModuleNotFoundError."""
    with _restored():
        _hide_device_module()
        sys.path[:] = [entry for entry in sys.path if entry != _HERE]
        importlib.invalidate_caches()
        if importlib.util.find_spec(_NAME) is not None:
            sys.modules[_NAME] = None  # a real one is here: this hides it
        yield
