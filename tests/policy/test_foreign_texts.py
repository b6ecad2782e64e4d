"""Policies with control characters or of any length, in messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedops
from fusedops import PolicyError, testing
from fusedops._cli.main import main


@pytest.mark.parametrize("text", ["cpu\x1b[2J", "cpu;cpu\x1b[2J", "bias_gelu\x07=cpu", "cpu\x9b31m,", "cpu," * 25000])
def test_a_policy_error_shows_no_control_character_and_no_endless_text(text: str) -> None:
    for call in (fusedops.set_policy, fusedops.use):
        with pytest.raises(PolicyError) as caught:
            call(text)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1500


ODD, ENDLESS = "\x1b[2J\x07\x9b31m", "long " * 20_000
VALUES: dict[str, Callable[[str], Any]] = {
    "an op's text": lambda text: fusedops.bias_gelu(torch.ones(2), approximate=text),
    "an op's text, traced": lambda text: torch.ops.fusedops.bias_gelu(torch.ones(2), None, text),
    "a reduction": lambda text: fusedops.cross_entropy(torch.ones(2, 3), torch.tensor([0, 1]), reduction=text),
    "a causal": lambda text: fusedops.attention(*[torch.ones(1, 1, 2, 2)] * 3, causal=text),
    "a backend": lambda text: fusedops.bias_gelu(torch.ones(2), backend=text),
    "an op's name": lambda text: fusedops.explain(text, torch.ones(2)),
    "a device": lambda text: fusedops.explain("bias_gelu", fusedops.TensorSpec((2,), device=text), backend="cpu"),
    "verify's backend": lambda text: fusedops.verify(text),
    "verify's every": lambda text: fusedops.verify("eager", every=text),  # type: ignore[arg-type]
    "the kit's backend": lambda text: testing.checks(text),
    "the kit's op": lambda text: testing.checks("eager", op=text),
    "the kit's device": lambda text: testing.checks("eager", text),
    "the kit's case": lambda text: testing.reproduce("eager", "bias_gelu/forward/kernel", text),
    "a mask's padding": lambda text: fusedops.masks.from_lengths(torch.tensor([1]), 2, padding=text),
    "a backend's name": lambda text: fusedops.register(fusedops.Backend(text, ("cpu",), 0, ())),
    "a spec's device": lambda text: fusedops.TensorSpec((text,)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("text", [ODD, ENDLESS], ids=["control characters", "endless"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_an_error_shows_no_control_character_and_no_endless_line(value: Callable[[str], Any], text: str) -> None:
    try:
        shown = str(value(text))  # a decision has the text too
    except fusedops.FusedOpsError as error:
        shown = str(error)
    lines = shown.split("\n")
    assert all(line.isprintable() and len(line) < 5000 for line in lines)


def test_a_decision_and_the_reasons_of_a_probe_show_none(capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> fusedops.Unavailable:
        return fusedops.Unavailable(f"no {ODD}", ENDLESS)

    fusedops.register(fusedops.Backend("mine", ("cpu",), 900, (fusedops.kernel("bias_gelu")(gelu),), probe=probe))
    decision = fusedops.explain("bias_gelu", fusedops.TensorSpec((2,), device="cpu:\x1b"))
    counts = fusedops.stats()
    for shown in (str(decision), decision._repr_html_(), str(counts), str(fusedops.backends())):
        assert all(line.isprintable() and len(line) < 5000 for line in shown.split("\n"))
    for command in (["explain", "bias_gelu", "--x", "2"], ["info"], ["doctor"], ["explain", f"bias_gelu{ODD}"]):
        main(command)
        out, err = capsys.readouterr()
        assert all(line.isprintable() and len(line) < 5000 for line in f"{out}{err}".split("\n")), command


def gelu(x: Any, bias: Any, approximate: Any) -> Any:
    return x


def test_a_warning_shows_none() -> None:
    with pytest.warns(fusedops.FusedOpsWarning) as caught:
        warnings.warn(f"{ODD}{ENDLESS}", fusedops.FusedOpsWarning, stacklevel=1)
    assert str(caught[0].message).isprintable()
    assert len(str(caught[0].message)) < 5000


def test_names_that_no_policy_can_have_are_not_offered(distribution: Any, rediscovered: Any) -> None:
    rediscovered(distribution("odd-dist", {"Foo Bar": "odd", "auto": "odd", "fits": "odd"}, odd="raise MemoryError"))
    with pytest.raises(PolicyError) as caught:
        fusedops.use("unknown")
    assert "Foo Bar" not in str(caught.value)
    assert str(caught.value).count("auto") == 1
    with pytest.raises(fusedops.PluginError, match=r"failed to load \(MemoryError\)"):
        fusedops.use("fits")
