"""bind: an op with the choosing done once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedops._dispatch import make_bound, plan_for
from fusedops._op import OPS
from fusedops._policy import unknown_name
from fusedops._spec import TensorSpec
from fusedops.errors import InvalidInputError, PolicyError


def bind(op: str, *like_args: Any, backend: str | None = None, **like_kwargs: Any) -> Callable[..., torch.Tensor]:
    """Chooses now who serves calls like this one, and returns the op without the choosing.

    The result has the op's signature, less ``backend``, and gradients as the op's. It checks nothing: you vouch that
    each call has the shapes, dtypes and device of ``like_args``, the same arguments present, and numbers that the
    kernel's limits take; what another call gives is undefined. A policy that changes later is not seen. Under
    torch.compile, under transforms and for subclasses of tensors, where no kernel can be called directly, it is the
    op itself.

    Args:
        op: the op's name.
        *like_args: the arguments of one such call, its tensors real. Nothing runs.
        backend: as on the op itself.
        **like_kwargs: the same, by name.

    Returns:
        A function of the op's arguments.

    Raises:
        InvalidInputError: the op's contract does not allow these arguments.
        NoBackendError: nobody serves such a call; its ``decision`` says why.
        PolicyError: an unknown op or backend.
    """
    if op not in OPS:
        raise PolicyError(f"bind: {unknown_name('op', op, list(OPS))}")
    contract = OPS[op]
    given = contract.complete(contract.bind(like_args, like_kwargs))
    contract.validate(*given)
    if isinstance(given[0], TensorSpec):
        name = contract.parameters[0]
        raise InvalidInputError(f"bind: {name} is a TensorSpec; needs a tensor, on this machine; explain takes specs")
    plan = plan_for(contract, given[0], backend)
    return make_bound(contract, plan, plan.pick(given), backend)
