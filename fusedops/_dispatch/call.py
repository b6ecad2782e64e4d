"""The three routes of a call, from the public function.

Traced (torch.compile, torch.export, torch.jit.trace), or on tensors that are not plain (fake tensors, subclasses such
as DTensor, dispatch modes): the registered torch op, which serves the call when it runs. Under a functorch transform or
forward-mode differentiation: the op's reference, which torch can transform. Else: :func:`serve`, by a kernel. The
kernel is selected by the same plan in all of them. torch.fx.symbolic_trace records the public function itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedops._contract.plain_argument import PlainFloat
from fusedops._contract.signature import with_floats
from fusedops._dispatch.other_calls import raise_or_record, serve_other_tensors
from fusedops._dispatch.registered.registration import call_registered
from fusedops._dispatch.serve import serve, serve_again
from fusedops._torch import dispatch_modes, is_dynamo_compiling, is_jit_tracing, is_transformed

if TYPE_CHECKING:
    from fusedops._contract.op import Op


def call(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Serve a call of an op.

    Args:
        op: the op.
        args: every argument, in the op's order.
        backend: a policy for this call alone, or None.

    Returns:
        The output, or a tuple where the op has several.

    Raises:
        InvalidInputError: an argument violates a constraint of the op.
        NoBackendError: no backend that the policy allows takes the call.
        PolicyError: ``backend`` is invalid.

    >>> import torch, fusedops
    >>> fusedops.call(fusedops.ops.OPS["bias_gelu"], (torch.zeros(2), None, "tanh"), None)
    tensor([0., 0.])
    """
    if is_dynamo_compiling():
        return call_registered(op, args, backend)
    results = serve_again(op, args, backend)
    if results is not None:
        return results
    if is_jit_tracing():
        return call_registered(op, args, backend)
    try:
        violated = op.check(*args)
    except (AttributeError, TypeError, RuntimeError):  # a value of another type; a nested tensor has no shape
        return raise_or_record(op, args, backend)
    if violated is not None or dispatch_modes():
        if isinstance(violated, PlainFloat):  # the last condition: the call is valid but for an integer
            return call(op, with_floats(args, op.float_indices), backend)
        return serve_other_tensors(op, args, backend, violated)
    if is_transformed():
        prepared = op.prepared(args)
        results = op.reference(*prepared)
        return op.write(prepared, results) if op.written else results
    return serve(op, args, backend)
