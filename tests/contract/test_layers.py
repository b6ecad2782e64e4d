"""Imports: no circle, no higher layer, few arrows between the rooms of ops, no backend in the core and the public core
alone in backends; and what importing fusedops loads, reads and starts.

Module-level, function-local and TYPE_CHECKING imports count alike, and ``import_module`` with a literal name.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distribution
from typing import Any

import pytest
from repository import ROOT

import fusedops

CORE = pathlib.Path(fusedops.__file__).parent
TOP = "the rest"
LAYERS: tuple[tuple[str, ...], ...] = (  # the lowest first; a name is a module or a package of fusedops
    ("_native", "_report", "_version"),
    ("_storages", "errors", "packed_call"),
    ("_contract",),
    ("constraints", "masks", "tensor_cache", "viewless", "philox"),
    ("_plugins",),
    ("_policy",),
    ("_dispatch",),
    ("ops",),
    (
        "__init__",
        "_bind",
        "_explain",
        "_verify",
        "_warm_up",
        "compat",
        "integrations",
        "nn",
        "testing",
    ),
    ("_cli", "__main__"),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def module_name(path: pathlib.Path, root: pathlib.Path = CORE) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("fusedops", *parts)).removesuffix(".__init__")


SOURCES = {module_name(path): path.read_text("utf-8") for path in sorted(CORE.rglob("*.py"))}


def imports(module: str, source: str, modules: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield each module of fusedops that a source imports, with the line."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [node.module])])
            # a name in a package is a module of it, or a value of its __init__
            names = [whole if (whole := f"{base}.{alias.name}") in modules else base for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        else:
            continue
        for name in names:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module:
                yield name, node.lineno


def graph(modules: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return for each module the modules that it imports, with the line."""
    return {module: dict(imports(module, source, modules)) for module, source in modules.items()}


def rank_of(module: str) -> int:
    """Return the layer of a module. A module without a layer belongs to none: give it one above."""
    return RANKS[module.split(".")[1] if "." in module else "__init__"]


def circles(edges: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return the sets of modules of which each imports each other one, directly or not (Tarjan 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for other in edges[module]:
            if other not in numbers:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], numbers[other])
        if lowest[module] == numbers[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                result.append(sorted(members))

    for module in edges:
        if module not in numbers:
            visit(module)
    return result


EDGES = graph(SOURCES)


def test_every_module_has_a_layer() -> None:
    assert {module.split(".")[1] for module in SOURCES if "." in module} <= set(RANKS)


@pytest.mark.parametrize("module", SOURCES)
def test_no_import_of_a_higher_layer(module: str) -> None:
    higher = [
        f"{module}:{line} imports {other}" for other, line in EDGES[module].items() if rank_of(other) > rank_of(module)
    ]
    assert not higher


@pytest.mark.parametrize("module", SOURCES)
def test_every_imported_module_exists(module: str) -> None:
    missing = [
        f"{module}:{node.lineno} imports {node.module}"
        for node in ast.walk(ast.parse(SOURCES[module]))
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("fusedops.")
        if node.module not in SOURCES
    ]
    assert not missing


def test_no_circle() -> None:
    assert circles(EDGES) == []


@pytest.mark.parametrize(
    "source",
    [
        "import fusedops.b",
        "from fusedops.b import value",
        "from fusedops import b",
        "from . import b",
        "from .b import value",
        "def f():\n    from fusedops.b import value",
        "if TYPE_CHECKING:\n    from fusedops.b import value",
        "import importlib\nimportlib.import_module('fusedops.b')",
    ],
)
def test_every_kind_of_import_is_seen(source: str) -> None:
    modules = {"fusedops": "", "fusedops.a": source}
    modules |= {"fusedops.b": "import fusedops.c", "fusedops.c": "import fusedops.a"}
    edges = graph(modules)
    assert "fusedops.b" in edges["fusedops.a"]
    assert circles(edges) == [["fusedops.a", "fusedops.b", "fusedops.c"]]
    assert graph({"fusedops": "", "fusedops.a": "from fusedops import call"})["fusedops.a"] == {"fusedops": 1}


# --------------------------------------------------------------------------------------------------- the rooms of ops

MOST_ROOMS, MOST_ARROWS = 12, 15


def rooms(edges: Mapping[str, Mapping[str, int]], package: str) -> dict[str, dict[str, int]]:
    """Return for each room of a package, a folder or a file of its first level, the rooms that it imports."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[: package.count(".") + 2])

    inside = [module for module in edges if f"{module}.".startswith(f"{package}.")]
    result: dict[str, dict[str, int]] = {room(module): {} for module in inside}
    for module in inside:
        for other, line in edges[module].items():
            if other in inside and room(other) != room(module):
                result[room(module)][room(other)] = line
    return result


def test_ops_are_few_rooms_with_few_arrows() -> None:
    edges = rooms(EDGES, "fusedops.ops")
    arrows = [(room, other) for room, others in edges.items() for other in others]
    assert circles(edges) == []
    assert len(edges) - 1 <= MOST_ROOMS  # without ops/__init__
    assert len(arrows) <= MOST_ARROWS, arrows


def test_arrows_and_circles_between_rooms_are_seen() -> None:
    modules = dict.fromkeys(("p", "p.a", "p.a.x", "p.a.y", "p.b", "p.b.z", "q"), "")
    edges = graph({f"fusedops.{name}": source for name, source in modules.items()} | {"fusedops": ""})
    edges["fusedops.p.a.x"] = {"fusedops.p.b.z": 1, "fusedops.p.a.y": 2, "fusedops.q": 3}
    edges["fusedops.p.b"] = {"fusedops.p.a.y": 4}
    found = rooms(edges, "fusedops.p")
    a, b = "fusedops.p.a", "fusedops.p.b"
    assert found == {"fusedops.p": {}, a: {b: 1}, b: {a: 4}}
    assert circles(edges) == []  # of files there is none
    assert circles(found) == [[a, b]]


# ------------------------------------------------------------------------------------------- the core and its backends

FILES = sorted(CORE.rglob("*.py"))
VENDORS = ("torch_npu",)
DEVICES = ("cpu",)  # the name of a backend and of torch's device type: generic code names the latter
NAMES = {*distribution("fusedops").entry_points.select(group="fusedops.backends").names, *VENDORS} - {*DEVICES}
ids = [str(path.relative_to(CORE)) for path in FILES]


def modules_of(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every module imported, and whether that is at the top level (not inside a function or `if TYPE_CHECKING`)."""
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", id(node) in top


def docstrings(tree: ast.Module) -> set[int]:
    """The constants that are docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    return {
        id(body[0].value)
        for body in bodies
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    }


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_the_core_imports_no_backend_and_no_vendor(path: pathlib.Path) -> None:
    for module, top in modules_of(ast.parse(path.read_text())):
        package = module.partition(".")[0]
        assert package not in ("triton", "torch_npu", "backends"), module
        assert not package.startswith("fusedops_"), module
        if path.name != "hookspecs.py":
            assert not (package == "pluggy" and top), "pluggy is imported where a plugin is loaded"
        assert not (module == "fusedops._plugins.hookspecs" and top), module


# compat's drop-ins are users of the library: what the original called its unfused form asks for one backend by name.
# In integrations the words are the other library's: "eager" is an attention of transformers, "npu" a device of kernels
USERS = ("compat", "integrations")


@pytest.mark.parametrize(
    "path", [f for f in FILES if f.relative_to(CORE).parts[0] not in USERS], ids=lambda f: str(f.relative_to(CORE))
)
def test_the_core_names_no_backend(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    words = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in words:
            assert node.value not in NAMES, f"{path}:{node.lineno}: {node.value!r}"
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert name not in NAMES, f"{path}:{node.lineno}: {name}"


def test_the_check_sees_a_backend_that_is_named() -> None:
    tree = ast.parse('"""eager"""\nif backend == "eager": import fusedops_triton.x')
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == "eager"]
    assert len([n for n in constants if id(n) not in docstrings(tree)]) == 1
    assert list(modules_of(tree)) == [("fusedops_triton.x", False)]


def private_imports(source: str) -> list[str]:
    """Return what a source imports from fusedops with an underscore at the start of a module or a name of the path.

    A module is public if no part of its path begins with an underscore, as ``fusedops.ops.losses.formulas``: a plugin
    of another distribution may import it as well.
    """
    paths: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            paths += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths += [f"{node.module}.{alias.name}" for alias in node.names]
    of_core = [path.split(".") for path in paths if path.partition(".")[0] == "fusedops"]
    return [".".join(parts) for parts in of_core if any(part.startswith("_") for part in parts)]


@pytest.mark.parametrize("path", sorted((ROOT / "backends").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_backend_imports_the_public_core_and_no_other_backend(path: pathlib.Path) -> None:
    own = path.relative_to(ROOT / "backends").parts[0]
    assert private_imports(path.read_text()) == [], "what begins with an underscore is the core's own"
    for module, top in modules_of(ast.parse(path.read_text())):
        package = module.partition(".")[0]
        assert not package.startswith("fusedops_") or package == own, module
        if path.name == "__init__.py":
            assert not (package in ("triton", "torch_npu") and top), "a vendor's library is imported in the probe"


def test_private_imports_are_found() -> None:
    private = (
        "import fusedops._native",
        "from fusedops import _native",
        "from fusedops._native import x",
        "from fusedops.ops import _x as y",
        "def f():\n    from fusedops.ops.norms.formulas import a, _b",
    )
    public = ("from fusedops.ops.norms import formulas", "import fusedops", "from fusedops_cpu import _x", "import _x")
    assert [len(private_imports(source)) for source in private] == [1] * len(private)
    assert [private_imports(source) for source in public] == [[]] * len(public)


def test_every_backend_folder_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs tomllib, of Python 3.11 and later")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").exists()}
    points = project["project"]["entry-points"]["fusedops.backends"]
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {value.partition(":")[0] for value in points.values()} == folders
    assert {f"fusedops_{name}" for name in points} == folders
    assert set(packages) == {"fusedops", "_fusedops_pytest.py", *(f"backends/{name}" for name in folders)}


def test_pytest_loads_no_torch_for_the_plugin(python: Callable[..., Any]) -> None:
    code = (
        "import json, sys, _fusedops_pytest; print(json.dumps([n for n in sys.modules if n in ('torch', 'fusedops')]))"
    )
    assert python(code, ROOT) == []


SCRIPT = """
import gc, json, os, sys, time
before = time.process_time()
import torch
of_torch = time.process_time() - before
torch_modules = set(sys.modules)
cuda_before = torch.cuda.is_initialized()
gc.collect()  # else a collection of torch's objects, 100 to 200 ms, falls into the import or not, by their number

class Watched(dict):
    read = []
    def __getitem__(self, key):
        self.read.append(key); return super().__getitem__(key)
    def get(self, key, default=None):
        self.read.append(key); return super().get(key, default)
    def __contains__(self, key):
        self.read.append(key); return super().__contains__(key)
    def __iter__(self):
        self.read.append("*"); return super().__iter__()
    def items(self):
        self.read.append("*"); return super().items()

real, os.environ = os.environ, Watched(os.environ)
wall, used = time.perf_counter(), time.process_time()
import fusedops
wall, used = time.perf_counter() - wall, time.process_time() - used
watched, os.environ = os.environ, real
fusedops.ops.scaled_masked_softmax, fusedops.constraints.Dim, fusedops.errors.PolicyError, fusedops.TensorSpec
loaded = sorted(set(sys.modules) - torch_modules)
hook = fusedops.hookimpl
print(json.dumps({"loaded": loaded, "read": watched.read, "ms": wall * 1000, "cpu ms": used * 1000,
                  "of torch": used / of_torch,
                  "cuda": torch.cuda.is_initialized() != cuda_before, "pluggy after hookimpl": "pluggy" in sys.modules,
                  "unknown": hasattr(fusedops, "nonsense")}))
"""


@pytest.fixture(scope="module")
def imported(python: Callable[..., Any]) -> list[dict[str, Any]]:
    # the first run writes the byte code, as installing does; the other runs are measured
    return [python(SCRIPT, PYTHONDONTWRITEBYTECODE="") for _ in range(4)][1:]


def test_importing_loads_no_backend_no_vendor_and_no_pluggy(imported: list[dict[str, Any]]) -> None:
    packages = {name.partition(".")[0] for name in imported[0]["loaded"]}
    assert "fusedops" in packages
    assert not packages & {"triton", "torch_npu", "pluggy", "numpy", "pytest", "tqdm", "matplotlib"}
    assert not {name for name in packages if name.startswith("fusedops_")}
    assert "fusedops.testing" not in imported[0]["loaded"]
    assert imported[0]["pluggy after hookimpl"]
    assert not imported[0]["unknown"]


def test_importing_reads_no_environment_and_starts_no_device(imported: list[dict[str, Any]]) -> None:
    assert [name for name in imported[0]["read"] if name == "*" or name.startswith("FUSEDOPS")] == []
    assert not imported[0]["cuda"]


def test_importing_adds_at_most_a_twentieth_to_torch(imported: list[dict[str, Any]]) -> None:
    # 35 to 45 ms of the CPU where torch's own import takes 1.0 to 1.2 s: a share, as neighbours lengthen both alike
    assert min(run["of torch"] for run in imported) <= 1 / 20, [(run["of torch"], run["cpu ms"]) for run in imported]
