"""Small calls of applied models are left to torch, and counted."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from model_families import FAMILIES
from small_calls import calls_may_be_small, no_call_is_small
from torch import Tensor, nn

import fusedops
from fusedops.integrations.transformers import apply, attention_forward, softmax_forward

pytestmark = pytest.mark.usefixtures("clean_fusedops")


@pytest.fixture(autouse=True)
def small_calls_are_left(ops_compute_small_calls: None) -> Iterator[None]:
    with calls_may_be_small():
        yield


def ran(run: Callable[[], Any], op: str) -> list[str]:
    """Return what computed the calls of an op, forward."""
    fusedops.reset_stats()
    run()
    return [row.backend for row in fusedops.stats().counts if row.op == op and row.direction == "forward"]


def norm(size: int = 64) -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(size))
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5), model[0].bias.uniform_(-1, 1)
    apply(model)
    return model


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attention(q: Tensor, k: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return attention_forward(nn.Identity(), q, k, k, mask, **options)[0]


def test_a_norm_is_torchs_up_to_its_number_of_elements() -> None:
    model = norm()
    assert ran(lambda: model(torch.randn(255, 64)), "layer_norm") == ["torch"]
    assert ran(lambda: model(torch.randn(256, 64)), "layer_norm") == ["cpu"]
    x = torch.randn(3, 5, 64)
    with no_call_is_small():
        expected = model(x)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)


def test_the_reason_is_in_the_counts() -> None:
    model = norm()
    ran(lambda: model(torch.zeros(2, 64)), "layer_norm")
    (row,) = fusedops.stats().counts
    assert (row.op, row.backend, row.calls) == ("layer_norm", "torch", 1)
    assert "ran torch (1)\n" in str(fusedops.stats())
    assert "not fusedops: fewer than 16,384 elements on a CPU, where torch's function" in str(fusedops.stats())


@pytest.mark.parametrize("where", ["a block", "a policy", "the environment"])
def test_where_a_backend_is_chosen_it_computes_small_calls(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = norm()

    def run() -> None:
        model(torch.zeros(2, 64))

    if where == "a block":
        with fusedops.use("eager"):
            assert ran(run, "layer_norm") == ["eager"]
    elif where == "a policy":
        fusedops.set_policy("eager")
        assert ran(run, "layer_norm") == ["eager"]
    else:
        monkeypatch.setenv("FUSEDOPS_BACKEND", "eager")
        fusedops.set_policy(None)
        assert ran(run, "layer_norm") == ["eager"]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_other_dtypes_and_devices_are_the_ops(fresh_compiler: None) -> None:
    model, x = norm(), torch.zeros(2, 64)
    assert ran(lambda: model(x.bfloat16()), "layer_norm") == ["cpu"]  # its weight is float32
    assert ran(lambda: norm().bfloat16()(x.bfloat16()), "layer_norm") == ["cpu"]
    assert ran(lambda: norm().bfloat16()(x), "layer_norm") == ["cpu"]
    assert ran(lambda: torch.compile(model, backend="aot_eager")(x), "layer_norm") == ["cpu"]
    traced = torch.jit.trace(model, (x,), check_trace=False)
    assert ran(lambda: traced(x), "layer_norm") == ["cpu"]
    assert ran(lambda: model.to("meta")(x.to("meta")), "layer_norm") == ["eager"]


class LayerNorm1P(nn.LayerNorm):
    """As Nemotron's."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


@pytest.mark.parametrize("own", [LayerNorm1P(64), nn.LayerNorm(64, bias=False), nn.LayerNorm(64, 0.1, False)])
def test_a_small_norm_of_each_form_has_its_own_results(own: nn.Module) -> None:
    for parameter in own.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    model, x = nn.Sequential(own), torch.randn(3, 64)
    expected = model(x)
    apply(model)
    assert ran(lambda: model(x), "layer_norm") == ["torch"]
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_norm_of_an_argument_with_a_name_is_the_ops() -> None:
    x, model = torch.randn(3, 64), norm()
    expected = model(x)
    assert ran(lambda: torch.testing.assert_close(model[0](input=x), expected), "layer_norm") == ["cpu"]


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_norm_whose_weight_is_a_tensor_beside_its_parameters_is_the_ops(name: str) -> None:
    x, model = torch.randn(3, 64), norm()
    expected, value = model(x), getattr(model[0], name).detach().clone()
    delattr(model[0], name)
    setattr(model[0], name, value)  # as torch's pruning keeps it
    assert ran(lambda: torch.testing.assert_close(model(x), expected), "layer_norm") == ["cpu"]


def test_a_subclass_of_tensors_is_the_ops() -> None:
    x = torch.zeros(2, 64).as_subclass(type("Own", (Tensor,), {}))
    assert ran(lambda: norm()(x), "layer_norm") == ["cpu"]


def test_a_compiled_model_is_not_compiled_again_for_a_larger_call(fresh_compiler: None) -> None:
    counter = torch._dynamo.testing.CompileCounter()

    def both(x: Tensor, q: Tensor) -> Tensor:
        return model(x).sum() + attention(q, q, is_causal=False).sum()

    model, compiled = norm(), torch.compile(both, backend=counter, dynamic=True)
    with torch.no_grad():
        for rows in (30, 300):
            compiled(torch.zeros(rows, 64), torch.zeros(1, 4, rows, 64))
    assert counter.frame_count == 1


@pytest.mark.parametrize("queries", [1, 5, 12])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_small_attention_has_the_results_of_the_op(queries: int, kv_heads: int, masked: bool, is_causal: bool) -> None:
    q, k = heads(2, 4, queries, 16), heads(2, kv_heads, 12, 16, seed=1)
    mask = torch.rand(2, 1, queries, 12, generator=torch.Generator().manual_seed(2)) < 0.6 if masked else None
    if mask is not None:
        mask[0, :, 0] = False  # a query that sees no key
    options: dict[str, Any] = {"is_causal": is_causal, "scaling": 0.3}

    def results() -> list[Tensor]:
        y = attention(q, k, mask, **options)
        return [y, *torch.autograd.grad(y.square().sum(), (q, k))]

    assert ran(results, "attention") == ["torch"]
    found = results()
    with no_call_is_small():
        assert ran(results, "attention") == ["cpu"]
        expected = results()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if mask is not None:
        assert (found[0][0, 0] == 0).all()


def test_attention_is_the_ops_where_it_takes_less_time_or_torch_has_no_parameter() -> None:
    q = heads(1, 4, 32, 16)
    assert ran(lambda: attention(q, q), "attention") == ["torch"]
    assert ran(lambda: attention(q, heads(1, 4, 63, 16)), "attention") == ["torch"]
    assert ran(lambda: attention(q, heads(1, 4, 64, 16)), "attention") == ["cpu"]  # 131,072 products
    few = heads(1, 4, 1, 16)
    assert ran(lambda: attention(few, heads(1, 4, 1023, 16)), "attention") == ["torch"]
    assert ran(lambda: attention(few, heads(1, 4, 1024, 16)), "attention") == ["cpu"]  # 65,536 elements of keys
    with torch.no_grad():
        assert ran(lambda: attention(few, heads(1, 4, 63, 16)), "attention") == ["torch"]
        assert ran(lambda: attention(few, heads(1, 4, 64, 16)), "attention") == ["cpu"]  # 4,096 products
    assert ran(lambda: attention(q.bfloat16(), q.bfloat16()), "attention") == ["cpu"]
    assert ran(lambda: attention(q, q, s_aux=torch.zeros(4)), "attention") == ["cpu"]
    assert ran(lambda: attention(q, q, sliding_window=4), "attention") == ["cpu"]
    assert ran(lambda: attention(few, heads(2, 4, 9, 16)), "attention") == ["cpu"]  # a query for both rows
    narrow = heads(1, 4, 32, 8)
    assert ran(lambda: attention_forward(nn.Identity(), q, q, narrow, None), "attention") == ["cpu"]


def biased(q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Any]:
    return softmax_forward(nn.Identity(), q, k, k, mask, scaling=1.0, position_bias=bias, **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [9, 12])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_one_small_query_with_a_bias_has_the_results_of_the_op(masked: bool, keys: int, kv_heads: int) -> None:
    q, k, bias = heads(2, 4, 1, 16), heads(2, kv_heads, 9, 16, seed=1), heads(1, 4, 1, keys, seed=2)
    mask = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(3)) < 0.6 if masked else None
    if mask is not None:
        mask[0] = False  # a query that sees no key
    with torch.no_grad():
        assert ran(lambda: biased(q, k, bias, mask), "scaled_masked_softmax") == ["torch"]
        found, weights = biased(q, k, bias, mask)
        with no_call_is_small():
            assert ran(lambda: biased(q, k, bias, mask), "scaled_masked_softmax") == ["cpu"]
            expected, _ = biased(q, k, bias, mask)
    assert weights is None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if masked:
        assert (found[0] == 0).all()


def test_a_bias_is_the_ops_where_it_takes_less_time_or_the_probabilities_are_wanted() -> None:
    q, k, bias = heads(1, 4, 1, 16), heads(1, 4, 255, 16), heads(1, 4, 1, 255)
    module = nn.Identity()
    options: dict[str, Any] = {"scaling": 1.0, "position_bias": bias}

    def op(*tensors: Tensor, **more: Any) -> list[str]:
        return ran(
            lambda: softmax_forward(module, *tensors, **{"attention_mask": None, **options, **more}),
            "scaled_masked_softmax",
        )

    assert op(q, k, k) == ["cpu"]  # its gradient takes less time there
    with torch.no_grad():
        assert op(q, k, k) == ["torch"]
        longer = heads(1, 4, 256, 16)  # 16,384 products
        assert op(q, longer, longer, position_bias=heads(1, 4, 1, 256)) == ["cpu"]
        assert op(k[:, :, :2], k, k) == ["cpu"]
        assert op(q, k, k, sliding_window=9) == ["cpu"]
        assert op(q, k, k, attention_mask=torch.zeros(1, 1, 1, 255)) == ["cpu"]
        assert op(q, k, k[..., :8]) == ["cpu"]
        assert op(q, k, k, position_bias=bias.bfloat16()) == ["cpu"]
        assert op(q, k, k, softcap=2.0) == ["cpu"]
        assert op(q, k, k, softcap=None) == ["torch"]
        assert op(q, k, k, position_bias=None) == ["cpu"]
        assert op(q, k, k, output_attentions=True) == ["cpu"]
        module.config = SimpleNamespace(_output_attentions=True)
        assert op(q, k, k) == ["cpu"]
        assert softmax_forward(module, q, k, k, None, **options)[1].shape == (1, 4, 1, 255)


def test_a_small_t5_generates_what_it_generates_by_the_op() -> None:
    family = FAMILIES["T5"]
    model, inputs = family.build().eval(), {n: v for n, v in family.inputs().items() if n != "decoder_input_ids"}
    apply(model)

    def logits() -> Tensor:
        found = model.generate(
            **inputs, max_new_tokens=6, min_new_tokens=6, output_logits=True, return_dict_in_generate=True
        )
        return torch.stack(found.logits)

    assert {*ran(logits, "scaled_masked_softmax")} == {"cpu", "torch"}  # of the inputs, and of each token
    small = logits()
    with no_call_is_small():
        torch.testing.assert_close(small, logits(), rtol=1e-4, atol=1e-4)
    attentions = model.generate(
        **inputs, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True
    ).decoder_attentions
    assert all(each is not None for token in attentions for each in token)


def test_small_attention_gives_probabilities_and_takes_numbers_as_a_mask_by_the_softmax() -> None:
    q, module = heads(1, 4, 5, 16), nn.Identity()
    with pytest.warns(fusedops.FusedOpsWarning, match="a mask that is added to the scores"):
        assert ran(lambda: attention(q, q, torch.zeros(1, 1, 5, 5)), "attention") == []
    module.config = SimpleNamespace(_output_attentions=True)
    with pytest.warns(fusedops.FusedOpsWarning, match="output_attentions"):
        weights = attention_forward(module, q, q, q, None)[1]
    assert weights is not None
    assert weights.shape == (1, 4, 5, 5)


def test_packed_sequences_are_the_ops() -> None:
    model = FAMILIES["Llama"].build(attn_implementation="fusedops")
    inputs = {"input_ids": torch.arange(3, 12)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    assert ran(lambda: model(**inputs, use_cache=False), "varlen_attention") == ["cpu"]
    assert ran(lambda: model(**inputs, use_cache=False), "attention") == []


def test_small_attention_takes_a_dropout() -> None:
    q = heads(1, 4, 16, 16)
    torch.manual_seed(0)
    y = attention(q, torch.zeros_like(q) + 1, dropout=0.5, is_causal=False)
    assert ran(lambda: attention(q, q, dropout=0.5), "attention") == ["torch"]
    # each row of values is ones: the sum of the kept probabilities, doubled, whose mean is 1
    assert y.std() > 0.1
    assert abs(y.mean() - 1) < 0.15


@pytest.mark.parametrize("family", ["BART", "BERT", "OPT", "Qwen3", "Whisper"])
def test_a_small_model_gives_what_it_gives_by_the_ops(family: str) -> None:
    model, inputs = FAMILIES[family].build().eval(), FAMILIES[family].inputs()
    plain = model(**inputs).logits.detach()
    apply(model)

    def results() -> list[Tensor]:
        logits, weights = model(**inputs).logits, [each for each in model.parameters() if each.requires_grad]
        return [logits, *torch.autograd.grad(logits.square().mean(), weights)]

    assert ran(results, "attention") == ["torch"]
    found = results()
    with no_call_is_small():
        assert ran(results, "attention") == ["cpu"]
        expected = results()
    torch.testing.assert_close(found[0].detach(), plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
