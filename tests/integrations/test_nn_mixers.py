"""The layers with a state: transformers' results with its weights, packed sequences, training, float64 autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops import nn

X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))


def deltanet(**options: Any) -> nn.GatedDeltaNet:
    return nn.GatedDeltaNet(32, heads=4, key_heads=2, key_size=8, value_size=6, **options)


def mamba2(**options: Any) -> nn.Mamba2:
    return nn.Mamba2(32, heads=4, head_size=16, state_size=8, groups=2, **options)


LAYERS = [deltanet, mamba2]


def of_transformers(layer: Any) -> Any:
    """transformers' layer of the same sizes."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if layer is deltanet:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_num_key_heads": 2}
        heads = {"linear_num_value_heads": 4, "layer_types": ["linear_attention"]}
        config = transformers.Qwen3_5TextConfig(hidden_size=32, num_hidden_layers=1, **sizes, **heads)
        return Qwen3_5GatedDeltaNet(config, 0)
    from transformers.models.bamba.modeling_bamba import BambaMixer

    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
    return BambaMixer(transformers.BambaConfig(hidden_size=32, num_hidden_layers=1, rms_norm_eps=1e-5, **sizes), 0)


@pytest.mark.parametrize("make", LAYERS)
def test_the_weights_of_transformers_give_its_results(make: Any) -> None:
    own, layer = of_transformers(make), make()
    layer.load_state_dict(own.state_dict())
    torch.testing.assert_close(layer(X), own(X), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", LAYERS)
def test_packed_sequences_and_their_states(make: Any) -> None:
    layer, row = make(), X[:1]
    parts = [layer(part, return_state=True) for part in row.split([4, 1, 2], 1)]
    bounds = torch.tensor([0, 4, 5, 7], dtype=torch.int32)
    y, state = layer(row, return_state=True, cu_seqlens=bounds)
    torch.testing.assert_close(y, torch.cat([each for each, _ in parts], 1), rtol=1e-4, atol=1e-6)
    for own, each in zip(state, zip(*(states for _, states in parts))):
        torch.testing.assert_close(own, torch.cat(each), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", LAYERS)
def test_gradients_reach_each_parameter_and_the_state(make: Any) -> None:
    layer = make(dtype=torch.float64)
    x = X[:, :3].double().requires_grad_()
    _, before = layer(X[:, :2].double(), return_state=True)
    states = [each.detach().double().requires_grad_() for each in before]

    def run(x: Tensor, *states: Tensor) -> Tensor:
        return layer(x, nn.MixerState(*states))

    assert torch.autograd.gradcheck(run, (x, *states), fast_mode=True)
    run(x, *states).sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in layer.parameters())


def test_a_new_layer_has_decays_of_its_paper() -> None:
    layer = mamba2()
    steps = torch.nn.functional.softplus(layer.dt_bias)
    assert 0.99e-3 < steps.min() < steps.max() < 0.101
    assert 1 <= layer.A_log.exp().min() < layer.A_log.exp().max() <= 16
    assert "groups=2" in repr(layer)
    assert "key_heads=2" in repr(deltanet(backend="eager"))
