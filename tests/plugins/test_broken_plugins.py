"""Broken plugins, as installed distributions: each fails alone, with its own error."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest
import torch
from broken_plugins import BROKEN, OP, X, fives, info, plugin, write_all
from state import backend_record

import fusedops
from fusedops import Backend, PluginError, Unavailable

OBJECT = """
import fusedops

class Plugin:
    @staticmethod
    @fusedops.hookimpl
    def fusedops_backend():
        return fusedops.Backend("two", ("cpu",), -5, ())
"""


@pytest.fixture
def broken(distribution: Any, rediscovered: Any) -> pathlib.Path:
    """The site folder with every plugin above, seen by this process."""
    site = write_all(distribution)
    rediscovered(site)
    return site


def test_every_broken_plugin_is_failed_with_its_own_error_and_the_rest_works(broken: pathlib.Path) -> None:
    for name, (_, kind, message) in BROKEN.items():
        shown = info(name)
        assert (shown.state, shown.distribution, shown.version) == ("failed", f"{name}-dist", "1.0"), name
        expected = message.replace("{file}", str(broken / f"{name}.py"))
        assert shown.why.endswith(expected), f"{name}: {shown.why}"
        assert shown.why.startswith(f"{kind}: "), f"{name}: {shown.why}"
        assert shown.error.startswith("Traceback (most recent call last):"), name
        assert shown.error.strip().endswith(expected.partition(" (syntax.py")[0]), name
        assert shown.fix == f"correct {name}, or uninstall {name}-dist; fusedops.backends() shows the traceback"
        assert shown.ops == shown.device_types == ()
    for name in ("works", "eager", "triton"):
        assert next(i.state for i in fusedops.backends() if i.name == name) == "ready"
    assert torch.equal(fusedops.scaled_masked_softmax(X, backend="works"), torch.zeros(2, 4))
    assert fusedops.explain(OP.name, X).backend == "eager"


def test_naming_a_failed_backend_raises_its_error_again(broken: pathlib.Path) -> None:
    for name in ({*BROKEN} - {"auto"}) | {"attribute", "gone", "twice"}:  # "auto" is the default order in a policy
        for call in (
            lambda name=name: fusedops.set_policy(name),
            lambda name=name: fusedops.use(f"triton; {OP.name}=works,{name}"),
            lambda name=name: fusedops.scaled_masked_softmax(X, backend=name),
            lambda name=name: fusedops.explain(OP.name, X, backend=name),
        ):
            with pytest.raises(PluginError) as error:
                call()
            cause = error.value.__cause__
            assert cause is not None
            text = f"but backend {name!r} failed to load ({type(cause).__name__}: {cause}), expected one that loads; "
            assert f"{text}to fix: " in str(error.value)
            if name in BROKEN:
                assert type(cause).__name__ == BROKEN[name][1]
            assert cause.__traceback__ is not None or isinstance(cause, PluginError)
    assert str(fusedops.get_policy()).startswith("auto (nothing set)")


def test_an_entry_point_that_leads_nowhere(broken: pathlib.Path) -> None:
    assert info("attribute").why == "AttributeError: module 'works' has no attribute 'nothing'"
    assert info("gone").why == "ModuleNotFoundError: No module named 'gone_module'"


def test_two_distributions_that_claim_one_name_are_both_failed(broken: pathlib.Path) -> None:
    both = [i for i in fusedops.backends() if i.name == "twice"]
    assert sorted(i.distribution for i in both) == ["first-dist", "second-dist"]
    for shown in both:
        assert shown.state == "failed"
        assert shown.why == (
            f"PluginError: backend 'twice' of {shown.distribution} is not loaded: got first-dist and second-dist, "
            "which both claim the name 'twice', expected one of them; to fix: uninstall one"
        )
    assert fusedops.explain(OP.name, X).backend == "eager"


def test_a_built_in_name_cannot_be_taken(broken: pathlib.Path) -> None:
    assert info("eager", "fusedops").state == "ready"
    shown = info("eager", "pretender-dist")
    assert shown.state == "failed"
    assert shown.why == (
        "PluginError: backend 'eager' of pretender-dist is not loaded: got the name 'eager', which belongs to "
        "fusedops, expected another; to fix: rename it"
    )
    assert fusedops.scaled_masked_softmax(X, backend="eager").sum() == 2
    fusedops.use("eager")


def test_a_probe_that_raises_is_a_failed_backend(broken: pathlib.Path) -> None:
    fusedops.use("probe")  # not probed yet: a policy alone imports nothing
    with pytest.warns(fusedops.FallbackWarning) as caught:
        fusedops.scaled_masked_softmax(X, backend="probe")
    assert [str(w.message) for w in caught] == [
        "scaled_masked_softmax runs on eager, not on probe: failed: PluginError: backend 'probe': its probe raised "
        "OSError: driver 5.1 is too old; to fix: correct probe, or uninstall probe-dist; fusedops.backends() "
        'shows the traceback. (Reported once; fallback="raise" makes this an error, "silent" hides it.)'
    ]
    shown = info("probe")
    assert shown.state == "failed"
    assert "OSError: driver 5.1 is too old" in shown.error
    assert "in bad" in shown.error, "the traceback of the probe itself"
    fusedops.use("probe")  # as before: what naming does must not depend on whether someone has looked
    with (
        pytest.raises(fusedops.NoBackendError, match=r"driver 5\.1 is too old"),
        fusedops.use("probe", fallback="raise"),
    ):
        fusedops.scaled_masked_softmax(X)


def cancelled() -> None:
    raise asyncio.CancelledError("vendor")


@pytest.mark.usefixtures("no_compiled_backend")
@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (lambda: exit(3), "its probe raised SystemExit: 3"),
        (cancelled, "its probe raised CancelledError: vendor"),
        (
            lambda: True,
            "its probe raised TypeError: the probe returned True, expected None or Unavailable(why, fix)",
        ),
        (
            lambda: Unavailable("", ""),
            "its probe raised TypeError: the probe returned Unavailable(why='', fix=''), expected None "
            "or Unavailable(why, fix)",
        ),
        (
            lambda: Unavailable(5, 6),  # type: ignore[arg-type]
            "its probe raised TypeError: the probe returned Unavailable(why=5, fix=6), expected None "
            "or Unavailable(why, fix)",
        ),
    ],
    ids=["exits", "cancelled", "junk", "empty", "numbers"],
)
def test_a_probe_that_leaves_or_gives_junk_is_a_failed_backend(probe: Any, text: str) -> None:
    fusedops.register(Backend("mine", ("cpu",), 5, (fives,), probe=probe))
    with pytest.warns(fusedops.FallbackWarning, match="scaled_masked_softmax runs on eager, not on mine: failed"):
        assert fusedops.scaled_masked_softmax(X).sum() == 2
    shown = info("mine")
    assert (shown.state, shown.why) == ("failed", f"PluginError: backend 'mine': {text}")


@pytest.mark.parametrize("where", ["import", "probe"])
def test_an_interrupt_passes(where: str, distribution: Any, rediscovered: Any) -> None:
    head = "def stop(): raise KeyboardInterrupt"
    source = "raise KeyboardInterrupt" if where == "import" else plugin("stops", head=head, probe="stop")
    rediscovered(distribution("stops-dist", {"stops": "stops"}, stops=source))
    for _ in range(2):  # and leaves nothing half done
        with pytest.raises(KeyboardInterrupt):
            fusedops.backends()


def test_a_plugin_of_high_priority_is_first_by_default_and_never_before_a_named_one(
    distribution: Any, rediscovered: Any
) -> None:
    source = plugin("first_of_all", priority="10**9")
    rediscovered(distribution("first-dist", {"first_of_all": "foremost"}, foremost=source))
    assert fusedops.explain(OP.name, X).backend == "first_of_all"
    assert info("first_of_all").priority == 10**9
    for text in ("eager", "triton", "npu,eager", f"{OP.name}=eager"):
        with fusedops.use(text, fallback="silent"):
            assert fusedops.explain(OP.name, X).backend == text.rpartition(",")[2].rpartition("=")[2]
            assert fusedops.scaled_masked_softmax(X).sum() == 2
    with pytest.raises(AttributeError, match="cannot assign to field 'priority'"):
        backend_record("eager").backend.priority = -1  # type: ignore[union-attr,misc]


def test_file_distribution_and_version_of_each_are_shown(
    distribution: Any, rediscovered: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusedops.__main__ import main

    site = distribution("two-dist", {"two": "two_module:Plugin"}, version="2.5", two_module=OBJECT)
    rediscovered(site)
    shown = info("two")
    assert (shown.distribution, shown.version, shown.file) == ("two-dist", "2.5", str(site / "two_module.py"))
    assert main(["info"]) == 0
    output = "".join(capsys.readouterr().out.split())
    for each in fusedops.backends():
        assert each.file
        assert "file" + "".join(each.file.split()) + f"version{each.version}" in output
        assert f"{','.join(each.device_types)}{each.distribution}" in output
    assert info("eager").file.endswith("fusedops_eager/__init__.py")


def test_a_probe_that_refuses_is_an_unavailable_backend(broken: pathlib.Path) -> None:
    shown = info("away")
    assert (shown.state, shown.why, shown.fix, shown.error) == ("unavailable", "no chip", "buy one", "")
    assert (shown.device_types, shown.priority, shown.ops) == (("cpu",), -5, (OP.name,))
    assert shown.file.endswith("away.py")
