"""What every process of a distributed test runs: checks by name, each of which all ranks enter and leave together.

Starting processes is slow, so one start serves all checks of a world size; tests/test_distributed.py reports each.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

import fusedops
from fusedops import testing
from fusedops._op import Op

EXAMPLES = str(pathlib.Path(__file__).parents[1] / "examples")
BACKENDS = ("eager", "triton")  # triton under its interpreter
# small, and with sizes that neither 2 nor 4 processes share out evenly
CALLS: dict[str, dict[str, Any]] = {
    "scaled_masked_softmax": {"x": (4, 3, 5, 8), "mask": (4, 1, 1, 8), "scale": 0.5, "causal": True},
    "bias_gelu": {"x": (5, 4, 6), "bias": (6,)},
    "bias_dropout": {"x": (5, 4, 6), "bias": (4, 1), "p": 0.3, "seed": 2**40 + 7},
    "bias_dropout_add": {"x": (5, 4, 6), "bias": (6,), "residual": (5, 4, 6), "p": 0.3, "seed": 11},
}
CHECKS: dict[str, Callable[..., None]] = {}


def check(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a check, by its name. One with a parameter ``op`` is a check of each op."""
    if "op" not in function.__annotations__:
        CHECKS[function.__name__] = function
        return function
    for op in testing.OPS.values():
        CHECKS[f"{function.__name__} {op.name}"] = lambda mesh, op=op: function(mesh, op)
    return function


def run_on(world: int, folder: pathlib.Path) -> dict[str, list[str]]:
    """Runs every check on ``world`` processes. Returns, by check, what went wrong on each rank; empty where nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (world, port, str(folder)), nprocs=world)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return {name: [one[name] for one in told] for name in told[0]}


def load() -> None:
    """Fills CHECKS."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    import ranks_models  # noqa: F401
    import ranks_ops  # noqa: F401


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    load()
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    told: dict[str, str] = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        fusedops.set_policy("eager")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's own; FallbackWarning is looked at by its check
                function(mesh)
            told[name] = ""
        except BaseException:
            told[name] = f"rank {rank}: {traceback.format_exc()}"
        pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(told))
        distributed.barrier()
    distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- calls


def public(op: Op) -> Callable[..., Tensor]:
    function = getattr(fusedops, op.name)
    return lambda *args, **kwargs: function(**dict(zip(op.parameters, args)), **kwargs)


def call_of(op: Op, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return testing.arguments(op, testing.Case("sharded", CALLS[op.name]), dtype)


def aligned(tensor: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> list[Placement]:
    """Where a tensor that broadcasts to ``shape`` has to lie beside one that lies at ``placements``."""
    found: list[Placement] = []
    for placement in placements:
        at = placement.dim - len(shape) + tensor.dim() if isinstance(placement, Shard) else -1
        found.append(Shard(at) if at >= 0 and tensor.shape[at] > 1 else Replicate())
    return found


def spread(op: Op, args: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Any]:
    """The arguments as DTensors by ``placements`` of x; the seed stays as it is, a number on every rank."""
    return [
        distribute_tensor(arg, mesh, aligned(arg, args[0].shape, placements))
        if isinstance(arg, Tensor) and name != "seed"
        else arg
        for name, arg in zip(op.parameters, args)
    ]


def leaves(op: Op, args: Sequence[Any]) -> dict[str, Tensor]:
    """The arguments that have gradients, made leaves."""
    wanted = (*op.differentiable, *((op.passed_through,) if op.passed_through else ()))
    found = {name: arg for name, arg in zip(op.parameters, args) if name in wanted and isinstance(arg, Tensor)}
    for leaf in found.values():
        leaf.requires_grad_()
    return found


def refused(call: Callable[[], object], *words: str) -> None:
    """Asserts that the call is refused, with these words, before anything is sent."""
    with CommDebugMode() as sent, pytest.raises(fusedops.InvalidInputError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert sent.get_total_counts() == 0, sent.get_comm_counts()


def counted(sent: CommDebugMode) -> dict[str, int]:
    return {str(name).rpartition(".")[2]: count for name, count in sent.get_comm_counts().items() if count}
