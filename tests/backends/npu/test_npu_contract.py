"""Every call of the npu backend fits the schemas of 13 releases, and the comparison sees what it is for."""

from __future__ import annotations

import ast

import npu_contract
import pytest
from npu_contract import Call, misfits, used

SOFTMAX = "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor"
GELU = "npu_gelu(Tensor input, *, str approximate='none') -> Tensor"


def call(*positional: str, **keywords: str) -> Call:
    return Call("op", "here", positional, tuple(keywords.items()))


@pytest.mark.parametrize(
    ("given", "schema", "expected"),
    [
        (call("Tensor", mask="Tensor", scale="float", fixed_triu_mask="bool"), SOFTMAX, []),
        (call("Tensor", "Tensor"), SOFTMAX, []),
        (call("Tensor", approximate="str"), GELU, []),
        (
            call("Tensor", mask="Tensor", scales="float"),
            SOFTMAX,
            ["no argument is called 'scales'; it takes x, mask, scale, fixed_triu_mask"],
        ),
        (call("Tensor", "float", "Tensor"), SOFTMAX, ["mask is given float; it takes Tensor", "scale is given Tensor"]),
        (call("Tensor"), SOFTMAX, ["mask is not given"]),
        (call("Tensor", "str"), GELU, ["2 positional arguments; it takes 1"]),
    ],
)
def test_misfits(given: Call, schema: str, expected: list[str]) -> None:
    found = list(misfits(given, schema))
    assert len(found) == len(expected)
    assert all(text.startswith(want) for text, want in zip(found, expected)), found


def test_every_vendor_op_of_the_backend_is_seen() -> None:
    assert {call.op for call in used()} == {
        "npu_scaled_masked_softmax", "npu_scaled_masked_softmax_backward", "npu_gelu", "npu_gelu_backward",
        "npu_rms_norm", "npu_rms_norm_backward",
        "npu_swiglu", "npu_swiglu_backward", "npu_geglu", "npu_geglu_grad", "npu_group_norm_silu",
        "npu_rotary_mul",
        "npu_cross_entropy_loss", "npu_cross_entropy_loss_backward",
        "npu_fusion_attention", "npu_fusion_attention_grad",
        "npu_grouped_matmul", "npu_moe_gating_top_k", "npu_recurrent_gated_delta_rule",
    }  # fmt: skip
    sources = [ast.parse(path.read_text(encoding="utf-8")) for path in npu_contract.BACKEND.rglob("*.py")]
    names = [node.attr for source in sources for node in ast.walk(source) if isinstance(node, ast.Attribute)]
    assert sum(name.startswith("npu_") for name in names) == len(used())  # none is passed on instead of called
    assert all("**" not in dict(call.keywords) for call in used())


def test_every_call_fits_every_release() -> None:
    """A new function's schemas get into the file by ``python tests/support/standins/npu_contract.py``."""
    assert len(npu_contract.SCHEMAS) == 13
    assert npu_contract.differences(npu_contract.SCHEMAS) == []


def test_a_release_without_a_function_is_named() -> None:
    registered = {"9.0": {op: text for op, text in npu_contract.SCHEMAS["2.14.0"].items() if op != "npu_gelu"}}
    (found,) = npu_contract.differences(registered)
    assert found.startswith("torch_npu 9.0, npu_gelu at bias_gelu.py:")
    assert found.endswith(": this release has no such function")
    assert "| 9.0 | 18 of 19 | `npu_gelu` |" in npu_contract.page(registered)


def test_a_release_for_an_older_torch_may_lack_a_function() -> None:
    lacking = {op: text for op, text in npu_contract.SCHEMAS["2.14.0"].items() if op != "npu_gelu"}
    assert npu_contract.differences({"2.9.9": lacking}) == []
    assert "2.9.9" not in npu_contract.page({"2.9.9": lacking})
    assert npu_contract.differences({"2.10.0": lacking}) != []


def test_the_page_is_of_the_schemas() -> None:
    assert npu_contract.PAGE.read_text(encoding="utf-8") == npu_contract.page(npu_contract.SCHEMAS)
