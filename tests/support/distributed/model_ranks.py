"""Models of transformers with fusedops on several processes: the losses of one process. Run by each rank."""

from __future__ import annotations

import json
import pathlib
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from model_families import FAMILIES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fusedops.integrations.transformers import apply


def losses(model: Any, ids: torch.Tensor, steps: int = 3) -> list[float]:
    """Train a model on a batch, the same on each rank, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    values: list[float] = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    return values


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Shard a model's parameters by FSDP2: each norm, each layer, and the rest."""
    fully_shard(model.model.norm, mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split(model: Any, mesh: DeviceMesh) -> None:
    """Split a model's heads and the inner dim of its MLPs over the ranks."""
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            plan = {name: ColwiseParallel() for name in columns if hasattr(part, name)}
            plan |= {name: RowwiseParallel() for name in rows if hasattr(part, name)}
            parallelize_module(part, mesh, plan)


def equals_one_process(
    spread: Callable[[Any, DeviceMesh], None], first: bool, fused_loss: bool, mesh: DeviceMesh
) -> None:
    """Compare the losses of a model that is spread over the ranks, before or after apply, with those of one process."""
    family, generator = FAMILIES["Llama"], torch.Generator().manual_seed(7)
    ids = torch.randint(3, 64, (2, 9), generator=generator)
    expected = losses(family.build(), ids)
    model = family.build().train()
    if first:
        spread(model, mesh)
    applied = apply(model, fused_loss=fused_loss)
    if not first:
        spread(model, mesh)
    ops = {"rms_norm": 5, "swiglu": 2, "rotary_embedding": 2, "cross_entropy": 1, "attention": 2}
    assert applied.ops == (ops | {"linear_cross_entropy": 1} if fused_loss else ops)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.testing.assert_close(losses(model, ids), expected, rtol=1e-4, atol=1e-4)
    # FSDP2 hooks the logits, among the outputs of the model
    assert any("(by its gradient)" in str(each.message) for each in seen) is (fused_loss and spread is shard)
    applied.remove()
    assert apply(model).ops == ops


CHECKS: dict[str, tuple[Callable[[Any, DeviceMesh], None], bool, bool]] = {
    "fsdp2 before apply": (shard, True, False),
    "fsdp2 after apply": (shard, False, False),
    "fsdp2 and the fused loss": (shard, False, True),
    "tensor parallel before apply": (split, True, False),
    "tensor parallel after apply": (split, False, False),
    "tensor parallel and the fused loss": (split, False, True),
}


def run(rank: int, world: int, folder: pathlib.Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    results: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            equals_one_process(*check, mesh)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(results))
