"""``fusedops bench --rank``: a policy text with the backends in the order of their measured times.

Nothing reads the text but the program that its user puts it in: no call is ever timed to choose its backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KINDS = ("inference", "training")
Times = Mapping[str, float]


def orders_of(records: Iterable[Mapping[str, Any]], unranked: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the backends in the order of their times for each op, and for all.

    Args:
        records: the measurements of ``bench``; the times of the directions of a case are added.
        unranked: the provider that is no backend.

    >>> record = {"op": "swiglu", "case": "few", "provider": "cpu", "ms": 2.0}
    >>> orders_of([record, {**record, "provider": "eager", "ms": 1.0}, {**record, "ms": 3.0}], "plain torch")
    ({'swiglu': ['eager', 'cpu']}, ['eager', 'cpu'])
    """
    times: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if (name := record["provider"]) != unranked:
            of_case = times.setdefault((record["op"], record["case"]), {})
            of_case[name] = of_case.get(name, 0.0) + record["ms"]
    ops = dict.fromkeys(op for op, _ in times)
    orders = {each: order_of([case for (op, _), case in times.items() if op == each]) for each in ops}
    return orders, order_of([*times.values()])


def order_of(cases: Sequence[Times]) -> list[str]:
    """Return the backends, the fastest first: by the mean logarithm of the time over that of the fastest in each case.

    >>> order_of([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 1.0}, {"c": 9.0}])
    ['c', 'b', 'a']
    """
    ratios: dict[str, list[float]] = {}
    for times in cases:
        for name, time in times.items():
            ratios.setdefault(name, []).append(math.log(time / min(times.values())))
    return sorted(ratios, key=lambda name: sum(ratios[name]) / len(ratios[name]))


def policy_text(orders: Mapping[str, Sequence[str]], general: Sequence[str]) -> str:
    """Return a policy: the general order, and that of each op where it is another.

    >>> policy_text({"rms_norm": ["b", "a"], "swiglu": ["a"]}, ["a", "b"])
    'a,b; rms_norm=b,a'
    """
    own = [
        f"{op}={','.join(order)}"
        for op, order in orders.items()
        if [name for name in general if name in order] != list(order)
    ]
    return "; ".join([",".join(general), *own])
