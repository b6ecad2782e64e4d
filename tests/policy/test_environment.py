"""The environment variables of a policy, in this process and in others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from policy_cases import X, who
from state import VARIABLES

import fusedops
from fusedops import FusedOpsWarning, PolicyError

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


def test_set_policy_none_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert who() == "eager"
    monkeypatch.setenv("FUSEDOPS_BACKEND", "triton")
    assert who() == "eager"  # read on first need, once
    fusedops.set_policy(None)
    assert who() == "triton"
    monkeypatch.delenv("FUSEDOPS_BACKEND")
    fusedops.set_policy(None)
    assert who() == "eager"


def test_empty_variables_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUSEDOPS_BACKEND", "FUSEDOPS_FALLBACK", "FUSEDOPS_PLUGINS"):
        monkeypatch.setenv(name, " ")
    assert str(fusedops.get_policy()) == "auto (nothing set); fallback warn (default)"


def test_an_unknown_variable_is_warned_of_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_BAKCEND", "eager")
    monkeypatch.setenv("FUSEDOPS_XYZZY", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert who() == "eager"
        assert who() == "eager"
    known = f"expected one of {', '.join(sorted(VARIABLES))}; to fix:"
    assert [(w.category, str(w.message)) for w in caught] == [
        (
            FusedOpsWarning,
            f"environment: got variable 'FUSEDOPS_BAKCEND', {known} write 'FUSEDOPS_BACKEND' "
            "(it has no effect as it is)",
        ),
        (
            FusedOpsWarning,
            f"environment: got variable 'FUSEDOPS_XYZZY', {known} use one of these names (it has no effect as it is)",
        ),
    ]


@pytest.mark.parametrize(
    ("variable", "text", "right"),
    [
        ("FUSEDOPS_BACKEND", "in \"xyzzy\": got backend 'xyzzy'", "eager"),
        ("FUSEDOPS_FALLBACK", "got fallback level 'xyzzy'", "silent"),
        ("FUSEDOPS_ADAPT", "got adapt setting 'xyzzy'", "pad"),
        ("FUSEDOPS_ROWS", "got rows setting 'xyzzy'", "any"),
    ],
)
def test_a_broken_environment_is_an_error_at_each_call_until_it_is_fixed(
    variable: str, text: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "xyzzy")
    for _ in range(2):
        with pytest.raises(PolicyError, match=f"^{variable}: {text}, expected "):
            fusedops.scaled_masked_softmax(X)
    monkeypatch.setenv(variable, right)
    fusedops.scaled_masked_softmax(X)


# The same from outside, where a user sets it. One process per variable would cost two seconds each: fork after import.
ENVIRONMENTS = {
    "mixed": {"FUSEDOPS_BACKEND": "npu,triton; scaled_masked_softmax=eager"},
    "silent": {"FUSEDOPS_BACKEND": "npu", "FUSEDOPS_FALLBACK": "silent"},
    "raise": {"FUSEDOPS_BACKEND": "npu", "FUSEDOPS_FALLBACK": "raise"},
    "none": {"FUSEDOPS_PLUGINS": "none"},
    "list": {"FUSEDOPS_PLUGINS": "stranger, unheard"},
    "all": {"FUSEDOPS_PLUGINS": "all"},
    "barred": {"FUSEDOPS_PLUGINS": "none", "FUSEDOPS_BACKEND": "stranger,eager"},
}

SCRIPT = """
import json, os, sys, warnings
import torch, fusedops

def outcome():
    x = torch.ones(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            y = fusedops.scaled_masked_softmax(x)
            decision = fusedops.explain("scaled_masked_softmax", x).to_dict()
            error = ""
        except fusedops.FusedOpsError as raised:
            decision, error = None, f"{type(raised).__name__}: {raised}"
    infos = fusedops.backends() if "FUSEDOPS_PLUGINS" in os.environ else []
    known = {info.name: [info.state, info.why] for info in infos}
    return {"decision": decision, "error": error, "warnings": [str(w.message) for w in caught], "backends": known}

outcomes = {}
for name, variables in json.loads(os.environ.pop("ENVIRONMENTS")).items():
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ.update(variables)
        os.write(write, json.dumps(outcome()).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        outcomes[name] = json.load(pipe)
    os.wait()
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outside(python: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import json

    site = tmp_path_factory.mktemp("site")
    for name in ("stranger", "other"):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fusedops.backends]\n{name} = {name}\n")
        (site / f"{name}.py").write_text(
            "import fusedops\n@fusedops.hookimpl\ndef fusedops_backend():\n"
            f"    return fusedops.Backend({name!r}, ('cuda',), 5, ())\n"
        )
    return python(SCRIPT, site, ENVIRONMENTS=json.dumps(ENVIRONMENTS))


def test_outside_a_mixed_order_is_followed_and_explained(outside: dict[str, Any]) -> None:
    printed = outside["mixed"]
    assert (printed["error"], printed["warnings"]) == ("", [])
    assert printed["decision"]["backend"] == "eager"
    assert printed["decision"]["preferences"] == [
        {"channel": "FUSEDOPS_BACKEND", "text": "npu,triton; scaled_masked_softmax=eager", "in_effect": True}
    ]
    assert printed["decision"]["candidates"][0]["backend"] == "eager"


def test_outside_the_fallback_level_is_obeyed(outside: dict[str, Any]) -> None:
    assert (outside["silent"]["error"], outside["silent"]["warnings"]) == ("", [])
    assert outside["raise"]["error"].startswith(
        'NoBackendError: no backend takes this call of scaled_masked_softmax (fallback="raise", policy "npu" from '
        "FUSEDOPS_BACKEND)"
    )


def test_outside_plugins_may_be_barred(outside: dict[str, Any]) -> None:
    known = {name: outside[name]["backends"] for name in ("none", "list", "all")}
    assert known["all"]["stranger"] == known["all"]["other"] == ["ready", ""]
    assert known["none"]["stranger"] == ["unavailable", "stranger-dist is not in FUSEDOPS_PLUGINS='none'"]
    assert known["list"]["stranger"] == ["ready", ""]
    assert known["list"]["other"] == ["unavailable", "other-dist is not in FUSEDOPS_PLUGINS='stranger, unheard'"]
    assert all(known[name]["eager"] == ["ready", ""] for name in known)
    barred = outside["barred"]
    assert barred["error"] == ""
    assert barred["warnings"] == [
        "scaled_masked_softmax runs on eager, not on stranger: unavailable: stranger-dist is not in "
        "FUSEDOPS_PLUGINS='none'; to fix: add stranger to FUSEDOPS_PLUGINS, or unset it. (Reported once; "
        'fallback="raise" makes this an error, "silent" hides it.)'
    ]
