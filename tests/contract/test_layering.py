"""Imports between layers: the core names no backend, and importing it loads, reads and starts nothing."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from repository import ROOT

import fusedops

CORE = pathlib.Path(fusedops.__file__).parent
FILES = sorted(CORE.rglob("*.py"))
NAMES = ("eager", "triton", "npu", "torch_npu")
ids = [str(path.relative_to(CORE)) for path in FILES]


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
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
    for module, top in imports(ast.parse(path.read_text())):
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
    assert list(imports(tree)) == [("fusedops_triton.x", False)]


@pytest.mark.parametrize("path", sorted((ROOT / "backends").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_backend_imports_the_public_core_and_no_other_backend(path: pathlib.Path) -> None:
    own = path.relative_to(ROOT / "backends").parts[0]
    for module, top in imports(ast.parse(path.read_text())):
        package = module.partition(".")[0]
        assert not package.startswith("fusedops_") or package == own, module
        assert not module.startswith("fusedops._"), f"{module}: what begins with an underscore is the core's own"
        if path.name == "__init__.py":
            assert not (package in ("triton", "torch_npu") and top), "a vendor's library is imported in the probe"


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
