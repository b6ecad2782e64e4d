"""Models on the stand-in for Ascend: one mask for all layers is looked at once; compile, AMP, checkpoint, the GPT."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import ascend
from repository import ROOT
from standin import npu_device
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import tensor_cache, testing

LAYERS = 24
OP = testing.OPS["scaled_masked_softmax"]
Layer = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def torch_npu() -> Iterator[ModuleType]:
    with ascend() as module, fusedops.use("npu", fallback="raise"):
        yield module


def layer(x: Tensor, mask: Tensor) -> Tensor:
    return fusedops.scaled_masked_softmax(x, mask, 0.125)


def run(one: Layer, x: Tensor, mask: Tensor, view: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """24 layers, one after the other, and back."""
    leaf = y = x.detach().requires_grad_()
    for _ in range(LAYERS):
        y = one(y, view(mask))
    return y.detach(), torch.autograd.grad(y, leaf, x)[0]


def vendors(torch_npu: ModuleType) -> dict[str, int]:
    names = [call.name.removeprefix("npu_scaled_masked_softmax") for call in torch_npu.calls]
    return {"forward": names.count(""), "backward": names.count("_backward")}


MASKS = {"[b, 1, sq, sk]": (2, 1, 32, 64), "[b, 1, 1, sk]": (2, 1, 1, 64), "[sq, sk]": (32, 64)}


@pytest.mark.parametrize("dead", [False, True], ids=["", "a fully masked row"])
@pytest.mark.parametrize("view", [lambda mask: mask, lambda mask: mask[:]], ids=["the mask", "a view of it"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
@tensor_cache.reuse()
def test_one_mask_for_24_layers_is_looked_at_once(
    torch_npu: ModuleType, shape: tuple[int, ...], view: Callable[[Tensor], Tensor], dead: bool
) -> None:
    x, mask = torch.randn(2, 3, 32, 64), torch.rand(shape) < 0.3
    mask[..., 0] = False
    if dead:
        mask[..., -1, :] = True
    on_device, device_mask = x.to("npu"), mask.to("npu")
    run(layer, on_device, torch.zeros_like(device_mask), view)  # what is made once a size is there, as in a second step
    torch_npu.calls.clear()
    npu_device.reset()
    y = on_device
    with torch.no_grad():
        for _ in range(LAYERS):
            y = layer(y, view(device_mask))
    counted = npu_device.kernels()
    looks = {"all": 1, "any": 1, "_local_scalar_dense": 1}  # where rows are fully masked; is there one; the host asks
    copies = {"copy": 1} if shape == MASKS["[b, 1, 1, sk]"] else {}
    filled = {"masked_fill": LAYERS if dead else 1}
    assert dict(counted) == {"npu_scaled_masked_softmax": LAYERS, **looks, **copies, **filled}
    assert npu_device.synchronisations() == 1

    npu_device.reset()
    got = run(layer, on_device, device_mask, view)
    assert vendors(torch_npu) == {"forward": 2 * LAYERS, "backward": LAYERS}
    assert npu_device.synchronisations() == 0
    counted = npu_device.kernels()
    both = {"npu_scaled_masked_softmax": LAYERS, "npu_scaled_masked_softmax_backward": LAYERS}
    assert dict(counted) == both | ({"masked_fill": LAYERS} if dead else {})

    with fusedops.use("eager"):
        want = run(layer, x, mask, lambda mask: mask)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine.cpu(), theirs, atol=1e-6, rtol=1e-5)


def test_a_mask_of_one_call_is_not_waited_for(torch_npu: ModuleType) -> None:
    x = torch.randn(2, 3, 32, 64).to("npu")
    masks = [(torch.rand(2, 1, 1, 64) < 0.3).to("npu") for _ in range(4)]
    masks[2].fill_(True)
    npu_device.reset()
    results = [layer(x, mask) for mask in masks]
    with torch.inference_mode():  # a mask made in it has no version: a change of it could not be noticed
        own = (torch.rand(2, 1, 1, 64) < 0.3).to("npu")
        waits = npu_device.synchronisations()
        for value in (own.clone(), torch.ones_like(own)):
            own.copy_(value)
            results.append(layer(x, own))
            masks.append(value)
        assert npu_device.synchronisations() == waits
    assert npu_device.calls["_local_scalar_dense"] == 0
    for y, mask in zip(results, masks):
        want = OP.reference(x.cpu().double(), mask.cpu(), 0.125, False)
        testing.assert_within(y, want, OP.evidence.tolerance[torch.float32], "y")


def ways(x: Tensor, mask: Tensor) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Ways to run the layers; each looks at the mask once."""
    compiled = torch.compile(
        lambda x, mask: run_forward(x, mask), fullgraph=True, backend="aot_eager", dynamic=False
    )  # a lambda: dynamo's caches are by code

    def run_forward(x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = fusedops.scaled_masked_softmax(x, mask, 0.125)
        return x

    def whole(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = function(leaf, mask)
        return y.detach(), torch.autograd.grad(y, leaf, x)[0]

    def one_registered(x: Tensor, mask: Tensor) -> Tensor:
        return torch.ops.fusedops.scaled_masked_softmax(x, mask, 0.125)

    def one_checkpointed(x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(layer, x, mask, use_reentrant=False, context_fn=fusedops.checkpoint_contexts)

    return {
        "compiled": lambda: whole(compiled),
        "registered": lambda: run(one_registered, x, mask, lambda mask: mask),
        "checkpointed": lambda: run(one_checkpointed, x, mask, lambda mask: mask),
    }


@pytest.mark.parametrize("way", ["compiled", "registered", "checkpointed"])
@tensor_cache.reuse()
def test_once_in_compiled_and_checkpointed_models_too(torch_npu: ModuleType, way: str) -> None:
    torch._dynamo.reset()
    x, mask = torch.randn(2, 3, 32, 64).to("npu"), (torch.rand(2, 1, 1, 64) < 0.3).to("npu")
    function = ways(x, mask)[way]
    with fusedops.use("npu", fallback="raise"):
        function()  # traces, compiles
        changed = mask.logical_not_()  # and a change in place is seen there too
        torch_npu.calls.clear()
        npu_device.reset()
        got = function()
    # a checkpoint recomputes on autograd's own thread, where no block is in effect: each layer prepares the mask again
    again = LAYERS if way == "checkpointed" else 0
    assert npu_device.calls["_local_scalar_dense"] == 1
    assert npu_device.calls["all"] == 1 + again
    again = 2 if way == "checkpointed" else 1
    assert vendors(torch_npu) == {"forward": again * LAYERS, "backward": LAYERS}
    with fusedops.use("eager"):
        want = run(layer, x.cpu(), changed.cpu(), lambda mask: mask)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine.cpu(), theirs, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- the demo's GPT


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import gpt

    torch.manual_seed(1)
    return gpt.GPT(31, gpt.FUSED_SOFTMAX, layers=2, width=32, heads=1, dropout=0.2)


def train(model: Any, device: str, forward: Callable[..., Tensor]) -> list[float]:
    """Four steps on one batch, dropout on, by seed."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
    text = torch.randint(31, (4, 33), generator=torch.Generator().manual_seed(3)).to(device)
    for _ in range(4):
        loss = F.cross_entropy(forward(model, text[:, :-1], 7).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _compiled(model: Any, text: Tensor, seed: int) -> Tensor:
    return torch.compile(model, backend="aot_eager", dynamic=False)(text, seed)


def _amp(model: Any, text: Tensor, seed: int) -> Tensor:
    with torch.autocast("npu", torch.bfloat16):
        return model(text, seed)


def _checkpointed(model: Any, text: Tensor, seed: int) -> Tensor:
    return checkpoint(model, text, seed, use_reentrant=False, context_fn=fusedops.checkpoint_contexts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "forwards"),
    [(lambda model, text, seed: model(text, seed), 8), (_compiled, 8), (_amp, 8), (_checkpointed, 16)],
    ids=["plain", "compiled", "autocast", "checkpointed"],
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
def test_the_demos_gpt_trains_as_on_a_cpu(gpt: Any, way: Callable[..., Tensor], forwards: int) -> None:
    torch._dynamo.reset()
    want = train(copy.deepcopy(gpt), "cpu", lambda model, text, seed: model(text, seed))
    with ascend() as torch_npu:
        got = train(copy.deepcopy(gpt).to("npu"), "npu", way)
    assert got == pytest.approx(want, rel=1e-4)
    assert want[-1] < want[0]
    names = [call.name for call in torch_npu.calls]
    assert {name: names.count(name) for name in sorted(set(names))} == {
        "npu_gelu": forwards,
        "npu_gelu_backward": 8,
        "npu_rotary_mul": 2 * (forwards + 8),  # of q and of k
        "npu_scaled_masked_softmax": forwards,
        "npu_scaled_masked_softmax_backward": 8,
    }


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_without_a_block_a_change_that_torch_misses_is_in_effect(torch_npu: ModuleType, write: str) -> None:
    x = torch.randn(2, 3, 32, 64).to("npu")
    mask = torch.zeros(2, 1, 1, 64, dtype=torch.bool).to("npu")
    layer(x, mask)
    if write == "data":
        mask.data[..., 16:] = True  # no version is counted
    else:
        mask.set_(torch.ones(2, 1, 1, 64, dtype=torch.bool).to("npu"))
    y = layer(x, mask).cpu()
    assert (y[mask.cpu().expand_as(y)] == 0).all()
