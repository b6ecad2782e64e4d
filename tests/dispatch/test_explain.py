"""explain: a decision as data and as a table, offline as well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fallback_cases import LONG, OP, SHORT, X, softmax
from standin import no_device
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops import FallbackWarning, InvalidInputError, PolicyError, TensorSpec, Unavailable

TOO_LONG = (
    (
        "size",
        "got dim -1 of x = 9, expected a size of at most 8",
        "dim -1 of x = 9",
        "a size of at most 8",
        "split x so that dim -1 is at most 8",
    ),
    ("dtype", "got x of float16, expected float32", "x of float16", "float32", "convert x to float32"),
)


def candidate(backend: str, status: str, *reasons: tuple[str, ...], named: bool = False) -> dict[str, Any]:
    """Return a candidate as data, whose reasons are written in order."""
    fields = ("code", "detail", "given", "needed", "fix")
    written = [dict(zip(fields, reason)) for reason in reasons]
    nothing: dict[str, Any] = {"deviations": [], "adaptations": []}
    return {"backend": backend, "status": status, "named": named, "reasons": written, **nothing}


def test_the_decision_as_data_and_as_a_table(fakes: Any) -> None:
    fakes("short", *SHORT)
    fusedops.set_policy("triton")
    with fusedops.use("short", fallback="silent"):
        decision = fusedops.explain(OP, torch.ones(2, 9, dtype=torch.float16), None, 0.125)
    data = decision.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data == {
        "op": OP,
        "given": "x float16[2, 9] on cpu, mask None, scale 0.125, causal False",
        "backend": "eager",
        "backward": "eager",
        "fallback": "silent",
        "adapt": "none",
        "rows": "any",
        "assumed": "",
        "preferences": [
            {"channel": "use()", "text": "short", "in_effect": True},
            {"channel": "set_policy()", "text": "triton", "in_effect": False},
        ],
        "candidates": [
            candidate("short", "refused", *TOO_LONG, named=True),
            candidate("npu", "refused", ("device", "serves npu, not cpu", "cpu", "npu", "move the tensors to npu")),
            candidate("eager", "selected"),
            candidate("triton", "eligible"),
        ],
    }
    assert str(decision) == (
        "scaled_masked_softmax: served by eager (backward: eager)\n"
        "  given     x float16[2, 9] on cpu, mask None, scale 0.125, causal False\n"
        '  prefer    use(): "short"\n'
        '  prefer    set_policy(): "triton" (overridden)\n'
        "  fallback  silent\n"
        "  refused   short    got dim -1 of x = 9, expected a size of at most 8\n"
        "                     got x of float16, expected float32\n"
        "                     to fix: split x so that dim -1 is at most 8\n"
        "                     to fix: convert x to float32\n"
        "  selected  eager\n"
        "  eligible  triton\n"
        "  others    for other devices: npu"
    )


def test_an_optional_backend_that_is_unavailable_has_no_line_of_its_own_unless_it_is_named(fakes: Any) -> None:
    fakes("vendor", optional=True, probe=lambda: Unavailable("vendor is not installed", "pip install vendor"))
    fakes("broken", probe=lambda: Unavailable("no driver", "install one"))
    lines = [" ".join(line.split()) for line in str(fusedops.explain(OP, X)).splitlines()]
    assert "refused broken unavailable: no driver" in lines
    assert lines[-1].startswith("others for other devices: ")
    assert lines[-1].endswith("; unavailable: vendor")
    named = " ".join(str(fusedops.explain(OP, X, backend="vendor, eager")).split())
    assert "refused vendor unavailable: vendor is not installed" in named


def test_explain_takes_real_meta_and_fake_tensors_and_specs(fakes: Any) -> None:
    fakes("short", *SHORT, devices=("cpu", "meta"))
    with FakeTensorMode():
        fake = torch.ones(2, 4)
    for like in (X, fake, TensorSpec((2, 4)), torch.nn.Parameter(X)):
        decision = fusedops.explain(OP, like, scale=0.5, causal=True)
        assert (decision.backend, decision.backward) == ("short", "short")
        assert decision.given == "x float32[2, 4] on cpu, mask None, scale 0.5, causal True"
        assert decision.assumed == ""
    assert fusedops.explain(OP, torch.ones(2, 4, device="meta")).given.startswith("x float32[2, 4] on meta")
    assert fusedops.explain(OP, torch.ones(2, 4, device="meta")).backend == "short"
    mask = TensorSpec((1, 4), torch.bool)
    assert "mask bool[1, 4] on cpu" in fusedops.explain(OP, X, mask).given
    with FakeTensorMode():
        cuda = torch.ones(2, 4, device="cuda")
    assert fusedops.explain(OP, cuda).given.startswith("x float32[2, 4] on cuda:0")


def test_explain_runs_nothing_and_warns_of_nothing(fakes: Any) -> None:
    fakes("away", probe=lambda: Unavailable("no chip", "buy one"))
    fakes("short", *SHORT, backward=None)
    for policy in (None, "away", "short", "npu,triton", "away,short"):
        with fusedops.use(policy):
            for x in (X, LONG):
                fusedops.explain(OP, x)
    assert fakes.ran == []
    with pytest.warns(FallbackWarning):  # explain counts no warning as given
        softmax(LONG, backend="short")


def test_explain_reports_invalid_arguments() -> None:
    with pytest.raises(
        PolicyError, match=r"^explain: got op 'scaled_masked_softmx', expected one of .*; to fix: write 'scaled_mas"
    ):
        fusedops.explain("scaled_masked_softmx", X)
    with pytest.raises(PolicyError, match=r"^backend=: in \"tritn\": got backend 'tritn', expected one of"):
        fusedops.explain(OP, X, backend="tritn")
    with pytest.raises(InvalidInputError, match="got x of int64, expected float16, bfloat16, float32 or float64"):
        fusedops.explain(OP, TensorSpec((2, 4), torch.int64, "npu"))
    with pytest.raises(InvalidInputError, match="got mask of shape"):
        fusedops.explain(OP, TensorSpec((2, 4), device="cuda"), TensorSpec((3, 4), torch.bool, "cuda"))
    with pytest.raises(InvalidInputError) as error:
        fusedops.explain(OP, X, dimension=1)
    assert str(error.value) == (
        "scaled_masked_softmax: got an unexpected keyword argument 'dimension', "
        "expected (x, mask=None, scale=1.0, *, causal=False); to fix: give each argument once"
    )
    with pytest.raises(InvalidInputError, match="got no argument 'x'"):
        fusedops.explain(OP)
    with pytest.raises(InvalidInputError, match=r"unexpected keyword argument 'is_causal', .*to fix: write 'causal'$"):
        fusedops.explain(OP, X, is_causal=True)


@pytest.mark.parametrize("device", ["tpu", "cuad:0"])
def test_an_unknown_device_type_is_refused(device: str) -> None:
    x = TensorSpec((2, 4), device=device)
    with pytest.raises(InvalidInputError) as error:
        fusedops.explain(OP, x)
    kind = device.partition(":")[0]
    fix = "write 'cuda'" if kind == "cuad" else "use one of these names"
    expected = f"got device type {kind!r}, expected one of cpu, cuda, meta, mps, npu, xpu"
    assert str(error.value) == f"explain: {OP}: x: {expected}; to fix: {fix}"
    assert fusedops.explain(OP, TensorSpec((2, 4), device="hpu:1")).backend == "eager"  # torch has it


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "npu"])
def test_a_mask_on_another_device_is_invalid_also_offline(device: str) -> None:
    with pytest.raises(InvalidInputError, match=f"got mask on cpu and x on {device}"):
        fusedops.explain(OP, TensorSpec((2, 4), device=device), TensorSpec((2, 4), torch.bool))
    fusedops.explain(OP, TensorSpec((2, 4), device=device), TensorSpec((2, 4), torch.bool, device))


def test_offline_answers_name_who_serves_without_an_optional_package() -> None:
    if torch.cuda.is_available():
        pytest.skip("the answer assumes nothing where the device is here")
    in_16_bits = [TensorSpec((2, 4, 64, 64), torch.bfloat16, "cuda")] * 3
    decision = fusedops.explain("attention", *in_16_bits)
    assert decision.backend == "flash_attn"
    assert decision.assumed.endswith("; without flash-attn 2.7 or 3.0, or newer, and an NVIDIA GPU, sdpa runs it")
    in_32_bits = [TensorSpec((2, 4, 64, 64), torch.float32, "cuda")] * 3
    decision = fusedops.explain("attention", *in_32_bits)
    assert decision.backend == "sdpa"  # it is a part of torch
    assert decision.assumed.endswith("; this one has no cuda")


def test_offline_answers(python: Callable[..., Any]) -> None:
    printed = python(
        """
        import json, torch, fusedops
        from fusedops import TensorSpec
        S, B = "scaled_masked_softmax", torch.bfloat16
        mask = TensorSpec((8, 1, 512, 512), torch.bool, "npu")
        calls = {
            "ascend": fusedops.explain(S, TensorSpec((8, 16, 512, 512), B, "npu"), mask, 0.125),
            "ragged": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "npu:0"), None, 0.125),
            "h200": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "cuda", (9, 0)), None, 0.125),
            "v100": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "cuda", (7, 0)), None, 0.125),
            "mac": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "mps"), None, 0.125),
        }
        print(json.dumps({name: [str(call), call.to_dict()] for name, call in calls.items()}))
        """
    )
    selected = {name: (data["backend"], data["backward"]) for name, (_, data) in printed.items()}
    assert selected == {
        "ascend": ("npu", "npu"),
        "ragged": ("eager", "eager"),
        "h200": ("triton", "triton"),
        "v100": ("eager", "eager"),
        "mac": ("eager", "eager"),
    }
    table, data = printed["ragged"]
    assert table.startswith(
        "scaled_masked_softmax: served by eager (backward: eager)\n"
        "  given     x bfloat16[8, 16, 512, 500] on npu:0, mask None, scale 0.125, causal False\n"
        "  prefer    nothing set: default order, by priority\n"
        "  fallback  warn\n"
        "  assumed   a machine with npu and the backends for it installed; this one has no npu\n"
        "  refused   npu      got dim -1 of x = 500, expected a multiple of 32 in [32, 4096]\n"
        '                     to fix: pad dim -1 of x from 500 to 512, or allow adapt="pad"\n'
    )
    assert data["assumed"]
    assert [v["backend"] for v in printed["ascend"][1]["candidates"] if v["status"] == "eligible"] == ["eager"]
    (triton,) = [v for v in printed["v100"][1]["candidates"] if v["backend"] == "triton"]
    assert [reason["code"] for reason in triton["reasons"]] == ["capability"]


def test_a_deviation_is_shown() -> None:
    with no_device():
        decision = fusedops.explain(OP, TensorSpec((1, 1, 32, 32), device="npu"), backend="npu")
    (npu,) = [v for v in decision.candidates if v.backend == "npu"]
    assert [text.partition(":")[0] for text in npu.deviations] == ["nonfinite-under-mask", "finite-fill"]
    assert "deviation: nonfinite-under-mask: older kernels mask by multiplication" in str(decision)
