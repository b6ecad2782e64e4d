"""Record: one backend as the registry holds it, and its kernels prepared for calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import count
from typing import Any, Literal

from torch.autograd.profiler import record_function

from fusedops._contract.backend import Backend, Unavailable
from fusedops._contract.constraint import Constraint, compile_check
from fusedops._contract.kernel import Kernel, NamedKernels, ops_of
from fusedops._contract.op import Op
from fusedops._plugins.validation import check_kernels
from fusedops._report.direction import Direction, call_name
from fusedops._report.foreign_text import error_text, printable
from fusedops._report.reason import Reason, ReasonCode
from fusedops._storages import with_check
from fusedops._torch import profiler
from fusedops.errors import PluginError


class _Thread(threading.local):
    """The state of one thread.

    Attributes:
        probing: the name of the backend whose probe this thread is running, or None.
    """

    probing: str | None = None


_thread = _Thread()
_LONGEST = 1000  # characters of a probe's reason and of its fix
State = Literal["ready", "unavailable", "failed"]


class PreparedKernel:
    """A kernel prepared for calls: its compiled check, its function, and a count of its calls.

    Attributes:
        backend: the backend's name.
        op: the op.
        kernel: the kernel as declared.
        check: decides admission: a function of the arguments that returns the violated constraint, or None where the
            kernel takes them.
        unconditional: True where the kernel has no constraints.
        function: the function as declared, which checks first that its tensors have memory.
        call: the function that computes. Padding and verify replace it in a copy.
        count: one ``next`` for each call; a plan's copy shares it with :func:`fusedops.stats`.
        record: of the kernel; None in a copy that calls another function.
        first_use: called by the first call, which then sets it to None; set in a plan's copy.
    """

    __slots__ = (
        "_for_rows",
        "backend",
        "call",
        "check",
        "count",
        "first_use",
        "function",
        "kernel",
        "op",
        "record",
        "unconditional",
    )

    def __init__(self, backend: str, kernel: Kernel, op: Op) -> None:
        self.backend = backend
        self.op = op
        self.kernel = kernel
        if not all(map(_compiles, kernel.constraints)):
            self.check = self._compiled_check()
        self.unconditional = not kernel.constraints
        types = op.types if kernel.direction == "forward" else op.backward_types
        self.function = with_check(kernel.function, call_name(op.name, kernel.direction), types)
        self.call = self.function
        self.record = kernel.record
        self.count: Iterator[int] = count()
        self.first_use: Callable[[], None] | None = None
        self._for_rows: PreparedKernel | None = None

    def __getattr__(self, name: str) -> Any:
        """Compile the check where it is first read."""
        if name != "check":
            raise AttributeError(name)
        self.check = self._compiled_check()
        return self.check

    def _compiled_check(self) -> Callable[..., Constraint | None]:
        kernel, op = self.kernel, self.op
        return compile_check(
            op.parameters_of(kernel.direction),
            kernel.constraints,
            f"constraints of {self.backend}'s {op.name} {kernel.direction}",
            op.required_tensors if kernel.direction == "forward" else (),
        )

    def for_independent_rows(self) -> PreparedKernel:
        """Return the kernel as a policy with independent rows calls it: one object for all plans."""
        kernel = self.kernel.for_independent_rows()
        if kernel is self.kernel:
            return self
        if self._for_rows is None:
            self._for_rows = PreparedKernel(self.backend, kernel, self.op)
        prepared = self._for_rows
        if self.kernel.for_rows is None:
            prepared.call = self.call
        elif self.call is not self.function and prepared.call is prepared.function:
            prepared.make_ready()
        return prepared

    def counted(self) -> Callable[..., Any]:
        """Count a call, and return the function that computes it: in a range where a profiler is active."""
        next(self.count)
        first_use = self.first_use
        if first_use is not None:
            self.first_use = None
            first_use()
        if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
            return self.in_profiler_range().call
        return self.call

    def run(self, args: tuple[Any, ...]) -> Any:
        """Count a call, and compute it."""
        return self.counted()(*args)

    def make_ready(self) -> None:
        """Let the backend prepare the function, after its probe."""
        if self.kernel.prepare is not None:
            self.call = self.kernel.prepare(self.function)

    def with_call(self, call: Callable[..., Any]) -> PreparedKernel:
        """Return a copy that calls another function."""
        changed = copy(self)
        changed.call, changed.record = call, None
        return changed

    def in_profiler_range(self) -> PreparedKernel:
        """Return a copy whose calls are ranges of torch.profiler, named ``fusedops::<op>[<backend>]``."""
        suffix = "" if self.kernel.direction == "forward" else "_backward"
        return self.with_call(partial(_in_range, f"fusedops::{self.kernel.op}{suffix}[{self.backend}]", self.call))


def _compiles(constraint: Constraint) -> bool:
    """Return True for a constraint of fusedops, whose check is compiled when it is first needed."""
    if not type(constraint).__module__.startswith("fusedops."):
        return False
    return all(_compiles(each) for each in vars(constraint).values() if isinstance(each, Constraint))


def _in_range(name: str, call: Callable[..., Any], *args: Any) -> Any:
    with record_function(name):
        return call(*args)


class Record:
    """One backend as the registry holds it: loaded, or failed with its error.

    Args:
        name: as policies use it.
        backend: None where the plugin failed to load, or is not allowed to.
        error: why it failed, or None.
        unavailable: why it cannot run here, or None.
        distribution: the installed package that it comes from.
        version: the distribution's version.
        file: the file of its module.
        observe: its observing hook, or None.
        ops: the names of the ops that the plugin brings.
    """

    def __init__(
        self,
        name: str,
        backend: Backend | None = None,
        error: BaseException | None = None,
        unavailable: Unavailable | None = None,
        distribution: str = "",
        version: str = "",
        file: str = "",
        observe: Callable[..., Any] | None = None,
        ops: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.backend = backend
        self.error = error
        self.unavailable = unavailable
        self.distribution = distribution
        self.version = version
        self.file = file
        self.observe = observe
        self.ops = ops
        self._ops: Mapping[str, Op] = {}
        self._prepared: dict[str, tuple[PreparedKernel, ...]] = {}  # by op
        self.lock = threading.RLock()
        self._probed = False
        self._probing = False

    @property
    def has_only_ops(self) -> bool:
        """True for a plugin that brings ops and no backend."""
        return self.backend is None and bool(self.ops) and self.error is None

    @property
    def is_empty(self) -> bool:
        """True for a plugin that has nothing left after its ops are removed."""
        return self.backend is None and self.error is None and self.unavailable is None and not self.ops

    def without_ops(self, names: Set[str]) -> Record:
        """Return this record, or a copy without these ops where its plugin brings one of them."""
        if names.isdisjoint(self.ops):
            return self
        changed = copy(self)
        changed.ops = tuple(op for op in self.ops if op not in names)
        return changed

    def prepare(self, ops: Mapping[str, Op]) -> None:
        """Prepare the kernels; those that are named as text when they are first needed.

        A constraint that cannot be compiled is the plugin's failure, not a call's.
        """
        self._ops = ops
        if self.backend is not None and not isinstance(self.backend.kernels, NamedKernels):
            for item in self.backend.kernels:
                self._prepared[item.op] = (*self._prepared.get(item.op, ()), self._prepare(item))

    def _prepare(self, kernel: Kernel) -> PreparedKernel:
        return PreparedKernel(self.name, kernel, self._ops[kernel.op])

    @property
    def kernels(self) -> tuple[PreparedKernel, ...]:
        """All kernels; those that are named as text are imported now."""
        names: tuple[str, ...] = ()
        with self._failing():
            names = ops_of(self.backend.kernels) if self.backend else ()
        found = [item for name in names for item in self._of(name)]
        return tuple(found) if self.backend else ()

    def _of(self, op: str) -> tuple[PreparedKernel, ...]:
        """Return the kernels of an op, those that are named as text imported now."""
        backend = self.backend
        kernels = backend.kernels if backend else ()
        if backend and isinstance(kernels, NamedKernels) and op not in self._prepared and op in self._ops:
            with self._failing():
                found = kernels.of(op)  # not under the lock: an import may wait for one of another thread
                check_kernels(backend, found, self._ops)
                prepared = tuple(map(self._prepare, found))
                with self.lock:
                    if op not in self._prepared:
                        for kernel in prepared if self._probed and not self.error and not self.unavailable else ():
                            kernel.make_ready()
                        self._prepared[op] = prepared
        return self._prepared.get(op, ())

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Fail the backend where its named kernels cannot be imported or do not fit."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.error, self.backend = failure_of(self.name, error), None

    def kernel(self, op: str, direction: Direction, device_type: str) -> PreparedKernel | None:
        """Return the kernel for an op and direction on a device type, or None."""
        if self.backend is None or not self.backend.serves(device_type):
            return None
        matching = (item for item in self._of(op) if item.kernel.direction == direction)
        return next((item for item in matching if item.kernel.serves(device_type)), None)

    def probe(self) -> None:
        """Run the backend's probe, once. If it raises, the backend has failed.

        Raises:
            PluginError: this thread is running a probe, and needs a backend whose probe has not returned.
        """
        if self._probed:
            return
        if _thread.probing is not None and self._probing:
            raise PluginError(
                f"backend {_thread.probing!r}: got a call in its probe that needs backend {self.name!r}, whose probe "
                f"has not returned, expected none; to fix: call the vendor's library or torch in it, not an op"
            )
        with self.lock:
            if self._probed or self.backend is None or self.unavailable is not None:
                return
            outer, _thread.probing, self._probing = _thread.probing, self.name, True
            try:
                result = self.backend.probe()
                problem = _problem_of(result)
                if problem:
                    raise TypeError(problem)
                self.unavailable = result
                for kernels in self._prepared.values() if result is None else ():
                    for kernel in kernels:
                        kernel.make_ready()
            except KeyboardInterrupt:
                raise
            # a plugin's probe must not end the program, not by sys.exit() either; the error is kept and shown
            except BaseException as error:
                self.error = PluginError(f"backend {self.name!r}: its probe raised {error_text(error)}")
                self.error.__cause__ = error
            finally:
                _thread.probing, self._probing = outer, False
            self._probed = True

    def refusal(self) -> Reason | None:
        """Return why this backend serves no call on this machine, or None. Probes."""
        self.probe()
        if self.error is not None:
            why = error_text(self.error)
            remove = f"uninstall {self.distribution}" if self.version else f"call fusedops.unregister({self.name!r})"
            fix = f"correct {self.name}, or {remove}; fusedops.backends() shows the traceback"
            return Reason(ReasonCode.FAILED, why, "a plugin that loads", fix, f"failed: {why}")
        if self.unavailable is not None:
            why, fix = printable(self.unavailable.why, _LONGEST), printable(self.unavailable.fix, _LONGEST)
            needed = self.backend.needs if self.backend and self.backend.needs else "an installation that runs here"
            return Reason(ReasonCode.UNAVAILABLE, why, needed, fix, f"unavailable: {why}")
        return None


def _problem_of(result: Any) -> str:
    """Return what is wrong with a probe's result, or an empty text."""
    if result is None:
        return ""
    if isinstance(result, Unavailable):
        texts: tuple[Any, ...] = (result.why, result.fix)
        if all(isinstance(text, str) and text for text in texts):
            return ""
    return f"the probe returned {result!r}, expected None or Unavailable(why, fix)"


def failure_of(name: str, error: BaseException) -> Exception:
    """Return the error that a plugin's import raised, to keep and to show.

    One that is no Exception is that of a sys.exit() in the import, or of an exception class of the plugin's own.
    """
    if isinstance(error, Exception):
        return error
    failure = PluginError(
        f"backend {name!r}: got {error_text(error)} from its import, expected an import that succeeds or raises an "
        f"Exception; to fix: correct the import"
    )
    failure.__cause__ = error
    return failure
