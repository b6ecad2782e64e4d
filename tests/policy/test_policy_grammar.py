"""The grammar of a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import OP, OTHER
from state import AUTO, PolicySource, backend_names, parse

import fusedops
from fusedops import PolicyError

KNOWN = f"expected one of {', '.join(sorted([AUTO, *backend_names()]))}; to fix:"

EMPTY = 'which has an empty name, expected backends separated by commas; to fix: write "npu,triton"'


@pytest.mark.parametrize(
    ("text", "order", "per_op"),
    [
        ("", None, {}),
        ("  ", None, {}),
        (";", None, {}),
        ("eager", ("eager",), {}),
        ("npu,triton", ("npu", "triton"), {}),
        ("  npu ,\ttriton  ", ("npu", "triton"), {}),
        ("auto", ("auto",), {}),
        ("npu, auto, eager", ("npu", "auto", "eager"), {}),
        ("eager, eager", ("eager", "eager"), {}),
        (f"npu,triton; {OP}=eager", ("npu", "triton"), {OP: ("eager",)}),
        (f"{OP}=eager; npu", ("npu",), {OP: ("eager",)}),
        (f" {OP} = eager , triton ;", None, {OP: ("eager", "triton")}),
        (f"{OP}=eager;{OTHER}=triton;;", None, {OP: ("eager",), OTHER: ("triton",)}),
    ],
)
def test_a_text_is_an_order_and_orders_for_single_ops(text: str, order: Any, per_op: Any) -> None:
    source = parse(text, "use()")
    assert (source.order, dict(source.per_op), source.text) == (order, per_op, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eager,xyzzy", f"in \"eager,xyzzy\": got backend 'xyzzy', {KNOWN} use one of these names"),
        ("cup", f"in \"cup\": got backend 'cup', {KNOWN} write 'cpu'"),
        ("Eager", f"in \"Eager\": got backend 'Eager', {KNOWN} write 'eager'"),
        ("eager triton", f"in \"eager triton\": got backend 'eager triton', {KNOWN} use one of these names"),
        ("eager,,triton", f'got "eager,,triton", {EMPTY}'),
        (f"{OP}=", f'got "{OP}=", {EMPTY}'),
        (f"{OP}=tritn", f"in \"{OP}=tritn\": got backend 'tritn', {KNOWN} write 'triton'"),
    ],
)
def test_what_is_not_understood_is_reported(text: str, message: str) -> None:
    for call in (lambda: fusedops.use(text), lambda: parse(text, "use()")):
        with pytest.raises(PolicyError) as error:
            call()
        assert str(error.value) == f"use(): {message}"


@pytest.mark.parametrize("text", ["softmax=eager", "scaled_masked_softmx=eager", "a=b=eager", "=eager"])
def test_an_unknown_op_is_reported_with_the_known_ones(text: str) -> None:
    with pytest.raises(PolicyError, match=r"^use\(\): in \".*\": got op '.*', expected one of .*scaled_masked_softmax"):
        fusedops.use(text)


@given(st.text("eagrti,;= _nou\n", max_size=20))
def test_any_text_is_a_source_or_a_policy_error(text: str) -> None:
    try:
        source = parse(text, "use()")
    except PolicyError:
        return
    assert isinstance(source, PolicySource)
    assert all(name in (AUTO, *backend_names()) for name in source.order or ())


def test_a_refused_text_changes_nothing() -> None:
    fusedops.set_policy("eager")
    for call in (lambda: fusedops.set_policy("tritn"), lambda: fusedops.set_policy("npu", fallback="xyzzy")):  # type: ignore[arg-type]
        with pytest.raises(PolicyError):
            call()
    assert str(fusedops.get_policy()) == 'set_policy(): "eager"; fallback warn (default)'


def test_an_alias_is_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3)
    assert fusedops.explain("rms_norm", x, backend="torch").backend == "eager"
    with fusedops.use("rms_norm=torch,cpu"):
        assert fusedops.explain("rms_norm", x).candidates[0].backend == "eager"
    fusedops.register(fusedops.Backend("torch", ("cpu",), 1, ()))  # a name is before an alias
    assert fusedops.explain("rms_norm", x, backend="torch").candidates[0].backend == "torch"
