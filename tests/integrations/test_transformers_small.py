"""Small calls of applied models are calls of the ops as any others: by the plan, and with the contract's semantics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from model_families import FAMILIES
from torch import Tensor, nn

import fusedops
from fusedops.integrations.transformers import apply, attention_forward, softmax_forward

pytestmark = pytest.mark.usefixtures("clean_fusedops")


def ran(run: Callable[[], Any], op: str) -> list[str]:
    """Return the backends that computed the calls of an op, forward."""
    fusedops.reset_stats()
    run()
    return [row.backend for row in fusedops.stats().counts if row.op == op and row.direction == "forward"]


def norm(size: int = 64) -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(size))
    apply(model)
    return model


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attention(q: Tensor, k: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return attention_forward(nn.Identity(), q, k, k, mask, **options)[0]


@pytest.mark.parametrize("backend", [None, "eager"])
def test_the_backend_of_a_small_call_is_explains(backend: str | None) -> None:
    model, x, q = norm(), torch.randn(2, 64), heads(1, 4, 5, 16)
    bias = torch.zeros(1, 4, 5, 5)
    fusedops.set_policy(backend)
    calls: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
        "layer_norm": (lambda: model(x), (x, model[0].weight, model[0].bias, 1e-5)),
        "attention": (lambda: attention(q, q), (q, q, q)),
        "scaled_masked_softmax": (
            lambda: softmax_forward(nn.Identity(), q, q, q, None, position_bias=bias),
            (torch.zeros(1, 4, 5, 5), None, 1.0),
        ),
    }
    for op, (run, args) in calls.items():
        assert ran(run, op) == [fusedops.explain(op, *args).backend], op


def test_a_small_norm_of_large_numbers_is_that_of_its_formula() -> None:
    model, x = norm(), torch.randn(3, 64) * 1e25
    assert torch.nn.functional.layer_norm(x, (64,)).isnan().any()  # torch's function
    expected = fusedops.ops.OPS["layer_norm"].reference(x, model[0].weight, model[0].bias, 1e-5)
    torch.testing.assert_close(model(x), expected)


def test_a_nan_in_a_key_stays_behind_the_mask_of_a_small_call() -> None:
    q, k = heads(1, 4, 5, 16), heads(1, 4, 5, 16, seed=1)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 3] = mask[0, 0, 0] = False  # no query sees key 3, and the first query no key
    expected = attention(q, k, mask)
    spoilt = k.detach().clone()
    spoilt[:, :, 3] = torch.nan
    assert torch.equal(attention(q, spoilt, mask), expected)
    assert (expected[0, 0] == 0).all()


def test_a_compiled_model_is_not_compiled_again_for_a_larger_call(fresh_compiler: None) -> None:
    counter = torch._dynamo.testing.CompileCounter()

    def both(x: Tensor, q: Tensor) -> Tensor:
        return model(x).sum() + attention(q, q, is_causal=False).sum()

    model, compiled = norm(), torch.compile(both, backend=counter, dynamic=True)
    with torch.no_grad():
        for rows in (30, 300):
            compiled(torch.zeros(rows, 64), torch.zeros(1, 4, rows, 64))
    assert counter.frame_count == 1


def test_packed_sequences_are_the_ops() -> None:
    model = FAMILIES["Llama"].build(attn_implementation="fusedops")
    inputs = {"input_ids": torch.arange(3, 12)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    assert ran(lambda: model(**inputs, use_cache=False), "varlen_attention") == ["cpu"]
    assert ran(lambda: model(**inputs, use_cache=False), "attention") == []
