"""The policy in effect: of the process, and of the ``with use(...)`` blocks around a call."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

from fusedops._plugins.registry import registry
from fusedops._policy.policy import Policy, PolicySource, check_text, parse
from fusedops._report.suggestion import unknown_name
from fusedops.errors import FusedOpsWarning, PolicyError

Watch = Callable[[Any], Any]  # takes a prepared kernel, and returns one that compares its results
_INNER = 256  # derived policies kept for one: `with use("eager")` in a loop must not make its plans again


class ActivePolicy:
    """A policy in effect, and the plans made from it.

    Attributes:
        policy: the value.
        watch: changes each kernel of a plan in a block that compares results; None elsewhere.
        plans: filled by the dispatch layer, by op and device type.
    """

    __slots__ = ("_inner", "plans", "policy", "watch")

    def __init__(self, policy: Policy, watch: Watch | None = None) -> None:
        self.policy, self.watch = policy, watch
        self.plans: dict[tuple[str, str], Any] = {}
        self._inner: dict[tuple[PolicySource, ...] | str | Policy, ActivePolicy] = {}

    def with_sources(self, sources: tuple[PolicySource, ...]) -> ActivePolicy:
        """Return this policy with more sources inside it."""
        return self._derived(sources, lambda: Policy((*sources, *self.policy.sources)))

    def with_argument(self, text: str) -> ActivePolicy:
        """Return the policy of a call with ``backend=text``."""
        check_text(text, "backend=")  # first: an unhashable value cannot be looked up
        return self._derived(text, lambda: Policy((parse(text, "backend="), *self.policy.sources)))

    def replaced_by(self, policy: Policy) -> ActivePolicy:
        """Return another policy with this one's watch."""
        return self._derived(policy, lambda: policy)

    def _derived(self, key: tuple[PolicySource, ...] | str | Policy, make: Callable[[], Policy]) -> ActivePolicy:
        derived = self._inner.get(key)
        if derived is None:
            derived = ActivePolicy(make(), self.watch)
            if len(self._inner) >= _INNER:
                self._inner.clear()
            self._inner[key] = derived
        return derived


class Frame:
    """One block, ``with use(...)`` or ``with verify(...)``, in a chain of the blocks around it.

    Args:
        owner: the object that the block was entered with.
        outer: the frame around it, or None.
        derive: makes the block's policy from the one around it.
        watches: it compares results.
    """

    __slots__ = ("_active", "_base", "_derive", "ended", "outer", "owner", "token", "watches")
    token: Token[Frame | None]  # of entering

    def __init__(
        self, owner: object, outer: Frame | None, derive: Callable[[ActivePolicy], ActivePolicy], watches: bool
    ) -> None:
        self.owner = owner
        self.outer = outer
        self.watches = watches
        self.ended = False
        self._derive: Callable[[ActivePolicy], ActivePolicy] = derive
        self._base: ActivePolicy | None = None
        self._active = _NOTHING

    def active(self) -> ActivePolicy:
        """Return the policy in effect; derived again if the policy of the process has changed, as by set_policy."""
        base = process or process_policy()
        if self._base is not base:
            self._active = self._derive(self.outer.active() if self.outer else base)
            self._base = base
        return self._active

    def end(self) -> None:
        """Mark the block as ended, also in the context where it was entered if that is another one."""
        self.ended = True
        self.stop_watching()
        try:
            frame.reset(self.token)
        except ValueError:  # the event loop closes an async generator in another task
            self._derive = lambda active: active
            self._base = None

    def stop_watching(self) -> None:
        """Count the block no more among those that compare results."""
        if self.watches:
            self.watches = False
            _count_watching(-1)


_NOTHING = ActivePolicy(Policy())
frame: ContextVar[Frame | None] = ContextVar("fusedops_use", default=None)
process: ActivePolicy | None = None
watching = 0  # number of blocks that compare results: a bound function looks for one only if there are any
_lock = threading.RLock()


def enter(owner: object, derive: Callable[[ActivePolicy], ActivePolicy], watches: bool = False) -> ActivePolicy:
    """Begin a block in this thread or task, and return its policy. An error in ``derive`` begins none."""
    block = Frame(owner, frame.get(), derive, watches)
    active = block.active()
    block.token = frame.set(block)
    if watches:
        _count_watching(1)
    return active


def _count_watching(change: int) -> None:
    global watching
    with _lock:
        watching += change


def leave(owner: object) -> None:
    """End the block of ``owner``, and restore the one around it.

    Raises:
        PolicyError: another block is inside it, or it was entered elsewhere. No other block changes.
    """
    current = frame.get()
    block = current
    while block is not None and (block.owner is not owner or block.ended):
        block = block.outer
    if block is None:
        inside = f"{current.owner!r}" if current else "no block"
        raise PolicyError(
            f"got the end of {owner!r} in a thread, task or generator where it was not entered (in effect here: "
            f"{inside}), expected it where it was entered; to fix: use one `with` statement"
        )
    block.end()
    if block is not current:
        assert current is not None
        frame.set(current)  # it stays in effect
        raise PolicyError(
            f"got the end of {owner!r} inside {current.owner!r}, expected {current.owner!r} to end first; to fix: nest "
            f"the two blocks, and close a generator before the block around it ends"
        )
    outer = block.outer
    while outer is not None and outer.ended:  # ended out of order while this block was inside it
        outer = outer.outer
    frame.set(outer)


@contextmanager
def within(block: Frame | None) -> Generator[None]:
    """Apply the policy of another context, whose ``frame.get()`` returned ``block``."""
    token = frame.set(block)
    try:
        yield
    finally:
        frame.reset(token)


def active_policy() -> ActivePolicy:
    """Return the policy in effect here, with its plans."""
    block = frame.get()
    return block.active() if block else process_policy()


def get_policy() -> Policy:
    """Return the policy in effect here: the settings of every channel, the innermost first.

    >>> import fusedops
    >>> with fusedops.use("eager"):
    ...     fusedops.get_policy().order("bias_gelu")
    ('eager',)
    """
    return active_policy().policy


def process_policy() -> ActivePolicy:
    """Return the policy of set_policy and the environment, which is read here when first needed."""
    global process
    if process is None and os.environ.get("FUSEDOPS_BACKEND"):
        registry.records()  # before the lock, which a plugin that reads the policy in its import may wait for
    with _lock:
        if process is None:
            process = ActivePolicy(Policy(_environment()))
        return process


def set_process_policy(sources: tuple[PolicySource, ...]) -> None:
    """Set the policy of the process: these sources, then the environment, which is read again."""
    global process
    environment = _environment()
    with _lock:
        process = ActivePolicy(Policy((*sources, *environment)))


def reset() -> None:
    """Return to the environment's policy, and end every block of this thread or task."""
    global process
    with _lock:
        process = None
    block = frame.get()
    while block is not None:
        block.stop_watching()
        block = block.outer
    frame.set(None)


def drop_plans() -> None:
    """Drop every plan, as the backends have changed. The policy keeps its settings."""
    global process
    with _lock:
        if process is not None:
            process = ActivePolicy(process.policy)


def variables() -> dict[str, str]:
    """Return the environment variables that fusedops and its plugins read, each with one sentence."""
    known = dict(_VARIABLES)
    for record in registry.records():
        if record.backend is not None:
            known.update(record.backend.variables)
    return known


def unknown_variables() -> dict[str, str]:
    """Return the environment's FUSEDOPS_ variables that nothing reads, each with the text of a warning."""
    names = [name for name in sorted(os.environ) if name.startswith("FUSEDOPS_") and name not in _VARIABLES]
    if not names:
        return {}
    known = variables()  # loads the plugins: only where a variable may be one of theirs
    return {name: unknown_name("variable", name, list(known), 0.75) for name in names if name not in known}


def _environment() -> tuple[PolicySource, ...]:
    for message in unknown_variables().values():
        warnings.warn(f"environment: {message} (it has no effect as it is)", FusedOpsWarning, stacklevel=2)
    text = os.environ.get("FUSEDOPS_BACKEND", "").strip()
    fallback = os.environ.get("FUSEDOPS_FALLBACK", "").strip()
    adapt = os.environ.get("FUSEDOPS_ADAPT", "").strip()
    rows = os.environ.get("FUSEDOPS_ROWS", "").strip()
    sources = [parse(text, "FUSEDOPS_BACKEND")] if text else []
    sources += [parse("", "FUSEDOPS_FALLBACK", fallback)] if fallback else []
    sources += [parse("", "FUSEDOPS_ADAPT", adapt=adapt)] if adapt else []
    sources += [parse("", "FUSEDOPS_ROWS", rows=rows)] if rows else []
    return tuple(sources)


_VARIABLES = {
    "FUSEDOPS_ADAPT": "The adapt setting: none or pad.",
    "FUSEDOPS_BACKEND": "A policy text.",
    "FUSEDOPS_FALLBACK": "The fallback level: warn, silent or raise.",
    "FUSEDOPS_PLUGINS": "The plugins that may load: all, none, or names separated by commas.",
    "FUSEDOPS_ROWS": "The rows setting: any or independent.",
    "FUSEDOPS_STATS": "1 prints the counts of calls when the process ends.",
}


def _renew_lock() -> None:
    """Replace the lock, in a forked child: one that another thread of the parent held is never released."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)
