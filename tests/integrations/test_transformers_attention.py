"""The attention implementations "fusedops" and "fusedops_softmax" of transformers."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from model_families import FAMILIES, Family, counted
from torch import Tensor, nn
from transformers import AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fusedops
from fusedops.integrations.transformers import apply, attention_forward, softmax_forward
from fusedops.integrations.transformers._attention import functions as _attention
from fusedops.integrations.transformers._attention import packed_mask as _packed_mask
from fusedops.integrations.transformers._attention.packed_mask import PackedMask

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAMES = ("fusedops", "fusedops_softmax")


def attended(model: Any, family: Family) -> Tensor:
    inputs = family.inputs()
    with torch.no_grad():
        logits = model(**inputs).logits
    return logits[inputs["attention_mask"].bool()] if "decoder_input_ids" not in inputs else logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma 3", "BERT", "BART", "ModernBERT", "DeepSeek-V3"])
def test_set_attn_implementation_equals_eager(family: str, name: str) -> None:
    """Causal and not, windows, encoder and decoder, values of another size than keys: masks arrive."""
    model = FAMILIES[family].build(attn_implementation="eager")
    expected = attended(model, FAMILIES[family])
    model.set_attn_implementation(name)
    op = "attention" if name == "fusedops" else "scaled_masked_softmax"
    calls = counted(
        lambda: torch.testing.assert_close(attended(model, FAMILIES[family]), expected, rtol=1e-4, atol=2e-5)
    )
    assert calls[op] >= 2


LENGTHS = ((5, 1, 9, 3), (18,))  # of the sequences of two rows
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def packed_step(model: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=POSITIONS, use_cache=False).logits
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("family", ["Llama", "Mistral"])  # without and with a window
def test_packed_sequences_run_without_their_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES[family].build(attn_implementation="eager")
    ids = torch.randint(3, 60, POSITIONS.shape, generator=torch.Generator().manual_seed(0))
    expected = packed_step(model, ids)
    alone = [
        model(input_ids=part, use_cache=False).logits[0]
        for row, lengths in zip(ids[:, None], LENGTHS)
        for part in row.split(lengths, 1)
    ]
    model.set_attn_implementation("fusedops")
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    results: list[Tensor] = []
    assert counted(lambda: results.extend(packed_step(model, ids))) == {"varlen_attention": 2}
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(results[0].flatten(0, 1), torch.cat(alone), rtol=1e-4, atol=2e-5)


def packed_mask(window: int | None = None) -> list[Any]:
    """Return the mask of transformers and that of "fusedops"."""
    make = masking_utils.create_causal_mask if window is None else masking_utils.create_sliding_window_causal_mask
    configs = [SimpleNamespace(_attn_implementation=name, sliding_window=window) for name in ("sdpa", "fusedops")]
    return [make(config, torch.zeros(2, 18, 1), None, None, POSITIONS) for config in configs]


def masks(function: Any) -> list[Any]:
    """Return the masks of a mask function."""
    sizes = {"batch_size": 2, "q_length": 18, "kv_length": 18, "mask_function": function}
    options = {"allow_is_causal_skip": False, "config": SimpleNamespace(_attn_implementation="fusedops")}
    return [make(**sizes, **options) for make in (masking_utils.sdpa_mask, AttentionMaskInterface()["fusedops"])]


@pytest.mark.parametrize("window", [None, 4])
def test_the_mask_of_packed_sequences_is_that_of_transformers_to_everything_else(window: int | None) -> None:
    boolean, packed = packed_mask(window)
    assert type(boolean) is Tensor
    assert type(packed) is PackedMask
    assert (packed.shape, packed.dtype) == (boolean.shape, torch.bool)
    q, k = torch.randn(2, 4, 18, 8), torch.randn(2, 2, 18, 8)
    sinks = torch.randn(4)
    for options in ({}, {"s_aux": sinks}):
        want, _ = softmax_forward(nn.Identity(), q, k, k, boolean, **options)
        torch.testing.assert_close(attention_forward(nn.Identity(), q, k, k, packed, **options)[0], want)
        torch.testing.assert_close(softmax_forward(nn.Identity(), q, k, k, packed, **options)[0], want)
    assert torch.equal(packed[..., :7], boolean[..., :7])
    packed.logical_not_()  # what is written into is a mask as any other
    want, _ = softmax_forward(nn.Identity(), q, k, k, ~boolean)
    torch.testing.assert_close(attention_forward(nn.Identity(), q, k, k, packed)[0], want)


def test_another_mask_of_packed_sequences_is_made() -> None:
    numbers = masking_utils.find_packed_sequence_indices(POSITIONS)
    assert numbers is not None
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    window = masking_utils.and_masks(masking_utils.sliding_window_overlay(4), within(numbers))
    for function in (
        within(numbers),
        window,
        masking_utils.and_masks(chunks, within(numbers)),
    ):  # two not causal, one of another kind
        expected, mask = masks(function)
        assert type(mask) is Tensor
        assert torch.equal(mask, expected)


def within(numbers: Tensor) -> Any:
    return masking_utils.packed_sequence_mask_function(numbers)


def shifted(function: Any, positions: Tensor) -> Any:
    """A mask function of the positions, as transformers 5.24 has it."""
    return lambda b, h, q, k: function(b, h, positions[b, q], positions[b, k])


@pytest.mark.parametrize("is_right", [True, False])
def test_a_mask_function_of_another_transformers_is_tried(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its code is known, but its mask in a trial."""

    def make(config: Any, x: Tensor, mask: Any, cache: Any, positions: Tensor) -> Any:
        numbers = masking_utils.find_packed_sequence_indices(positions)
        assert numbers is not None
        causal = masking_utils.causal_mask_function if is_right else masking_utils.bidirectional_mask_function
        function = masking_utils.and_masks(within(numbers), shifted(causal, positions))
        sizes = {"batch_size": len(x), "q_length": x.shape[1], "kv_length": x.shape[1], "mask_function": function}
        make = AttentionMaskInterface()[config._attn_implementation]
        return make(**sizes, allow_is_causal_skip=False, config=config)

    _packed_mask._forms.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(masking_utils, "create_causal_mask", make)
            boolean, packed = packed_mask()
    finally:
        _packed_mask._forms.cache_clear()
    assert type(boolean) is Tensor
    assert type(packed) is (PackedMask if is_right else Tensor)
    assert torch.equal(packed.logical_not(), ~boolean)


@pytest.mark.parametrize("name", NAMES)
def test_an_implementation_is_named_when_a_model_is_built(name: str, tmp_path: Any) -> None:
    FAMILIES["Llama"].build().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert model.config._attn_implementation == name
    expected = attended(FAMILIES["Llama"].build(), FAMILIES["Llama"])
    torch.testing.assert_close(attended(model, FAMILIES["Llama"]), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["gpt-oss", "Mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_sinks_windows_and_caches(family: str, name: str, cache: str) -> None:
    model, inputs = FAMILIES[family].build(attn_implementation="eager"), FAMILIES[family].inputs()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    for text in (inputs, {name: value[:1] for name, value in inputs.items()}):  # padded, and one without padding
        model.set_attn_implementation("eager")
        expected = model.generate(**text, **options, disable_compile=True)
        model.set_attn_implementation(name)
        assert torch.equal(model.generate(**text, **options, disable_compile=True), expected)


def test_softcap_and_biases_are_computed_by_the_softmax_with_a_warning() -> None:
    family = FAMILIES["Gemma 2"]
    model = family.build(attn_implementation="eager")
    expected = attended(model, family)
    model.set_attn_implementation("fusedops")
    with pytest.warns(fusedops.FusedOpsWarning, match=r"got softcap = 50, expected what fusedops\.attention takes"):
        torch.testing.assert_close(attended(model, family), expected, rtol=1e-4, atol=2e-5)
    family = FAMILIES["T5"]
    model = family.build(attn_implementation="eager")
    expected = attended(model, family)
    model.set_attn_implementation("fusedops")
    with pytest.warns(fusedops.FusedOpsWarning, match="got a position_bias, expected") as seen:
        torch.testing.assert_close(attended(model, family), expected, rtol=1e-4, atol=2e-5)
    assert {each.filename for each in seen} == {__file__}, "the line that called the model"


# ------------------------------------------------------------------------------------------------- the functions alone


class Module(nn.Module):
    """An attention module, as far as its implementation looks at it."""

    num_key_value_groups = 2

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.sinks = nn.Parameter(torch.randn(4))


def tensors(sq: int = 5, sk: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, sq, 8), (2, 2, sk, 8), (2, 2, sk, 6)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def written_out(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Any = 0.0, softcap: Any = None, sinks: Any = None
) -> Tensor:
    """Attention in float64, keys seen where True."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = q @ k.mT * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(2, 4, q.shape[2], 1)), -1)
    p = torch.softmax(scores, -1)[..., : k.shape[2]]
    return (p @ v).transpose(1, 2)


def causal(sq: int, sk: int, offset: int = 0, window: int | None = None) -> Tensor:
    distance = torch.arange(sq)[:, None] + offset - torch.arange(sk)
    return (distance >= 0) & (distance < (window or sk + sq))


CASES: dict[str, tuple[dict[str, Any], tuple[int, int], Tensor]] = {
    "causal": ({}, (5, 5), causal(5, 5)),
    "not causal": ({"is_causal": False}, (5, 5), torch.ones(5, 5, dtype=torch.bool)),
    "one token sees all": ({}, (1, 7), torch.ones(1, 7, dtype=torch.bool)),
    "a prefill into a longer cache": ({}, (3, 7), causal(3, 7)),
    "a window": ({"sliding_window": 2}, (5, 5), causal(5, 5, window=2)),
    "a window of one token": ({"sliding_window": 3}, (1, 7), causal(1, 7, offset=6, window=3)),
    "a window in a longer cache": ({"sliding_window": 2}, (4, 7), causal(4, 7, window=2)),
    "a window as wide as the keys": ({"sliding_window": 5}, (5, 5), causal(5, 5)),
}


@pytest.mark.parametrize("function", [attention_forward, softmax_forward])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_calls_without_a_mask(name: str, sinks: bool, function: Any) -> None:
    options, sizes, seen = CASES[name]
    module, qkv = Module(), tensors(*sizes)
    extra = {"s_aux": module.sinks} if sinks else {}
    out = function(module, *qkv, None, scaling=0.3, **options, **extra)[0]
    expected = written_out(*qkv, seen, sinks=module.sinks if sinks else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape)
    wanted = [*qkv, *([module.sinks] if sinks else [])]
    gradients = torch.autograd.grad((out * weights).sum(), wanted)
    for gradient, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), wanted)):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [attention_forward, softmax_forward])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_mask_and_fully_masked_rows(sinks: bool, function: Any) -> None:
    module, qkv = Module(), tensors()
    mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 0, 2], mask[..., 0] = False, True
    mask[0, 0, 2] = False
    out = function(module, *qkv, mask, scaling=0.3, sliding_window=2, **({"s_aux": module.sinks} if sinks else {}))[0]
    expected = written_out(*qkv, mask, sinks=module.sinks if sinks else None)
    torch.testing.assert_close(out.double(), expected.nan_to_num(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(out.sum(), qkv)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 1.5}, "softcap = 1.5"),
        ({"position_bias": torch.randn(1, 4, 5, 5)}, "a position_bias"),
        ({"dropout": 0.5}, r"dropout = 0\.5"),
        ({"output_attentions": True}, "output_attentions = True"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_the_op_has_no_parameter_for(options: dict[str, Any], reason: str) -> None:
    qkv, bias = tensors(), options.get("position_bias", 0.0)
    torch.manual_seed(0)
    expected = softmax_forward(Module(), *qkv, None, scaling=0.3, **options)
    torch.manual_seed(0)
    with pytest.warns(fusedops.FusedOpsWarning, match=f"got {reason}, expected .* to fix: "):
        out = attention_forward(Module(), *qkv, None, scaling=0.3, **options)
    assert torch.equal(out[0], expected[0])
    assert (out[1] is not None) == ("output_attentions" in options), "only where asked, as without such options"
    if "dropout" not in options:
        right = written_out(*qkv, causal(5, 5), bias, options.get("softcap"))
        torch.testing.assert_close(out[0].double(), right, rtol=1e-5, atol=1e-5)
    else:
        assert not torch.allclose(out[0].double(), written_out(*qkv, causal(5, 5)))


@pytest.mark.filterwarnings("error::fusedops.FusedOpsWarning")
def test_dropout_is_torchs_where_its_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention, "_takes_dropout", Tensor.is_cpu.__get__)  # as on a GPU
    qkv, results = tensors(), list[Tensor]()
    for function in (attention_forward, sdpa_attention_forward):
        torch.manual_seed(0)
        results.append(function(Module(), *qkv, causal(5, 5)[None, None], 0.5, 0.3, sliding_window=2)[0])
    assert torch.equal(*results)
    for option in ({"softcap": 1.5}, {"s_aux": torch.zeros(4)}, {"output_attentions": True}):  # which it does not have
        with pytest.warns(fusedops.FusedOpsWarning, match=r"got dropout = 0\.5"):
            attention_forward(Module(), *qkv, None, 0.5, **option)


def test_an_additive_mask_is_added() -> None:
    qkv, bias = tensors(), torch.randn(2, 1, 5, 5)
    with pytest.warns(fusedops.FusedOpsWarning, match="got a mask that is added to the scores"):
        out = attention_forward(Module(), *qkv, bias, scaling=0.3)[0]
    right = written_out(*qkv, torch.ones(5, 5, dtype=torch.bool), bias)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:attention implementation:fusedops.FusedOpsWarning")
@pytest.mark.parametrize("mask", [torch.ones(2, 1, 5, 5).tril().long(), causal(5, 5).byte()[None, None]])
def test_a_mask_that_torch_refuses_is_its_error(mask: Tensor) -> None:
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or float"):
        attention_forward(Module(), *tensors(), mask)
    for function, other in itertools.product(
        (attention_forward, softmax_forward), (torch.zeros(2, 1, 5, 8), torch.zeros(2, 1, 5, 5) + 0j)
    ):
        with pytest.raises((RuntimeError, fusedops.InvalidInputError)):
            function(Module(), *tensors(), other)


@pytest.mark.parametrize("function", [attention_forward, softmax_forward])
@pytest.mark.parametrize("name", ["cache", "indices", "block_indices"])
def test_what_neither_computes_is_refused(name: str, function: Any) -> None:
    with pytest.raises(fusedops.InvalidInputError, match=rf"got .* \({name}\), expected .* to fix: "):
        function(Module(), *tensors(), None, **{name: torch.zeros(1)})


@pytest.mark.parametrize("function", [attention_forward, softmax_forward])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_keys_that_a_call_chooses(function: Any, masked: bool, is_causal: bool) -> None:
    """As DeepSeek-V3.2 (keys) and MiniMax-M3 (blocks of keys, -1 for none, one choice for each head of k) pass them."""
    qkv, everything = tensors(), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask = everything.tril() if masked else None
    visible = everything.tril() if masked or is_causal else everything
    keys = torch.tensor([[[0, 1], [0, 1], [0, 2], [1, 3], [0, 4]]] * 2, dtype=torch.int32)
    chosen = torch.zeros(2, 5, 5, dtype=torch.bool).scatter(-1, keys.long(), True)[:, None]
    out = function(Module(is_causal), *qkv, mask, scaling=0.3, indices=keys)[0]
    torch.testing.assert_close(out.double(), written_out(*qkv, chosen & visible), rtol=1e-5, atol=1e-5)

    module = Module(is_causal)
    module.indexer = nn.Identity()
    module.indexer.block_size = 2
    first, second = [[0, -1], [0, -1], [1, 0], [1, -1], [2, 0]], [[0, -1], [0, -1], [0, -1], [0, 1], [1, 2]]
    blocks = torch.tensor([[first, second]] * 2)
    of_blocks = torch.zeros(2, 2, 5, 4, dtype=torch.bool).scatter(-1, blocks.masked_fill(blocks < 0, 3), True)[..., :3]
    chosen = of_blocks.repeat_interleave(2, -1)[..., :5].repeat_interleave(2, 1)
    out = function(module, *qkv, mask, scaling=0.3, block_indices=blocks)[0]
    torch.testing.assert_close(out.double(), written_out(*qkv, chosen & visible), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"s_aux": torch.tensor([0.1, -0.2, 0.3, 2.0])}, {"sliding_window": 17}])
def test_few_chosen_keys_are_not_a_mask(masked: bool, is_causal: bool, options: dict[str, Any]) -> None:
    """Also where a cache of a fixed size has more keys than the call sees."""
    q, k, v = (torch.randn(2, heads, length, 8) for heads, length in ((4, 9), (2, 40), (2, 40)))
    mask = torch.rand(2, 1, 9, 40) < 0.6 if masked else None
    keys = torch.rand(2, 9, 40).argsort(-1)[..., :7].to(torch.int32)
    keys[..., 3] = -1
    if not masked and not is_causal:
        options = {name: value for name, value in options.items() if name != "sliding_window"}
    call = partial(attention_forward, Module(is_causal), q, k, v, mask, scaling=0.3, **options)
    fusedops.reset_stats()
    got = call(indices=keys)[0]
    assert {count.op for count in fusedops.stats().counts} == {"sparse_attention"}
    want = softmax_forward(Module(is_causal), q, k, v, mask, scaling=0.3, indices=keys, **options)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [attention_forward, softmax_forward])
def test_a_window_on_both_sides_without_a_mask_is_refused(function: Any) -> None:
    with pytest.raises(fusedops.InvalidInputError, match="got sliding_window = 2 without a mask for attention that is"):
        function(Module(is_causal=False), *tensors(), None, sliding_window=2)


def test_autocast_gives_one_dtype() -> None:
    q, k, v = (tensor.detach() for tensor in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_forward(Module(), q, k, v.bfloat16(), None)[0].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------------- apply


def test_apply_leaves_an_implementation_that_was_chosen() -> None:
    model = FAMILIES["Llama"].build()
    model.config._attn_implementation_internal = "flex_attention"
    left = {row.module: row.left for row in apply(model).rows if not row.op}
    assert left == {"LlamaAttention": "its implementation flex_attention was chosen for it"}
    assert model.config._attn_implementation == "flex_attention"


def test_apply_keeps_fusedops_and_remove_restores_what_was_before() -> None:
    model = FAMILIES["Llama"].build(attn_implementation="eager")
    apply(model).remove()
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("fusedops_softmax")
    applied = apply(model)
    assert applied.ops["scaled_masked_softmax"] == 2
    applied.remove()
    assert model.config._attn_implementation == "fusedops_softmax"


def test_remove_restores_an_inner_model_and_keeps_what_was_set_since() -> None:
    model = FAMILIES["Llama"].build()
    apply(model.model)
    apply(model).remove()
    assert model.config._attn_implementation == "sdpa"
    applied = apply(model)
    model.set_attn_implementation("eager")
    applied.remove()
    assert model.config._attn_implementation == "eager"


def test_a_model_whose_own_attention_is_another_is_left() -> None:
    from transformers.models.llama import modeling_llama

    class Odd(transformers.LlamaForCausalLM):
        _supports_sdpa = False

    config = FAMILIES["Llama"].build(attn_implementation="eager").config
    model = Odd(config)
    assert apply(model).ops["attention"] == 2
    apply(model).remove()
    own = modeling_llama.eager_attention_forward
    try:
        modeling_llama.eager_attention_forward = lambda *args, **kwargs: (own(*args, **kwargs)[0] * 2, None)
        (row,) = [row for row in apply(model).rows if row.left]
        assert row.left == f"its implementation eager calls {__name__}'s function"
    finally:
        modeling_llama.eager_attention_forward = own


def test_under_torch_compile() -> None:
    family = dataclasses.replace(FAMILIES["gpt-oss"], values={**FAMILIES["gpt-oss"].values, "num_hidden_layers": 1})
    model = family.build()
    expected = attended(model, family)
    model.set_attn_implementation("fusedops")
    attention = model.model.layers[0].self_attn
    attention.forward = torch.compile(attention.forward, backend="eager", fullgraph=True)
    torch._dynamo.reset()
    calls = counted(lambda: torch.testing.assert_close(attended(model, family), expected, rtol=1e-4, atol=2e-5))
    assert calls == {"attention": 1}


def test_a_bias_for_more_keys_than_there_are_is_cut() -> None:
    query, key, value = tensors()
    bias = torch.randn(1, 4, query.shape[2], key.shape[2] + 3)
    cut = softmax_forward(nn.Identity(), query, key, value, None, position_bias=bias[..., : key.shape[2]])
    found = softmax_forward(nn.Identity(), query, key, value, None, position_bias=bias)
    torch.testing.assert_close(found, cut, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 2], ids=["of all", "of more batches than the scores"])
def test_a_bias_is_added_to_many_scores_where_they_are_in_memory(batch: int) -> None:
    q, k, v = (torch.randn(1, 4, 128, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(batch, 4, 128, 128, requires_grad=True)

    def weights(bias: Tensor) -> Tensor:
        found = softmax_forward(nn.Identity(), q, k, v, None, is_causal=False, position_bias=bias)[1]
        assert found is not None
        return found

    def results(weights: Tensor) -> list[Tensor]:
        y = weights @ v
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v, bias))]

    torch.testing.assert_close(results(weights(bias)), results(torch.softmax(q @ k.mT / 4 + bias, -1)))
    torch.testing.assert_close(torch.func.vmap(weights)(bias[:, None]).flatten(0, 1), weights(bias))
    scores = (q @ k.mT).detach()
    assert (_attention._sum(scores, bias.detach()) is scores) == (batch == 1)
    few = scores[..., :9]
    assert _attention._sum(few, few) is not few


def doubled(*args: Any, **kwargs: Any) -> Any:
    return 2 * sdpa_attention_forward(*args, **kwargs)[0], None


def doubled_scores(*args: Any, **kwargs: Any) -> Tensor:
    return 2 * SDPA(*args, **kwargs)


SDPA = torch.nn.functional.scaled_dot_product_attention
LLAMA = transformers.models.llama.modeling_llama


@pytest.mark.parametrize(
    ("implementation", "patched"),
    [
        ("sdpa", lambda patch: patch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", doubled)),
        ("sdpa", lambda patch: patch.setitem(LLAMA.ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", doubled)),
        ("eager", lambda patch: patch.setitem(LLAMA.ALL_ATTENTION_FUNCTIONS._local_mapping, "eager", doubled)),
        ("eager", lambda patch: patch.setattr(LLAMA, "eager_attention_forward", doubled)),
        ("sdpa", lambda patch: patch.setattr(torch.nn.functional, "scaled_dot_product_attention", doubled_scores)),
        (
            "sdpa",
            lambda patch: patch.setitem(AttentionMaskInterface._global_mapping, "sdpa", lambda *args, **kwargs: None),
        ),
    ],
)
def test_a_model_whose_attention_function_is_the_users_keeps_it(
    implementation: str, patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch)
    model = FAMILIES["Llama"].build(attn_implementation=implementation)
    expected = attended(model, FAMILIES["Llama"])
    applied = apply(model)
    assert [row.left.split("'s")[0] for row in applied.rows if row.family == "attention"] == [
        f"its implementation {implementation} calls {__name__}"
    ]
    torch.testing.assert_close(attended(model, FAMILIES["Llama"]), expected, rtol=1e-4, atol=2e-5)
