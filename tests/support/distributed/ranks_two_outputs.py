"""Checks of an op with two outputs and saved values, on every rank. The op is in two_outputs.py."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from calls import call_registered, gradients
from ranks import call_of, check, counted, leaves, spread
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from two_outputs import two_outputs

import fusedops


@check
def two_outputs_of_shards(mesh: DeviceMesh) -> None:
    """Rows on each rank: the whole's outputs and gradients, and nothing is sent; called, registered and compiled."""
    with two_outputs() as op, fusedops.use("two_outputs", fallback="raise"):
        args = call_of(op, torch.float64)
        whole_args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        whole = leaves(op, whole_args)
        want = op.reference(*whole_args)
        # the gradients of the sum of squares, given: torch's own square gathers a dim of fewer rows than ranks
        wanted = dict(zip(whole, gradients(want, [*whole.values()])))
        grads = [2 * y.detach() for y in want]
        ways: dict[str, Any] = {
            "called": op.call_public,
            "torch.ops": partial(call_registered, op.name),
            "compiled": None,  # made anew for each placement
        }
        for name, way in ways.items():
            for placement in (Shard(0), Shard(1), Replicate()):
                parts = spread(op, args, mesh, [placement])
                cut = leaves(op, parts)
                cut_grads = [distribute_tensor(grad, mesh, [placement]) for grad in grads]
                if name == "compiled":
                    torch._dynamo.reset()
                    way = torch.compile(op.call_public, backend="aot_eager", fullgraph=True)
                label = f"{name} {placement}"
                sent = CommDebugMode()
                with nullcontext() if name == "compiled" else sent:  # torch compiles nothing in a dispatch mode
                    results = way(*parts)
                    torch.autograd.backward(results, cut_grads)
                assert name == "compiled" or sent.get_total_counts() == 0, f"{label}: {counted(sent)}"
                for y, other in zip(results, want):
                    assert list(y.placements) == [placement], label
                    assert torch.allclose(y.full_tensor(), other, atol=1e-12, rtol=1e-10), label
                for key, leaf in cut.items():
                    assert leaf.grad is not None, f"{label}: {key}"
                    got = leaf.grad.full_tensor()
                    assert torch.allclose(got, wanted[key], atol=1e-12, rtol=1e-10), f"{label}: {key}"
