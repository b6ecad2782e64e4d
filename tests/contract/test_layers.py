"""The import graph of fusedops: no circle, and no import of a higher layer.

Module-level, function-local and TYPE_CHECKING imports count alike, and ``import_module`` with a literal name.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator, Mapping

import pytest

import fusedops

CORE = pathlib.Path(fusedops.__file__).parent
TOP = "the rest"
LAYERS: tuple[tuple[str, ...], ...] = (  # the lowest first; a name is a module or a package of fusedops
    ("_native", "_report", "_version"),
    ("errors", "packed_call"),
    ("_contract",),
    ("constraints", "masks", "tensor_cache", "viewless", "philox"),
    ("_plugins",),
    ("_policy",),
    ("_dispatch",),
    ("ops",),
    (
        "__init__",
        "_bind",
        "_compare",
        "_explain",
        "_result_form",
        "_result_memory",
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
