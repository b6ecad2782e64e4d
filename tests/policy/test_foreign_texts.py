"""Policies with control characters or of any length, in messages."""

from __future__ import annotations

from typing import Any

import pytest

import fusedops
from fusedops import PolicyError


@pytest.mark.parametrize("text", ["cpu\x1b[2J", "cpu;cpu\x1b[2J", "bias_gelu\x07=cpu", "cpu\x9b31m,", "cpu," * 25000])
def test_a_policy_error_shows_no_control_character_and_no_endless_text(text: str) -> None:
    for call in (fusedops.set_policy, fusedops.use):
        with pytest.raises(PolicyError) as caught:
            call(text)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1500


def test_names_that_no_policy_can_have_are_not_offered(distribution: Any, rediscovered: Any) -> None:
    rediscovered(distribution("odd-dist", {"Foo Bar": "odd", "auto": "odd", "fits": "odd"}, odd="raise MemoryError"))
    with pytest.raises(PolicyError) as caught:
        fusedops.use("unknown")
    assert "Foo Bar" not in str(caught.value)
    assert str(caught.value).count("auto") == 1
    with pytest.raises(fusedops.PluginError, match=r"failed to load \(MemoryError\)"):
        fusedops.use("fits")
