"""Every text about DTensors, word for word."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from error_calls import DROPOUT, INVALID, NO_BACKEND, X, alone, made
from error_texts import Table
from torch import Tensor

import fusedops

TABLE = Table(__file__, "fakes")
pin = TABLE.pin
WRITTEN = (*[X.view(1, 1, -1)] * 2, *[X.view(1, 1, 1, -1)] * 2, X.flatten()[:1].long())


@contextmanager
def mesh() -> Iterator[Any]:
    """A mesh of 2 x 2 ranks of which this process plays the first: torch's fake process group sends nothing."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook


def sharded(call: Callable[..., Any]) -> Callable[[], Any]:
    """``call`` with DTensor, a mesh, and the kinds of placement."""

    def run() -> None:
        from torch.distributed import tensor

        with mesh() as whole:
            call(tensor, whole["tp"], whole)

    return run


def on(tensor: Any, mesh_: Any, *placements: Any, x: Tensor = X) -> Any:
    return tensor.DTensor.from_local(x, mesh_, placements, run_check=False)


pin(
    "two meshes",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.Replicate()), on(t, w["dp"], t.Replicate(), x=X[0]))),
    INVALID,
)
pin(
    "a plain tensor beside DTensors",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.Replicate()), X[0])),
    INVALID,
)
pin(
    "an op that writes its arguments",
    sharded(lambda t, m, w: fusedops.store_kv(*[on(t, m, t.Replicate(), x=each) for each in WRITTEN])),
    INVALID,
)
pin("a dim that is to be whole", sharded(lambda t, m, w: fusedops.scaled_masked_softmax(on(t, m, t.Shard(1)))), INVALID)
pin(
    "a sequence on two mesh dims",
    sharded(lambda t, m, w: fusedops.attention(*[on(t, w, t.Shard(2), t.Shard(2), x=X[None, None]) for _ in range(3)])),
    INVALID,
)
pin(
    "a strange placement",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.placement_types._StridedShard(0, split_factor=2)))),
    INVALID,
)
pin(
    "what would gather",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.Shard(0)), on(t, m, t.Shard(0), x=X[0, :2]))),
    INVALID,
)


def shard_of_dropout(t: Any, m: Any, w: Any) -> None:
    alone(made(op="bias_dropout", form=DROPOUT))
    with fusedops.use("mine", fallback="raise"):
        fusedops.bias_dropout(on(t, m, t.Shard(0)), seed=3)


pin("dropout's shard", sharded(shard_of_dropout), NO_BACKEND)

test_a_text, test_no_text_is_left_over = TABLE.tests()
