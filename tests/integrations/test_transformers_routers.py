"""Routers of experts: each form is replaced by top_k_routing, and a look-alike is left."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_families import FAMILIES
from model_family import counted
from torch import Tensor, nn

import fusedops
from fusedops.integrations.transformers import Row, apply

pytestmark = pytest.mark.filterwarnings("ignore:apply. fusedops in:fusedops.FusedOpsWarning", "ignore::FutureWarning")

E, H, K = 8, 16, 3
CHOICE = "its choice of experts is none of top_k_routing"
WEIGHTS = "its weights are none of top_k_routing"
SMALL = "its weights differ from those of top_k_routing where the scores are small"
LOGITS = "its first result is not a linear function of its tokens"
FORM = "its forward does not return logits, weights and the indices of experts"


class TinyRouter(nn.Module):
    """A router by a formula that a test gives."""

    def __init__(self, formula: Any, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H))
        self.e_score_correction_bias = nn.Buffer(torch.randn(E))
        self.formula = formula
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.formula(self, x.reshape(-1, H))


class BiasedRouter(TinyRouter):
    """A router whose bias is an argument."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:
        return self.formula(self, x.reshape(-1, H), bias)


class LayerRouter(nn.Module):
    """A router whose weight is that of a layer, and whose results keep the dims of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        logits = self.gate(x)
        best, index = logits.topk(K, -1)
        return logits, best.float().softmax(-1).type_as(x), index


def of_scores(scores: Tensor, choices: Tensor, k: int = K) -> tuple[Tensor, Tensor]:
    index = choices.topk(k, -1).indices
    return scores.gather(-1, index), index


def softmax(router: Any, x: Tensor, over: Callable[[Tensor], Any] = lambda w: 1) -> Any:
    logits = F.linear(x, router.weight)
    scores = logits.softmax(-1, dtype=torch.float32)
    weights, index = of_scores(scores, scores)
    return logits, weights / over(weights), index


def total(weights: Tensor) -> Tensor:
    return weights.sum(-1, keepdim=True)


def sigmoid(router: Any, x: Tensor, bias: Any = None, over: Callable[[Tensor], Any] = total, masked: Any = None) -> Any:
    logits = F.linear(x.float(), router.weight.float())
    scores = logits.sigmoid()
    choices = scores + (router.e_score_correction_bias if bias is None else bias)
    if masked is not None:
        of_groups = choices.unflatten(-1, (4, -1))
        best = of_groups.topk(2, -1).values.sum(-1).topk(2, -1).indices
        left = torch.ones_like(of_groups[..., 0]).scatter(-1, best, 0.0)[..., None].bool()
        choices = of_groups.masked_fill(left, masked).flatten(-2)
    weights, index = of_scores(scores, choices)
    return logits, weights / over(weights), index


def capped(router: Any, x: Tensor) -> Any:
    logits = F.linear(x, router.weight).float()
    logits = torch.tanh(logits / router.cap) * router.cap
    scores = F.softplus(logits).sqrt()
    weights, index = of_scores(scores, scores)
    return logits, weights.to(x.dtype), index


def scaled(router: Any, x: Tensor) -> Any:
    logits = F.linear(x, router.weight) * router.multiplier
    scores = logits.sigmoid()
    weights, index = of_scores(scores, scores)
    return logits, weights / (total(weights) + router.eps) * router.scale, index


INFINITE = float("-inf")
FORMS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: TinyRouter(softmax),
    "softmax, normalized": lambda: TinyRouter(lambda r, x: softmax(r, x, total)),
    "softmax of the chosen, from a layer": LayerRouter,
    "sigmoid with a bias": lambda: TinyRouter(sigmoid),
    "sigmoid with an eps": lambda: TinyRouter(lambda r, x: sigmoid(r, x, over=lambda w: total(w) + r.eps), eps=1e-20),
    "sigmoid, half": lambda: TinyRouter(lambda r, x: sigmoid(r, x, over=lambda w: 1 / r.half), half=0.5),
    "groups": lambda: TinyRouter(lambda r, x: sigmoid(r, x, masked=INFINITE), groups=4, best=2),
    "a bias as an argument": lambda: BiasedRouter(sigmoid),
    "capped, sqrt of softplus": lambda: TinyRouter(capped, cap=4.0),
    "a factor of the logits": lambda: TinyRouter(scaled, multiplier=0.25, scale=2.5, eps=1e-15),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_router_is_recognised(name: str) -> None:
    router = FORMS[name]()
    kind = type(router)
    arguments = (torch.randn(E),) if kind is BiasedRouter else ()
    for dtype in (torch.float32, torch.bfloat16):
        router.to(dtype)
        x = torch.randn(2, 3, H, dtype=dtype, requires_grad=True)
        leaves = [x, next(router.parameters())]
        expected = router(x, *arguments)
        applied = apply(router)
        assert applied.rows == (Row(kind.__name__, "top_k_routing", 1),)
        fusedops.reset_stats()
        results = router(x, *arguments)
        assert [each.op for each in fusedops.stats().counts] == ["top_k_routing"]
        assert [each.dtype for each in results] == [each.dtype for each in expected]
        assert torch.equal(results[0], expected[0])
        assert dtype == torch.bfloat16 or torch.equal(results[2], expected[2])
        torch.testing.assert_close(results[1], expected[1], atol=2e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-4)
        if dtype == torch.float32:
            pair = [
                torch.autograd.grad((each[1] * each[1]).sum() + each[0].sum(), leaves) for each in (results, expected)
            ]
            for gradient, own in zip(*pair):
                torch.testing.assert_close(gradient, own, atol=1e-5, rtol=1e-4)
        applied.remove()
        assert type(router) is kind


def noisy(router: Any, x: Tensor) -> Any:
    return softmax(router, x * torch.empty_like(x).uniform_(0.9, 1.1) if router.training else x)


def dropped(router: Any, x: Tensor) -> Any:
    """No more than 4 tokens for an expert."""
    logits, weights, index = softmax(router, x)
    taken = F.one_hot(index, E).flatten(0, 1).cumsum(0).view(*index.shape, E).gather(-1, index[..., None])[..., 0]
    return logits, weights * (taken <= 4), index


def probabilities(router: Any, x: Tensor) -> Any:
    logits, weights, index = softmax(router, x)
    return logits.softmax(-1), weights, index


def clamped(router: Any, x: Tensor) -> Any:
    logits = F.linear(x, router.weight).clamp(-20, 20)
    return logits, *of_scores(logits.softmax(-1), logits)


def by_logits(router: Any, x: Tensor) -> Any:
    logits = F.linear(x, router.weight)
    return logits, *of_scores(logits.sigmoid(), logits)


def second_best(router: Any, x: Tensor) -> Any:
    logits = F.linear(x, router.weight)
    scores = logits.softmax(-1)
    index = scores.topk(K + 1, -1).indices[..., 1:]
    return logits, scores.gather(-1, index), index


LOOK_ALIKES: dict[str, tuple[Any, str]] = {
    "the largest of the sum and an eps": (lambda r, x: sigmoid(r, x, over=lambda w: total(w).clamp(min=1e-12)), SMALL),
    "an eps that is no attribute": (lambda r, x: sigmoid(r, x, over=lambda w: total(w) + x.new_tensor(7e-7)), SMALL),
    "another sum": (lambda r, x: softmax(r, x, lambda w: w.square().sum(-1, keepdim=True)), WEIGHTS),
    "a learned scale": (lambda r, x: softmax(r, x, lambda w: r.e_score_correction_bias[0]), WEIGHTS),
    "a scale of each expert": (lambda r, x: softmax(r, x, lambda w: r.weight[:K, 0]), WEIGHTS),
    "logits as weights": (lambda r, x: (z := F.linear(x, r.weight), *of_scores(z, z)), WEIGHTS),
    "0 for the experts of other groups": (lambda r, x: sigmoid(r, x, masked=0.0), CHOICE),
    "the best but one": (second_best, CHOICE),
    "a sigmoid, chosen by the logits": (by_logits, "it chooses by its logits, also where their sigmoid is equal"),
    "a limit of tokens for an expert": (dropped, WEIGHTS),
    "no gradient of the weights": (
        lambda r, x: tuple(y.detach() if at else y for at, y in enumerate(softmax(r, x))),
        "its gradients are others than the op's",
    ),
    "probabilities": (probabilities, LOGITS),
    "clamped logits": (clamped, LOGITS),
    "normalized tokens": (
        lambda r, x: softmax(r, F.normalize(x)),
        "its results are those of the op for some tokens alone",
    ),
    "two results": (lambda r, x: softmax(r, x)[:2], FORM),
    "the choice as a mask": (lambda r, x: (*softmax(r, x)[:2], F.one_hot(softmax(r, x)[2], E).sum(-2)), FORM),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_a_router_is_left(name: str) -> None:
    formula, reason = LOOK_ALIKES[name]
    router = TinyRouter(formula, groups=4, best=2)
    before = torch.get_rng_state()
    assert apply(router).rows == (Row("TinyRouter", "", 1, reason),)
    assert type(router) is TinyRouter
    assert torch.equal(torch.get_rng_state(), before)


def test_a_router_with_noise_in_training_is_replaced_in_evaluation() -> None:
    router, x = TinyRouter(noisy), torch.randn(7, H)
    (evaluation, training) = apply(router).rows
    assert (evaluation.op, evaluation.when) == ("top_k_routing", "evaluation")
    assert (training.op, training.left) == ("", "in training it computes something else")
    results = [router.train(mode)(x)[1] for mode in (True, True, False, False)]
    assert not torch.equal(*results[:2])
    assert torch.equal(*results[2:])


def small(module: str, name: str, config: str, /, **values: Any) -> nn.Module:
    """A router of transformers, with random weights."""
    package = f"transformers.models.{module}"
    kind = getattr(import_module(f"{package}.modeling_{module}"), name)
    configs = import_module(f"{package}.configuration_{module}")
    values = {"hidden_size": 32, "num_attention_heads": 4, "num_experts_per_tok": K, **values}
    router = kind(getattr(configs, config)(**values))
    for tensor in (*router.parameters(), *router.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    return router


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "DeepSeek-V2, groups": lambda: small(
        "deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config", n_routed_experts=E,
        topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
    ),
    "DeepSeek-V4": lambda: small("deepseek_v4", "DeepseekV4TopKRouter", "DeepseekV4Config", n_routed_experts=E),
    "LongCat-Flash": lambda: small(
        "longcat_flash", "LongcatFlashTopkRouter", "LongcatFlashConfig", n_routed_experts=E, zero_expert_num=4,
        moe_topk=K,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_router_of_transformers_is_replaced(name: str) -> None:
    torch.manual_seed(0)
    router, x = OTHERS[name](), torch.randn(500, 32)
    expected = router(x)
    assert apply(router).ops == {"top_k_routing": 1}
    results = router(x)
    weights, own_weights = (torch.zeros_like(each[0]).scatter(-1, each[2], each[1]) for each in (results, expected))
    torch.testing.assert_close(results[0], expected[0])
    torch.testing.assert_close(weights, own_weights)


def test_calls_of_another_form_are_the_routers_own() -> None:
    router = BiasedRouter(lambda r, x, bias: sigmoid(r, x, bias) if bias is not None else ("none",))
    x, bias = torch.randn(5, H), torch.randn(E)
    expected = router(x, bias)
    apply(router)
    assert router(x) == ("none",)
    assert torch.equal(router(bias=bias, x=x)[2], expected[2])

    router = TinyRouter(softmax)
    apply(router)
    with pytest.raises(TypeError, match="unexpected keyword"):
        router(x=x, y=x)


def test_logits_that_a_model_records_and_its_balance_loss_stay() -> None:
    """transformers records the routers' first results by hooks, and adds a loss of them."""
    model = FAMILIES["Mixtral"].build()
    model.config.output_router_logits = True
    ids = torch.arange(3, 21).view(2, 9)

    def losses() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        result = model.train()(input_ids=ids, labels=ids)
        result.loss.backward()
        gates = [p.grad.clone() for name, p in model.named_parameters() if name.endswith("gate.weight")]
        return torch.stack([result.loss.detach(), result.aux_loss.detach()]), [*result.router_logits, *gates]

    own, recorded = losses()
    apply(model)
    calls: list[Tensor] = []
    hook = model.model.layers[0].mlp.gate.register_forward_hook(lambda *values: calls.append(values[2][0]))
    assert counted(losses)["top_k_routing"] == 2
    replaced, again = losses()
    hook.remove()
    assert len(calls) == 2
    assert len(recorded) == len(again) == 4
    torch.testing.assert_close(replaced, own)
    for each, before in zip(again, recorded):
        torch.testing.assert_close(each, before, atol=1e-5, rtol=1e-4)


def test_a_replaced_router_is_one_graph(fresh_compiler: None) -> None:
    router, x = TinyRouter(sigmoid), torch.randn(5, H)
    expected = router(x)
    apply(router)
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


def test_a_router_is_left_where_ops_has_no_routing() -> None:
    assert apply(LayerRouter(), ops=["experts"]).rows == (Row("LayerRouter", "", 1, "ops has no top_k_routing"),)


def test_modules_with_large_tensors_are_not_tried() -> None:
    """The block of a router and its experts has one matrix, and an output embedding that is no Linear has one too."""
    block = TinyRouter(softmax)
    block.experts = nn.Parameter(torch.empty(2**20, 2**20, 8, device="meta"))
    embedding = TinyRouter(softmax)
    embedding.weight = nn.Parameter(torch.empty(2**20, 2**20, device="meta"))
    for module in (block, embedding):
        assert apply(module).rows == (Row("TinyRouter", "", 1, FORM),)
