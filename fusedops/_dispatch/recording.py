"""A run of a function whose calls are made again without its Python: for other numbers in the same tensors.

What the function computes goes through torch's dispatcher, or is an op of fusedops: each such call is kept with its
tensors, and all of them with the recording, so that no other tensor gets their memory. Views and new tensors without
values need not be made again. What Python computes from numbers, such as a position, stays as it was: whoever records
has to compare a later run with the function's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.kernel import Replay
from fusedops._dispatch.registered.implementations import ForwardImpl
from fusedops._dispatch.serve import plan_for, select
from fusedops._plugins.registry import registry
from fusedops._torch import TorchDispatchMode, TorchFunctionMode, without_torch_function_modes

_OF_PYTHON = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READERS: set[Any] = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

Step = Callable[[], object]


class _Readers(TorchFunctionMode):
    """Sees the functions by which Python reads the memory of a tensor, of which the dispatcher hears nothing."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call."""
        if func in _READERS:
            self._refuse(f"its Python reads the values of a tensor ({func.__name__})")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records the calls in its block.

    Attributes:
        reason: why the run cannot be made again, or an empty text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self._functions: dict[str, Any] = {}  # of torch, by the backends that serve calls of the run
        self._calls: list[Replay | Step] = []
        self._counts: list[Iterator[int]] = []
        self._kept: list[Any] = []
        self._readers = _Readers(self._refuse)

    def __enter__(self) -> Recorder:
        """Begin the run."""
        self._readers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the run."""
        super().__exit__(*error)
        self._readers.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call, and keep what makes it again."""
        with without_torch_function_modes():  # a kernel may read what it checks
            return self._made(func, args, kwargs or {})

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "fusedops":
            return self._op(name, func, args, kwargs)
        recorded = self._functions[str(func)](*args, **kwargs) if str(func) in self._functions else None
        if recorded is not None:
            self._calls.append(recorded[1] or _again(func, args, kwargs, recorded[0]))
            self._kept.append((args, recorded[0]))
            return recorded[0]
        results = func(*args, **kwargs)
        self._kept.append((args, kwargs, results))
        alias = [each.alias_info for each in func._schema.returns]
        if name in _ALLOCATIONS or any(each is not None and not each.is_write for each in alias):
            return results
        if not _OF_PYTHON.isdisjoint(func.tags) and not _is_plain_index(name, args):
            self._refuse(f"its Python reads the values of a tensor ({name})")
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(f"it draws random numbers ({name})")
        else:
            self._calls.append(_again(func, args, kwargs, results))
        return results

    def _op(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        op = registry.ops.get(name)
        if op is None or kwargs.get("save"):
            self._refuse(f"it computes gradients ({name})")
            return func(*args, **kwargs)
        impl = ForwardImpl(op)
        args = impl.complete_arguments(args)
        kernel = select(plan_for(op, args[0], kwargs.get("backend")), args)
        given = (*args, False) if op.saved else args
        record, run = kernel.record, kernel.counted()
        results, call = (run(*given), None) if record is None else record(kernel.kernel.function, *given)
        call = call or partial(_copied, results, kernel.call, given, {})
        if (served := registry.find(kernel.backend)) and served.backend:
            self._functions.update(served.backend.records)
        self._counts.append(kernel.count)
        self._calls.append(call)
        self._kept.append((given, results))
        if op.written:
            op.count_writes(args)
            return None
        return impl.as_registered(op.outputs_of(results), args)

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def recording(self) -> Recording:
        """Return what makes the calls again."""
        return Recording(self._calls, self._counts, self._kept)


class Recording:
    """The calls of a run.

    Args:
        calls: in order.
        counts: of the kernels, one for each call of an op.
        kept: every tensor of the run.
    """

    def __init__(self, calls: Sequence[Replay | Step], counts: Sequence[Iterator[int]], kept: Sequence[Any]) -> None:
        self._steps: list[Step] = []
        self._kinds: list[type[Replay]] = []
        for kind, group in groupby(calls, lambda each: type(each) if isinstance(each, Replay) else None):
            if kind is None:
                self._steps.extend(cast("Iterator[Step]", group))
            else:
                self._steps.append(kind.joined([*cast("Iterator[Replay]", group)]))
                if kind not in self._kinds:
                    self._kinds.append(kind)
        self._counts, self._kept = tuple(counts), kept

    def run(self) -> None:
        """Make the calls again. The tensors that the function got and returned have the new values."""
        begun = [kind for kind in self._kinds if kind.begin()]
        try:
            for step in self._steps:
                step()
        finally:
            for kind in begun:
                kind.end()
        for count in self._counts:
            next(count)


def _is_plain_index(name: str, args: Any) -> bool:
    """Return True for an indexing by integers, whose result has the shape of these."""
    return name == "index" and not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _again(func: Any, args: Any, kwargs: Any, results: Any) -> Step:
    """Return a function that makes a call of torch again, into the same results."""
    if func._schema.is_mutable:
        return partial(func, *args, **kwargs)
    out = _out_of(func) if type(results) is Tensor else None
    if out is not None:
        return partial(out, *args, **kwargs, out=results)
    return partial(_copied, results, func, args, kwargs)


def _out_of(func: Any) -> Any:
    """Return the overload of a function of torch that writes its result into a tensor, or None."""
    other = getattr(func.overloadpacket, "out", None)
    if other is None:
        return None
    own = [(each.name, str(each.type)) for each in func._schema.arguments]
    return (
        other if [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out] == own else None
    )


def _copied(results: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Call a function, and copy what it returns into the results of its first call."""
    new = function(*args, **kwargs)
    for old, each in zip(_tensors(results), _tensors(new)):
        if old is not each:
            old.copy_(each)


def _tensors(results: Any) -> list[Tensor]:
    several = cast("Sequence[Any]", results if isinstance(results, (tuple, list)) else (results,))
    return [each for each in several if isinstance(each, Tensor)]
