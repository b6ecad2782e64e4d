"""Megatron's tensor parallel with fusedops on several processes, beside Megatron's own code. Run by each rank."""

from __future__ import annotations

import contextlib
import json
import pathlib
import traceback
from collections.abc import Callable, Iterator

import megatron_layers as layers
import megatron_peer
import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional

CLASSES, RANKS = 12, 2
LLAMA = {"normalization": "RMSNorm", "activation_func": functional.silu, "gated_linear_unit": True}
LLAMA |= {"add_bias_linear": False, "bias_activation_fusion": True, "num_query_groups": 2}


def own_part(whole: Tensor) -> Tensor:
    """Return this rank's part of the last dim."""
    return whole.chunk(RANKS, -1)[distributed.get_rank()].clone()


def with_gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    values = loss(logits * 1.0)  # Megatron writes into the logits
    values.backward(torch.linspace(-1, 2, values.numel()).view(values.shape))
    assert logits.grad is not None
    return values.detach(), logits.grad


def losses_equal_megatrons_own(smoothing: float, fused: bool) -> None:
    """Compare with Megatron's; with label smoothing, which it computes of each part, with torch's of the whole."""
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel import cross_entropy

    from fusedops.integrations.megatron import patch

    group = parallel_state.get_tensor_model_parallel_group()
    whole = torch.randn(5, 3, CLASSES, generator=torch.Generator().manual_seed(0))
    target = torch.arange(15).view(5, 3) % CLASSES

    def call(logits: Tensor) -> Tensor:
        if fused:
            return fused_cross_entropy.fused_vocab_parallel_cross_entropy(logits, target, group)
        return cross_entropy.vocab_parallel_cross_entropy(logits, target, smoothing)

    if smoothing:
        share = smoothing * CLASSES / (CLASSES - 1)
        options = {"label_smoothing": share, "reduction": "none"}
        value, grad = with_gradient(
            lambda x: functional.cross_entropy(x.flatten(0, 1), target.flatten(), **options).view(5, 3), whole
        )
        want = value, own_part(grad)
    else:
        want = with_gradient(call, own_part(whole))
    patched = patch()
    got = with_gradient(call, own_part(whole))
    patched.remove()
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    tolerance = 1e-2 if fused else 1e-5  # Megatron rounds the fused gradient to bfloat16
    torch.testing.assert_close(got[1], want[1], rtol=tolerance, atol=tolerance / 2)


def targets_that_are_no_class() -> None:
    from megatron.core.tensor_parallel import cross_entropy

    from fusedops.integrations.megatron import patch

    patched = patch()
    target = torch.tensor([0, -100, CLASSES, CLASSES - 1])
    logits = torch.zeros(4, CLASSES // RANKS)
    loss, grad = with_gradient(lambda x: cross_entropy.vocab_parallel_cross_entropy(x, target), logits)
    patched.remove()
    expected = float(torch.tensor(CLASSES).log())
    torch.testing.assert_close(loss, torch.tensor([expected, 0.0, 0.0, expected]))
    assert not grad[1:3].any()


def layers_equal_megatrons_own(sequence_parallel: bool) -> None:
    from fusedops.integrations.megatron import get_gpt_layer_spec

    settings = {**LLAMA, "tensor_model_parallel_size": RANKS}
    chosen = layers.config(**settings)
    want = layers.computed(layers.block(chosen, layers.local_spec(chosen)), layers.hidden(), None)
    if sequence_parallel:
        chosen = layers.config(**settings, sequence_parallel=True)
        whole = layers.hidden()
        # the norm after the last layer is Megatron's own, which refuses sequence parallel: the block brings ours
        from fusedops.integrations.megatron import get_gpt_block_spec

        module = layers.block(chosen, get_gpt_block_spec(chosen))
        part = whole.chunk(RANKS)[distributed.get_rank()]
        assert all(p.sequence_parallel for name, p in module.named_parameters() if "norm" in name)
        out = module(part, None)
        torch.testing.assert_close(out, want["output"].chunk(RANKS)[distributed.get_rank()], rtol=2e-5, atol=2e-5)
        return
    got = layers.computed(layers.block(chosen, get_gpt_layer_spec(normalization="RMSNorm")), layers.hidden(), None)
    layers.assert_near(got, want)


CHECKS: dict[str, Callable[[], None]] = {
    "loss": lambda: losses_equal_megatrons_own(0.0, False),
    "smoothed loss": lambda: losses_equal_megatrons_own(0.1, False),
    "fused loss": lambda: losses_equal_megatrons_own(0.0, True),
    "targets that are no class": targets_that_are_no_class,
    "tensor parallel layers": lambda: layers_equal_megatrons_own(False),
    "sequence parallel layers": lambda: layers_equal_megatrons_own(True),
}


@contextlib.contextmanager
def _megatron() -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(RANKS)
    with pytest.MonkeyPatch.context() as patch, megatron_peer.on_cpu():
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", layers.NoTracker)
        yield
    parallel_state.destroy_model_parallel()


def run(rank: int, world: int, folder: pathlib.Path) -> None:
    megatron_peer.modules()
    results: dict[str, str] = {}
    with _megatron():
        for name, check in CHECKS.items():
            try:
                check()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(results))
