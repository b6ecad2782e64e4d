"""What an MLP keeps for backward after apply: gate and up, from which the input of its last layer is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import fusedops
from fusedops.integrations.transformers import apply

CONFIG: Any = transformers.LlamaConfig(hidden_size=32, intermediate_size=512)


class Seen(nn.Module):
    """The last layer, and the memory of its input."""

    memory: StorageWeakRef

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        self.memory = StorageWeakRef(h.untyped_storage())
        return self.layer(h)

    @property
    def keeps(self) -> bool:
        """True while the memory of the input is there."""
        return not self.memory.expired()


def mlp(kind: Any = LlamaMLP) -> Any:
    """Return an MLP after apply."""
    torch.manual_seed(0)
    module = kind(CONFIG)
    assert len(apply(nn.Sequential(module)).ops) == 1
    module.down_proj = Seen(module.down_proj)
    return module


def rows(count: int = 512) -> Tensor:
    """Return an input, of which the activation takes 1 MiB."""
    return torch.randn(1, count, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(call(x).sin().sum(), [x, *module.parameters()]))


def by_halves(module: Any, x: Tensor) -> Tensor:
    """Compute the MLP with the activation kept, as a small one is."""
    return torch.cat([module(half) for half in x.chunk(2, dim=1)], 1)


@pytest.mark.parametrize("kind", [LlamaMLP, GemmaMLP, Phi3MLP])
def test_the_input_of_the_last_layer_is_not_kept(kind: Any) -> None:
    module, x = mlp(kind), rows()
    y = module(x)
    assert not module.down_proj.keeps
    torch.testing.assert_close(gradients(module, module, x), gradients(lambda x: by_halves(module, x), module, x))
    y = by_halves(module, x)
    assert module.down_proj.keeps
    del y


def test_another_tensor_of_its_size_is_kept() -> None:
    module, x = mlp(), rows()
    module.down_proj.layer = nn.Sequential(nn.Tanh(), module.down_proj.layer)
    torch.testing.assert_close(gradients(module, module, x), gradients(lambda x: by_halves(module, x), module, x))


def test_the_bits_are_those_of_a_kept_one() -> None:
    module, x = mlp(), rows()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # of others, which take it as it is
        y = module(x)
        assert module.down_proj.keeps
        expected = torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])
    assert all(map(torch.equal, gradients(module, module, x), expected))


def test_it_is_computed_once_more_in_backward_and_in_each_backward_of_a_kept_graph() -> None:
    module, x = mlp(), rows()
    fusedops.reset_stats()
    y = module(x).sum()
    for _ in range(2):
        y.backward(retain_graph=True)
    counts = {(each.op, each.direction): each.calls for each in fusedops.stats().counts}
    assert counts == {("swiglu", "forward"): 3, ("swiglu", "backward"): 2}
    assert x.grad is not None
    torch.testing.assert_close(x.grad / 2, torch.autograd.grad(by_halves(module, x).sum(), x)[0])


def test_backward_computes_it_by_the_policy_of_forward() -> None:
    module, x = mlp(), rows()
    fusedops.reset_stats()
    with fusedops.use("eager"):
        y = module(x).sum()
    y.backward()
    assert {each.backend for each in fusedops.stats().counts} == {"eager"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(rows(1024))
    assert not module.down_proj.keeps
    assert y.dtype == torch.bfloat16


def test_it_is_kept_where_that_saves_nothing() -> None:
    module, x = mlp(), rows()
    with torch.no_grad():
        module(x)
    y = cast("Any", checkpoint)(module, x, use_reentrant=False)  # keeps x alone
    assert not module.down_proj.keeps
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(by_halves(module, x).sum(), x))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        y = module(x)
        assert module.down_proj.keeps
    del y


def test_a_change_in_place_is_an_error_as_with_a_kept_one() -> None:
    module, x = mlp(), rows()
    ups: list[Tensor] = []
    project = module.up_proj.forward
    module.up_proj.forward = lambda x: ups.append(project(x)) or ups[0]  # pyright: ignore[reportUnknownLambdaType]
    y = module(x).sum()
    ups[0].detach().zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        y.backward()


def test_a_change_of_the_last_layers_weight_is_an_error_too() -> None:
    module, x = mlp(), rows()
    y = module(x).sum()
    torch.nn.init.zeros_(module.down_proj.layer.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_an_input_to_which_a_hook_writes_is_kept() -> None:
    module, x = mlp(), rows()
    module.down_proj.layer.register_forward_pre_hook(lambda _, h: h[0].mul_(2))
    torch.testing.assert_close(gradients(module, module, x), gradients(lambda x: by_halves(module, x), module, x))


def test_frozen_layers_and_adapters() -> None:
    module, x = mlp(), rows()
    for layer in (module.gate_proj, module.up_proj, module.down_proj):
        layer.requires_grad_(False)
    y = module(x.detach())
    assert not y.requires_grad
    module.down_proj.layer = Adapted(module.down_proj.layer)
    y = module(x.detach())  # gate and up have no gradient: nothing keeps them
    assert module.down_proj.keeps
    y = module(x)
    assert not module.down_proj.keeps
    wanted = [x, *module.down_proj.layer.down.parameters()]
    found = torch.autograd.grad(y.sum(), wanted)
    torch.testing.assert_close(found, torch.autograd.grad(by_halves(module, x).sum(), wanted))


class Adapted(nn.Module):
    """A layer with an adapter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(512, 2), nn.Linear(2, 32)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h) + self.up(self.down(h))


def test_a_second_derivative_and_a_transform() -> None:
    module, x = mlp(), rows()
    module.down_proj = module.down_proj.layer  # a transform's tensor has no storage to look at
    (first,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    (expected,) = torch.autograd.grad(by_halves(module, x).sin().sum(), x, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), x)[0])

    def loss(x: Tensor) -> Tensor:
        return module(x).sin().sum()

    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), first.detach())


def test_compiled() -> None:
    module, x = mlp(), rows()
    module.down_proj = module.down_proj.layer
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, module, x), gradients(module, module, x))
