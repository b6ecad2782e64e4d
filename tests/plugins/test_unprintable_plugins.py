"""Plugins whose exceptions cannot be printed, ops that torch cannot register, probes that call ops, odd names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken_plugins import info
from plugin_ops import SOURCE

import fusedops
import fusedops.testing
from fusedops import PluginError

pytestmark = pytest.mark.filterwarnings("ignore::fusedops.FallbackWarning")
X = torch.ones(2, 4)
MUTE = """
class Mute(Exception):
    def __str__(self): return "driver error " + 5

raise Mute()
"""


class Mute(Exception):
    def __str__(self) -> str:
        return "driver error " + 5  # type: ignore[operator]


@fusedops.kernel("bias_gelu")
def gelu(x: Any, bias: Any, approximate: str) -> Any:
    return torch.nn.functional.gelu(x, approximate=approximate)


def test_an_exception_that_cannot_be_printed_affects_its_plugin_alone(distribution: Any, rediscovered: Any) -> None:
    rediscovered(distribution("mute-dist", {"mute": "mute"}, mute=MUTE))
    assert info("mute").state == "failed"
    assert info("mute").why == "Mute, whose text raises TypeError"
    assert torch.equal(fusedops.layer_norm(X), torch.zeros(2, 4))
    assert fusedops.explain("layer_norm", X).backend is not None
    with pytest.raises(PluginError, match=r"failed to load \(Mute, whose text raises TypeError\)"):
        fusedops.use("mute")


def test_a_probe_that_raises_what_cannot_be_printed() -> None:
    def probe() -> None:
        raise Mute

    fusedops.register(fusedops.Backend("mine", ("cpu",), 1000, (gelu,), probe=probe))
    fusedops.bias_gelu(X)
    assert info("mine").why == "PluginError: backend 'mine': its probe raised Mute, whose text raises TypeError"


def test_a_probe_that_calls_an_op_of_its_backend_is_refused_by_name() -> None:
    def probe() -> None:
        fusedops.bias_gelu(X)

    fusedops.register(fusedops.Backend("mine", ("cpu",), 1000, (gelu,), probe=probe))
    fusedops.bias_gelu(X)
    assert "got a call in its probe that needs backend 'mine', whose probe has not returned" in info("mine").why


@pytest.mark.parametrize("name", ["my-op", "1a", "class", "é", "rms_norm_backward", ""])
def test_an_op_whose_name_torch_cannot_register_is_refused_and_leaves_nothing(name: str) -> None:
    names: dict[str, Any] = {}
    exec(SOURCE.replace("TOLERANCE =", f"my_square.__name__ = my_square.__qualname__ = {name!r}\nTOLERANCE ="), names)
    for _ in range(2):
        with pytest.raises(PluginError, match="rename the op's function"):
            fusedops.register(names["OP"])
    assert name not in fusedops.testing.OPS
