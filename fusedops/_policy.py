"""What a policy says: who is preferred, for which op, and how loud a fallback is. Which one is in force: _in_force.py.

A policy text is an order of preference, then orders for single ops: ``"npu,triton; scaled_masked_softmax=eager"``. The
name ``auto`` stands for the default order. Texts come through four channels; the innermost that speaks of an op wins:
``backend=`` argument > :func:`use` > :func:`set_policy` > environment (``FUSEDOPS_BACKEND``, ``FUSEDOPS_FALLBACK``,
``FUSEDOPS_ADAPT``).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from fusedops._op import OPS
from fusedops._registry import registry
from fusedops.errors import PluginError, PolicyError

if TYPE_CHECKING:
    from fusedops._verify import verify

Fallback = Literal["warn", "silent", "raise"]
Adapt = Literal["none", "pad"]

AUTO = "auto"
LEVELS: tuple[str, ...] = get_args(Fallback)
ADAPTS: tuple[str, ...] = get_args(Adapt)


@dataclass(frozen=True)
class Layer:
    """What one channel says.

    Attributes:
        channel: "backend=", "use()", "set_policy()", "FUSEDOPS_BACKEND", "FUSEDOPS_FALLBACK" or "FUSEDOPS_ADAPT".
        text: the policy text as given; empty where only a fallback level or an adapt setting was given.
        order: the preference for every op, or None where it does not speak of it.
        per_op: the preference for single ops.
        fallback: the fallback level, or None where it does not speak of it.
        adapt: the adapt setting, or None where it does not speak of it.
    """

    channel: str
    text: str
    order: tuple[str, ...] | None = None
    per_op: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fallback: Fallback | None = None
    adapt: Adapt | None = None

    def wish(self, op: str) -> tuple[str, ...] | None:
        """The order this layer wants for ``op``, or None."""
        return dict(self.per_op).get(op, self.order)


@dataclass(frozen=True, eq=False)
class Policy:
    """The preferences in force: layers, the innermost first.

    ``str(policy)`` says which channel said what. Plans made from a policy are kept on it, by op and device type.
    """

    layers: tuple[Layer, ...] = ()
    plans: dict[Any, Any] = field(default_factory=lambda: {}, repr=False)
    verifier: verify | None = field(default=None, repr=False)  # whose watch the plans' entries are under

    @property
    def fallback(self) -> Fallback:
        """The fallback level: the innermost that was given, else "warn"."""
        said: list[Fallback] = [layer.fallback for layer in self.layers if layer.fallback]
        return said[0] if said else "warn"

    @property
    def adapt(self) -> Adapt:
        """Which costly adaptations are allowed: the innermost setting that was given, else "none"."""
        said: list[Adapt] = [layer.adapt for layer in self.layers if layer.adapt]
        return said[0] if said else "none"

    def deciding(self, op: str) -> Layer | None:
        """The layer whose order counts for ``op``, or None where nobody spoke."""
        return next((layer for layer in self.layers if layer.wish(op) is not None), None)

    def order(self, op: str) -> tuple[str, ...]:
        """The order of preference for ``op``; ("auto",) where nobody spoke."""
        layer = self.deciding(op)
        return (layer and layer.wish(op)) or (AUTO,)

    def under(self, layer: Layer) -> Policy:
        """This policy with one more layer inside it."""
        return Policy((layer, *self.layers), verifier=self.verifier)

    def __str__(self) -> str:
        said = [f'{layer.channel}: "{layer.text}"' for layer in self.layers if layer.text]
        level = next((f"from {layer.channel}" for layer in self.layers if layer.fallback), "default")
        adapt = next((f"; adapt {layer.adapt} (from {layer.channel})" for layer in self.layers if layer.adapt), "")
        return f"{'; '.join(said) or 'auto (nothing set)'}; fallback {self.fallback} ({level}){adapt}"


def parse(text: str, channel: str, fallback: str | None = None, adapt: str | None = None) -> Layer:
    """Reads a policy text.

    Raises:
        PolicyError: it is not of the grammar, or names an unknown backend, op, fallback level or adapt setting.
        PluginError: it names a backend that failed to load; the cause is that backend's own error.
    """
    check_text(text, channel)
    if fallback is not None and fallback not in LEVELS:
        raise PolicyError(f"{channel}: {unknown_name('fallback level', fallback, LEVELS)}")
    if adapt is not None and adapt not in ADAPTS:
        raise PolicyError(f"{channel}: {unknown_name('adapt setting', adapt, ADAPTS)}")
    order: tuple[str, ...] | None = None
    per_op: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        op, equals, names = part.rpartition("=")
        wish = _names(names, channel, text)
        if not equals:
            if order is not None:
                raise PolicyError(
                    f'{channel}: "{text}" has two orders for every op; needs one, with the orders for single ops '
                    f'after it, as in "npu,triton; bias_gelu=eager"'
                )
            order = wish
        elif (op := op.strip()) not in OPS:
            raise PolicyError(f'{channel}: "{text}": {unknown_name("op", op, list(OPS))}')
        elif op in per_op:
            raise PolicyError(f'{channel}: "{text}" has two orders for {op}; needs one; join them with commas')
        else:
            per_op[op] = wish
    wishes = tuple(per_op.items())
    return Layer(channel, text, order, wishes, cast("Fallback | None", fallback), cast("Adapt | None", adapt))


def check_text(text: object, channel: str) -> None:
    """Raises PolicyError where a policy is no text."""
    if not isinstance(text, str):
        raise PolicyError(f'{channel}: a policy is given as {type(text).__name__}; needs a text; write "npu,triton"')


def _names(text: str, channel: str, whole: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    known = registry.names()
    for name in names:
        if name == AUTO:
            continue
        if not name:
            raise PolicyError(
                f'{channel}: "{whole}" has an empty name; needs backends, separated by commas; write "npu,triton"'
            )
        record = registry.find(name)
        if record is None:
            raise PolicyError(f'{channel}: "{whole}": {unknown_name("backend", name, [*known, AUTO])}')
        if record.error is not None and record.backend is None:  # one whose probe raised is a fallback like any other
            raise PluginError(
                f'{channel}: "{whole}" names {name!r}, which failed to load: {record.error}; needs one that loads; '
                f"fusedops.backends() shows the traceback"
            ) from record.error
    return names


def unknown_name(kind: str, name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """A sentence such as: no backend is called 'tritn'; the nearest is 'triton'; known are eager, npu, triton."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=cutoff)
    if not known:
        return f"no {kind} is called {name!r}; known are none; needs an installed fusedops; run pip install fusedops"
    hint, todo = (f" the nearest is {near[0]!r};", "") if near else ("", "; name one of these")
    return f"no {kind} is called {name!r};{hint} known are {', '.join(sorted(known))}{todo}"
