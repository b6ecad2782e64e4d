"""Uses of the logits of a training step, by their kind: with fused_loss=True they are those of the plain model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations._replacement import replace
from fusedops.integrations.transformers._loss.head import Head
from tests.integrations.test_fused_loss_programs import IDS, Tripled, V, models


def loss_of(logits: Tensor) -> Tensor:
    return cross_entropy(logits.reshape(-1, V), IDS.reshape(-1))


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def with_other_weights(model: Any) -> list[Tensor]:
    other = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    loss = loss_of(torch.func.functional_call(model, other, (IDS,)).logits)
    return [loss, *torch.autograd.grad(loss, list(other.values()))]


def with_weights_that_leave(model: Any) -> list[Tensor]:
    """As accelerate's hooks do, which offload the weights of a layer after its forward."""
    weight = model.lm_head.weight

    def leave(module: Any, *_: Any) -> None:
        module.weight = nn.Parameter(module.weight.detach().to("meta"))

    model.lm_head.register_forward_hook(leave)
    loss = loss_of(model(IDS).logits)
    model.lm_head.weight = weight
    return gradients(model, loss)


def with_a_change_after_a_view(model: Any, change: Callable[[Tensor], Any]) -> list[Tensor]:
    logits = model(IDS).logits
    rows, part, copied = logits.view(-1, V), logits[:, :-1], logits * 2
    change(logits)
    return gradients(
        model, loss_of(rows) + loss_of(copied) + cross_entropy(part.reshape(-1, V), IDS[:, 1:].reshape(-1))
    )


def with_the_gradient_of_the_logits(model: Any) -> list[Tensor]:
    out = model(IDS, labels=IDS)
    out.logits.register_hook(lambda grad: grad * 3)
    out.logits.retain_grad()
    return [
        *gradients(model, out.loss),
        *torch.autograd.grad(model(IDS, labels=IDS).loss + 0 * out.logits.sum(), out.logits),
    ]


def with_a_gradient_asked_for_later(model: Any) -> list[Tensor]:
    out = model(IDS, labels=IDS)
    first = torch.autograd.grad(out.loss, [out.logits, model.lm_head.weight], create_graph=True)
    return [*first, *gradients(model, first[0].square().sum())]


def with_a_penalty(model: Any) -> list[Tensor]:
    out = model(IDS, labels=IDS)
    return gradients(model, out.loss + out.logits.logsumexp(-1).square().mean())


def with_a_leaf(model: Any) -> list[Tensor]:
    leaf = model(IDS).logits.detach().requires_grad_()
    return list(torch.autograd.grad(loss_of(leaf), leaf))


def with_a_function(model: Any) -> list[Tensor]:
    return gradients(model, loss_of(Tripled.apply(model(IDS).logits)))


def with_views_without_gradients(model: Any) -> list[Tensor]:
    logits = model(IDS).logits
    with torch.no_grad():
        rows = logits.view(-1, V)
    return [loss_of(rows), loss_of(logits)]


def with_a_hook_on_the_head(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    model.lm_head.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0].clone()))
    return gradients(model, loss_of(model(IDS).logits)) + seen


USES: dict[str, Callable[[Any], list[Tensor]]] = {
    "other weights": with_other_weights,
    "weights that leave": with_weights_that_leave,
    "a mask after a view": lambda m: with_a_change_after_a_view(m, lambda z: z[..., 9:].fill_(-4)),
    "a temperature after a view": lambda m: with_a_change_after_a_view(m, lambda z: z.div_(0.25)),
    "data after a view": lambda m: with_a_change_after_a_view(m, lambda z: z.data.mul_(2)),
    "gradients": with_the_gradient_of_the_logits,
    "gradients asked for later": with_a_gradient_asked_for_later,
    "a penalty": with_a_penalty,
    "a leaf": with_a_leaf,
    "a function": with_a_function,
    "views without gradients": with_views_without_gradients,
    "a hook on the head": with_a_hook_on_the_head,
    "logits": lambda m: [m(IDS).logits],
    "a view": lambda m: [m(IDS).logits[:, 1:-1]],
    "reshape": lambda m: [torch.reshape(m(IDS).logits, shape=(-1, V)), m(IDS).logits.reshape(shape=(-1, V))],
    "view": lambda m: [m(IDS).logits.view(size=(-1, V))],
    "div": lambda m: [torch.div(m(IDS).logits, 0.5, rounding_mode="trunc")],
    "add": lambda m: [torch.add(m(IDS).logits, torch.ones(V), alpha=2)],
    "contiguous": lambda m: [m(IDS).logits.contiguous(memory_format=torch.contiguous_format)],
    "float": lambda m: [m(IDS).logits.float(memory_format=torch.preserve_format)],
    "copies": lambda m: [copy.copy(m(IDS).logits), pickle.loads(pickle.dumps(m(IDS).logits))],
    "memory": lambda m: [torch.tensor(m(IDS).logits.tolist()), torch.from_dlpack(m(IDS).logits.detach())],
    "a loss of no class": lambda m: [cross_entropy(m(IDS).logits[0], torch.full((5,), -100))],
    "autocast": lambda m: [autocast_loss(m, inside=True), autocast_loss(m, inside=False)],
}


def autocast_loss(model: Any, inside: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS).logits
        if inside:
            return loss_of(logits)
    return loss_of(logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES)
def test_a_use_is_the_plain_one(use: str) -> None:
    expected, result = (USES[use](copy.deepcopy(model)) for model in models())
    tolerance = 2e-2 if use == "autocast" else 1e-4
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance / 10, equal_nan=True)
    assert [layout(each) for each in result] == [layout(each) for each in expected]


def layout(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.stride(), tensor.storage_offset(), tensor.requires_grad, tensor.is_leaf


def head(bias: bool = False) -> Any:
    layer = nn.Linear(4, V, bias=bias)
    replace(layer, Head())
    return layer


@pytest.mark.parametrize("how", ["weight", "bias", "input", "memory", "added"])
def test_a_loss_after_a_change_of_what_the_logits_are_made_from_is_an_error(how: str) -> None:
    layer, x, added = head(bias=True), torch.randn(3, 4), torch.ones(V)
    logits = layer(x) + added
    with torch.no_grad():
        if how == "memory":
            layer.weight.data = torch.zeros(V, 4)
        else:
            {"weight": layer.weight, "bias": layer.bias, "input": x, "added": added}[how].zero_()
    with pytest.raises(InvalidInputError, match="after a change of the head's weight or input"):
        cross_entropy(logits, torch.arange(3))


def test_a_head_with_tensors_of_two_dtypes_is_torchs() -> None:
    layer = head()
    with pytest.raises(RuntimeError, match="same dtype"), pytest.warns(FusedOpsWarning, match="float32, torch.float64"):
        layer(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shapes"):
        layer(torch.ones(2, 5))


def test_a_scale_does_not_leave_the_range_of_the_input() -> None:
    layer = head().half()
    x = torch.full((2, 4), 100.0, dtype=torch.float16)
    torch.nn.init.constant_(layer.weight, 1e-3)
    loss = cross_entropy(layer(x) * 1000, torch.arange(2), reduction="none")
    torch.testing.assert_close(loss, torch.full((2,), 12.0).log().half())


def test_a_loss_frees_what_it_keeps_after_backward() -> None:
    layer, x = head(), torch.randn(3, 4)
    logits = layer(x)
    loss = cross_entropy(logits, torch.arange(3))
    kept = weakref.ref(logits)
    del logits
    loss.backward()
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("change", [lambda z: z.t_(), lambda z: setattr(z, "data", z + 1)])
@pytest.mark.filterwarnings("ignore::fusedops.FusedOpsWarning")
def test_logits_of_another_shape_or_memory_in_place_are_an_error(change: Any) -> None:
    with pytest.raises(InvalidInputError, match="replaces their shape or memory"):
        change(head()(torch.randn(3, 4)))
