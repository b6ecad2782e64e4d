"""The code of a forward, which shows what its results cannot: what it stores, what it asks, and what it calls.

The code is read with all that it calls: methods of its class, functions of its file, decorators. It may call functions
of tensors, and read numbers and words of its module. Functions of torch and of a library's own files that are no
model's are known and are not read.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.nn import Module

from fusedops.integrations._replacement import own_class
from fusedops.integrations._trial.copied import contents_of, instructions_of, may_change

_ENTERED = (
    torch,
    torch.nn,
    torch.nn.functional,
    torch.special,
    torch.linalg,
    torch.amp,
    torch.amp.autocast_mode,
    math,
)
_KNOWN = (
    "torch.nn.",
    "torch.functional",
    "torch._tensor",
    "torch._C._nn",
    "torch.amp.",
    "torch.autograd.",
    "torch.dist",
)
_OF_MODELS = ("transformers.", "diffusers.")  # libraries whose models are below `models`, and are read
_OF_LIBRARIES = ("torch", "math", "builtins", "typing", "collections")
_BUILTINS = {
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "getattr", "hasattr", "int", "isinstance", "len",
    "list", "map", "max", "min", "pow", "range", "round", "set", "slice", "sorted", "str", "sum", "super",
    "tuple", "type", "zip",
}  # fmt: skip
# methods by which a result changes more than itself, or which ask what a trial on a CPU cannot show
_EFFECTS = {
    "backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "set_",
    "share_memory_", "is_cuda", "is_cpu", "is_mps", "is_xpu", "float16", "half", "is_inference", "data_ptr", "_version",
    "get_device", "grad", "is_contiguous", "is_meta", "is_nested", "is_quantized", "is_sparse", "retains_grad",
    "storage_offset", "stride", "index",
}  # fmt: skip
# functions of torch that ask for a state which no trial has
_ASKS = {
    "get_autocast_cpu_dtype", "get_default_dtype", "get_num_threads", "get_num_interop_threads", "is_anomaly_enabled",
    "is_autocast_cache_enabled", "is_autocast_cpu_enabled", "is_inference", "is_inference_mode_enabled",
}  # fmt: skip
_HOLDERS: dict[type[Any], str] = {
    partial: "func", MethodType: "__func__", staticmethod: "__func__", classmethod: "__func__", property: "fget",
    type(cache(abs)): "__wrapped__",
}  # fmt: skip
_STORES, _STORES_FREE = ("STORE_GLOBAL", "DELETE_GLOBAL"), ("STORE_DEREF", "DELETE_DEREF")
_DEVICES = frozenset(("cpu", "cuda", "meta", "mps", "npu", "xpu", "hpu"))
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, tuple)


def reason_of_source(
    modules: Iterable[Module],
    *functions: Any,
    subject: str = "its forward",
    tried: Iterable[str] = (),
    outside: bool = False,
) -> str | None:
    """Return what a code does that no call on random numbers can show, or None.

    Args:
        modules: whose forward is read, and whose attributes it reads. The first one is called as before; the others are
            not, so what their classes do in a call of their own is read too.
        functions: read in addition.
        subject: of the reason.
        tried: names that are no reason, for there is a call that shows what they do; also of devices.
        outside: True for what reaches beyond the modules alone: a trial is to do none of it.

    >>> class Counted(torch.nn.Module):
    ...     def forward(self, x):
    ...         self.calls = 1
    ...         return x
    >>> reason_of_source([Counted()])
    'its forward stores calls'
    """
    modules = list(modules)
    tried = set(tried)
    reader = _Reader(modules, _EFFECTS - tried, _DEVICES - tried)
    for name in ("forward", "__getattr__", "__getattribute__"):
        reader.attribute(name)
    for each in modules[1:]:
        if type(each).__call__ is not Module.__call__:
            reader.value("__call__", type(each).__call__)
    for function in functions:
        reader.value(getattr(function, "__name__", type(function).__name__), function)
    return next((f"{subject} {what}" for what, beyond in reader.reasons.items() if beyond or not outside), None)


class _Reader:
    """Reads functions, each once. Reasons are in the order of the code."""

    def __init__(self, modules: Iterable[Module], effects: set[str], devices: frozenset[str]) -> None:
        self._effects, self._devices = effects, devices
        self._names: list[Mapping[str, Any]] = []  # of the attributes of the modules and of their classes
        for module in modules:
            classes = own_class(module).__mro__
            self._names += [vars(module), *(vars(each) for each in classes[: classes.index(Module)])]
        self._read: set[int] = set()
        self.reasons: dict[str, bool] = {}  # True for what reaches beyond the modules

    def attribute(self, name: str) -> None:
        """Read what a name stands for in a module or in its class."""
        found = [names[name] for names in self._names if name in names]
        if not found and name in self._effects:
            self._refuse(f"uses {name}")
        for value in found:
            self.value(name, value)

    def value(self, name: str, value: Any) -> None:
        """Read a function, or refuse an object whose state is not known. A number is a setting."""
        for each in _inside(value):
            self.value(name, each)
        for kind, held in _HOLDERS.items():
            value = getattr(value, held) if isinstance(value, kind) else value
        self._constant(value)
        home = home_of(value)
        if isinstance(value, Module) and (_is_library(home) or home.startswith("kernels.")):
            value = type(value).forward  # a function that the package kernels may replace
            home = home_of(value)
        if isinstance(value, FunctionType):
            self._function(name, value, home)
        elif isinstance(value, BuiltinFunctionType):
            known = value.__name__ in _BUILTINS if home == "builtins" else _is_library(home)
            if not known or value.__name__.startswith(("set_", "_")) or value.__name__ in _ASKS:
                self._refuse(f"calls {name}")
        elif isinstance(value, type):
            self._class(name, value, home)
        elif not isinstance(value, _PLAIN) and not any(map(_is_of_models, type(value).__mro__)):
            self._refuse(f"uses {name}, of {type(value).__name__}")

    def _class(self, name: str, cls: type[Any], home: str) -> None:
        if issubclass(cls, torch.autograd.Function):
            for each in ("forward", "backward", "setup_context"):
                self.value(each, getattr(cls, each))
        elif not _is_library(home) or (home.startswith("torch.") and not home.startswith(_KNOWN)):
            self._refuse(f"uses {name}")

    def _function(self, name: str, function: FunctionType, home: str) -> None:
        if id(function) in self._read:
            return
        self._read.add(id(function))
        self._names.append(vars(function))
        free = dict(zip(function.__code__.co_freevars, contents_of(function)))
        if not _is_library(home):
            for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self.value(f"a default of {name}", each)
            self._code(function.__code__, function.__globals__, free)
        elif home.split(".")[0] == "torch" and not home.startswith((*_KNOWN, "torch.utils._contextlib")):
            self._refuse(f"calls {name}")
        else:
            for inner in free.values():  # of a decorator of a library
                if isinstance(inner, FunctionType):
                    self._function(name, inner, home_of(inner))

    def _code(self, code: CodeType, names: dict[str, Any], free: dict[str, Any]) -> None:
        held: ModuleType | None = None  # the module of Python that the instruction before has loaded
        for kind, name in instructions_of(code):
            before, held = held, None
            if kind in ("STORE_ATTR", "DELETE_ATTR"):
                self._refuse(f"stores {name}", beyond=False)
            elif kind in _STORES or (kind in _STORES_FREE and name in free):
                self._refuse(f"stores {name}")
            elif kind in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
                value = names.get(name, getattr(builtins, name, None))
                if name in names and may_change(name, value):
                    self._refuse(f"reads the global {name}")
                held = self._outer(name, value)
            elif kind.endswith("DEREF") and name in free and name != "__class__":
                held = self._outer(name, free[name])
            elif kind.startswith("LOAD") and ("ATTR" in kind or "METHOD" in kind):
                if before is None:
                    self.attribute(name)
                elif name in self._effects:
                    self._refuse(f"uses {name}")
                else:
                    held = self._outer(name, getattr(before, name, None))
            elif kind == "LOAD_CONST" and isinstance(name, CodeType):
                self._code(name, names, free)
            elif kind == "LOAD_CONST":
                self._constant(name)

    def _outer(self, name: str, value: Any) -> ModuleType | None:
        """Read what a name outside of the function stands for; return a module of Python, whose names follow."""
        if not isinstance(value, ModuleType):
            self.value(name, value)
        elif value in _ENTERED or value.__name__.startswith("torch.distributions") or not _is_standard(value.__name__):
            return value
        else:
            self._refuse(f"uses {name}")
        return None

    def _constant(self, value: Any) -> None:
        """Refuse the name of a device, such as cuda or cuda:0, also inside of a constant set."""
        for each in _inside(value):
            self._constant(each)
        if isinstance(value, (str, torch.device)) and str(value).partition(":")[0] in self._devices:
            self._refuse(f"asks for the device {value}", beyond=False)

    def _refuse(self, what: str, beyond: bool = True) -> None:
        self.reasons[what] = beyond


def _inside(value: Any) -> tuple[Any, ...]:
    """Return what a tuple, a constant set or a partial holds."""
    if isinstance(value, partial):
        return (*cast("Any", value).args, *cast("Any", value).keywords.values())
    return tuple(cast("Any", value)) if isinstance(value, (tuple, frozenset)) else ()


def home_of(value: Any) -> str:
    """Return the name of the file of a function or class, or of the class of an object."""
    if isinstance(value, FunctionType):  # functools.wraps changes __module__
        return str(value.__globals__.get("__name__", ""))
    if isinstance(value, (type, BuiltinFunctionType)):
        return str(value.__module__)
    return str(type(value).__module__)


def _is_library(home: str) -> bool:
    first, _, rest = home.partition(".")
    return first in _OF_LIBRARIES or (home.startswith(_OF_MODELS) and not rest.startswith("models."))


def _is_of_models(cls: type[Any]) -> bool:
    """Return True for a class of a library of models that is in no model's file, such as a config's base."""
    return cls.__module__.startswith(_OF_MODELS) and _is_library(cls.__module__)


def _is_standard(home: str) -> bool:
    """Return True for a module of Python's library and for one of torch."""
    return home.partition(".")[0] in ("torch", *sys.stdlib_module_names)
