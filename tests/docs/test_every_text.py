"""Every text of an error, a warning or a refusal in the sources is in a table of texts (``tests/**/test_*_texts.txt``).

The sources are read, not run: each place that makes a text gives a pattern, and a pinned text has to match it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import pathlib
import re
from collections.abc import Iterator

from error_texts import read_texts
from repository import ROOT, last_name, nodes

import fusedops
import fusedops_eager
from fusedops import errors

CORE = pathlib.Path(fusedops.__file__).parent
FILES = sorted([*CORE.rglob("*.py"), *pathlib.Path(fusedops_eager.__file__).parents[1].glob("fusedops_*/**/*.py")])
PYTHONS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
CLASSES = {*errors.__all__} - {"FusedOpsError"}
PINNED = [
    text for path in sorted((ROOT / "tests").rglob("test_*_texts.txt")) for text in read_texts(path).values()
]  # fmt: skip


def sites(source: str) -> Iterator[ast.expr]:
    """Return where a source makes the text of an error, a warning or a refusal of fusedops; not of an error of Python.

    That is: each call of one of the classes, or of a function that calls one with the text that it is given; each
    reason of a refusal; and each other text of the form ``got X, expected Y; to fix: Z``, such as a returned one, that
    is no docstring.
    """
    done: set[ast.AST] = set()
    for node in nodes(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            done.add(node.value)
        elif isinstance(node, ast.Call) and last_name(node.func) in PYTHONS:
            done.update(ast.walk(node))
    for node in nodes(source):
        if node in done:
            continue
        if isinstance(node, ast.Call):
            names = {last_name(node.func)}
            if names == {"warn"}:
                names |= {last_name(arg) for arg in node.args}
            is_site = bool(names & {*CLASSES, "Reason", "_refuse", "_warn"})
        elif isinstance(node, (ast.JoinedStr, ast.Constant)):
            is_site = all(part in _literal(node) for part in ("got ", "expected ", "; to fix: "))
        else:
            continue
        if is_site:
            done.update(ast.walk(node))
            yield node


def patterns(site: ast.AST) -> list[str]:
    """Return a pattern for each text in a place: its literal parts, with anything in place of the rest."""
    if isinstance(site, ast.Constant):
        return [re.escape(site.value)] if isinstance(site.value, str) and len(site.value) >= 8 else []
    if isinstance(site, ast.JoinedStr):
        if len(_literal(site)) < 8:
            return []
        pieces = [re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*?" for p in site.values]
        return ["".join(pieces)]
    return [pattern for child in ast.iter_child_nodes(site) for pattern in patterns(child)]


def wanted(site: ast.expr) -> list[list[str]]:
    """Return the parts that one pinned text must have, each as the patterns of which one must match.

    A reason is ``Reason(code, given, needed, fix, detail)``, where a detail is shown in place of given and needed.
    """
    if isinstance(site, ast.Call) and last_name(site.func) == "Reason":
        texts = site.args[3:] if len(site.args) > 4 else site.args[1:]
        return [alternatives for text in texts for alternatives in [patterns(text)] if alternatives]
    return [alternatives for alternatives in [patterns(site)] if alternatives]


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern, which each pinned text is searched for: there are more than ``re`` keeps."""
    return re.compile(pattern, re.S)


@functools.cache
def longest(pattern: str) -> str:
    """Return the longest literal part of a pattern: a search for it, in each text, takes a tenth of the pattern's."""
    return max((re.sub(r"\\(.)", r"\1", part) for part in pattern.split(".*?")), key=len)


def found(pattern: str, text: str) -> bool:
    return longest(pattern) in text and compiled(pattern).search(text) is not None


def unpinned(source: str, pinned: list[str]) -> list[tuple[int, str]]:
    """Return the lines of a source that make a text, with the text, where no pinned text matches."""
    missing: list[tuple[int, str]] = []
    for site in sites(source):
        parts = wanted(site)
        if not any(all(any(found(p, text) for p in part) for part in parts) for text in pinned):
            missing.append((site.lineno, ast.unparse(site)))
    return missing


def _literal(node: ast.AST) -> str:
    return "".join(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_every_text_in_the_sources_is_in_a_table() -> None:
    missing = [
        f"{path}:{line}: {text[:100]}" for path in FILES for line, text in unpinned(path.read_text("utf-8"), PINNED)
    ]
    assert not missing, "no text of a table matches; add one to a tests/**/test_*_texts.py:\n" + "\n".join(missing)


def test_the_search_finds_every_kind_of_place() -> None:
    source = (
        '"""Make texts: "got X, expected Y; to fix: Z"."""\n'
        "def f(x):\n"
        "    warnings.warn('be careful', FusedOpsWarning)\n"
        "    raise ValueError(f'got {x}, expected y; to fix: pass y')\n"
        "    return InvalidInputError(f'got {x}, expected y; to fix: pass y')\n"
        "    text = f'got {x}, expected y; to fix: pass y'\n"
        "    raise errors.PolicyError(text)\n"
        "    return [Reason(CODE, f'{x} of one kind', 'two of them' if x else 'none of them', fix)]\n"
        "    return Reason(CODE, x, needed, f'install {x}', f'unavailable: {x}')\n"
    )
    refusal = "got 5 of one kind, expected none of them; to fix: leave it out"
    assert sorted(site.lineno for site in sites(source)) == [3, 5, 6, 7, 8, 9]
    assert lines(source, ["got 5, expected y; to fix: pass y"]) == [3, 8, 9]
    assert lines(source, ["be careful", refusal]) == [5, 6, 9]
    assert lines(source, ["got 5 of one kind, expected three", "unavailable: 5; to fix: install 5"]) == [3, 5, 6, 8]


def lines(source: str, pinned: list[str]) -> list[int]:
    return sorted(line for line, _ in unpinned(source, pinned))
