"""ShapeTensor: a tensor with a shape and a dtype, and without numbers, on which a model runs in a plan.

Integers that a program makes stay real, so that masks, positions and lengths keep their values: a call with a
ShapeTensor among its arguments gives ShapeTensors, and a floating tensor that is made in a plan becomes one. So no
dispatch mode is in effect, and a model and its replacements take the branches that they take in a real run.
"""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from types import FrameType
from typing import Any, NamedTuple, Protocol, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from fusedops._torch import disabled_torch_function, share_storage, tree_map_only, wrapper_subclass
from fusedops.errors import InvalidInputError

MOST_KNOWN = 2**22  # elements of an integer tensor that is made for real in a plan
_aten: Any = torch.ops.aten
_CPU = torch.device("cpu")
_OUTERMOST = ("fusedops._plan.model", "fusedops._plan.plan")  # the modules that call the model


class Watcher(Protocol):
    """The recorder of a plan, to which a ShapeTensor reports the calls that reach torch, and what was assumed."""

    device_type: str
    tensors: list[ReferenceType[ShapeTensor]]

    def op_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nbytes: int) -> None:
        """Record a call of a registered op of fusedops."""

    def torch_call(self, name: str, kind: str, nbytes: int, products: int) -> None:
        """Record a call that torch computes."""

    def assume(self, text: str) -> None:
        """Record an assumption."""


class ShapeTensor(Tensor):
    """A tensor without numbers. For torch and the model's own code it is on the CPU, for ``is_cuda`` on the device.

    Attributes:
        on_meta: the tensor on the meta device that has its shape, dtype and strides.
        watcher: records what is called with it.
    """

    on_meta: Tensor
    watcher: Watcher
    has_no_numbers = True  # for code that takes plain tensors alone: it stands for one
    __torch_function__ = disabled_torch_function

    @staticmethod
    def of(on_meta: Tensor, watcher: Watcher) -> ShapeTensor:
        """Return a tensor with the shape, dtype and strides of one on the meta device."""
        shape, strides = tuple(on_meta.shape), on_meta.stride()
        # autograd needs a runtime of any device but the CPU
        made = wrapper_subclass(ShapeTensor, on_meta.dtype, _CPU, shape, strides, int(on_meta.storage_offset()))
        made.on_meta, made.watcher = on_meta, watcher
        watcher.tensors.append(ref(made))
        return made

    @property
    def is_cpu(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True in a plan for a CPU."""
        return self.watcher.device_type == "cpu"

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True in a plan for a GPU."""
        return self.watcher.device_type == "cuda"

    def data_ptr(self) -> int:
        """Return 0: there is no memory."""
        return 0

    def __format__(self, spec: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return format(self.item() if self.dim() == 0 else repr(self), spec if self.dim() == 0 else "")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"ShapeTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeTensor:
        made: Any = ShapeTensor.of(self.on_meta, self.watcher).requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the results' shapes, and record the call."""
        kwargs = kwargs or {}
        watcher = next(value.watcher for value in _tensors((args, kwargs)) if isinstance(value, ShapeTensor))
        facts = _facts(func)
        known = _VALUES.get(func)
        if known is not None:
            result = known(watcher, *args, **kwargs)
            if result is not NotImplemented:
                return result
        written: Any = None
        if facts.written is not None:  # after the arguments it is out=
            at, name = facts.written
            written = args[at] if at < len(args) else kwargs[name]
        if written is not None and not isinstance(written, ShapeTensor):
            if written.is_floating_point():
                raise InvalidInputError(
                    f"plan: got {facts.name} into a floating tensor that is no tensor of the plan, expected one that "
                    "the model makes while it runs; to fix: register it as a buffer of its module"
                )
            watcher.assume(f"{site()}: integers that {facts.name} changes by computed numbers are as before")
            return written
        given = tree_map_only(Tensor, _on_meta, (args, kwargs))
        if kwargs.get("device") is not None:
            given[1]["device"] = torch.device("meta")
        results = func(*given[0], **given[1])
        nbytes = sum(each.numel() * each.itemsize for each in _tensors((given, results)))
        if func.namespace == "fusedops":
            watcher.op_call(func, args, kwargs, nbytes)
        if facts.kind:
            count = flop_registry.get(func._overloadpacket)
            products = 0 if count is None else int(count(*given[0], **given[1], out_val=results)) // 2
            watcher.torch_call(facts.name, facts.kind, nbytes, products)
        if written is not None:
            return written
        made = tree_map_only(Tensor, lambda each: ShapeTensor.of(each, watcher), results)
        if facts.is_view:
            for each in _tensors(made):
                share_storage(each, args[0])
        return made


class _Facts(NamedTuple):
    """A function of torch: its name; "products", "attention", "other", or "" where it computes nothing; the index and
    the name of the argument that it writes and returns, or None; True for a view.
    """

    name: str
    kind: str
    written: tuple[int, str] | None
    is_view: bool


@cache
def _facts(func: Any) -> _Facts:
    name, schema = func._overloadpacket.__name__, func._schema
    arguments = enumerate(schema.arguments)
    writes = [(at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    returns = [each.alias_info for each in schema.returns if each.alias_info is not None]
    is_view = bool(returns) and not writes
    computes = not (is_view or name.startswith(("empty", "new_empty", "_local")) or func.namespace == "fusedops")
    kind = "other" if computes else ""
    if kind and (func._overloadpacket in flop_registry or name.endswith(("mm", "mv", "dot"))):
        kind = "products"
    if kind and "attention" in name:
        kind = "attention"
    return _Facts(name, kind, writes[0] if writes and returns else None, is_view)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested values."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in cast("list[Any]", values):
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors([*cast("dict[Any, Any]", values).values()])


def _on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShapeTensor):
        return tensor.on_meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# ------------------------------------------------------------------------------- functions whose results are numbers


def frames() -> Iterator[FrameType]:
    """Yield the frames of calls within a plan, newest first, without the reader's: its f_locals would have itself.

    Those of a plan's caller would keep what is read of them.
    """
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__") not in _OUTERMOST:
        yield frame
        frame = frame.f_back


def site() -> str:
    """Return the place in a program that called torch: the class of the module and the function, and its line."""
    for frame in frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "fusedops"):
            owner = frame.f_locals.get("self")
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            return f"{f'{type(owner).__name__}.' if owner is not None else ''}{frame.f_code.co_name}, `{text}`"
    return "a call"


def _number(watcher: Watcher, tensor: Any) -> Any:
    value = False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0
    watcher.assume(f"{site()}: a computed number is {value}")
    return value


def _middle(watcher: Watcher, tensor: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the largest, as the token that is generated: the middle one, seldom a special one."""
    index = (tensor.numel() if dim is None else tensor.shape[dim]) // 2
    watcher.assume(f"{site()}: the index of the largest is {index}")
    return torch.full(torch.argmax(_on_meta(tensor), dim, keepdim).shape, index)


def _nonzero(watcher: Watcher, tensor: Tensor) -> Tensor:
    watcher.assume(f"{site()}: each of {tensor.numel():,} elements is taken")
    return torch.ones(tuple(tensor.shape), dtype=torch.bool).nonzero()


def _index(watcher: Watcher, tensor: Tensor, indices: list[Tensor | None]) -> Any:
    """Index by numbers in place of booleans, whose number of rows torch would have to count."""
    if not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices):
        return NotImplemented
    numbers: list[Tensor | None] = []
    for each in indices:
        if each is None or each.dtype not in (torch.bool, torch.uint8):
            numbers.append(each)
        else:
            rows = _nonzero(watcher, each) if isinstance(each, ShapeTensor) else each.nonzero()
            numbers += rows.unbind(-1)
    if not isinstance(tensor, ShapeTensor):
        return tensor[tuple(slice(None) if each is None else each for each in numbers)]
    return _aten.index.Tensor(tensor, numbers)


def _masked_select(watcher: Watcher, tensor: Tensor, mask: Tensor) -> Any:
    whole: list[Tensor] = [*torch.broadcast_tensors(tensor, mask)]
    return _index(watcher, whole[0], [whole[1]])


def _compared(watcher: Watcher, *args: Any, **kwargs: Any) -> bool:
    watcher.assume(f"{site()}: computed numbers are not equal")
    return False


def _bincount(watcher: Watcher, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength:
        watcher.assume(f"{site()}: the largest of {tensor.numel():,} numbers is {tensor.numel()}")
    size, like = minlength or tensor.numel() + 1, tensor if weights is None else weights
    return ShapeTensor.of(torch.empty(size, dtype=like.dtype, device="meta"), watcher)


def _repeat(watcher: Watcher, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    size = len(repeats) if output_size is None else output_size
    watcher.assume(f"{site()}: {len(repeats)} computed repeats are {size} in sum")
    return torch.arange(size) % max(len(repeats), 1)


_VALUES: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _number,
    _aten.allclose.default: _compared,
    _aten.argmax.default: _middle,
    _aten.bincount.default: _bincount,
    _aten.equal.default: _compared,
    _aten.nonzero.default: _nonzero,
    _aten.index.Tensor: _index,
    _aten.masked_select.default: _masked_select,
    _aten.repeat_interleave.Tensor: _repeat,
}


#: Functions that make a tensor of any size from none: run for their shape first.
_OF_SIZES = {
    torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand,
    torch.randint, torch.randn, torch.zeros,
}  # fmt: skip


class MakesShapeTensors(TorchFunctionMode):
    """A block in which the floating tensors that a program makes are ShapeTensors.

    One number that is not computed from a ShapeTensor, as by torch.tensor(0.5), stays real.

    Args:
        watcher: of the tensors.
    """

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if str(kwargs.get("device")) == "meta":  # of a plan itself
            return func(*args, **kwargs)
        if func in _OF_SIZES:
            shape = func(*args, **{**kwargs, "device": "meta"})
            if shape.is_floating_point() or shape.numel() > MOST_KNOWN:
                made = ShapeTensor.of(shape.detach(), self._watcher)
                return made.requires_grad_() if kwargs.get("requires_grad") else made
        elif func is Tensor.tolist and isinstance(args[0], ShapeTensor):
            self._watcher.assume(f"{site()}: {args[0].numel()} computed numbers are 0")
            zeros: Any = torch.zeros(tuple(args[0].shape), dtype=args[0].dtype)
            return zeros.tolist()
        return self._made(func(*args, **kwargs))

    def _made(self, result: Any) -> Any:
        """Return a result whose floating tensors have no numbers."""
        if type(result) is Tensor and result.is_floating_point() and result.numel() > 1:
            return ShapeTensor.of(_on_meta(result), self._watcher)
        if type(result) is tuple:
            return tuple(map(self._made, cast("tuple[Any, ...]", result)))
        return result


def forget_cached() -> None:
    """Clear each functools.lru_cache with a ShapeTensor, such as one for positions: a real call would get it."""
    for cached in [*_caches()]:
        if any(isinstance(each, ShapeTensor) for value in gc.get_referents(cached) for each in _tensors(value)):
            cached.cache_clear()


def _caches() -> Iterator[Any]:
    yield from (each for each in gc.get_objects() if type(each) is _lru_cache)
    if gc.get_freeze_count():  # gc does not list what it has frozen
        found: dict[int, Any] = {}  # by id: many modules have a name for one class
        for module in [*sys.modules.values()]:
            for value in [*getattr(module, "__dict__", {}).values()]:
                # by the type alone: no __class__ is asked
                if type(value) is _lru_cache or issubclass(type(value), type):
                    found[id(value)] = value
        for value in found.values():
            members = () if type(value) is _lru_cache else [*cast("Any", vars)(value).values()]
            yield from (each for each in (value, *members) if type(each) is _lru_cache)


_lru_cache: Any = type(lru_cache(len))


def kept_tensors(watcher: Watcher) -> int:
    """Return how many tensors of a plan that is over others hold, without those in a cache, which is cleared."""

    def kept() -> int:
        return sum(each() is not None for each in watcher.tensors)

    # a module and its hooks refer to each other; to look into every cache takes longer than to collect them
    for free in (gc.collect, forget_cached, gc.collect):
        if kept():
            free()
    return kept()
