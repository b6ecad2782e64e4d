"""CUDA graphs: a capture, its replays, and a capture whose kernel is not loaded."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import CUDA, DEVICE, HERE, softmax_of

import fusedops

if not HERE:
    pytest.skip("needs a GPU: `make gpu` runs these", allow_module_level=True)
pytestmark = pytest.mark.skipif(not CUDA, reason="needs CUDA")


def test_a_first_launch_in_a_capture_is_refused_and_warm_up_helps() -> None:
    x = torch.randn(3, 5, 77, dtype=torch.float16, device=DEVICE)  # a kernel that no other test launches
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(fusedops.FusedOpsError, match="warm_up"):
        softmax_of(x, causal=True)
    fusedops.warm_up("scaled_masked_softmax", x, scale=0.125, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax_of(x, causal=True)
    graph.replay()
    assert torch.equal(y, softmax_of(x, causal=True))


def test_cuda_graphs() -> None:
    """Captured once, replayed with other numbers: forward, backward, and fresh dropout masks for each replay."""
    x = torch.randn(2, 4, 64, 256, device=DEVICE, requires_grad=True)
    mask = torch.rand(2, 1, 64, 256, device=DEVICE) < 0.3
    h = torch.randn(512, 256, device=DEVICE)
    bias = torch.randn(256, device=DEVICE, requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        y = softmax_of(x, mask)
        u = fusedops.bias_gelu(h, bias)
        d = fusedops.bias_dropout_add(u, bias, h, 0.5)
        return y, u, d, *torch.autograd.grad(y.square().sum() + u.square().sum(), (x, bias))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    masks = []
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            h.copy_(torch.randn_like(h))
        graph.replay()
        masks.append((captured[2] - h) != 0)
        y, u, _, dx, dbias = step()
        for got, want in zip((captured[0], captured[1], captured[3], captured[4]), (y, u, dx, dbias)):
            assert torch.equal(got, want)
    assert not torch.equal(*masks)
