"""A forward whose statements are joined calls the same in the same order, and returns the same, on each way through."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from diffusion_families import FAMILIES

from fusedops.integrations.diffusers import apply
from fusedops.integrations.diffusers._forwards.joined import join


def branches(self: Any, x: Any, gate: Any) -> Any:
    if self.a:
        n = self.first(x)
    elif self.b:
        n = self.second(x) + gate
    if self.c:
        n = n * 3 + x
    if self.a and self.b:
        y = gate * n
    elif self.c:
        return gate * n
    else:
        y = self.first(n)
    x = y + x
    if self.b:
        x = x + y  # read again: y must not have been moved
    return x


def loop(self: Any, x: Any, gate: Any) -> Any:
    n = self.first(x)
    for _ in range(2):
        if self.a:
            n = gate * n
        x = n + x
        if self.b:
            n = self.second(x)
            if self.c:
                continue
        x = x + n
    return x + n


def asked(self: Any, x: Any, gate: Any) -> Any:
    n = self.first(x)
    if self.second(n) > 5:  # reads n, and is a call
        n = n * 2
    y = self.second(x)
    if self.a or self.first(x):  # may be called between them
        y = y * gate
    return y + n


def run(function: Callable[..., Any], flags: tuple[bool, ...]) -> tuple[Any, list[Any]]:
    """What a function returns, or the class of its error, and the calls in it."""
    calls: list[Any] = []

    def called(name: str, factor: int) -> Callable[[int], int]:
        return lambda x: calls.append((name, x)) or x * factor + 1

    names = dict(zip("abc", flags, strict=True))
    module = SimpleNamespace(**names, first=called("first", 5), second=called("second", 7))
    try:
        return function(module, 2, 11), calls
    except UnboundLocalError as error:
        return type(error), calls


def is_moved(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult))


@pytest.mark.parametrize("function", [branches, loop, asked], ids=lambda each: each.__name__)
def test_each_way_computes_the_same(function: Any) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    before = ast.unparse(definition)
    join(definition, is_moved)
    assert (ast.unparse(definition) == before) == (function is asked)
    names: dict[str, Any] = dict(globals())
    exec(compile(ast.fix_missing_locations(tree), "<joined>", "exec"), names)
    for flags in product((False, True), repeat=3):
        assert run(names[function.__name__], flags) == run(function, flags), flags


@pytest.mark.parametrize("name", ["DiT", "PixArt"])
def test_a_gate_in_a_branch_is_a_gated_sum(name: str) -> None:
    rows = {(row.module, row.op) for row in apply(FAMILIES[name].build()).rows}
    assert {("BasicTransformerBlock", "gated_add"), ("BasicTransformerBlock", "modulated_norm")} <= rows
