"""Random calls as the explorer page writes them, and the decisions of ``fusedops.explain`` for them, as JSON lines.

Run as a program, in a process of its own: ``python explorer_calls.py COUNT SEED``. In the tests' own process triton's
interpreter is on, and the backend lists other devices than on a user's machine.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import random
import re
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

os.environ["TRITON_INTERPRET"] = "0"
ROOT = pathlib.Path(__file__).parents[3]
sys.path += map(str, (ROOT / "tests" / "support" / "makers", ROOT / "tests", ROOT))  # after the fusedops of PYTHONPATH

from standin import npu_device  # noqa: E402

npu_device.register()

import fusedops  # noqa: E402
from fusedops import _explain  # noqa: E402
from fusedops._plugins.registry import OWN_DISTRIBUTION, registry  # noqa: E402
from fusedops.testing import OPS  # noqa: E402
from tests.fuzz.call import Made  # noqa: E402
from tests.fuzz.generate import generate  # noqa: E402
from tests.fuzz.machine import Target  # noqa: E402

SETTINGS = ("op", "device", "capability", "policy", "fallback", "adapt", "rows", "bandwidth")
CAPABILITIES = (None, None, (7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (12, 0))
DEVICES = ("cpu", "cuda", "npu")
ELEMENTS = 2**19


def targets() -> list[Target]:
    """Return each op, backend and device where the backend has a kernel."""
    records = [record for record in registry.records() if record.distribution == OWN_DISTRIBUTION]
    names = tuple(record.name for record in records)
    return [
        Target(op, record.name, device, ELEMENTS, names)
        for op in fusedops.ops.__all__
        for device in DEVICES
        for record in records
        if record.kernel(op, "forward", device)
    ]


def calls(count: int, seed: str) -> Iterator[dict[str, Any]]:
    """Yield calls: the fragment of the page's address, and the decision."""
    every = targets()
    for at in range(count):
        dice = random.Random(f"{seed} {at}")
        target = every[at % len(every)]
        call = generate(target, f"{seed} {at}")
        capability = dice.choice(CAPABILITIES) if target.device == "cuda" else None
        args = {name: _argument(value, capability) for name, value in call.args.items()}
        if dice.random() < 0.03:
            _moved(args, dice)
        _with_numbers(call.op, args, dice)
        policy = "" if dice.random() < 0.4 else _policy(call.backend, target, dice)
        rows = "independent" if dice.random() < 0.2 else "any"
        settings = {"policy": policy, "fallback": call.fallback, "adapt": call.adapt, "rows": rows}
        yield {
            "fragment": _fragment(call.op, target.device, capability, settings, args),
            "expected": decision(call.op, args, **settings),
        }


def _with_numbers(op: str, args: dict[str, Any], dice: random.Random) -> None:
    """Give numbers for some tensors where the public function takes either, such as a seed."""
    for name, parameter in OPS[op].signature.parameters.items():
        either = name in OPS[op].tensors and re.search(r"\b(int|float)\b", str(parameter.annotation))
        if either and dice.random() < 0.3:
            args[name] = dice.choice((0, 7, -5, 2**63, 2**70, 3.5, math.inf))


def _policy(text: str, target: Target, dice: random.Random) -> str:
    """Return an order of names, for every op or for this one or another one."""
    names = dice.sample([*target.others, "auto"], dice.randint(1, 3))
    order = ",".join(names)
    return dice.choice((text, text, order, f"{order}; {target.op}={target.backend}", f"bias_gelu=eager; {order}"))


def _argument(value: Any, capability: tuple[int, int] | None) -> Any:
    if not isinstance(value, Made):
        return tuple(value) if isinstance(value, list) else value  # an address has tuples alone
    import torch

    return fusedops.TensorSpec(value.shape, getattr(torch, value.dtype), value.device, capability)


def _moved(args: dict[str, Any], dice: random.Random) -> None:
    """Move one tensor to another device."""
    name = dice.choice([name for name, value in args.items() if isinstance(value, fusedops.TensorSpec)])
    args[name] = args[name].replace(device=dice.choice(("cpu", "cuda:1", "meta", "npu")))


def decision(op: str, args: dict[str, Any], policy: str, fallback: Any, adapt: Any, rows: Any) -> dict[str, Any]:
    """Return what explain returns, as the page shows it."""
    with fusedops.use(fallback=fallback, adapt=adapt, rows=rows):
        try:
            found = fusedops.explain(op, **args, backend=policy or None)
        except fusedops.InvalidInputError as error:
            return {"error": str(error)}
    contract = OPS[op]
    return {
        "backend": found.backend,
        "backward": found.backward,
        "given": found.given,
        "bytes": contract.evidence.min_bytes(*contract.bound_specs((), args)),
        "candidates": [
            {
                "backend": each.backend,
                "status": each.status,
                "reasons": [[reason.code.value, reason.detail, reason.fix] for reason in each.reasons],
                "deviations": [text.partition(":")[0] for text in each.deviations],
                "adaptations": [[a.name, a.direction, a.bytes] for a in each.adaptations],
            }
            for each in found.candidates
        ],
    }


def _fragment(
    op: str, device: str, capability: tuple[int, int] | None, settings: dict[str, str], args: dict[str, Any]
) -> str:
    """Return the page's address from the # on, as a person may write it."""
    version = {"capability": "{}.{}".format(*capability)} if capability else {}
    fields = {"op": op, "device": device, **version, **settings}
    texts = {f"arg.{name}" if name in SETTINGS else name: _text(value) for name, value in args.items()}
    return "#" + "&".join(f"{name}={quote(text)}" for name, text in {**fields, **texts}.items())


def _text(value: Any) -> str:
    if isinstance(value, fusedops.TensorSpec):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{','.join(map(str, value.shape))}:{dtype}@{value.device}"
    return repr(value)


def main() -> None:
    """Write the calls, one a line."""
    for info in fusedops.backends():
        if info.distribution != OWN_DISTRIBUTION:
            fusedops.unregister(info.name)
    _explain._is_here = lambda device_type: False  # as on a machine with every backend: the page assumes that
    for call in calls(int(sys.argv[1]), sys.argv[2]):
        print(json.dumps(call))


if __name__ == "__main__":
    main()
