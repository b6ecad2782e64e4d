"""Which policy is in force: that of the process, and of the ``with use(...)`` blocks around a call."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fusedops._policy import Adapt, Fallback, Layer, Policy, check_text, parse, unknown_name
from fusedops._registry import registry
from fusedops.errors import FusedOpsWarning

if TYPE_CHECKING:
    from fusedops._verify import verify

F = TypeVar("F", bound=Callable[..., Any])

VARIABLES = (
    "FUSEDOPS_ADAPT",
    "FUSEDOPS_AUTOTUNE",
    "FUSEDOPS_BACKEND",
    "FUSEDOPS_FALLBACK",
    "FUSEDOPS_PLUGINS",
    "FUSEDOPS_STATS",
)


class Frame:
    """One ``with use(...)``: its layers, the frame around it, and the policy they make together with the process's.

    Where ``whole``, the layers are a policy by themselves, whatever is in force around them. One ``with verify(...)``
    is a frame too, with no layers.
    """

    __slots__ = ("_base", "_policy", "layers", "outer", "verifier", "whole")

    def __init__(
        self, layers: tuple[Layer, ...], outer: Frame | None, whole: bool, verifier: verify | None = None
    ) -> None:
        self.layers, self.outer, self.whole, self.verifier = layers, outer, whole, verifier
        self._base: Policy | None = None
        self._policy = Policy()

    def policy(self) -> Policy:
        """The policy in force; made anew when the process's has changed, so that set_policy inside a block is seen."""
        base = process or process_policy()
        if self._base is not base:
            around = None if self.whole else self.outer.policy() if self.outer else base
            self._policy, self._base = _interned(around, self.layers, self.verifier), base
        return self._policy


frame: ContextVar[Frame | None] = ContextVar("fusedops_use", default=None)
process: Policy | None = None
_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked child: a lock that another thread of the parent held would never be released."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def within(inside: Frame | None) -> Generator[None]:
    """A block under the policy of another place, whose ``frame.get()`` gave ``inside``."""
    token = frame.set(inside)
    try:
        yield
    finally:
        frame.reset(token)


@functools.lru_cache(maxsize=256)  # entering `with use("eager")` in a loop must not make plans anew each time
def _interned(base: Policy | None, layers: tuple[Layer, ...], verifier: verify | None) -> Policy:
    if base is None:
        return Policy(layers, verifier=verifier)
    return Policy((*layers, *base.layers), verifier=verifier or base.verifier)


def with_argument(base: Policy, text: str) -> Policy:
    """The policy of a call with ``backend=text``."""
    check_text(text, "backend=")  # first: the cache would ask a list for its hash
    return _with_argument(base, text)


@functools.lru_cache(maxsize=256)
def _with_argument(base: Policy, text: str) -> Policy:
    return base.under(parse(text, "backend="))


def process_policy() -> Policy:
    """The policy of set_policy and the environment. The environment is read here, on first need."""
    global process
    if process is None and os.environ.get("FUSEDOPS_BACKEND"):
        registry.records()  # before the lock: a plugin that asks for the policy while it is imported may wait for that
    with _lock:
        if process is None:
            process = Policy(_environment())
        return process


def unknown_variables() -> dict[str, str]:
    """The environment's FUSEDOPS_ variables that mean nothing, each with a sentence."""
    unknown = [name for name in sorted(os.environ) if name.startswith("FUSEDOPS_") and name not in VARIABLES]
    return {name: unknown_name("FUSEDOPS variable", name, VARIABLES, 0.75) for name in unknown}  # all begin alike


def _environment() -> tuple[Layer, ...]:
    for message in unknown_variables().values():
        warnings.warn(f"{message}; it has no effect", FusedOpsWarning, stacklevel=2)
    text = os.environ.get("FUSEDOPS_BACKEND", "").strip()
    fallback = os.environ.get("FUSEDOPS_FALLBACK", "").strip()
    adapt = os.environ.get("FUSEDOPS_ADAPT", "").strip()
    layers = [parse(text, "FUSEDOPS_BACKEND")] if text else []
    layers += [parse("", "FUSEDOPS_FALLBACK", fallback)] if fallback else []
    layers += [parse("", "FUSEDOPS_ADAPT", adapt=adapt)] if adapt else []
    return tuple(layers)


def forget() -> None:
    """Drops every plan and interned policy: the backends have changed. The process's own policy keeps its texts."""
    global process
    with _lock:
        if process is not None:
            process = Policy(process.layers)
        _interned.cache_clear()
        _with_argument.cache_clear()


registry.on_change.append(forget)


def get_policy() -> Policy:
    """The policy in force here: each channel that spoke, the innermost first."""
    here = frame.get()
    return here.policy() if here else process_policy()


def set_policy(policy: str | None = None, *, fallback: Fallback | None = None, adapt: Adapt | None = None) -> None:
    """Sets the policy of the whole process, for every thread.

    Args:
        policy: such as "npu,triton; scaled_masked_softmax=eager". None: back to the environment, read again.
        fallback: what happens when the preferred backend does not take a call: "warn" (once per reason), "silent" or
            "raise".
        adapt: "pad" lets a call that a backend refuses for a size that is no multiple be padded, and its result
            cropped; "none" does not. What is free is done without being asked.

    Raises:
        PolicyError: an unknown backend, op, fallback level or adapt setting.
    """
    global process
    layers = _environment()
    if policy is not None or fallback is not None or adapt is not None:
        layers = (parse(policy or "", "set_policy()", fallback, adapt), *layers)
    with _lock:
        process = Policy(layers)
        _interned.cache_clear()
        _with_argument.cache_clear()


class use:
    """A policy for a block of code, in this thread or task: ``with fusedops.use("eager"): ...``, also as a decorator.

    Args:
        policy: such as "npu,triton; scaled_masked_softmax=eager". None: only what else is given changes. A Policy, as
            :func:`get_policy` returns it: that one, whatever is in force around the block; it carries a policy to
            another thread, or to what runs later, as a checkpoint's recomputation does.
        fallback: "warn", "silent" or "raise"; None leaves it.
        adapt: "none" or "pad", as in :func:`set_policy`; None leaves it.

    Raises:
        PolicyError: an unknown backend, op, fallback level or adapt setting.
    """

    def __init__(
        self,
        policy: str | Policy | None = None,
        *,
        fallback: Fallback | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        self._whole = isinstance(policy, Policy)
        self._layers, self._verifier = (policy.layers, policy.verifier) if isinstance(policy, Policy) else ((), None)
        if not self._whole or fallback is not None or adapt is not None:
            text = "" if policy is None or isinstance(policy, Policy) else policy
            self._layers = (parse(text, "use()", fallback, adapt), *self._layers)

    def __enter__(self) -> Policy:
        inside = Frame(self._layers, frame.get(), self._whole, self._verifier)
        frame.set(inside)
        return inside.policy()

    def __exit__(self, *exc: object) -> None:
        inside = frame.get()
        assert inside is not None, "use() left in another context than it was entered"
        frame.set(inside.outer)

    def __call__(self, function: F) -> F:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"use() cannot decorate {function.__name__}, a generator: its body runs after the call; put "
                f"`with fusedops.use(...)` around the calls in it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def later(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("F", later)

        @functools.wraps(function)
        def now(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", now)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Lets the recomputation of an activation checkpoint choose by the policy that forward had.

    ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=fusedops.checkpoint_contexts)``: torch
    recomputes when backward runs, when a ``with use(...)`` around forward may have ended, and for CUDA tensors on a
    thread of its own, where no :func:`use` reaches. A reentrant checkpoint takes no ``context_fn``: there, checkpoint
    ``fusedops.use(fusedops.get_policy())(block)``.

    Returns:
        A context manager for forward, which changes nothing, and one for the recomputation.
    """
    return nullcontext(), use(get_policy())
