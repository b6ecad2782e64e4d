"""Find in a forward what an op computes: attention, rotations, modulated norms, gated sums.

Each is replaced by a call that gets the parts of the expression, in their order, and computes it by an op or as it was.
So the names and shapes of a model do not matter to what is computed, only to how.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any, NamedTuple, cast

from fusedops.integrations.diffusers._forwards.joined import is_simple, is_view, join
from fusedops.integrations.diffusers._source import SERVED, names_in, path_of

_DISPATCH, _SDPA = "dispatch_attention_fn", "scaled_dot_product_attention"


class Site(NamedTuple):
    """A place in a forward: the op, and the function or the module in question as it is written there.

    Attributes:
        op: the name of the op.
        path: such as ``apply_rotary_emb`` or ``self.norm1``; of an activation and a norm, both.
        options: the constants that a function is called with by name; None where others are.
        conditions: those under which the place is reached, each with True or False.
    """

    op: str
    path: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] | None = ()
    conditions: tuple[tuple[ast.expr, bool], ...] = ()


def changed(tree: ast.FunctionDef, ops: Collection[str]) -> tuple[Site, ...]:
    r"""Change the tree of a forward in place; return what is replaced.

    >>> tree = ast.parse("def f(self, x, gate):\n return x + gate * self.mlp(x)").body[0]
    >>> changed(tree, ["gated_add"])
    (Site(op='gated_add', path=(), options=(), conditions=()),)
    >>> print(ast.unparse(tree.body[0]))
    return _fusedops.gated(x, gate, self.mlp(x), False, False)
    """
    join(tree, _is_moved)
    changes = _Changes(ops)
    tree.body = [changes.visit(statement) for statement in tree.body]
    if "gated_add_modulated_norm" in ops:
        _Pairs(changes.sites).visit(tree)
    return tuple(changes.sites)


def _is_moved(value: ast.expr) -> bool:
    """Return True for a call of a module with one argument, and for a product."""
    return _module_call(value) is not None or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult))


def _module_call(tree: ast.expr) -> tuple[str, ast.expr] | None:
    """Return the module and the argument of a call such as ``self.norm(x)``, or None."""
    if not isinstance(tree, ast.Call) or len(tree.args) != 1 or tree.keywords or isinstance(tree.args[0], ast.Starred):
        return None
    path = path_of(tree.func)
    return (path, tree.args[0]) if path.startswith("self.") and not is_view(path.rpartition(".")[2]) else None


def _plus_one(tree: ast.expr) -> ast.expr | None:
    """Return what is added to 1, or None."""
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        for one, other in ((tree.left, tree.right), (tree.right, tree.left)):
            if isinstance(one, ast.Constant) and one.value in (1, 1.0) and type(one.value) is not bool:
                return other
    return None


def _has(tree: ast.expr, word: str) -> bool:
    return any(word in name.lower() for name in names_in(tree))


def _is_product(tree: ast.expr) -> bool:
    return isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult)


def _options(call: ast.Call) -> tuple[tuple[str, Any], ...] | None:
    """Return the constants that a function is called with by name, or None where other values are given by name."""
    options: list[tuple[str, Any]] = []
    for each in call.keywords:
        try:
            options.append((str(each.arg), ast.literal_eval(each.value)))
        except ValueError:
            return None
    return tuple(sorted(options))


class _Changes(ast.NodeTransformer):
    """Replaces expressions, the outer ones first."""

    def __init__(self, ops: Collection[str]) -> None:
        self._ops = ops
        self._conditions: tuple[tuple[ast.expr, bool], ...] = ()
        self.sites: list[Site] = []

    def _call(self, name: str, op: str, path: tuple[str, ...], *args: Any) -> ast.Call:
        """Return a call of what serves; its parts are changed too."""
        self.sites.append(Site(op, path, conditions=self._conditions))
        given = [ast.Constant(each) if isinstance(each, (bool, float)) else each for each in args]
        function = ast.Attribute(ast.Name(SERVED, ast.Load()), name, ast.Load())
        return ast.Call(function, [self.visit(each) for each in given], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Leave a function in a forward as it is."""
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        """Change both branches; what is replaced in them has the condition."""
        node.test, outside = self.visit(node.test), self._conditions
        for name, wanted in (("body", True), ("orelse", False)):
            self._conditions = (*outside, (node.test, wanted))
            setattr(node, name, [self.visit(statement) for statement in getattr(node, name)])
        self._conditions = outside
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        """Leave a function in a forward as it is."""
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace a call of an attention function, of a rotary function, and of an activation of a norm."""
        wide = self._wide(node)
        if wide is not None:
            return wide
        path = path_of(node.func)
        last = path.rpartition(".")[2]
        is_rotary = path == last and "apply" in path and "rotary" in path
        kinds = {"attention": path == _DISPATCH, "sdpa": last == _SDPA, "rotary": is_rotary}
        for name, is_kind in kinds.items():
            op = "rotary_embedding" if name == "rotary" else "attention"
            if is_kind and op in self._ops:
                at = len(self.sites)
                call = self._call(name, op, (path,), node.func, *node.args)
                call.keywords = [ast.keyword(each.arg, self.visit(each.value)) for each in node.keywords]
                self.sites[at] = self.sites[at]._replace(options=_options(node) if name == "rotary" else ())
                return call
        outer = _module_call(node)
        inner = _module_call(outer[1]) if outer is not None else None
        if outer is not None and inner is not None and "group_norm" in self._ops:
            assert isinstance(node.args[0], ast.Call)
            return self._call("chained", "group_norm", (outer[0], inner[0]), node.func, node.args[0].func, inner[1])
        return self.generic_visit(node)  # pyright: ignore[reportReturnType]

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Replace a modulated norm and a gated sum."""
        found = self._modulated(node) or self._gated(node)
        return self.generic_visit(node) if found is None else found  # pyright: ignore[reportReturnType]

    def _wide(self, node: ast.Call) -> ast.expr | None:
        """Return the call for ``(... x.float() ...).type_as(x)``, which computes in float32, or None."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "type_as" or len(node.args) != 1:
            return None
        inner = node.func.value
        if not isinstance(inner, ast.BinOp) or not isinstance(node.args[0], ast.Name):
            return None
        return self._modulated(inner, node.args[0].id) or self._gated(inner, node.args[0].id)

    def _modulated(self, node: ast.BinOp, wide: str = "") -> ast.expr | None:
        """Return the call for ``norm(x) * (1 + scale) + shift``, or None."""
        if "modulated_norm" not in self._ops:
            return None
        product, shift = (node.left, node.right) if isinstance(node.op, ast.Add) else (node, ast.Constant(None))
        if not _is_product(product) or not is_simple(shift):
            return None
        assert isinstance(product, ast.BinOp)
        call = _module_call(product.left)
        scale = _plus_one(product.right)
        if isinstance(product.right, ast.Subscript):  # (1 + scale)[:, None]
            inner = _plus_one(product.right.value)
            scale = None if inner is None else ast.Subscript(inner, product.right.slice, ast.Load())
        offset = 0.0 if scale is None else 1.0
        scale = product.right if scale is None else scale
        if call is None or not is_simple(scale) or not (offset or _has(scale, "scale")):
            return None
        path, x = call
        if wide:
            if not _is_float_of(x, wide):
                return None
            x = _float_of(x)
        assert isinstance(product.left, ast.Call)
        return self._call(
            "modulated", "modulated_norm", (path,), product.left.func, x, scale, shift, offset, bool(wide)
        )

    def _gated(self, node: ast.BinOp, wide: str = "") -> ast.expr | None:
        """Return the call for ``x + gate * y``, or None."""
        if "gated_add" not in self._ops or not isinstance(node.op, ast.Add):
            return None
        product, residual = (node.right, node.left) if _is_product(node.right) else (node.left, node.right)
        if not isinstance(product, ast.BinOp) or not _is_product(product):
            return None
        if product is node.left and not is_simple(residual):
            return None
        one, other = product.left, product.right
        for gate, y, first in ((one, other, True), (other, one, False)):
            if not _has(gate, "gate") or not is_simple(gate):
                continue
            if not first and not is_simple(residual):
                return None
            if wide:
                if not _is_float_of(residual, wide):
                    return None
                residual = _float_of(residual)
            gate, is_tanh = _without_tanh(gate)
            return self._call("gated", "gated_add", (), residual, gate, y, is_tanh, bool(wide))
        return None


def _is_float_of(tree: ast.expr, name: str) -> bool:
    """Return True for ``x.float()`` with the variable of a name."""
    return isinstance(tree, ast.Call) and not tree.args and not tree.keywords and path_of(tree.func) == f"{name}.float"


def _float_of(tree: Any) -> ast.expr:
    """Return x of ``x.float()``."""
    return tree.func.value


def _without_tanh(gate: ast.expr) -> tuple[ast.expr, bool]:
    """Return the gate below a tanh at its outside, and True where there is one."""
    if not isinstance(gate, ast.Call) or not isinstance(gate.func, ast.Attribute) or gate.func.attr != "tanh":
        return gate, False
    if path_of(gate.func) == "torch.tanh":
        return gate.args[0], True
    return (gate, False) if gate.args else (gate.func.value, True)


class _Pairs(ast.NodeTransformer):
    """Joins a gated sum and the modulated norm of it, in two statements one after the other, to one call."""

    def __init__(self, sites: list[Site]) -> None:
        self._sites = sites

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Join the statements of each block."""
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, self._joined(cast("list[ast.stmt]", block)))
        return super().generic_visit(node)

    def _joined(self, block: list[ast.stmt]) -> list[ast.stmt]:
        joined: list[ast.stmt] = []
        for statement in block:
            pair = self._pair(joined[-1], statement) if joined else None
            if pair is None:
                joined.append(statement)
            else:
                joined[-1] = pair
        return joined

    def _pair(self, first: ast.stmt, second: ast.stmt) -> ast.stmt | None:
        added, normed = _served_call(first, "gated"), _served_call(second, "modulated")
        if added is None or normed is None:
            return None
        (s, gated), (y, modulated) = added, normed
        norm, x, *rest = modulated.args
        if path_of(x) != s or s in names_in(*rest) or s == y:
            return None
        path = path_of(norm)
        at = next(at for at, site in enumerate(self._sites) if site[:2] == ("modulated_norm", (path,)))
        self._sites[at] = self._sites[at]._replace(op="gated_add_modulated_norm")
        del self._sites[next(at for at, site in enumerate(self._sites) if site.op == "gated_add")]
        function = ast.Attribute(ast.Name(SERVED, ast.Load()), "gated_modulated", ast.Load())
        target = ast.Tuple([ast.Name(y, ast.Store()), ast.Name(s, ast.Store())], ast.Store())
        return ast.copy_location(ast.Assign([target], ast.Call(function, [*gated.args, norm, *rest], [])), first)


def _served_call(statement: ast.stmt, name: str) -> tuple[str, ast.Call] | None:
    """Return the variable and the call of a statement that assigns a call of what serves, or None."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    (target,), call = statement.targets, statement.value
    if not isinstance(target, ast.Name) or not isinstance(call, ast.Call) or path_of(call.func) != f"{SERVED}.{name}":
        return None
    return target.id, call
