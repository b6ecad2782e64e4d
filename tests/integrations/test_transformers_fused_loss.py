"""apply with fused_loss=True: a training step that never makes the logits, and what happens where they are used."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_families import FAMILIES, VOCABULARY
from torch import Tensor, nn

import fusedops
from fusedops.integrations.transformers import Row, apply
from fusedops.integrations.transformers._loss.deferred_logits import DeferredLogits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def trainee(name: str = "Llama", **values: Any) -> Any:
    """Return a model in training without dropout."""
    family = FAMILIES[name]
    model = dataclasses.replace(family, values={**family.values, "num_hidden_layers": 1, **values}).build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for field in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if getattr(model.config, field, 0):
            setattr(model.config, field, 0.0)
    return model


def batch(name: str = "Llama") -> dict[str, Tensor]:
    inputs = FAMILIES[name].inputs()
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        seen = inputs["attention_mask"].bool()
        labels = labels.masked_fill(~(seen & seen.roll(1, 1)), -100)  # no token is predicted from padding
    return {**inputs, "labels": labels}


def step(model: Any, name: str = "Llama", **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a step."""
    model.zero_grad()
    loss = model(**batch(name), **options).loss
    loss.backward()
    return loss.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-5)
    assert one[1].keys() == other[1].keys()
    for key, gradient in other[1].items():
        scale = max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(one[1][key], gradient, rtol=1e-3, atol=1e-5 * scale, msg=key)


def losses() -> dict[str, int]:
    """Return the calls of the losses since the last reset."""
    counts = fusedops.stats().counts
    return {each.op: each.calls for each in counts if each.op.endswith("cross_entropy") and each.direction == "forward"}


# a scaled head, a softcap, a loss in the model's forward, a tied head with a bias, two stacks
@pytest.mark.parametrize(
    ("name", "values", "options"),
    [
        ("Llama", {}, {}),
        ("Llama", {"tie_word_embeddings": True}, {"num_items_in_batch": torch.tensor(7)}),
        ("Cohere", {}, {"num_items_in_batch": 7}),
        ("Granite", {"logits_scaling": 4.0}, {}),
        ("Gemma 2", {"final_logit_softcapping": 0.5}, {}),
        ("GPT-J", {}, {}),
        ("BERT", {}, {}),
        ("BART", {"dropout": 0.0}, {}),
    ],
)
def test_a_step_computes_the_same_and_makes_no_logits(name: str, values: Any, options: Any) -> None:
    model = trainee(name, **values)
    expected = step(model, name, **options)
    applied = apply(model, fused_loss=True)
    assert Row("Linear", "linear_cross_entropy", 1, when="training") in applied.rows
    fusedops.reset_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusedops.FusedOpsWarning)
        same(step(model, name, **options), expected)
    assert losses() == {"linear_cross_entropy": 1}
    assert isinstance(model(**batch(name)).logits, DeferredLogits)
    again = apply(model)
    assert again.rows == applied.rows
    applied.remove()
    torch.testing.assert_close(step(model, name, **options), expected, rtol=0, atol=0)


def test_the_table_has_the_modes() -> None:
    applied = apply(trainee(), fused_loss=True)
    assert "linear_cross_entropy, training" in str(applied)
    assert Row("LlamaForCausalLM", "cross_entropy", 1, when="evaluation") in applied.rows
    assert apply(trainee(), ops=["linear_cross_entropy"]).ops == {"linear_cross_entropy": 1}


def test_a_model_without_a_head_has_a_note() -> None:
    model = trainee().model
    note = "linear_cross_entropy: the model has no output embedding"
    assert note in str(apply(model, fused_loss=True))
    assert note not in str(apply(model))


def test_evaluation_and_steps_without_gradients_have_logits() -> None:
    model = trainee()
    expected = model(**batch()).logits
    apply(model, fused_loss=True)
    with torch.no_grad():
        assert type(model(**batch()).logits) is Tensor
    out = model.eval()(**batch())
    assert type(out.logits) is Tensor
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=2e-5)


def test_a_use_of_the_logits_makes_them_and_names_the_fix() -> None:
    model = trainee()
    expected = model(**batch()).logits
    apply(model, fused_loss=True)
    out = model(**batch())
    assert out.logits.shape == expected.shape
    assert repr(out.logits).endswith("made on their first use)")
    with pytest.warns(fusedops.FusedOpsWarning, match=r"by argmax.*\(2, 9, 64\).*to fix: use the loss alone"):
        result = out.logits.argmax(-1)
    assert torch.equal(result, expected.argmax(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # made once
        torch.testing.assert_close(out.logits + 0, expected, rtol=1e-4, atol=2e-5)
        (out.logits * 1).sum().backward()
    assert model.lm_head.weight.grad is not None


USES: list[Any] = [
    lambda z: z[:, :-1],
    lambda z: z[..., 1:, :],
    lambda z: z[0],
    lambda z: z[..., :5],
    lambda z: z[:, -1, 3],
    lambda z: z[torch.ones(2, 9, dtype=torch.bool)],
    lambda z: z.view(-1, z.size(-1)),
    lambda z: z.reshape(18, -1),
    lambda z: z.reshape(-1),
    lambda z: z.flatten(0, 1),
    lambda z: z.flatten(1),
    lambda z: z.to(torch.bfloat16).float(),
    lambda z: z.to(device="cpu", dtype=torch.float64),
    lambda z: 3 * z / 2,
    lambda z: z * torch.tensor(2.0),
    lambda z: torch.tanh(z / 5).tanh() * 5,
    lambda z: z.transpose(1, 2),
    lambda z: z.long(),
    lambda z: z.clone().mul_(2),
    lambda z: torch.cat((z, z)),
]


def test_each_use_has_the_numbers_of_the_logits() -> None:
    model = trainee()
    expected = [use(model(**batch()).logits) for use in USES]
    apply(model, fused_loss=True, ops=["rms_norm"])
    for place, (use, right) in enumerate(zip(USES, expected)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusedops.FusedOpsWarning)
            result = use(model(**batch()).logits) + 0
        assert (result.dtype, result.shape) == (right.dtype, right.shape), place
        torch.testing.assert_close(result, right, rtol=2e-2, atol=2e-2, msg=lambda text, at=place: f"{at}: {text}")


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=5, reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"),
        lambda z, t: nn.CrossEntropyLoss()(4 * torch.tanh(z * 3), t),
        lambda z, t: nn.CrossEntropyLoss()(z.to(torch.bfloat16), t).float(),
    ],
)
def test_a_loss_outside_of_the_model_is_fused_too(loss: Any) -> None:
    model, target = trainee(), torch.arange(18) % 9
    inputs = FAMILIES["Llama"].inputs()
    expected = loss(model(**inputs).logits.flatten(0, 1), target)
    apply(model, fused_loss=True)
    fusedops.reset_stats()
    result = loss(model(**inputs).logits.flatten(0, 1), target)
    assert losses() == {"linear_cross_entropy": 1}
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.rand(VOCABULARY)),
        lambda z, t: nn.CrossEntropyLoss()(z, nn.functional.one_hot(t, VOCABULARY).float()),
        lambda z, t: nn.functional.nll_loss(z.log_softmax(-1), t),
        lambda z, t: nn.CrossEntropyLoss()(z.tanh().tanh(), t),
    ],
)
def test_another_loss_makes_the_logits(loss: Any) -> None:
    model, target = trainee(), torch.arange(18) % 9
    inputs = FAMILIES["Llama"].inputs()
    expected = loss(model(**inputs).logits.flatten(0, 1), target)
    apply(model, fused_loss=True)
    with pytest.warns(fusedops.FusedOpsWarning, match="got a use of the logits"):
        result = loss(model(**inputs).logits.flatten(0, 1), target)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_logits_of_changed_weights_are_an_error() -> None:
    model = trainee()
    apply(model, fused_loss=True)
    out = model(**batch())
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(fusedops.InvalidInputError, match="after a change of the head's weight"):
        out.logits.argmax(-1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints(reentrant: bool) -> None:
    model = trainee()
    expected = step(model, use_cache=False)
    apply(model, fused_loss=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    same(step(model, use_cache=False), expected)


def test_autocast_has_the_dtypes_of_the_model() -> None:
    model = trainee()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch())
        apply(model, fused_loss=True)
        out = model(**batch())
    assert (out.loss.dtype, out.logits.dtype) == (expected.loss.dtype, expected.logits.dtype)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-2, atol=1e-2)
    with pytest.warns(fusedops.FusedOpsWarning, match="got a use"):
        logits = out.logits + 0
    torch.testing.assert_close(logits, expected.logits, rtol=5e-2, atol=5e-2)


def test_copies_and_pickles_keep_it() -> None:
    model = trainee("BERT")  # a Llama cannot be pickled where kernels is installed
    apply(model, fused_loss=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(step(other, "BERT"), step(model, "BERT"))
        assert isinstance(other(**batch("BERT")).logits, DeferredLogits)


def test_outputs_keep_no_memory_alive() -> None:
    model = trainee()
    apply(model, fused_loss=True)
    out = model(**batch())
    hidden = weakref.ref(out.logits.source.x)
    del out
    gc.collect()
    assert hidden() is None


class LoraHead(nn.Module):
    """A head with an adapter, as PEFT wraps one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)
        self.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def test_an_adapter_on_the_head_is_refused_with_the_reason() -> None:
    model = trainee()
    model.lm_head = LoraHead(model.lm_head)
    expected = step(model)
    (row,) = [row for row in apply(model, fused_loss=True).rows if row.family == "linear_cross_entropy"]
    assert row.left == "the head has layers of its own, such as an adapter's; to fix: leave the head out of the adapter"
    same(step(model), expected)


HEADS: dict[str, Any] = {
    "of detached tokens": lambda x, weight: F.linear(x.detach(), weight),
    "with a frozen weight": lambda x, weight: F.linear(x, weight.detach()),
    "in float32": lambda x, weight: F.linear(x.float(), weight.float()),
    "limited": lambda x, weight: F.linear(x, weight).clamp(-1e4, 1e4),
    "with a factor for many tokens": lambda x, weight: F.linear(x, weight) * (2 if x.shape[1] > 4 else 1),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_with_a_forward_of_its_own_is_left(name: str) -> None:
    kind = type("OwnHead", (nn.Linear,), {"forward": lambda self, x: HEADS[name](x, self.weight)})
    model = trainee()
    model.lm_head.__class__ = kind
    expected = step(model)
    (row,) = [row for row in apply(model, fused_loss=True).rows if row.family == "linear_cross_entropy"]
    assert row.left == "its class has a forward of its own"
    same(step(model), expected)


def test_an_adapter_put_on_a_fused_head_makes_the_logits() -> None:
    model = trainee()
    apply(model, fused_loss=True)
    model.lm_head = LoraHead(model.lm_head)
    with pytest.warns(fusedops.FusedOpsWarning, match="got a use of the logits"):
        _, gradients = step(model)
    assert "lm_head.up.weight" in gradients


@pytest.mark.slow
def test_torch_compile_is_refused_by_name() -> None:
    model = trainee()
    expected = step(model)
    apply(model, fused_loss=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(fusedops.FusedOpsWarning, match="got a head that torch.compile traces"):
        loss = compiled(**batch()).loss
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
