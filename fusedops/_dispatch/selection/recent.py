"""Recent calls of a plan: a call like one that its first kernel took is not checked again.

What is compared (see ``comparison``) is all that constraints read, so a call like a recent one passes the same checks.
Nothing else follows from the comparison: the kernel gets the arguments of its own call.

A call is kept when one of its shapes comes the second time. Keeping one takes 10 us, so calls whose lengths always
differ, such as those with a growing key cache, never pay it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusedops._contract.comparison import comparison_with
from fusedops._named_tuple import NamedTuple

if TYPE_CHECKING:
    from fusedops._plugins.record import PreparedKernel

# recent calls of a plan: a decoder has linear layers of up to six shapes (q, k and v, o, gate and up, down, the
# head). A miss costs 0.1 to 0.3 us per entry.
MOST = 6


class Recent(NamedTuple):
    """A recent call.

    Attributes:
        is_like: True for arguments like the call's.
        kernel: the first kernel of the plan, which took the call.
        wants_gradient: a tensor of the call requires a gradient.
        backward: the kernel of the gradient; None where the call computed none.
    """

    is_like: Callable[..., bool]
    kernel: PreparedKernel
    wants_gradient: bool
    backward: PreparedKernel | None


def with_call(
    recent: tuple[Recent, ...],
    parameters: tuple[str, ...],
    kernel: PreparedKernel,
    backward: PreparedKernel | None,
    args: tuple[Any, ...],
    wants_gradient: bool,
) -> tuple[Recent, ...]:
    """Return the recent calls with one that passed the checks of the op and of the kernel, in place of the oldest."""
    is_like = comparison_with(parameters, args)
    if is_like is None:
        return recent
    return (Recent(is_like, kernel, wants_gradient, backward), *recent)[:MOST]
