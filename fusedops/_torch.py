"""Every private name of torch that the core uses, and what is asked with them: ``is_traced``, ``is_transformed``.

torch may change a private name in any release. Each was seen in torch 2.10.0 to 2.15.0, the releases that the project
tests, except where its line names another range. No other file of the core has a private name of torch; a backend has
its own in a file of this name.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from sys import modules
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad as forward_ad  # for _current_level, read in each call: -1 without forward mode
from torch.autograd import profiler as profiler  # for _is_profiler_enabled, read in each call
from torch.compiler import is_compiling
from torch.compiler import is_dynamo_compiling as is_dynamo_compiling  # public; here beside is_jit_tracing
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_forward_ad: Any = forward_ad
_torch: Any = torch  # whose stubs lack some of these names, or have other types
_c: Any = torch._C

TENSOR_TYPES = frozenset((Tensor, Parameter))

# --------------------------------------------------------------------------------------------------- what is in effect

#: True under torch.jit.trace.
is_jit_tracing: Callable[[], bool] = _c._is_tracing
#: How many modes see each op, such as those of fake tensors.
dispatch_modes: Callable[[], int] = _c._len_torch_dispatch_stack
#: The functorch transform in effect, or None.
functorch_level: Callable[[], Any] = _c._functorch.peek_interpreter_stack
#: The hooks of torch.autograd.graph.saved_tensors_hooks in effect, or None. Takes True, to see those of a trace too.
saved_tensors_hooks: Callable[[bool], Any] = _c._autograd._top_saved_tensors_default_hooks
#: True in a backward that keeps its graph, by retain_graph=True.
graph_is_kept: Callable[[], bool] = _c._autograd._get_current_graph_task_keep_graph
#: The comparison of tensors with kept metadata, of compiled models; None in a torch without it.
_tensor_guards: Any = getattr(getattr(_c._dynamo, "guards", None), "TensorGuards", None)
#: True for a tensor of torch's first batching, which is_grads_batched=True passes to backward.
is_legacy_batchedtensor: Callable[[Tensor], bool] = _c._functorch.is_legacy_batchedtensor
#: The tensor in a wrapper of a functorch transform that has ended; another tensor as it is.
unwrap_if_dead: Callable[[Tensor], Tensor] = _c._functorch.unwrap_if_dead
#: A block in which torch's dispatcher leaves out the keys of autograd.
BelowAutograd: Any = _c._AutoDispatchBelowAutograd
#: The dispatch keys after those of autograd.
after_autograd: Any = _c._after_autograd_keyset


def is_traced() -> bool:
    """Return True under torch.compile, torch.export and torch.jit.trace: the call becomes a node of a graph.

    torch.export without Dynamo sets a flag of the process, and traces with modes of its own thread.
    """
    return is_dynamo_compiling() or is_jit_tracing() or (dispatch_modes() > 0 and is_compiling())


def is_onnx_export() -> bool:
    """Return True in torch.onnx.export, which has loaded the package that the question would load, in 0.07 s."""
    return "torch.onnx._internal" in modules and _torch.onnx.is_in_onnx_export()


def takes_saved_tensors_hooks() -> bool:
    """Return True where no hooks of saved tensors are in effect, and new ones are not disabled."""
    return saved_tensors_hooks(True) is None and _c._autograd._saved_tensors_hooks_get_disabled_error_message() is None


def is_transformed() -> bool:
    """Return True under a functorch transform or forward-mode differentiation, which transform plain torch alone."""
    return functorch_level() is not None or _forward_ad._current_level >= 0


def autocasts(device_type: str) -> bool:
    """Return True where autocast is enabled. torch's own function raises for a device type without it, as meta."""
    known = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)  # the latter takes 1 us
    return known and torch.is_autocast_enabled(device_type)


def is_plain_or_planned(value: Any) -> bool:
    """Return True for a plain tensor, and for one of a plan, which stands for one."""
    return type(value) in TENSOR_TYPES or (isinstance(value, Tensor) and getattr(value, "has_no_numbers", False))


def is_plain(args: Iterable[Any]) -> bool:
    """Return True if every tensor among the arguments is a plain one with memory, and no dispatch mode is active."""
    if dispatch_modes():
        return False
    for arg in args:  # not all(...): a generator costs 0.4 us
        if isinstance(arg, Tensor) and (type(arg) not in TENSOR_TYPES or arg.is_meta):
            return False
    return True


def legacy_vmap_level() -> int:
    """Return the level of torch's first batching that a call is in, which is_grads_batched=True has entered."""
    level = _torch._C._vmapmode_increment_nesting() - 1
    _torch._C._vmapmode_decrement_nesting()
    return level


def remove_batch_dim(tensor: Tensor, level: int) -> Tensor:
    """Return what a batched tensor of a level holds, the batch as its first dim; a batch of 1 for another tensor."""
    return _torch._remove_batch_dim(tensor, level, 1, 0)


def add_batch_dim(tensor: Tensor, level: int) -> Tensor:
    """Return a tensor whose first dim is the batch of a level."""
    return _torch._add_batch_dim(tensor, 0, level)


def raw_saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors of an autograd Function's context as autograd holds them, with their hooks."""
    return ctx._raw_saved_tensors


def set_node_apply(function: type[torch.autograd.Function], backward: Callable[..., Any]) -> None:
    """Let autograd call a Function's backward itself, without the Python in between, which takes 0.8 us.

    The name was seen in torch 2.0 and 2.13.
    """
    _backward_cls: Any = function._backward_cls
    _backward_cls.apply = backward


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages share a storage's memory."""
    return _c._storage_Use_Count(storage._cdata)


def storage_id(tensor: Tensor) -> int:
    """Return a number that no other storage has while this one lives."""
    return tensor.untyped_storage()._cdata


def is_same_storage(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    """Return True if two storages are one piece of memory, also where it has no address."""
    return a._cdata == b._cdata


def storage_of(weak: int) -> torch.UntypedStorage | None:
    """Return the storage of a weak reference, StorageWeakRef.cdata; None where nothing holds it any more."""
    return _torch.UntypedStorage._new_with_weak_ptr(weak)


def define(library: torch.library.Library, name: str, schema: str) -> None:
    """Define the first overload of an op of ours.

    Library.define asks torch.ops for the op before, and waits for an AttributeError: half of its time or more.
    """
    # before: of an op that is defined, the entry for its fake implementation reads the types of all arguments
    _torch._library.simple_registry.singleton.find(f"fusedops::{name}")
    of_library = cast("Any", library)
    of_library.m.define(f"{name}{schema}", "", ())
    of_library._op_defs.add(f"fusedops::{name}")
    _torch.library._defs.add(f"fusedops::{name}")


def implement(
    library: torch.library.Library, name: str, function: Callable[..., Any], key: str, with_keyset: bool = False
) -> None:
    """Register an implementation of an op of ours, without the questions of Library.impl, a third of its time."""
    of_library, registered = cast("Any", library), f"fusedops/{name}/{key}"
    of_library.m.impl(name, key, function, with_keyset)
    of_library._op_impls.add(registered)
    _torch.library._impls.add(registered)


def register_fake(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    """Register the fake implementation of an op of ours.

    torch.library.register_fake looks up the source of its caller too, 0.1 ms for each of 83 at import.
    """
    holder = _torch._library.simple_registry.singleton.find(f"fusedops::{name}").fake_impl
    handle, of_library = holder.register(function, __name__, lib=library), cast("Any", library)
    of_library._registration_handles.append(handle)


def destroy(library: torch.library.Library) -> None:
    """Remove the ops and the implementations that a library registered."""
    library._destroy()


def broadcast(tensor: Tensor, source: int, group: Any) -> Tensor:
    """Return the tensor of one rank of a group, such as (mesh, dim): an op, which torch.compile traces."""
    from torch.distributed import _functional_collectives as collectives

    function: Any = getattr(collectives, "broadcast")  # noqa: B009  # its type is partly unknown
    return function(tensor, source, group)


def all_reduce(tensor: Tensor, kind: str, group: Any) -> Tensor:
    """Return the "sum" or "max" of a tensor over the ranks of a group, such as (mesh, dim)."""
    from torch.distributed import _functional_collectives as collectives

    function: Any = getattr(collectives, "all_reduce")  # noqa: B009
    return function(tensor, kind, group)


def all_to_all(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> Callable[[], Tensor]:
    """Send consecutive parts of a flat tensor, of ``sent`` elements, to the ranks of a group, such as (mesh, dim).

    Returns a function that waits for what they send this rank, of ``received`` elements, one part after the other.
    """
    from torch.distributed import _functional_collectives as collectives

    function: Any = getattr(collectives, "all_to_all_single")  # noqa: B009
    result = function(tensor, [*received], [*sent], group)
    return result.wait if isinstance(result, collectives.AsyncCollectiveTensor) else lambda: result


def replicates_plain_tensors(dtensor: Any) -> bool:
    """Return True in a block of ``torch.distributed.tensor.experimental.implicit_replication``. Takes DTensor."""
    return bool(dtensor._op_dispatcher._allow_implicit_replication)


def private_device_name() -> str:
    """Return the name of the device type that an extension of torch uses: "privateuseone" if none has renamed it."""
    return _c._get_privateuse1_backend_name()


def negative_view(tensor: Tensor) -> Tensor:
    """Return a view that stands for the negative of a tensor."""
    return _torch._neg_view(tensor)


def fake_tensor_mode() -> Any:
    """Return a FakeTensorMode: a context manager, with ``from_tensor``. Loads it, in 0.1 s."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def reset_dynamo() -> None:
    """Drop what torch.compile has compiled."""
    _torch._dynamo.reset()


def cuda_sleep(cycles: int) -> None:
    """Keep the current CUDA stream busy for a number of the GPU's clock cycles."""
    _torch.cuda._sleep(cycles)


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a function of tensors that is True for those like ``tensors``, or None where this torch has none.

    It compares the type, dtype, device, layout, sizes, strides and requires_grad of each, and the dispatch modes,
    functorch transforms, torch.jit.trace, autocast and inference mode in effect. ``tensors`` are different objects. A
    strided nested tensor among those compared ends the process.
    """
    if _tensor_guards is None:
        return None
    sizes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
    return _tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# ---------------------------------------------------------------------------------------- tensors without their numbers


def without_torch_function() -> Any:
    """Return a context in which a tensor subclass is a plain tensor for torch's Python functions."""
    return _c.DisableTorchFunctionSubclass()


def without_torch_function_modes() -> Any:
    """Return a context in which no function of torch is seen by a mode or a subclass."""
    return _c.DisableTorchFunction()


def wrapper_subclass(
    cls: type[Tensor],
    dtype: torch.dtype,
    device: torch.device,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    storage_offset: int | None = None,
) -> Any:
    """Return a tensor of a subclass that has a shape and no memory. ``strides`` None: contiguous."""
    make: Any = Tensor._make_wrapper_subclass
    return make(cls, tuple(shape), strides, storage_offset, dtype=dtype, device=device)


def tree_map_only(kind: type[Any], function: Callable[[Any], Any], values: Any) -> Any:
    """Return nested values with a function applied to the values of a type."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(kind, function, values)


#: ``__torch_function__`` of a subclass whose calls go to its ``__torch_dispatch__`` alone.
disabled_torch_function: Any = _c._disabled_torch_function_impl


def share_storage(view: Tensor, base: Tensor) -> None:
    """Give a wrapper, which has no memory, the storage of another: torch then takes it for a view of that one."""
    _torch._functionalize_unsafe_set(view, base)
