"""A Policy is a plain value: equal, hashable, picklable, and free of what calls leave behind."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from policy_cases import OP, OTHER, X, preferences, who

import fusedops
from fusedops import Policy, PolicyError

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


def test_a_policy_is_a_value() -> None:
    with fusedops.use(f"triton; {OTHER}=eager", fallback="raise") as policy:
        fusedops.scaled_masked_softmax(X)
        again = fusedops.get_policy()
        assert again == policy
    with fusedops.use(f"triton; {OTHER}=eager", fallback="raise") as twin:
        assert twin == policy
        assert hash(twin) == hash(policy)
    with fusedops.use("eager") as other:
        assert other != policy
    for same in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), dataclasses.replace(policy)):
        assert same == policy
        assert same.order(OP) == ("triton",)
        assert same.order(OTHER) == ("eager",)
        assert str(same) == str(policy)
    assert [field.name for field in dataclasses.fields(policy)] == ["sources"]
    assert vars(policy) == {"sources": policy.sources}, "no plans, no verifier"
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.sources = ()  # type: ignore[misc]


def test_a_policy_under_verify_can_be_pickled() -> None:
    with fusedops.verify("reference"), fusedops.use("eager"):
        fusedops.bias_gelu(X)
        assert pickle.loads(pickle.dumps(fusedops.get_policy())).order(OP) == ("eager",)


def test_a_policy_replaces_the_whole_of_what_is_around_it() -> None:
    default = Policy()
    fusedops.set_policy("triton", fallback="raise")
    with fusedops.use(f"{OP}=triton"), fusedops.use(default):
        assert who() == "eager"
        assert preferences() == []
        assert fusedops.get_policy().fallback == "warn"
        with fusedops.use("triton"):
            assert who() == "triton"
    with fusedops.use(default, fallback="silent") as policy:
        assert (policy.fallback, policy.order(OP)) == ("silent", ("auto",))
    with fusedops.use(default):
        fusedops.set_policy("eager")  # in a block with a whole policy, the process's has no effect
        assert preferences() == []


@pytest.mark.parametrize("policy", [5, 0, b"", b"eager", [], ["eager"], (), False, True])
def test_a_policy_of_another_type_is_refused(policy: Any) -> None:
    for call in (
        lambda: fusedops.set_policy(policy),
        lambda: fusedops.use(policy),
        lambda: fusedops.bias_gelu(X, backend=policy),
        lambda: fusedops.explain(OP, X, backend=policy),
        lambda: fusedops.bind(OP, X, backend=policy),
    ):
        with pytest.raises(PolicyError, match=r": got a policy of type \w+, expected a str; to fix: write "):
            call()
    assert fusedops.get_policy() == Policy()


@pytest.mark.parametrize("level", [5, "", [], True, "Warn"])
def test_a_level_of_another_type_is_refused(level: Any) -> None:
    for call in (fusedops.use, fusedops.set_policy):
        with pytest.raises(PolicyError, match=r"got fallback level .*, expected one of raise, silent, warn; to fix: "):
            call(fallback=level)
        with pytest.raises(PolicyError, match=r"got adapt setting .*, expected one of none, pad; to fix: "):
            call(adapt=level)


def test_plans_are_made_once_for_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from state import count_plans

    plans = count_plans(monkeypatch)
    for _ in range(5):
        with fusedops.use("eager"):
            fusedops.scaled_masked_softmax(X)
        fusedops.scaled_masked_softmax(X, backend="eager")
        fusedops.scaled_masked_softmax(X)
    assert len(plans) == 3
    fusedops.register(fusedops.Backend("mine", ("cpu",), -5, ()))
    fusedops.scaled_masked_softmax(X)
    assert len(plans) == 4
