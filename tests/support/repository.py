"""Folders of the repository, and its files of Python that are on no path."""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
# the folders that hold the helper modules of the tests, for the path of a process that pytest does not start
SUPPORT_FOLDERS = [SUPPORT, *filter(pathlib.Path.is_dir, SUPPORT.iterdir())]
EXAMPLE_PLUGIN = ROOT / "tests" / "example_plugin" / "fusedops-backend-example"


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which several tests search."""
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree: to walk it takes as long as to parse it."""
    return tuple(ast.walk(parsed(source)))


def docstrings(source: str) -> set[int]:
    """Return the ids of the constants that are docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in nodes(source) if isinstance(node, documented)]
    return {
        id(body[0].value)
        for body in bodies
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    }


def last_name(node: ast.AST) -> str:
    """Return the name of a node, or of its attribute; of others an empty text."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def load(path: pathlib.Path) -> Any:
    """Return a file of Python as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # which some of them remove
        spec.loader.exec_module(module)
    return module
