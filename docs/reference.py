"""The pages of the API reference, docs/api/, written from the public names where the site is built.

Each public name has one entry. A name that is in no group is an error: a new op or function cannot be left out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

import fusedops

FOLDER = Path(__file__).parent / "api"


class Group(NamedTuple):
    """A page: its file in docs/api/, its title, its first sentences, and its names in ``fusedops``.

    A module stands for its own public names; a package of modules, such as ``integrations``, for those of each module.
    """

    file: str
    title: str
    text: str
    names: tuple[str, ...]


GROUPS = (
    Group(
        "ops",
        "Ops",
        "Each op is a function of ``fusedops``. :doc:`The ops <../ops>` has their formulas and edge cases, and\n"
        ":doc:`from torch to fusedops <../from-torch>` the op for what a model has now.",
        ("ops",),
    ),
    Group(
        "modules",
        "Modules, losses, masks, random numbers",
        "Beside the functions.",
        ("nn", "losses", "accept", "masks", "quantization", "philox", "dtypes"),
    ),
    Group(
        "select",
        "Select",
        "Which backends are preferred, for which ops: :doc:`choosing a backend <../choosing>`.",
        ("use", "set_policy", "get_policy", "Policy", "checkpoint_contexts", "bind", "warm_up", "tensor_cache"),
    ),
    Group(
        "inspect",
        "Inspect",
        "Which backend serves a call, and why: :doc:`inspecting <../inspecting>`.",
        (
            "explain", "TensorSpec", "Decision", "plan", "Plan", "DeviceSpec", "backends", "BackendInfo", "stats",
            "reset_stats", "Stats", "Event",
        ),
    ),
    Group(
        "check",
        "Check",
        "Compare a program's results with the reference, and a backend with the contracts of the ops.",
        ("verify", "Verification", "Mismatch", "testing"),
    ),
    Group(
        "libraries",
        "Other libraries",
        "fusedops in :doc:`models of transformers <../transformers>` and in :doc:`Megatron <../megatron>`, and\n"
        "functions with the names of other libraries.",
        ("integrations", "viewless", "compat"),
    ),
    Group("errors", "Errors and warnings", "Each message has a fix.", ("errors",)),
    Group(
        "backends",
        "Backends",
        "For the author of a backend: :doc:`add a backend <../add-a-backend>`.",
        (
            "Backend", "kernel", "kernels_of", "Kernel", "Deviation", "Adaptation", "Replay", "Unavailable", "hookimpl",
            "register", "unregister", "API_VERSION",
        ),
    ),
    Group("constraints", "Constraints", "Conditions of ops and kernels on the arguments of a call.", ("constraints",)),
    Group(
        "contracts",
        "Contracts of ops",
        "For the author of an op: :doc:`add an op <../add-an-op>`.",
        ("Op", "Evidence", "Rows", "call", "Case", "Tolerance", "Output", "Saved", "Padding", "Sharding", "Shard"),
    ),
)  # fmt: skip

HOOKS = """
Hooks
-----

A plugin marks its functions with ``@fusedops.hookimpl``.

.. autoclass:: fusedops._plugins.hookspecs.Hooks
   :members:
   :no-index:
"""


class Entry(NamedTuple):
    """A public name and what it is."""

    path: str
    value: Any
    again: bool = False  # it has an entry under another path too


def submodules(package: ModuleType) -> list[str]:
    """Return the names of the public modules in a package, in order."""
    return sorted(each.name for each in pkgutil.iter_modules(package.__path__) if not each.name.startswith("_"))


def exported(module: ModuleType) -> list[str]:
    """Return the public names of a module: its ``__all__``, or what it defines and what it imports ``X as X``."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    names: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_") and documented(getattr(module, name))]


def documented(value: Any) -> bool:
    """Return True for what has an entry: not a type variable, an alias of a type or a table."""
    kinds = inspect.isfunction(value) or inspect.isclass(value)
    return kinds or type(value).__module__.startswith("fusedops")


def sections(group: Group) -> Iterator[tuple[ModuleType | None, list[Entry]]]:
    """Yield the parts of a page: the names of ``fusedops`` itself, and each module with its names."""
    own: list[Entry] = []
    for name in group.names:
        value = getattr(fusedops, name)
        if not isinstance(value, ModuleType):
            own.append(Entry(f"fusedops.{name}", value))
        elif value is fusedops.ops:  # the functions are names of fusedops too
            own += [Entry(f"fusedops.{op}", getattr(fusedops, op)) for op in fusedops.ops.__all__]
    if own:
        yield None, own
    for name in group.names:
        value = getattr(fusedops, name)
        if not isinstance(value, ModuleType) or value is fusedops.ops:
            continue
        names = [value.__name__]
        if hasattr(value, "__path__") and not exported(value):
            names = [f"{value.__name__}.{each}" for each in submodules(value)]
        for each in names:
            module = importlib.import_module(each)
            yield module, [Entry(f"{each}.{public}", getattr(module, public)) for public in exported(module)]


def entries() -> dict[str, list[tuple[ModuleType | None, list[Entry]]]]:
    """Return the parts of each page by its file.

    What a module without ``__all__`` imports from another public place has its entry there.
    """
    seen: list[Any] = []
    own = {id(getattr(fusedops, name)) for group in GROUPS for name in group.names}
    pages: dict[str, list[tuple[ModuleType | None, list[Entry]]]] = {}
    for group in GROUPS:
        parts = pages.setdefault(group.file, [])
        for module, found in sections(group):
            kept: list[Entry] = []
            for entry in found:
                before = any(entry.value is other for other in seen)
                if module is None or hasattr(module, "__all__") or not (before or id(entry.value) in own):
                    kept.append(entry._replace(again=before))
                    seen.append(entry.value)
            parts.append((module, kept))
    return pages


def missing() -> list[str]:
    """Return the public names of ``fusedops`` that have no entry."""
    values = [entry.value for parts in entries().values() for _, found in parts for entry in found]
    modules = {name for group in GROUPS for name in group.names}
    return [
        name
        for name in dir(fusedops)
        if name not in modules and not any(getattr(fusedops, name) is value for value in values)
    ]


def directive(entry: Entry) -> list[str]:
    """Return the lines that document a name; of a class, also its public methods that have a docstring."""
    path, value, again = entry
    if inspect.isclass(value):
        options = [f"   :members: {', '.join(public)}"] if (public := members(value)) else []
        return [f".. autoclass:: {path}", *options, *(["   :no-index:"] if again else [])]
    if inspect.isroutine(value):
        return [f".. autofunction:: {path}"]
    if type(value).__module__.startswith("fusedops"):
        return [f".. data:: {path}"]
    return [f".. autodata:: {path}"]


def members(value: type) -> list[str]:
    """Return the public methods and properties of a class that have a docstring; none of an autograd Function."""
    if issubclass(value, torch.autograd.Function):  # it is called by its `apply`, which its own docstring is about
        return []
    kinds = (FunctionType, classmethod, staticmethod, property, cached_property)
    return [
        name
        for name, member in vars(value).items()
        if not name.startswith("_") and isinstance(member, kinds) and member.__doc__
    ]


def title(text: str, line: str) -> list[str]:
    """Return a heading."""
    return [text, line * len(text), ""]


def page(group: Group, parts: list[tuple[ModuleType | None, list[Entry]]]) -> str:
    """Return a page of docs/api/."""
    lines = [*title(group.title, "="), group.text, ""]
    for module, found in parts:
        if module is not None and len(parts) > 1:
            lines += title(module.__name__, "-")
        lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {entry.path}" for entry in found), ""]
        if module is not None:
            lines += [f".. automodule:: {module.__name__}", ""]
        for entry in found:
            lines += [*directive(entry), ""]
    if "hookimpl" in group.names:
        lines += HOOKS.splitlines()
    return "\n".join(lines).rstrip() + "\n"


def files() -> dict[Path, str]:
    """Return the text of each page, or raise ValueError for a public name that no group has."""
    if names := missing():
        raise ValueError(
            f"docs/reference.py: got {', '.join(names)} in no group, expected each public name in GROUPS; "
            "to fix: add the name to its group"
        )
    pages = entries()
    return {FOLDER / f"{group.file}.rst": page(group, pages[group.file]) for group in GROUPS}


def write() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
