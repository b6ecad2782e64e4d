"""An Ascend device in plain Python: PrivateUse1 under the name ``npu``, its memory on the CPU.

``register()`` enables ``torch.device("npu")`` in this process. The tensors are plain ``torch.Tensor`` with the dispatch
keys of a real NPU tensor, so autograd, views, in-place ops and dispatch modes use the same paths as on hardware.

Implementation: every device storage is a ``torch.UntypedStorage`` on ``npu:0`` that points to the bytes of a CPU
storage. A table, keyed by ``untyped_storage()._cdata``, keeps the CPU storage alive until the device storage is freed.
Ops without their own kernel reach ``_fallback``, which runs the CPU kernel on CPU aliases of the same bytes. View ops
run the CPU kernel on the device tensor (they change only sizes and strides), so views share storage as on any device.

The stand-in is stricter than necessary: a CPU tensor among device tensors raises, a generator of another device raises,
and new floating-point memory is filled with NaN, so that a result that depends on uninitialised memory is visible.

Registration cannot be undone. It does not affect CPU tensors, ``torch.compile`` on the CPU and autograd (tested).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils import backend_registration

DEVICE = "npu"

calls: Counter[str] = Counter()
"""The number of calls on the device by op name, such as ``add``, ``masked_fill``, ``npu_gelu``. Names have no overload
and no ``_`` of in-place ops, which torch often runs as the out= overload. Copies are ``copy``, ``copy_to_host`` and
``copy_to_device``."""

VIEWS = frozenset(
    {"as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex", "set", "resize"}
)
ALLOCATIONS = frozenset({"empty", "empty_strided"})
# Ops that synchronise: explicitly, by a Python value or a copy to the host, or because the shape depends on the data.
_DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
SYNCHRONISING = frozenset({"synchronize", "_local_scalar_dense", "equal", "copy_to_host", "bincount", *_DATA_DEPENDENT})
# As on CUDA, these accept index tensors on the host.
_TAKES_HOST_INDICES = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"})
# op-plugin's docs, torch_npu-npu_gelu.md: "on an NPU the native gelu ignores `approximate` and computes tanh" (D).
_ALWAYS_TANH = frozenset({"aten::gelu", "aten::gelu_", "aten::gelu_backward"})

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})

_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_memory: dict[int, tuple[torch.UntypedStorage, int]] = {}
_libraries: list[torch.library.Library] = []
_lock = threading.Lock()
_generator = torch.Generator("cpu")
_present = True
_in_use = 0
_peak = 0
registered_late = False
"""True if a backward ran before ``register()``. Backward on the device then works only in the registering thread."""


def reset() -> None:
    """Set the counter of calls to zero."""
    calls.clear()


def kernels() -> Counter[str]:
    """Return the calls that would start a kernel: all except views, allocations and explicit synchronisations."""
    return Counter({k: n for k, n in calls.items() if k not in VIEWS | ALLOCATIONS | {"synchronize"}})


def synchronisations() -> int:
    """Return the number of device synchronisations since the last reset."""
    return sum(n for name, n in calls.items() if name in SYNCHRONISING)


def live_storages() -> int:
    """Return the number of device storages that are alive."""
    return len(_memory)


# Memory ------------------------------------------------------------------------------------------------------------


class _DeviceStorage(torch.UntypedStorage):
    """A storage on the device. torch has no allocator for it: ``UntypedStorage(n, device="npu")`` ends the process."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.UntypedStorage:
        done = memo.setdefault("torch", {})
        if self._cdata not in done:
            done[self._cdata] = _device_storage(_memory[self._cdata][0].clone())
            # Tensor.__deepcopy__ requires exactly this class; set_, which it calls next, sets _DeviceStorage again.
            done[self._cdata].__class__ = torch.UntypedStorage
        return done[self._cdata]

    def resize_(self, size: int) -> None:
        raise NotImplementedError(
            "the stand-in cannot resize the storage of a device tensor; to fix: resize the tensor"
        )


def _device_storage(cpu: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage on the device with the bytes of ``cpu``, which the table keeps alive as long."""
    global _in_use, _peak
    storage = torch._C._construct_storage_from_data_pointer(cpu.data_ptr(), torch.device(DEVICE, 0), cpu.nbytes())
    storage.__class__ = _DeviceStorage
    key = storage._cdata
    _memory[key] = cpu, cpu.nbytes()
    # The Python object of the storage lives as long as the C++ storage, so this runs when the last view is freed, and
    # before another storage can reuse the address.
    weakref.finalize(storage, _free, key).atexit = False
    _in_use += cpu.nbytes()
    _peak = max(_peak, _in_use)
    return storage


def _free(key: int) -> None:
    global _in_use
    _in_use -= _memory.pop(key)[1]


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Set the storage of the device tensor, with the offset, sizes and strides of ``like``."""
    op = torch.ops.aten.set_.source_Storage_storage_offset
    return op.redispatch(_CPU_KERNEL, tensor, storage, like.storage_offset(), like.shape, like.stride())


def to_device(cpu: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """Return a device tensor with the bytes of the CPU tensor, without a copy."""
    tensor = torch._C._acc.create_empty_tensor((0,), cpu.dtype)
    return _set(tensor, _device_storage(cpu.untyped_storage()) if storage is None else storage, cpu)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the bytes of the device tensor, without its autograd history and without a copy."""
    memory = _memory[tensor.untyped_storage()._cdata][0]
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return alias.set_(cast(Any, memory), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_ours(value: object) -> bool:
    """Return True if the value is a tensor on the device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


# Calls -------------------------------------------------------------------------------------------------------------


def _name(op: torch._ops.OpOverload) -> str:
    return op._schema.name.split("::")[1].removesuffix("_")


class _Aliases:
    """The CPU aliases of the arguments of a call, and the conversion of the CPU kernel's result to the device."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.op = op
        self.name = _name(op)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.host: list[torch.Tensor] = []

    def enter(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != DEVICE:
                self.host.append(value)
                return value
            alias = on_cpu(value)
            self.pairs.append((value, alias))
            return alias
        if isinstance(value, (list, tuple)):
            return type(value)(self.enter(item) for item in cast(Sequence[Any], value))
        if isinstance(value, torch.device) and value.type == DEVICE:
            return torch.device("cpu")
        return value

    def check(self) -> None:
        # A 0-dim CPU tensor counts as a number, as in TensorIterator.
        stray = [t for t in self.host if t.dim() > 0]
        if stray and self.name not in _TAKES_HOST_INDICES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE}:0 and "
                f"{stray[0].device}! (in {self.op})"
            )

    def leave(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for tensor, alias in self.pairs:
                if value is alias:  # an in-place or out= op returns its argument
                    return tensor
            for tensor, alias in self.pairs:
                if value.untyped_storage()._cdata == alias.untyped_storage()._cdata:
                    return to_device(value, tensor.untyped_storage())
            return to_device(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.leave(item) for item in cast(Sequence[Any], value))
        return value

    def take_over_resizes(self) -> None:
        # resize_ and out= arguments of another size change the alias; apply the change to its tensor.
        for tensor, alias in self.pairs:
            grown = alias.untyped_storage().nbytes() != tensor.untyped_storage().nbytes()
            if grown or alias.shape != tensor.shape or alias.stride() != tensor.stride():
                storage = _device_storage(alias.untyped_storage()) if grown else tensor.untyped_storage()
                _set(tensor, storage, alias)


def _with_generator(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add the device's generator to the arguments of an op that draws random numbers."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "generator" and position >= len(args):
            if kwargs.get("generator") is not None:
                raise RuntimeError(f"Expected a '{DEVICE}' device type for generator but found 'cpu' (in {op})")
            return {**kwargs, "generator": _generator}
    return kwargs


def _fallback(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU kernel of the op on the same bytes."""
    aliases = _Aliases(op)
    calls[aliases.name] += 1
    if op._schema.name in _ALWAYS_TANH:
        kwargs["approximate"] = "tanh"
    if op._schema.name.startswith(
        ("aten::bitwise_", "aten::remainder")
    ):  # torch passes a number here, but the overload needs a tensor
        args = tuple(torch.tensor(arg) if isinstance(arg, int) else arg for arg in args)
    cpu_args = aliases.enter(args)
    cpu_kwargs = {name: aliases.enter(value) for name, value in _with_generator(op, args, kwargs).items()}
    aliases.check()
    with torch._C._AutoDispatchBelowAutograd():
        result = _computed(op, aliases.name, cpu_args, cpu_kwargs)
        aliases.take_over_resizes()
        return aliases.leave(result)


def _computed(op: torch._ops.OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the CPU kernel's result, without the defects of torch's CPU kernels (2.13) that a device does not have."""
    if name in _PRODUCTS and args[-1].dtype is torch.bfloat16:
        # oneDNN's product of an odd number of terms is NaN where one of them is infinite
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return op(*args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(enabled)
    if name == "_log_softmax" and args[0].shape[-1] > 2**16:  # it adds up a long row in few float32 sums
        wide = torch.log_softmax(args[0].double(), args[1])
        return kwargs["out"].copy_(wide) if "out" in kwargs else wide.to(args[0].dtype)
    return op(*args, **kwargs)


def _on_the_tensor_itself(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a kernel for a view op. It changes only sizes and strides, so the CPU kernel works on any device."""
    name = _name(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if name == "set" and isinstance(args[1], torch.UntypedStorage):
            args[1].__class__ = _DeviceStorage
        return op.redispatch(_CPU_KERNEL, *args, **kwargs)

    return kernel


def _poisoned(cpu: torch.Tensor) -> torch.Tensor:
    if cpu.is_floating_point():
        cpu.fill_(float("nan"))
    return to_device(cpu)


def _empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    calls["empty"] += 1
    plain = memory_format or torch.contiguous_format
    return _poisoned(torch.empty(size, dtype=dtype, device="cpu", memory_format=plain))


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    calls["empty_strided"] += 1
    return _poisoned(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    way = "copy_to_host" if not is_ours(target) else "copy_to_device" if not is_ours(source) else "copy"
    calls[way] += 1
    with torch._C._AutoDispatchBelowAutograd():
        (on_cpu(target) if is_ours(target) else target).copy_(on_cpu(source) if is_ours(source) else source)


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _copy(target, source)
    return target


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _copy(target, source)
    return target


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target.resize_(source.shape)
    _copy(target, source)
    return target


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    # The op has no generator argument: the CPU kernel would draw from the CPU's generator.
    calls["native_dropout"] += 1
    with torch._C._AutoDispatchBelowAutograd():
        values = on_cpu(x)
        keep = torch.ones(x.shape, dtype=torch.bool, device="cpu")
        if train is False:
            return to_device(values.clone()), to_device(keep)
        keep.bernoulli_(1 - p, generator=_generator)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return to_device(values * keep * scale), to_device(keep)


def _fused_sdp_choice(*args: Any, **kwargs: Any) -> int:
    return 0  # at::SDPBackend::math: scaled_dot_product_attention in plain ops


# torch.npu ---------------------------------------------------------------------------------------------------------


def memory_allocated(device: object = None) -> int:
    """Return the bytes of device memory in use."""
    return _in_use


def _max_memory_allocated(device: object = None) -> int:
    return _peak


def _reset_peak_memory_stats(device: object = None) -> None:
    global _peak
    _peak = _in_use


def _synchronize(device: object = None) -> None:
    calls["synchronize"] += 1


def _manual_seed(seed: int) -> None:
    _generator.manual_seed(seed)


def _get_rng_state(device: object = None) -> torch.Tensor:
    return _generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    _generator.set_state(new_state)


def _nothing(*args: object, **kwargs: object) -> None:
    pass


class _Stream:
    """The only stream. All work is finished when a call returns."""

    stream_id = 0
    synchronize = wait_stream = wait_event = record_event = staticmethod(_nothing)

    def query(self) -> bool:
        return True


def _device_module() -> types.ModuleType:
    module = types.ModuleType("torch.npu", "The part of torch_npu's torch.npu that the tests need.")
    names: dict[str, Any] = {
        "is_available": lambda: _present,
        "device_count": lambda: int(_present),
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "get_device_name": lambda device=None: "stand-in for an Ascend device",
        "device": lambda index=None: contextlib.nullcontext(),
        "synchronize": _synchronize,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream=None: contextlib.nullcontext(),
        "empty_cache": _nothing,
        "memory_allocated": memory_allocated,
        "max_memory_allocated": _max_memory_allocated,
        "reset_peak_memory_stats": _reset_peak_memory_stats,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "initial_seed": lambda: _generator.initial_seed(),
        "seed": lambda: _generator.seed(),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": _nothing,
        "_standin": sys.modules[__name__],  # for the fake torch_npu; independent of this module's import name
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _present

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """Make ``torch.npu.is_available()`` return False, as on a machine with torch_npu and without the hardware."""
    global _present
    before, _present = _present, False
    try:
        yield
    finally:
        _present = before


def _let_late_registration_run_backward() -> None:
    """Enable backward on the device in this thread, even if the autograd engine started before registration.

    The engine counts the devices at the first backward of the process. A device that is registered later has no thread,
    and backward raises an internal assertion. Without device threads, backward runs in the calling thread.
    """
    global registered_late
    one = torch.ones((), device=DEVICE, requires_grad=True)
    try:
        torch.autograd.grad(one * 1, one, torch.ones((), device=DEVICE))
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        registered_late = True
        torch.autograd.set_multithreading_enabled(False)
    reset()


def register() -> types.ModuleType:
    """Register the device, once per process, and return the module ``torch.npu``.

    Raises:
        RuntimeError: another backend uses PrivateUse1, or this file was imported under two names.
    """
    with _lock:
        if _libraries:
            return _module
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise RuntimeError(
                f"PrivateUse1 is in use as {taken!r}: by another backend, or by this file under another name."
            )
        backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=_module, hook=_Hooks())
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(_fallback, "PrivateUse1")
        # torch.autocast("npu") runs and casts nothing: torch_npu's lists of ops to cast are not implemented.
        autocast = torch.library.Library("_", "IMPL")
        autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        aten = torch.library.Library("aten", "IMPL")
        ops = torch.ops.aten
        for op in (
            ops.as_strided.default,
            ops.view.default,
            ops._reshape_alias.default,
            ops.unfold.default,
            ops.view_as_real.default,
            ops.view_as_complex.default,
            ops.set_.source_Storage,
            ops.set_.source_Storage_storage_offset,
            ops.set_.source_Tensor,
        ):
            aten.impl(op, _on_the_tensor_itself(op), "PrivateUse1")
        for name, kernel in {
            "empty.memory_format": _empty,
            "empty_strided": _empty_strided,
            "copy_": _copy_,
            "_copy_from": _copy_from,
            "_copy_from_and_resize": _copy_from_and_resize,
            "native_dropout": _native_dropout,
            "_fused_sdp_choice": _fused_sdp_choice,
        }.items():
            aten.impl(name, kernel, "PrivateUse1")
        torch.serialization.register_package(
            # Before torch's own function (priority 21 to 23), which would construct a plain storage.
            15,
            lambda storage: f"{DEVICE}:0" if storage.device.type == DEVICE else None,
            lambda storage, place: _device_storage(storage.clone()) if place.startswith(DEVICE) else None,
        )
        _libraries.extend((everything, autocast, aten))
        _let_late_registration_run_backward()
        return _module


_module = _device_module()
