"""The public functions that set a policy: use, set_policy, checkpoint_contexts."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from fusedops._policy import context
from fusedops._policy.context import ActivePolicy
from fusedops._policy.policy import Adapt, Fallback, Policy, RowsSetting, parse

F = TypeVar("F", bound=Callable[..., Any])


def set_policy(
    policy: str | None = None,
    *,
    fallback: Fallback | None = None,
    adapt: Adapt | None = None,
    rows: RowsSetting | None = None,
) -> None:
    """Set the policy of the whole process, for every thread.

    Args:
        policy: such as "npu,triton; scaled_masked_softmax=eager". None: back to the environment, read again.
        fallback: what happens when the preferred backend does not take a call: "warn" (once per reason), "silent" or
            "raise".
        adapt: "pad" allows padding a call that a backend refuses because a size is not a multiple, and cropping its
            result; "none" does not. Adaptations that cost nothing are always allowed.
        rows: "independent" allows only kernels that promise that a row of a result has the same bits whatever the other
            rows are; "any" allows all.

    Raises:
        PolicyError: an unknown backend, op, fallback level, adapt or rows setting.

    >>> import fusedops
    >>> fusedops.set_policy("eager", fallback="raise")
    >>> print(fusedops.get_policy())
    set_policy(): "eager"; fallback raise (from set_policy())
    >>> fusedops.set_policy()
    """
    is_set = any(setting is not None for setting in (policy, fallback, adapt, rows))
    sources = (parse("" if policy is None else policy, "set_policy()", fallback, adapt, rows),) if is_set else ()
    context.set_process_policy(sources)


class use:
    """Apply a policy to a block of code, in this thread or task: ``with fusedops.use("eager"): ...``. Also a decorator.

    Args:
        policy: such as "npu,triton; scaled_masked_softmax=eager". None: only the other settings change. A Policy, as
            :func:`fusedops.get_policy` returns it: exactly that one, whatever is in effect around the block. It carries
            a policy to another thread, or to code that runs later, such as a checkpoint's recomputation.
        fallback: "warn", "silent" or "raise"; None leaves it.
        adapt: "none" or "pad", as in :func:`fusedops.set_policy`; None leaves it.
        rows: "any" or "independent", as in :func:`fusedops.set_policy`; None leaves it.

    Raises:
        PolicyError: an unknown backend, op, fallback level, adapt or rows setting; or, at the end of the block, another
            block inside it has not ended (that one stays in effect).

    >>> import torch, fusedops
    >>> with fusedops.use("eager"):
    ...     fusedops.bias_gelu(torch.zeros(2))
    tensor([0., 0.])
    """

    def __init__(
        self,
        policy: str | Policy | None = None,
        *,
        fallback: Fallback | None = None,
        adapt: Adapt | None = None,
        rows: RowsSetting | None = None,
    ) -> None:
        self._policy = policy if isinstance(policy, Policy) else None
        self._sources = ()
        if self._policy is None or fallback is not None or adapt is not None or rows is not None:
            text = "" if policy is None or isinstance(policy, Policy) else policy
            self._sources = (parse(text, "use()", fallback, adapt, rows),)
        self._location = "compiled code"
        if not is_dynamo_compiling():  # which cannot trace _getframe
            caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            self._location = f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def _derive(self, outer: ActivePolicy) -> ActivePolicy:
        base = outer if self._policy is None else outer.replaced_by(self._policy)
        return base.with_sources(self._sources) if self._sources else base

    def __enter__(self) -> Policy:
        return context.enter(self, self._derive).policy

    def __exit__(self, *exc: object) -> None:
        context.leave(self)

    def __repr__(self) -> str:
        text = str(self._policy) if self._policy else ", ".join(source.text for source in self._sources)
        return f"use({text!r}) of {self._location}"

    def _copy(self) -> use:
        """Return a new object with the same settings: a decorated function may run in several threads at a time."""
        copied = object.__new__(use)
        copied.__dict__.update(self.__dict__)
        return copied

    def __call__(self, function: F) -> F:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"use(): got {function.__name__}, a generator, whose body runs after the call, expected a function; to "
                f"fix: put `with fusedops.use(...)` around the calls in it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_later(*args: Any, **kwargs: Any) -> Any:
                with self._copy():
                    return await function(*args, **kwargs)

            return cast("F", run_later)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._copy():
                return function(*args, **kwargs)

        return cast("F", run)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts with which an activation checkpoint recomputes under the policy that forward had.

    ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=fusedops.checkpoint_contexts)``: torch
    recomputes when backward runs, when a ``with use(...)`` around forward may have ended, and for CUDA tensors on
    another thread, where no :func:`use` is in effect. A reentrant checkpoint takes no ``context_fn``: checkpoint
    ``fusedops.use(fusedops.get_policy())(block)`` there.

    Returns:
        A context manager for forward, which changes nothing, and one for the recomputation.

    >>> import torch, fusedops
    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.zeros(2, requires_grad=True)
    >>> y = checkpoint(fusedops.bias_gelu, x, use_reentrant=False, context_fn=fusedops.checkpoint_contexts)
    >>> y.sum().backward(); x.grad
    tensor([0.5000, 0.5000])
    """
    return nullcontext(), use(context.get_policy())
