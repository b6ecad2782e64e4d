"""The public names: listed alike by dir, __all__ and help, lazy ones included; and how results display."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import fusedops

pytestmark = pytest.mark.usefixtures("no_compiled_backend")

LAZY = ("compat", "constraints", "integrations", "losses", "nn", "philox", "tensor_cache", "testing", "viewless")
EXPECTED = {
    "API_VERSION", "Adaptation", "Backend", "BackendInfo", "Case", "Decision", "Deviation", "DeviceSpec", "Event",
    "Evidence", "FallbackWarning", "FusedOpsError", "FusedOpsWarning", "InvalidInputError", "Kernel",
    "MakeViewlessTensor", "Mismatch", "MismatchError", "NoBackendError", "Op", "Output", "Padding", "Plan", "Replay",
    "PluginError", "Policy", "PolicyError", "Rows", "Saved", "Shard", "Sharding", "Stats", "TensorSpec", "Tolerance",
    "Unavailable", "Verification", "accept", "assert_viewless_tensor", "backends", "bind", "call",
    "checkpoint_contexts", "compat", "constraints", "dtypes", "errors", "explain", "get_policy", "hookimpl",
    "integrations", "kernel", "kernels_of", "losses", "make_viewless_tensor", "masks", "nn", "ops", "philox", "plan",
    "quantization", "register", "reset_stats", "safely_set_viewless_tensor_data", "set_policy", "stats",
    "tensor_cache", "testing", "unregister", "use", "verify", "viewless", "warm_up",
}  # fmt: skip


def test_dir_and_all_list_the_public_names_and_nothing_else() -> None:
    assert dir(fusedops) == sorted(fusedops.__all__)
    assert set(fusedops.__all__) == EXPECTED | set(fusedops.ops.__all__)
    assert len(fusedops.__all__) == len(set(fusedops.__all__))
    for name in fusedops.__all__:
        assert getattr(fusedops, name) is not None, name


def test_help_shows_every_public_name() -> None:
    text = pydoc.plain(pydoc.render_doc(fusedops))
    assert [name for name in fusedops.__all__ if not re.search(rf"\b{name}\b", text)] == []
    content = text.partition("PACKAGE CONTENTS")[2].partition("\n\n")[0].split()
    shown = {name for name in content if not name.startswith("_")} - {"(package)"}
    assert shown == {name for name in fusedops.__all__ if inspect.ismodule(getattr(fusedops, name))}


def test_each_lazy_name_works_after_import_fusedops_alone(python: Callable[..., Any]) -> None:
    code = """
        import json, sys, torch, fusedops
        before = [name for name in sys.modules if name.startswith("fusedops.")]
        y = fusedops.nn.BiasGELU if hasattr(fusedops.nn, "BiasGELU") else fusedops.nn
        lazy = {name: getattr(fusedops, name).__name__ for name in %r}
        namespace = {}
        exec("from fusedops import *", namespace)
        print(json.dumps([lazy, sorted(before), sorted(set(fusedops.__all__) - set(namespace))]))
    """
    modules, before, missing = python(code % (LAZY,))
    assert modules == {name: f"fusedops.{name}" for name in LAZY}
    assert not {f"fusedops.{name}" for name in ("nn", "compat", "testing", "viewless")} & set(before)
    assert missing == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fusedops' has no attribute 'nonsense'"):
        fusedops.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["constraints", "testing", "nn", "compat", "ops", "errors"])
def test_the_names_of_a_module_are_public(name: str) -> None:
    module = getattr(fusedops, name)
    for public in getattr(module, "__all__", []):
        assert getattr(module, public) is not None
        assert not public.startswith("_")


# ------------------------------------------------------------------------------------------------------------ display


class Cells(HTMLParser):
    """Read a table's texts, and check that every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def refusing() -> None:
    """Register a backend whose name in texts must be escaped, and that refuses x of more than 2 columns."""
    from fusedops.constraints import Dim

    @fusedops.kernel("bias_gelu", Dim("x", (-1,), at_most=2), deviations=[fusedops.Deviation("odd", "a < b & c")])
    def refusing(x: Any, bias: Any, approximate: str) -> Any:
        return x.clone()

    fusedops.register(fusedops.Backend("strict", ("cpu",), 999, (refusing,)))
    fusedops.reset_stats()


@pytest.mark.usefixtures("refusing")
def test_a_decision_displays_as_a_table() -> None:
    decision = fusedops.explain("bias_gelu", torch.ones(3, 4))
    assert repr(decision) == str(decision)
    assert repr(decision).splitlines()[0] == "bias_gelu: served by eager (backward: eager)"
    assert re.search(r"^  refused   strict   got dim -1 of x = 4, expected a size of at most 2$", repr(decision), re.M)
    assert re.search(r"^ +to fix: split x so that dim -1 is at most 2$", repr(decision), re.M)
    table = Cells(decision._repr_html_())
    assert table.tags[:2] == ["table", "caption"]
    assert table.texts[:4] == ["bias_gelu: served by eager (backward: eager)", "status", "backend", "notes"]
    notes = (
        "got dim -1 of x = 4, expected a size of at most 2; to fix: split x so that dim -1 is at most 2; deviation: odd"
    )
    assert f"{notes}: a < b & c" in table.texts, "escaped, and read back"
    assert table.tags.count("tr") == 1 + len(decision.shown) + 1, "the others have one row"


def test_backends_display_as_a_table() -> None:
    infos = fusedops.backends()
    assert len(infos) == len(list(infos))
    assert repr(infos).splitlines() == [repr(info) for info in infos]
    by_name = {info.name: info for info in infos}
    assert re.fullmatch(r"<eager, for \*, priority 0, \d+ ops, ready>", repr(by_name["eager"]))
    fusedops.register(
        fusedops.Backend("away", ("cuda",), 1, (), probe=lambda: fusedops.Unavailable("no <chip>", "buy one"))
    )
    (away,) = [info for info in fusedops.backends() if info.name == "away"]
    assert repr(away) == "<away, for cuda, priority 1, 0 ops, unavailable: no <chip>; to fix: buy one>"
    table = Cells(fusedops.backends()._repr_html_())
    assert table.texts[:7] == ["backends", "name", "state", "devices", "priority", "why", "fix"]
    assert "no <chip>" in table.texts
    assert table.tags.count("tr") == 1 + len(fusedops.backends())


@pytest.mark.usefixtures("refusing")
def test_stats_display_as_a_table() -> None:
    assert repr(fusedops.stats()) == "no calls counted"
    assert Cells(fusedops.stats()._repr_html_()).tags.count("tr") == 1
    with pytest.warns(fusedops.FallbackWarning):
        fusedops.bias_gelu(torch.ones(3, 4))
    fusedops.bias_gelu(torch.ones(3, 2))
    assert repr(fusedops.stats()).splitlines() == [
        "bias_gelu: 2 calls",
        "     50 % ran eager (1)",
        "          not strict: got dim -1 of x = 4, expected a size of at most 2",
        "     50 % ran strict (1)",
    ]
    table = Cells(fusedops.stats()._repr_html_())
    assert table.texts[:5] == ["calls by backend", "call", "backend", "calls", "refused"]
    assert table.texts[5:9] == ["bias_gelu", "eager", "1", "strict: got dim -1 of x = 4, expected a size of at most 2"]


@pytest.mark.usefixtures("refusing")
def test_a_verification_displays_as_a_table() -> None:
    with fusedops.use("strict"), fusedops.verify("reference", raise_on_mismatch=False) as report:
        warned = pytest.warns(fusedops.FusedOpsWarning, match="got 1 results? beyond the tolerance")
        with warned, fusedops.verify("reference", raise_on_mismatch=False) as inner:
            fusedops.bias_gelu(torch.ones(3, 2))
        fusedops.bias_gelu(torch.zeros(3, 2))
    assert repr(inner) == str(inner)
    assert repr(inner).splitlines()[0] == "verify against reference: 1 result compared, 1 beyond the tolerance"
    assert inner.worst is not None
    assert inner.worst.reproduce in repr(inner)
    assert report.mismatches == 0
    table = Cells(report._repr_html_())
    assert table.texts[0] == "verify against reference: 1 result compared, 0 beyond the tolerance"
    assert table.tags.count("tr") == 1 + len(report.rows)
