"""Megatron's router and GroupedMLP with the patch, beside its own router and a loop over experts."""

from __future__ import annotations

import inspect
from typing import Any

import megatron_layers as layers
import pytest
import torch
from megatron_cases import tensor, with_gradients
from megatron_layers import config
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

import fusedops
from fusedops import FusedOpsWarning, InvalidInputError

pytestmark = [*layers.OWN_WARNINGS, pytest.mark.usefixtures("patch_removed")]
TOKENS, EXPERTS = 33, 16
LOGITS, BIAS = tensor(TOKENS, EXPERTS), tensor(EXPERTS, seed=1, scale=0.1)


def patch() -> Any:
    from fusedops.integrations import megatron

    return megatron.patch(ops=["top_k_routing", "grouped_matmul"])


def route(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from megatron.core.transformer.moe import router

    return router.topk_routing_with_score_function(logits, **options)


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax first": {"topk": 3, "use_pre_softmax": True},
    "softmax of the chosen": {"topk": 3, "expert_bias": BIAS},  # which Megatron does not read
    "sigmoid of one": {"topk": 1, "score_function": "sigmoid"},
    "bias, groups, factor": {
        **{"topk": 4, "score_function": "sigmoid", "expert_bias": BIAS},
        **{"num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
    },
    "best of groups": {"topk": 2, "use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_equals_megatrons_own(name: str) -> None:
    options = ROUTERS[name]
    factors = tensor(TOKENS, EXPERTS, seed=2)
    want = with_gradients(lambda logits: route(logits, **options)[0] * factors, LOGITS)
    chosen = route(LOGITS, **options)[1]
    patched = patch()
    fusedops.reset_stats()
    got = with_gradients(lambda logits: route(logits, **options)[0] * factors, LOGITS)
    assert {count.op for count in fusedops.stats().counts} == {"top_k_routing"}
    assert_close(got, want, atol=1e-6, rtol=2e-6)
    assert torch.equal(route(LOGITS, **options)[1], chosen)
    probs, _ = route(LOGITS.bfloat16(), **options)
    assert probs.dtype is torch.bfloat16
    assert {row.module for row in patched.rows if row.op == "top_k_routing"} == {"topk_routing_with_score_function"}


def test_equal_logits_choose_the_first_experts() -> None:
    patch()
    _, chosen = route(torch.zeros(2, EXPERTS), topk=3)
    assert chosen[:, :3].all()
    assert chosen.sum() == 6


@pytest.mark.parametrize("options", [{"topk": 6, "num_groups": 4, "group_topk": 2}, {"topk": 2, "router_replay": 1}])
def test_what_the_op_does_not_compute_is_megatrons(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import moe_utils

    def own(*args: Any, router_replay: Any = None, num_groups: int = 0, group_topk: int = 0, **kwargs: Any) -> Any:
        return "own"

    own.__module__ = moe_utils.__name__
    own.__signature__ = inspect.signature(moe_utils.topk_routing_with_score_function)
    monkeypatch.setattr(moe_utils, "topk_routing_with_score_function", own)
    patch()
    with pytest.warns(FusedOpsWarning, match="topk_routing_with_score_function: got .*; Megatron's own code"):
        assert moe_utils.topk_routing_with_score_function(LOGITS, **options) == "own"


def grouped_mlp() -> tuple[Any, Any]:
    """Megatron's GroupedMLP, which needs the package grouped_gemm without the patch, and its config."""
    experts = pytest.importorskip("megatron.core.transformer.moe.experts")
    if not hasattr(experts, "GroupedMLP"):
        pytest.skip("megatron-core 0.17 and later have no GroupedMLP")
    from megatron.core.process_groups_config import ProcessGroupCollection

    chosen = config(num_moe_experts=4, moe_ffn_hidden_size=24, gated_linear_unit=True, add_bias_linear=False)
    chosen.activation_func, chosen.bf16, chosen.params_dtype = functional.silu, True, torch.bfloat16
    world = torch.distributed.group.WORLD
    groups = ProcessGroupCollection(ep=world, expt_tp=world, expt_dp=world)
    return experts.GroupedMLP(4, chosen, groups), chosen


def test_grouped_mlp_runs_without_grouped_gemm() -> None:
    with pytest.raises(AssertionError, match="Grouped GEMM is not available"):
        grouped_mlp()
    patched = patch()
    model, chosen = grouped_mlp()
    sizes, hidden = [5, 0, 7, 1], chosen.hidden_size
    x, probs = tensor(13, hidden, dtype=torch.bfloat16), torch.rand(13)
    fusedops.reset_stats()
    got = with_gradients(lambda *given: model(given[0], torch.tensor(sizes), given[1])[0], x, probs)
    calls = {(count.op, count.direction): count.calls for count in fusedops.stats().counts}
    assert calls == {("grouped_matmul", "forward"): 2, ("grouped_matmul", "backward"): 2}

    gate_up = model.weight1.detach().float().view(4, hidden, -1)
    down = model.weight2.detach().float().view(4, -1, hidden)

    def loop(x: Tensor, probs: Tensor) -> Tensor:
        parts = list[Tensor]()
        for e, (rows, p) in enumerate(zip(x.split(sizes), probs.split(sizes))):
            gate, up = (rows @ gate_up[e]).chunk(2, dim=-1)
            parts.append((functional.silu(gate) * up * p[:, None]) @ down[e])
        return torch.cat(parts)

    for mine, exact in zip(got, with_gradients(loop, x.float(), probs)):
        assert mine is not None
        assert exact is not None
        assert float((mine.float() - exact).norm()) <= 0.02 * float(exact.norm())
    empty = model(x[:0], torch.zeros(4, dtype=torch.int64), probs[:0])[0]
    assert empty.shape == (0, hidden)
    patched.remove()
    with pytest.raises(AssertionError, match="Grouped GEMM is not available"):
        grouped_mlp()


def test_the_product_by_rows_of_both_is_refused() -> None:
    from fusedops.integrations.megatron._experts import gmm

    with pytest.raises(InvalidInputError, match="got trans_a = True, expected False; to fix: "):
        gmm(LOGITS, LOGITS[None], torch.tensor([TOKENS]), trans_a=True)
    weight = tensor(1, 5, EXPERTS, seed=3)
    assert_close(gmm(LOGITS, weight, torch.tensor([TOKENS]), trans_b=True), LOGITS @ weight[0].T)
