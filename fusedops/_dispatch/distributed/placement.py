"""Where the tensors of a call are placed on a mesh, and each rank's part of them.

Loaded with ``dtensor.py``, once there can be a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fusedops._contract import values
from fusedops._contract.op import Op
from fusedops._torch import all_reduce, all_to_all, replicates_plain_tensors
from fusedops.errors import InvalidInputError


class Combining(NamedTuple):
    """The ranks of one call, see :class:`fusedops._contract.values.Ranks`."""

    op: str
    layout: Layout
    shard: values.Shard
    saves: bool
    shapes: Mapping[str, tuple[int, ...]]
    backend: str | None
    serve: Callable[..., tuple[Tensor, ...]]

    def is_cut(self, dim: int) -> bool:
        """Return True where a dim of the first parameter is sharded."""
        return dim % len(self.layout.shape) in self.layout.dims

    def total(self, tensor: Tensor, dims: Sequence[int], kind: str) -> Tensor:
        """Return the "sum" or "max" of a tensor over the ranks that hold other parts of these dims."""
        cut = [dim % len(self.layout.shape) for dim in dims]
        for at, dim in enumerate(self.layout.dims):
            if dim in cut:
                tensor = all_reduce(tensor, kind, (self.layout.mesh, at))
        return tensor

    def run(self, **changes: Any) -> tuple[Tensor, ...]:
        """Serve this rank's part with some arguments changed, by a kernel."""
        return self.serve(**changes)

    def place(self, dim: int) -> int:
        """Return this rank's place among those that hold other parts of a dim."""
        return self.layout.mesh.get_local_rank(self._mesh_dim(dim))

    def bounds(self, dim: int, size: int) -> list[int]:
        """Return where the part of each of these ranks starts in a tensor of ``size`` along the dim, and the end."""
        count = self.layout.mesh.size(self._mesh_dim(dim))
        chunk = -(-size // count)
        return [min(chunk * at, size) for at in range(count + 1)]

    def exchange(self, message: Tensor, dim: int, distance: int, received: int) -> Callable[[], Tensor]:
        """Send a flat tensor to the rank ``distance`` places after this one; return a function that waits for one."""
        at, own = self._mesh_dim(dim), self.place(dim)
        count = self.layout.mesh.size(at)
        to, source = [0] * count, [0] * count
        to[(own + distance) % count], source[(own - distance) % count] = message.numel(), received
        return all_to_all(message, source, to, (self.layout.mesh, at))

    def _mesh_dim(self, dim: int) -> int:
        """Return the mesh dim that shards a dim of the first parameter."""
        several = [at for at, each in enumerate(self.layout.dims) if each == dim % len(self.layout.shape)]
        if len(several) > 1:
            _refuse(
                self.op,
                f"dim {dim} sharded on mesh dims {' and '.join(map(str, several))}",
                "one mesh dim",
                "make a mesh on which one dim has all these ranks",
            )
        return several[0]


class Layout(NamedTuple):
    """The placement of a call's tensors on a mesh: the whole's shape, and the dim that each mesh dim shards."""

    mesh: DeviceMesh
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]  # of ``shape``; None: replicated

    @property
    def outside(self) -> bool:
        """True on a rank that is not in the mesh: its results are empty, as in torch's ops."""
        return self.mesh.get_coordinate() is None

    def of(
        self, shape: Sequence[int], absent: Placement | None = None, with_dims: Sequence[int | None] | None = None
    ) -> tuple[Placement, ...]:
        """Return the placements of a tensor, which broadcasts to the whole unless ``with_dims`` differs.

        Args:
            shape: of the tensor.
            absent: its placement where it lacks the sharded dim.
            with_dims: the dim of the whole, counted from the end, that each dim of the tensor goes with.
        """
        placements: list[Placement] = []
        own = range(-len(shape), 0) if with_dims is None else with_dims
        for dim in self.dims:
            at = None if dim is None or dim - len(self.shape) not in own else own.index(dim - len(self.shape))
            has = at is not None and dim is not None and (shape[at] != 1 or self.shape[dim] == 1)
            placements.append(Shard(at) if has else Replicate() if dim is None else absent or Replicate())  # pyright: ignore[reportArgumentType]
        return tuple(placements)

    def leading(self, shape: Sequence[int]) -> tuple[Placement, ...]:
        """Return the placements of a tensor whose dims are the leading dims of the whole, such as a saved ``rstd``."""
        return tuple(
            Shard(dim) if dim is not None and dim < len(shape) and shape[dim] == self.shape[dim] else Replicate()
            for dim in self.dims
        )

    def shard(self) -> values.Shard:
        """Return this rank's part of the whole. Parts are torch.chunk's. Outside the mesh it is the whole."""
        sizes, starts = list(self.shape), [0] * len(self.shape)
        if self.outside:
            return values.Shard(self.shape, self.shape, tuple(starts))
        for at, dim in enumerate(self.dims):
            if dim is not None:
                chunk = -(-sizes[dim] // self.mesh.size(at))
                skipped = min(chunk * self.mesh.get_local_rank(at), sizes[dim])
                sizes[dim] = min(chunk, sizes[dim] - skipped)
                starts[dim] += skipped
        return values.Shard(self.shape, tuple(sizes), tuple(starts))


def distributed(op: Op, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, every tensor a DTensor on one mesh; only a replicated parameter may be a plain tensor."""
    mesh = next(value.device_mesh for value in given.values() if isinstance(value, DTensor))
    for key, value in given.items():
        if isinstance(value, DTensor):
            if value.device_mesh != mesh:
                _refuse(
                    name,
                    f"{key} on {value.device_mesh} and others on {mesh}",
                    "one mesh for all tensors",
                    "distribute all of them on the same mesh",
                )
        elif isinstance(value, Tensor):
            if key not in op.sharding.replicated and not replicates_plain_tensors(DTensor):
                _refuse(
                    name,
                    f"{key} as a plain tensor beside DTensors",
                    "a DTensor on their mesh",
                    f"use distribute_tensor({key}, mesh, placements)",
                )
            given[key] = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return given


def common_layout(op: Op, name: str, given: Mapping[str, Any], first: str, order: Sequence[str]) -> Layout:
    """Return the common placement of the tensors. The first in ``order`` decide; a gradient may have any placement."""
    mesh: DeviceMesh = given[first].device_mesh
    shape = tuple(given[first].shape) if op.sharding.shape_of is None else op.sharding.shape_of(given)
    reason = op.sharding.reason
    whole, with_dims = whole_dims(op, given), dims_by_name(op, given)
    combined = op.sharding.combined.dims if op.sharding.combined is not None else ()
    uncut = {dim % len(shape) for dim in whole if dim not in combined} if shape else set[int]()
    grads = op.backward_call.grads
    dims: list[int | None] = []
    for at in range(mesh.ndim):
        cut: int | None = None
        for key in order:
            tensor = given[key]
            if tensor is None or key in op.sharding.replicated:
                continue
            placement = tensor.placements[at]
            if type(placement) is Shard:
                own = with_dims.get(key) or tuple(range(-tensor.ndim, 0))
                dim_index = int(cast("int", placement.dim) % tensor.ndim)
                with_dim = own[dim_index]
                dim = None if with_dim is None else with_dim + len(shape)
                if (dim is None or dim in uncut) and key not in grads:
                    _refuse(
                        name,
                        f"{key} with {placement!r} on mesh dim {at}",
                        f"dim {dim_index - tensor.ndim if with_dim is None else with_dim} whole on every rank"
                        + (f": {reason}" if reason else ""),
                        f"shard another dim, as in {key}.redistribute(placements={_text(_uncut(tensor, at))})",
                    )
                if cut is None and dim is not None and dim not in uncut:
                    cut = dim if tensor.shape[placement.dim] != 1 or shape[dim] == 1 else None
            elif not isinstance(placement, (Replicate, Partial)):
                _refuse(
                    name,
                    f"{key} with {placement!r} on mesh dim {at}",
                    "Shard, Replicate or Partial",
                    f"call {key}.redistribute",
                )
        dims.append(cut)
    return Layout(mesh, shape, tuple(dims))


def whole_dims(op: Op, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dims of the first parameter that every rank needs whole in a call."""
    more = op.sharding.whole_of
    return op.sharding.whole if more is None else (*op.sharding.whole, *more(given))


def dims_by_name(op: Op, given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the first parameter that the dims of some tensors go with."""
    return {} if op.sharding.dims_of is None else op.sharding.dims_of(given)


def _uncut(tensor: DTensor, at: int) -> list[Placement]:
    """Return the placements with mesh dim ``at`` on the first dim."""
    placements = list(tensor.placements)
    placements[at] = Shard(0) if tensor.ndim > 2 else Replicate()
    return placements


def local_arguments(
    op: Op, name: str, given: Mapping[str, Any], layout: Layout, saved: Collection[str] = ()
) -> dict[str, Any]:
    """Return this rank's part of every argument, each tensor cut or summed to match the layout.

    Outside the mesh, each tensor is the whole on the meta device.
    """
    local, with_dims = dict(given), dims_by_name(op, given)
    gradients = {value.name for value in op.saved if value.gradient_of is not None}  # a rank keeps its own part
    for key, value in given.items():
        if isinstance(value, DTensor):
            if key in op.sharding.replicated:
                wanted: tuple[Placement, ...] = tuple(Replicate() for _ in layout.dims)
            elif key in gradients:
                wanted = value.placements
            elif key in saved:
                wanted = layout.leading(value.shape)
            else:
                wanted = layout.of(value.shape, None, with_dims.get(key))
            if not _gathers_nothing(value.placements, wanted):
                _refuse(
                    name,
                    f"{key} with {_text(value.placements)}, which would have to be gathered",
                    f"{_text(wanted)}, as the other tensors are placed",
                    f"call {key}.redistribute(placements={_text(wanted)})",
                )
            if layout.outside:
                local[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            else:
                local[key] = value.redistribute(placements=wanted).to_local()
    return local


def _gathers_nothing(now: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    for at, (old, new) in enumerate(zip(now, wanted)):
        if old == new:
            continue
        # a dim that a later mesh dim cuts already cannot be cut by an earlier one first without an exchange
        if isinstance(old, Shard) or (isinstance(new, Shard) and new in now[at + 1 :]):
            return False
    return True


def whole_tensor(local: Tensor, layout: Layout, shape: tuple[int, ...], placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor from this rank's part; outside the mesh, where ``local`` has no memory, with an empty part."""
    like = torch.empty(shape, device="meta")  # contiguous, whatever the order of the dims in a rank's part
    if layout.outside:
        local = torch.zeros((0,) if shape else (), dtype=local.dtype, device=layout.mesh.device_type)
    local = local.contiguous()
    return DTensor.from_local(local, layout.mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def whole_result(local: Tensor, shard: values.Shard, layout: Layout) -> DTensor:
    """Return one of several results as a DTensor: its leading dims are those of the first argument."""
    shape = tuple(
        layout.shape[dim] if dim < len(shard.part) and size == shard.part[dim] else size
        for dim, size in enumerate(local.shape)
    )
    return whole_tensor(local, layout, shape, layout.leading(shape))


def _text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def _refuse(name: str, given: str, needed: str, fix: str) -> NoReturn:
    raise InvalidInputError(f"{name}: got {given}, expected {needed}; to fix: {fix}")
