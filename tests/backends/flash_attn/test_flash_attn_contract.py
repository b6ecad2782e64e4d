"""The calls of the backend fit flash-attn's functions, by their signatures in each release; so does the stand-in."""

from __future__ import annotations

import inspect

import flash_attn_contract
import flash_attn_standin
import pytest
import torch
from flash_attn_standin import Call

import fusedops

SIGNATURES = flash_attn_contract.read()
#: Since when a release is called: before, it is refused.
SINCE = {"2": "2.7.0", "3": "3.0.0.b1 of 2025-08-06, 5e114d53"}


def calls_of(release: str) -> list[Call]:
    """Return the calls of a forward and a backward of each op, as the backend writes them."""
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with flash_attn_standin.flash_attn(three=release == "3") as log, fusedops.use(flash_attn_standin.NAME):
        fusedops.attention(q, k, v, causal=True, window=(1, 0)).sum().backward()
        bounds = torch.tensor([0, 1, 2])
        fusedops.varlen_attention(q[0], k[0], v[0], bounds, causal=True, window=(1, 0)).sum().backward()
        return list(log)


def fits(call: Call, parameters: str) -> bool:
    try:
        flash_attn_contract.signature(parameters).bind(*call.args, **call.kwargs)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("release", ["2", "3"])
def test_calls_fit_every_release_that_is_called_and_no_other(release: str) -> None:
    calls = calls_of(release)
    packed = "_varlen" if release == "2" else ""
    assert [call.function for call in calls] == [
        f"_flash_attn{kind}_{direction}" for kind in ("", packed) for direction in ("forward", "backward")
    ]
    supported = False
    for since, functions in SIGNATURES[release].items():
        supported = supported or since == SINCE[release]
        fitting = all(fits(call, functions[call.function]) for call in calls)
        assert fitting == supported, since
    assert supported


def test_arguments_by_position_are_the_tensors() -> None:
    """A release that adds a parameter in between would take a number for another one."""
    for release in ("2", "3"):
        for call in calls_of(release):
            assert all(isinstance(arg, torch.Tensor) for arg in call.args)


@pytest.mark.parametrize("release", ["2", "3"])
def test_the_stand_in_has_the_newest_signatures(release: str) -> None:
    newest = list(SIGNATURES[release].values())[-1]
    functions = flash_attn_standin.TWO if release == "2" else flash_attn_standin.THREE
    for name, function in zip(newest, functions):
        given = [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        wanted = flash_attn_contract.signature(newest[name]).parameters.values()
        empty = inspect.Parameter.empty
        assert given == [(p.name, p.default if p.default is empty else eval(p.default)) for p in wanted], name


def test_release_4_has_other_functions() -> None:
    """Which are not called: they changed in seven of its betas."""
    assert all(set(functions) == {"_flash_attn_fwd", "_flash_attn_bwd"} for functions in SIGNATURES["4"].values())
    assert all("beta" in release for release in SIGNATURES["4"])
