"""Megatron's own modules on a CPU, in one process: configs, blocks of layers, models, and what they compute."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import megatron_peer
import pytest
import torch
from torch import Tensor

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
S, B = 12, 3
OWN_WARNINGS = [  # of Megatron's code, about itself
    pytest.mark.filterwarnings(f"ignore:.*{text}:DeprecationWarning")
    for text in ("should not be instantiated", "tp_group is None", "MLP requires ffn_hidden_size")
]


class NoTracker:
    """The tracker of random states, which Megatron has for CUDA alone."""

    def fork(self, name: str = "") -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Be the one rank of a job, with Megatron's groups of processes: to end them takes a tenth of a second.

    Skips the test where megatron-core is not installed.
    """
    megatron_peer.modules()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.gpt import gpt_layer_specs as gpt_layer_specs  # warns of packages that are missing
    if not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo, for the groups of Megatron")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(1, 1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Run the code of Megatron's layers on a CPU, within a job."""
    from megatron.core import tensor_parallel

    with pytest.MonkeyPatch.context() as patch, megatron_peer.on_cpu():
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", NoTracker)
        yield


def config(**settings: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of defaults of its own
        return TransformerConfig(**{**SIZES, **PLAIN, **settings})


def local_spec(config: Any) -> Any:
    """Return Megatron's local spec for a config."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    names = {"normalization": config.normalization, "qk_layernorm": config.qk_layernorm}
    return get_gpt_layer_local_spec(**names, qk_l2_norm=config.qk_l2_norm)


def block(config: Any, spec: Any, seed: int = 0) -> Any:
    """Return the layers of a spec with random parameters, the same for all specs with the same names."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    return randomized(TransformerBlock(config, spec), seed)


def randomized(module: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1) * 0.5)
    return module


def hidden(s: int = S, b: int = B, seed: int = 1) -> Tensor:
    return torch.randn(s, b, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


def computed(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Return the output of a module, and the gradients of its input and of its parameters, by name."""
    x = x.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    out = module(x, *args, **kwargs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    out.backward(grad)
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert None not in gradients.values()
    return {"output": out.detach(), "input": x.grad, **gradients}


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Assert that all results are the same, within a part of the largest number of each."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        limit = tolerance * float(expected.abs().max())
        torch.testing.assert_close(
            got[name], expected, rtol=tolerance, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )
