"""The zentorch backend on the real library, where it is installed, and its reasons where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from repository import ROOT

import fusedops
from fusedops_zentorch import _library

WHY = _library.unavailable()
needs_zentorch = pytest.mark.skipif(WHY is not None, reason=WHY.why if WHY else "")

# what zentorch 2.13.0.2 does, and so what the backend declares or corrects; an error is given by its beginning
AT_LIMITS = {
    "rms_norm": "right",
    "rms_norm of float64": "RuntimeError",
    "rms_norm with eps 0": "wrong",
    "rms_norm of 3 dims": "wrong",
    "rms_norm of strides": "wrong",
    "rms_norm with a weight of strides": "wrong",
    "add_rms_norm_ in bfloat16": "other bits",
    "gradient of rms_norm": "none",
    "attention": "right",
    "lse without a gradient": "wrong",
    "lse with a gradient": "right",
    "attention with scale 0": "wrong",
    "causal attention of a negative scale": "wrong",
    "attention of expanded keys": "RuntimeError",
    "attention of values of another size": "RuntimeError",
    "attention without queries": "RuntimeError",
    "attention with a fully masked row": "its lse is finite",
    "delta rule": "finite",
    "delta rule of a batch of 2": "RuntimeError",
    "delta rule with a decay of -inf": "NaN",
    "weights of experts": "overwritten",
}


@needs_zentorch
def test_the_limits_are_those_of_the_library() -> None:
    program = ROOT / "tests" / "support" / "zentorch_limits.py"
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=120)
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen.pop("rms_norm of float16") in ("wrong", "right")  # right with AVX512-FP16, which few processors have
    assert {name: text.partition(":")[0] for name, text in seen.items()} == AT_LIMITS


def norm(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, ...]:
    return "rms_norm", (torch.ones(4, 8, dtype=dtype),), options


def heads(dtype: torch.dtype = torch.bfloat16, values: int = 32, **options: Any) -> tuple[Any, ...]:
    q = torch.ones(1, 2, 4, 32, dtype=dtype)
    return "attention", (q, q, torch.ones(1, 2, 4, values, dtype=dtype)), options


def rule(**options: Any) -> tuple[Any, ...]:
    x = torch.ones(1, 4, 1, 8)
    return "linear_attention", (x, x, x), options


DECAY = {"decay": torch.zeros(1, 4, 1)}
REFUSED = [
    (norm(torch.float16), "DTYPE"),
    (norm(torch.float64), "DTYPE"),
    (norm(eps=0.0), "SCALAR"),
    (("add_rms_norm", (torch.ones(4, 8), torch.ones(4, 8).bfloat16()), {}), "DTYPE"),
    (("gated_rms_norm", (torch.ones(4, 8), torch.ones(4, 8)), {"gate_first": True}), "SCALAR"),
    (("gated_rms_norm", (torch.ones(4, 8), torch.ones(4, 8)), {"groups": 2}), "SCALAR"),
    (heads(torch.float32), "DTYPE"),
    (heads(scale=0.0), "SCALAR"),
    (heads(values=16), "SIZE"),
    (heads(mask=torch.zeros(4, 4, dtype=torch.bool)), "PRESENCE"),
    (heads(window=(1, 1)), "PRESENCE"),
    (rule(**DECAY), "PRESENCE"),
    (rule(**DECAY, beta=torch.ones(1, 4, 1), cu_seqlens=torch.tensor([0, 4])), "PRESENCE"),
    (rule(decay=torch.zeros(1, 4, 1, 8), beta=torch.ones(1, 4, 1)), "RANK"),
]


@needs_zentorch
@pytest.mark.parametrize(("call", "code"), REFUSED)
def test_what_it_does_not_take_is_refused_with_a_fix(call: tuple[Any, ...], code: str) -> None:
    op, args, options = call
    decision = fusedops.explain(op, *args, **options, backend="zentorch")
    reason = next(each for each in decision.candidates if each.backend == "zentorch").reasons[0]
    assert (reason.code.name, bool(reason.fix)) == (code, True)


@needs_zentorch
@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (3, 0)])
def test_a_gradient_is_that_of_another_backend(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    with fusedops.use("zentorch", fallback="silent"):
        decision = fusedops.explain("rms_norm", x)
        fusedops.rms_norm(x).square().sum().backward()
    (expected,) = torch.autograd.grad(torch.rms_norm(x, shape[-1:], None, 1e-6).square().sum(), x)
    assert (decision.backend, decision.backward) == ("zentorch", "cpu")
    torch.testing.assert_close(x.grad, expected)


@needs_zentorch
def test_the_default_order_is_cpu_zentorch_sdpa() -> None:
    q = torch.randn(1, 2, 32, 64).bfloat16()
    assert fusedops.explain("attention", q, q, q).backend == "zentorch"
    assert fusedops.explain("attention", *[q[..., :16]] * 3).backend == "sdpa"
    assert fusedops.explain("attention", *[q.float()] * 3).backend == "sdpa"
    assert fusedops.explain("attention", q[:, :, :1], q, q).backend == "cpu"
    assert fusedops.explain("rms_norm", q).backend == "cpu"
    assert fusedops.explain("attention", q, q, q, backend="zentorch").backend == "zentorch"


@needs_zentorch
def test_a_model_of_transformers_generates() -> None:
    transformers = pytest.importorskip("transformers")
    from fusedops.integrations.transformers import apply

    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, pad_token_id=0))
    model = model.to(torch.bfloat16).eval()
    ids = torch.arange(1, 41).unsqueeze(0)
    with torch.no_grad():
        plain = model(ids).logits
    apply(model)
    with torch.no_grad(), fusedops.use("zentorch", fallback="silent"):
        torch.testing.assert_close(model(ids).logits, plain, atol=0.02, rtol=0.02)
        fusedops.reset_stats()
        assert model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 43)
    served = {(row.op, row.backend) for row in fusedops.stats().counts if row.op in ("attention", "rms_norm")}
    assert served == {("attention", "zentorch"), ("rms_norm", "zentorch")}


@pytest.mark.parametrize(
    ("path", "version", "capability", "why"),
    [
        (None, "", "AVX512", "zentorch is not installed"),
        ("libzentorch.so", "2.9.1", "AVX512", "zentorch 2.9.1 is not for torch"),
        ("libzentorch.so", torch.__version__, "AVX2", "is 'AVX2', and zentorch is made for AVX-512"),
        ("libzentorch.so", torch.__version__, "AVX512", "does not load"),
    ],
)
def test_each_installation_has_its_own_reason(
    path: str | None, version: str, capability: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "library_path", lambda: path)
    monkeypatch.setattr(_library.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    found = _library.unavailable()
    assert found is not None
    assert why in found.why
    assert found.fix


@needs_zentorch
def test_neither_the_import_nor_the_probe_imports_zentorch() -> None:
    program = "import sys, fusedops; fusedops.backends(); sys.exit('zentorch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
