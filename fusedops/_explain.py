"""explain: who would serve a call, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusedops._in_force import get_policy, with_argument
from fusedops._op import OPS
from fusedops._policy import unknown_name
from fusedops._spec import TensorSpec
from fusedops.errors import PolicyError

if TYPE_CHECKING:
    from fusedops._decision import Decision


def explain(op: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Decision:
    """Says who would serve a call of ``op``, who refused it, why, and how to qualify. Runs nothing.

    Args:
        op: the op's name.
        *args: the call's arguments. Each tensor may be real, meta, fake, or a :class:`TensorSpec`; with a spec the
            answer is also given for a device that this machine does not have.
        **kwargs: the same, by name.
        backend: as on the op itself.

    Raises:
        InvalidInputError: the op's contract does not allow these arguments on any backend.
        PolicyError: an unknown op or backend.
    """
    from fusedops._decision import decide  # not at import: see fusedops.__getattr__
    from fusedops._plan import make_plan

    if not isinstance(op, str) or op not in OPS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PolicyError(f"explain: {unknown_name('op', op, list(OPS))}")
    contract = OPS[op]
    given = contract.complete(contract.specs(contract.bind(args, kwargs)))
    contract.validate(*given)
    first: TensorSpec = given[0]
    policy = get_policy() if backend is None else with_argument(get_policy(), backend)
    kind = first.device_type
    assumed = (
        "" if _is_here(kind) else f"a machine with {kind} and the backends for it installed; this one has no {kind}"
    )
    return decide(make_plan(contract, policy, kind, assume=bool(assumed)), given, assumed)


def _is_here(device_type: str) -> bool:
    """Whether this machine has a device of that type. Imports no vendor's library."""
    if device_type in ("cpu", "meta"):
        return True
    module = getattr(torch, device_type, None)
    return module is not None and hasattr(module, "is_available") and bool(module.is_available())
