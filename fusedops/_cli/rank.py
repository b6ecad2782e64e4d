"""``fusedops bench --rank``: a policy text with the backends in the order of their measured times.

Nothing reads the text but the program that its user puts it in: no call is ever timed to choose its backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusedops._cli.output import print_json, print_warning
from fusedops._plugins.registration import backends

if TYPE_CHECKING:
    from fusedops import Case, Op

KINDS = ("inference", "training")
Times = Mapping[str, float]


def run(
    cases: Iterable[tuple[Op, Case]], dtype: torch.dtype, device: str, seconds: float, kind: str, json: bool
) -> int:
    """Measure the backends for each case, print the policy, and return the exit code.

    Args:
        cases: each op with its cases, as ``bench`` has them.
        dtype: of the tensors.
        device: a torch device.
        seconds: the measuring time of each backend and case, about.
        kind: "inference", forward without a gradient, or "training", forward and backward.
        json: True prints the order of each op too, as JSON.
    """
    measured: dict[str, list[Times]] = {}
    for op, case in cases:
        times = times_of(op, case, dtype, device, seconds, kind)
        if times:
            measured.setdefault(op.name, []).append(times)
    orders = {op: order_of(times) for op, times in measured.items()}
    text = policy_text(orders, order_of([times for each in measured.values() for times in each]))
    if json:
        print_json({"policy": text, "orders": orders})
    elif orders:
        print(text)  # on one line, to be copied
    return int(not orders)


def times_of(op: Op, case: Case, dtype: torch.dtype, device: str, seconds: float, kind: str) -> Times:
    """Return the milliseconds of each backend that takes the case, measured in turns."""
    from fusedops import testing
    from fusedops.testing import _timing

    args = testing.arguments(op, case, dtype, device)
    work: dict[str, Callable[[], object]] = {}
    for info in backends():
        if _timing.refusal(info, op, args) is None:
            function = _timing.served_by(info.name, op)
            call = _inference(function, args) if kind == "inference" else _training(function, op, args)
            try:
                call()
            except Exception as error:  # a kernel may raise anything, and the others are still to be ranked
                print_warning(f"left out: {info.name} for {op.name}: {type(error).__name__}: {error}")
            else:
                work[info.name] = call
    times = testing.interleaved(work, device, seconds) if work else {}
    return {name: time.p50 for name, time in times.items()}


def _inference(function: Callable[..., Any], args: Sequence[Any]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return function(*args)

    return call


def _training(function: Callable[..., Any], op: Op, args: Sequence[Any]) -> Callable[[], object]:
    from fusedops.testing import _timing

    leaves, inputs = _timing.with_grad(op, args)

    def call() -> object:
        results = function(*leaves)
        outputs = [y for y in _timing.floating(results) if y.requires_grad]
        if outputs:
            _timing.backward_of(results, inputs, [torch.ones_like(y) for y in _timing.floating(results)])()
        return results

    return call


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
