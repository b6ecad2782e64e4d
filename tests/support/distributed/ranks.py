"""The checks of a distributed test, run by every process: by name, each of which all ranks enter and leave together.

Starting processes is slow, so one start serves all checks of a world size; test_distributed.py reports each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from calls import arguments, inputs
from repository import ROOT
from state import Op
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

import fusedops
from fusedops import testing
from fusedops.constraints import LeadingDims

EXAMPLES = str(ROOT / "examples")
# one that is torch's and one with kernels of its own: how a call is cut does not depend on who computes a part
BACKENDS = tuple(
    info.name for info in fusedops.backends() if info.name in ("eager", "cpu") and info.state != "unavailable"
)
BATCH, LENGTH = 5, 3  # small, and sizes that neither 2 nor 4 processes share out evenly
CHECKS: dict[str, Callable[..., None]] = {}
# Of two processes in a start of their own: a rank of four compiles the same graph
COMPILED = (
    "compiled", "a_linear_loss_compiled", "a_drawn_seed_is_one_for_all_compiled", "attention_of_a_sequence_compiled",
)  # fmt: skip
#: Checks that have two dims of mesh on four processes, or more ranks, some without elements. Others have two processes.
OF_FOUR = (
    "gpt_spread_over_ranks", "shards_equal_the_whole", "a_shard_drops_what_the_whole_drops",
    "rotary_embedding_of_shards", "attention_of_sharded_heads_and_batches",
    "attention_of_a_sequence_is_that_of_the_whole", "attention_sends_the_keys_that_another_rank_sees",
    "attention_of_a_sequence_keeps_a_share_of_it", "attention_of_a_sequence_beside_other_shards",
    "a_loss_of_cut_rows_or_classes_is_that_of_the_whole",
    "a_linear_loss_of_cut_rows_or_classes_is_that_of_the_whole",
    "log_probs_of_cut_rows_or_classes_are_those_of_the_whole",
    "fsdp2_around_tensor_parallel", "partial_sums_are_summed", "a_vocabulary_over_ranks_trains_as_torchs",
    "experts_over_ranks", "tokens_are_sent_to_their_experts", "the_same_choices", "other_choices_are_reported",
)  # fmt: skip


def check(function: Callable[..., None]) -> Callable[..., None]:
    """Register a function as a check, by its name. One with ``op`` is a check of each op with a gradient."""
    if "op" not in function.__annotations__:
        CHECKS[function.__name__] = function
        return function
    for op in filter(lambda op: op.has_gradient, testing.OPS.values()):
        CHECKS[f"{function.__name__} {op.name}"] = lambda mesh, op=op: function(mesh, op)
    return function


def checks_of(world: int, compiled: bool = False) -> dict[str, Callable[..., None]]:
    """Return the checks that ``world`` processes run, by name. compiled: those of COMPILED, which others leave out."""
    checks = {name: name.partition(" ")[0] for name in CHECKS}
    wanted = COMPILED if compiled else OF_FOUR if world == 4 else {*checks.values()} - {*COMPILED, *OF_FOUR}
    return {name: CHECKS[name] for name, of in checks.items() if of in wanted}


def run_on(
    world: int,
    folder: pathlib.Path,
    rank: Callable[[int, int, pathlib.Path], None] | None = None,
    start: str = "spawn",
) -> dict[str, list[str]]:
    """Run ``rank``, or every check, on ``world`` processes. Return the error of each rank, or an empty text, by check.

    A rank gets its number, the world's size and the folder, and writes RANK.json: the error or an empty text, by check.
    A process that has run no backward may ``start`` them by "fork": they have imported what it has.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (world, port, folder, rank or _rank)
    try:
        torch.multiprocessing.start_processes(_begin, arguments, nprocs=world, start_method=start)
    except Exception as error:  # one waited for another, which may have had the error: what each has written
        seen = [
            f"{file.stem}: {list(json.loads(file.read_text()).items())[-1]}" for file in sorted(folder.glob("*.json"))
        ]
        raise RuntimeError("the last check of each rank, and its error: " + "; ".join(seen)) from error
    data = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return {name: [one[name] for one in data] for name in data[0]}


def load() -> None:
    """Fills CHECKS."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    import ranks_attention  # noqa: F401
    import ranks_context  # noqa: F401
    import ranks_experts  # noqa: F401
    import ranks_linear_loss  # noqa: F401
    import ranks_log_probs  # noqa: F401
    import ranks_loss  # noqa: F401
    import ranks_models  # noqa: F401
    import ranks_ops  # noqa: F401


def _begin(
    rank: int, world: int, port: int, folder: pathlib.Path, run: Callable[[int, int, pathlib.Path], None]
) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGTERM, chain=True)  # where a rank is that another one waited for
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    distributed.init_process_group("gloo", timeout=timedelta(seconds=150))
    run(rank, world, folder)
    distributed.destroy_process_group()


def compiled_rank(rank: int, world: int, folder: pathlib.Path) -> None:
    """Run the checks of COMPILED, as ``run_on`` does the others."""
    _rank(rank, world, folder, compiled=True)


def _rank(rank: int, world: int, folder: pathlib.Path, compiled: bool = False) -> None:
    with suppress(ImportError):  # without Triton
        import quick_interpreter

        quick_interpreter.install()
    load()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    results: dict[str, str] = {}
    for name, function in checks_of(world, compiled).items():
        torch.manual_seed(0)
        fusedops.set_policy("eager")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's own; FallbackWarning is looked at by its check
                function(mesh)
            results[name] = ""
        except BaseException:
            results[name] = f"rank {rank}: {traceback.format_exc()}"
        (folder / f"{rank}.json").write_text(json.dumps(results))
        distributed.barrier()


# ------------------------------------------------------------------------------------------------------------- calls


def public(op: Op) -> Callable[..., Any]:
    """Return the public function with every argument by position."""
    return op.call_public


def call_of(op: Op, dtype: torch.dtype = torch.float32, batch: int = BATCH) -> tuple[Any, ...]:
    """Return the arguments of a small call. A loss is that of each row: a sum over rows has checks of its own."""
    args = arguments(op.name, inputs(op.name, LENGTH, dtype, batch=batch))
    return tuple("none" if name == "reduction" else arg for name, arg in zip(op.parameters, args))


def aligned(
    tensor: Tensor, shape: Sequence[int], placements: Sequence[Placement], dims: Sequence[int] | None = None
) -> list[Placement]:
    """Where a tensor has to lie beside one of ``shape`` that lies at ``placements``; ``dims`` as of ``dims_of``."""
    own = list(dims or range(-tensor.dim(), 0))
    found: list[Placement] = []
    for placement in placements:
        dim = placement.dim - len(shape) if isinstance(placement, Shard) else 0
        at = own.index(dim) if dim in own else -1
        found.append(Shard(at) if at >= 0 and tensor.shape[at] > 1 else Replicate())
    return found


def cuttable(op: Op, args: Sequence[Any]) -> list[int]:
    """The dims of x that may be sharded, from the first."""
    sharding, rank = op.sharding, args[0].dim()
    whole = {*sharding.whole, *(sharding.whole_of(dict(zip(op.parameters, args))) if sharding.whole_of else ())}
    return [dim for dim in range(rank) if dim - rank not in whole]


def first_cut(op: Op, args: Sequence[Any]) -> list[Placement]:
    """Placements of x that cut its first dim, or none where no dim may be sharded."""
    return [Shard(0) if 0 in cuttable(op, args) else Replicate()]


def dims_of(op: Op, args: Sequence[Any]) -> dict[str, Sequence[int]]:
    """The dims of x that those of some tensors go with."""
    return dict(op.sharding.dims_of(dict(zip(op.parameters, args)))) if op.sharding.dims_of else {}


def spread(op: Op, args: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Any]:
    """The arguments as DTensors by ``placements`` of x; the seed stays as it is, a number on every rank."""
    dims, rank = dims_of(op, args), args[0].dim()
    for item in op.constraints:
        if isinstance(item, LeadingDims):
            dims[item.name] = range(-rank, -1)
    return [
        distribute_tensor(arg, mesh, aligned(arg, args[0].shape, placements, dims.get(name)))
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
