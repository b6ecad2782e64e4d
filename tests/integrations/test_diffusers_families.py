"""Models of many families of diffusers with fusedops: results, gradients, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusion_families import FAMILIES, Family
from torch import Tensor

from fusedops.integrations.diffusers import apply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def floating(value: Any) -> Iterator[Tensor]:
    """The floating tensors of an output; of a distribution, its mean."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from floating(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from floating(each)


def results(model: Any, family: Family) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of a model, and the gradients of its parameters."""
    model.zero_grad()
    torch.manual_seed(1)  # an autoencoder draws
    outputs = list(floating(model(**family.inputs())))
    sums = [
        (each * torch.randn(each.shape, generator=torch.Generator().manual_seed(at))).sum()
        for at, each in enumerate(outputs)
    ]
    torch.stack(sums).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [each.detach().clone() for each in outputs], gradients


def state(model: Any) -> list[Any]:
    """What remove() has to bring back: the class and the attributes of each module and of its processor."""
    found: list[Any] = []
    for module in model.modules():
        processor = vars(module).get("processor")
        found.append(
            (type(module), sorted(vars(module)), type(processor), sorted(vars(processor) if processor else ()))
        )
    return found


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_computes_the_same(family: Family) -> None:
    model = family.build()
    outputs, gradients = results(model, family)
    before, names = state(model), list(model.state_dict())  # an autoencoder of videos sets attributes in its forward
    assert outputs

    applied = apply(model)
    assert applied.ops
    applied_outputs, applied_gradients = results(model, family)
    # measured: at most 6e-7 of the largest value, and 5e-5 of the largest gradient of a parameter
    for plain, fused in zip(outputs, applied_outputs, strict=True):
        assert (plain - fused).abs().max() <= 5e-6 * plain.abs().max()
    assert applied_gradients.keys() == gradients.keys()
    largest = max(float(each.abs().max()) for each in gradients.values())
    for name, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-2 * largest)  # that of the bias of a key is 0 but for rounding
        assert (applied_gradients[name] - gradient).abs().max() <= 2e-4 * scale, name
    assert list(model.state_dict()) == names

    applied.remove()
    assert state(model) == before
    again, gradients_again = results(model, family)
    assert all(map(torch.equal, again, outputs))
    assert all(torch.equal(gradients_again[name], gradient) for name, gradient in gradients.items())
