"""Policy: the preferences, as a plain value, and the parser of policy texts.

A policy text is an order of preference, then orders for single ops: ``"npu,triton; scaled_masked_softmax=eager"``. The
name ``auto`` stands for the default order. Texts come through four channels; the innermost that has an order for an op
wins: ``backend=`` argument > ``use()`` > ``set_policy()`` > environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from fusedops._named_tuple import NamedTuple
from fusedops._plugins.registry import registry
from fusedops._report.foreign_text import error_text, printable
from fusedops._report.suggestion import unknown_name
from fusedops.errors import PluginError, PolicyError

Fallback = Literal["warn", "silent", "raise"]
Adapt = Literal["none", "pad"]
RowsSetting = Literal["any", "independent"]

AUTO = "auto"
LEVELS: tuple[str, ...] = get_args(Fallback)
ADAPTS: tuple[str, ...] = get_args(Adapt)
ROWS: tuple[str, ...] = get_args(RowsSetting)
# other libraries' names for a level
_LEVELS_ELSEWHERE = {"error": "raise", "strict": "raise", "ignore": "silent", "quiet": "silent", "off": "silent"}


class PolicySource(NamedTuple):
    """The settings that came through one channel.

    Attributes:
        channel: "backend=", "use()", "set_policy()", or the name of an environment variable.
        text: the policy text as given; empty where only another setting was given.
        order: the order for every op, or None where none was given.
        per_op: the orders for single ops.
        fallback: the fallback level, or None where none was given.
        adapt: the adapt setting, or None where none was given.
        rows: the rows setting, or None where none was given.
    """

    channel: str
    text: str
    order: tuple[str, ...] | None = None
    per_op: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fallback: Fallback | None = None
    adapt: Adapt | None = None
    rows: RowsSetting | None = None

    def order_for(self, op: str) -> tuple[str, ...] | None:
        """Return the order that applies to an op, or None."""
        return dict(self.per_op).get(op, self.order)


@dataclass(frozen=True)
class Policy:
    """The preferences that apply to a call, by source, the innermost first. A plain value; ``str()`` lists the sources.

    >>> import fusedops
    >>> with fusedops.use("eager", fallback="raise") as policy:
    ...     print(policy)
    use(): "eager"; fallback raise (from use())
    """

    sources: tuple[PolicySource, ...] = ()

    @property
    def fallback(self) -> Fallback:
        """The fallback level: the innermost that was given, else "warn"."""
        settings: list[Fallback] = [source.fallback for source in self.sources if source.fallback]
        return settings[0] if settings else "warn"

    @property
    def adapt(self) -> Adapt:
        """Which costly adaptations are allowed: the innermost setting that was given, else "none"."""
        settings: list[Adapt] = [source.adapt for source in self.sources if source.adapt]
        return settings[0] if settings else "none"

    @property
    def rows(self) -> RowsSetting:
        """Which kernels may serve, by their promise about rows: the innermost setting that was given, else "any"."""
        settings: list[RowsSetting] = [source.rows for source in self.sources if source.rows]
        return settings[0] if settings else "any"

    def source_for(self, op: str) -> PolicySource | None:
        """Return the source whose order applies to an op, or None where no source has one."""
        return next((source for source in self.sources if source.order_for(op) is not None), None)

    def order(self, op: str) -> tuple[str, ...]:
        """Return the order of preference for an op; ("auto",) where no source has one."""
        source = self.source_for(op)
        return (source and source.order_for(op)) or (AUTO,)

    def __str__(self) -> str:
        orders = [f'{source.channel}: "{printable(source.text)}"' for source in self.sources if source.text]
        level = next((f"from {source.channel}" for source in self.sources if source.fallback), "default")
        adapt = next((f"; adapt {source.adapt} (from {source.channel})" for source in self.sources if source.adapt), "")
        rows = next((f"; rows {source.rows} (from {source.channel})" for source in self.sources if source.rows), "")
        return f"{'; '.join(orders) or 'auto (nothing set)'}; fallback {self.fallback} ({level}){adapt}{rows}"


def parse(
    text: str, channel: str, fallback: str | None = None, adapt: str | None = None, rows: str | None = None
) -> PolicySource:
    """Parse a policy text.

    Raises:
        PolicyError: the text is invalid, or names an unknown backend, op, fallback level, adapt or rows setting.
        PluginError: it names a backend that failed to load; the cause is that backend's own error.
    """
    check_text(text, channel)
    if fallback is not None and fallback not in LEVELS:
        near = _LEVELS_ELSEWHERE.get(str(fallback))
        fix = f"write {near!r}" if near else ""
        raise PolicyError(f"{channel}: {unknown_name('fallback level', fallback, LEVELS, fix=fix)}")
    if adapt is not None and adapt not in ADAPTS:
        raise PolicyError(f"{channel}: {unknown_name('adapt setting', adapt, ADAPTS)}")
    if rows is not None and rows not in ROWS:
        raise PolicyError(f"{channel}: {unknown_name('rows setting', rows, ROWS)}")
    order: tuple[str, ...] | None = None
    per_op: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        op, equals, names = part.rpartition("=")
        backends = _names(names, channel, text)
        op = op.strip()
        if not equals:
            if order is not None:
                raise PolicyError(
                    f'{channel}: got "{printable(text)}", which has two orders for every op, expected one; to fix: '
                    f'write the orders for single ops after it, as in "npu,triton; bias_gelu=eager"'
                )
            order = backends
        elif op not in registry.ops:
            raise PolicyError(f'{channel}: in "{printable(text)}": {unknown_name("op", op, list(registry.ops))}')
        elif op in per_op:
            raise PolicyError(
                f'{channel}: got "{printable(text)}", which has two orders for {op}, expected one; to fix: '
                f"join them with commas"
            )
        else:
            per_op[op] = backends
    return PolicySource(
        channel,
        text,
        order,
        tuple(per_op.items()),
        cast("Fallback | None", fallback),
        cast("Adapt | None", adapt),
        cast("RowsSetting | None", rows),
    )


def check_text(text: object, channel: str) -> None:
    """Raise PolicyError where a policy is not a str."""
    if not isinstance(text, str):
        raise PolicyError(
            f'{channel}: got a policy of type {type(text).__name__}, expected a str; to fix: write "npu,triton"'
        )


def _names(text: str, channel: str, whole: str) -> tuple[str, ...]:
    names: list[str] = []
    for name in (name.strip() for name in text.split(",")):
        if name == AUTO:
            names.append(name)
            continue
        if not name:
            raise PolicyError(
                f'{channel}: got "{printable(whole)}", which has an empty name, expected backends separated by '
                f'commas; to fix: write "npu,triton"'
            )
        record = registry.find(name)
        if record is None:
            raise PolicyError(f'{channel}: in "{printable(whole)}": {registry.unknown_backend(name, AUTO)}')
        if record.error is not None and record.backend is None:  # one whose probe raised is skipped, with a reason
            raise PluginError(
                f'{channel}: got "{printable(whole)}", but backend {name!r} failed to load '
                f"({error_text(record.error)}), expected one that loads; to fix: see its traceback in "
                f"fusedops.backends()"
            ) from record.error
        names.append(record.name)  # the backend's name, also for an alias
    return tuple(names)
