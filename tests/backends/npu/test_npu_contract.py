"""The comparison behind `make npu-contract` sees what it is for; the comparison itself needs the package index."""

from __future__ import annotations

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
    source = "".join(path.read_text(encoding="utf-8") for path in npu_contract.BACKEND.glob("*.py"))
    assert {call.op for call in used()} == {
        "npu_scaled_masked_softmax", "npu_scaled_masked_softmax_backward", "npu_gelu", "npu_gelu_backward",
        "npu_rms_norm", "npu_rms_norm_backward",
        "npu_swiglu", "npu_swiglu_backward", "npu_geglu", "npu_geglu_grad",
        "npu_cross_entropy_loss", "npu_cross_entropy_loss_backward",
    }  # fmt: skip
    assert source.count(".npu_") == len(used()) + source.count('"torch_npu.npu_') + source.count(
        "Source: torch_npu.npu_"
    )
    assert all("**" not in dict(call.keywords) for call in used())


def test_the_page_has_every_release() -> None:
    page = npu_contract.PAGE.read_text(encoding="utf-8")
    for release in npu_contract.RELEASES:
        assert f"| {release} |{' matches |' * len({call.op for call in used()})}" in page
    assert "differs" not in page
