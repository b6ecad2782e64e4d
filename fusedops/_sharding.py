"""The ops on DTensors: where each tensor must lie, what is moved for that, and what a shard must know of the whole.

Loaded once a DTensor may be there, never by ``import fusedops``. The rules are torch-dispatch rules of the registered
ops, not sharding strategies: torch takes a strategy's inputs wherever they lie and gathers them unasked, and a strategy
cannot tell a kernel which part of the whole it has.

One rule for all ops. Every tensor broadcasts to the first one; a dim that is sharded for one of them is sharded for
all that have it. A replicated tensor is cut, which moves nothing; a partial one is summed, by a reduce-scatter where
the others are sharded. Anything else would gather, and is refused; but backward brings the gradient, which no caller
can place, to the tensors that forward kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed._functional_collectives import broadcast  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fusedops._op import OPS, Op
from fusedops._shard_dropout import backward_of_shard, forward_of_shard
from fusedops.errors import InvalidInputError


def shared_seed(seed: Tensor, x: Tensor) -> Tensor:
    """A seed that this rank drew for a call with ``x``; for a DTensor that of its mesh's first rank, on every rank."""
    if isinstance(x, DTensor):
        for dim in range(x.device_mesh.ndim):
            seed = broadcast(seed, 0, (x.device_mesh, dim))  # not distribute_tensor, which torch.compile cannot trace
    return seed


class Layout(NamedTuple):
    """How the tensors of a call lie on a mesh: the whole's shape, and for each mesh dim where it is sharded."""

    mesh: DeviceMesh
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]  # of ``shape``; None: replicated

    def of(self, shape: Sequence[int], absent: Placement | None = None) -> tuple[Placement, ...]:
        """The placements of a tensor that broadcasts to the whole; ``absent`` where it lacks the sharded dim."""
        found: list[Placement] = []
        for dim in self.dims:
            at = None if dim is None else dim - len(self.shape) + len(shape)
            has = at is not None and at >= 0 and (shape[at] != 1 or self.shape[at - len(shape)] == 1)
            found.append(Shard(at) if has else Replicate() if dim is None else absent or Replicate())  # pyright: ignore[reportArgumentType]
        return tuple(found)

    def shard(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """This rank's part of the whole: its shape, and the place of its first element. Shards are torch.chunk's."""
        sizes, starts = list(self.shape), [0] * len(self.shape)
        for at, dim in enumerate(self.dims):
            if dim is not None:
                chunk = -(-sizes[dim] // self.mesh.size(at))
                skipped = min(chunk * self.mesh.get_local_rank(at), sizes[dim])
                sizes[dim] = min(chunk, sizes[dim] - skipped)
                starts[dim] += skipped
        return tuple(sizes), tuple(starts)


# -------------------------------------------------------------------------------------------------------------- rules


def _forward(
    op: Op, cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    defaults = [parameter.default for parameter in op.signature.parameters.values()]
    args = (*args, *defaults[len(args) :])  # torch leaves out trailing arguments that equal the schema's default
    op.validate(*args)
    given = _distributed(op.name, dict(zip(op.parameters, args)))
    first = op.parameters[0]
    layout = _layout(op, op.name, given, first, op.tensors)
    local = _local(op.name, given, layout)
    part, start = layout.shard()
    if local.get("causal") and start[-2]:
        local.update(causal=False, mask=_later(local["mask"], part, start, local[first].device))
    if local.get("seed") is not None and local["training"] and local["p"] > 0 and part != layout.shape:
        y = forward_of_shard(op, local, layout.shape, part, start, kwargs.get("backend"))
    else:
        y = func(*local.values(), **kwargs)
    return _whole(y, layout, layout.shape, layout.of(layout.shape))


def _backward(
    op: Op, cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = f"{op.name}_backward"
    given = _distributed(name, dict(zip(op.backward_parameters, args)))
    kept = [n for n, value in given.items() if isinstance(value, DTensor) and n != "grad"]
    layout = _layout(op, name, given, "grad", (*kept, "grad"))
    given["grad"] = given["grad"].redistribute(placements=layout.of(layout.shape))
    local = _local(name, given, layout)
    part, start = layout.shard()
    if local.get("causal") and start[-2]:
        local["causal"] = False  # y is 0 there; the flag only spares the work
    if local.get("seed") is not None and local["training"] and local["p"] > 0 and part != layout.shape:
        found: Any = backward_of_shard(op, local, layout.shape, part, start, kwargs.get("backend"))
    else:
        found = func(*local.values(), **kwargs)
    single = len(op.differentiable) == 1
    whole: list[DTensor] = []
    for place, gradient in enumerate((found,) if single else found):
        like = given.get(op.differentiable[place])  # None: x, of which dropout keeps nothing
        if not single and not given["needs"][place]:
            shape, placements = tuple(gradient.shape), tuple(Replicate() for _ in layout.dims)  # the empty stand-in
        else:
            shape = layout.shape if like is None else tuple(like.shape)
            placements = layout.of(shape, absent=Partial())
        whole.append(_whole(gradient, layout, shape, placements))
    return whole[0] if single else tuple(whole)


def _later(mask: Tensor | None, part: Sequence[int], start: Sequence[int], device: torch.device) -> Tensor:
    """``mask`` joined with the causal one of a shard whose first query is ``start[-2]``."""
    later = torch.ones(part[-2:], dtype=torch.bool, device=device).triu(1 + start[-2])
    return later if mask is None else mask.bool() | later


# ---------------------------------------------------------------------------------------------------------- placement


def _distributed(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, every tensor but a plain seed a DTensor on one mesh."""
    mesh = next(value.device_mesh for value in given.values() if isinstance(value, DTensor))
    for key, value in given.items():
        if isinstance(value, DTensor):
            if value.device_mesh != mesh:
                _refuse(
                    name,
                    f"{key} is on {value.device_mesh}, others on {mesh}; needs one mesh for all tensors; make all "
                    f"of them on the same",
                )
        elif isinstance(value, Tensor):
            # a seed is one number, equal on all ranks by its contract
            if key != "seed" and not DTensor._op_dispatcher._allow_implicit_replication:  # pyright: ignore[reportPrivateUsage]
                _refuse(
                    name,
                    f"{key} is a plain tensor beside DTensors; needs a DTensor on their mesh; make it one with "
                    f"distribute_tensor({key}, mesh, placements)",
                )
            given[key] = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return given


def _layout(op: Op, name: str, given: Mapping[str, Any], first: str, order: Sequence[str]) -> Layout:
    """Where the tensors lie together. Those first in ``order`` decide; a gradient may lie where it likes."""
    mesh: DeviceMesh = given[first].device_mesh
    shape = tuple(given[first].shape)
    uncut = {dim % len(shape) for dim in op.unsharded} if shape else set[int]()
    dims: list[int | None] = []
    for at in range(mesh.ndim):
        found: int | None = None
        for key in order:
            tensor = given[key]
            if tensor is None or key == "seed":
                continue
            placement = tensor.placements[at]
            if type(placement) is Shard:
                dim = cast("int", placement.dim) % tensor.ndim + len(shape) - tensor.ndim
                if dim in uncut and key != "grad":
                    _refuse(
                        name,
                        f"{key} is {placement!r} on mesh dim {at}; needs dim {dim - len(shape)} whole on every rank; "
                        f"shard another dim, as in {key}.redistribute(placements={_text(_uncut(tensor, at))})",
                    )
                if found is None and dim not in uncut and tensor.shape[placement.dim] == shape[dim]:
                    found = dim
            elif not isinstance(placement, (Replicate, Partial)):
                _refuse(
                    name,
                    f"{key} is {placement!r} on mesh dim {at}; needs Shard, Replicate or Partial: redistribute it",
                )
        dims.append(found)
    return Layout(mesh, shape, tuple(dims))


def _uncut(tensor: DTensor, at: int) -> list[Placement]:
    """The placements with that of mesh dim ``at`` on the first dim."""
    found = list(tensor.placements)
    found[at] = Shard(0) if tensor.ndim > 2 else Replicate()
    return found


def _local(name: str, given: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """This rank's part of every argument, each tensor cut or summed to lie by the layout."""
    found = dict(given)
    for key, value in given.items():
        if isinstance(value, DTensor):
            wanted = layout.of(value.shape) if key != "seed" else tuple(Replicate() for _ in layout.dims)
            if not _gathers_nothing(value.placements, wanted):
                _refuse(
                    name,
                    f"{key} is {_text(value.placements)} beside tensors by which it is to be {_text(wanted)}; "
                    f"that would gather it; ask for it, with {key}.redistribute(placements={_text(wanted)})",
                )
            found[key] = value.redistribute(placements=wanted).to_local()
    return found


def _gathers_nothing(now: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    for at, (old, new) in enumerate(zip(now, wanted)):
        if old == new:
            continue
        # a dim that a later mesh dim cuts already cannot be cut by an earlier one first without an exchange
        if isinstance(old, Shard) or (isinstance(new, Shard) and new in now[at + 1 :]):
            return False
    return True


def _whole(local: Tensor, layout: Layout, shape: tuple[int, ...], placements: Sequence[Placement]) -> DTensor:
    like = torch.empty(shape, device="meta")  # contiguous, as every op's output is
    return DTensor.from_local(local, layout.mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidInputError(f"{name}: {why}")


for _op in OPS.values():
    torch.library.register_torch_dispatch(f"fusedops::{_op.name}", DTensor, partial(_forward, _op))
    torch.library.register_torch_dispatch(f"fusedops::{_op.name}_backward", DTensor, partial(_backward, _op))
