"""warm_up: the kernels of a call compiled and loaded, before a graph is captured or a time is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedops._contract.tensor_spec import TensorSpec
from fusedops._explain import explain, find_op
from fusedops.errors import FusedOpsError, InvalidInputError

if TYPE_CHECKING:
    from fusedops._report.decision import Decision


def warm_up(op: str | Callable[..., Any], /, *args: Any, backend: str | None = None, **kwargs: Any) -> Decision:
    """Make a call of ``op``, forward and backward, so that its kernels are compiled and loaded. Drop the results.

    A kernel that is first used while a CUDA graph is captured cannot be loaded. Call this before the capture with the
    arguments of each call in it. It works for every backend, because it makes the call: by the policy in effect, once
    under ``no_grad`` and, if a gradient is wanted, once with the backward. It waits for the device. Random generators
    keep their state, and no argument is written. ``stats()`` counts these calls.

    Args:
        op: the op's name, or its public function.
        *args: the call's arguments. Each tensor may be real or a :class:`TensorSpec`. Kernels depend on shapes, dtypes,
            strides and alignment: a real tensor is used itself; for a spec, a contiguous tensor of zeros is allocated.
        backend: as on the op itself.
        **kwargs: the same, by name.

    Gradients are computed for the real tensors that require one, and for each differentiable spec. The incoming
    gradient is contiguous.

    Returns:
        The decision: the backends that served the call and its gradient.

    Raises:
        FusedOpsError: a graph is being captured.
        InvalidInputError: the op does not accept these arguments, or a tensor is on a device that is not here.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.
        PolicyError: an unknown op or backend.

    >>> import fusedops
    >>> x, bias = fusedops.TensorSpec((8, 64)), fusedops.TensorSpec((64,))
    >>> decision = fusedops.warm_up("bias_gelu", x, bias, backend="eager")
    >>> decision.backend, decision.backward
    ('eager', 'eager')
    """
    contract = find_op(op, "warm_up")
    decision = explain(contract.name, *args, backend=backend, **kwargs)
    given = contract.bind(args, kwargs)
    where = str(given[0].device)
    if decision.assumed or where.startswith("meta"):
        raise InvalidInputError(
            f"warm_up: got {contract.parameters[0]} on {where}, expected a device of this machine; to fix: run this "
            f"where the call runs"
        )
    device = torch.device(where)
    module: Any = torch.get_device_module(device)
    if hasattr(module, "is_current_stream_capturing") and module.is_current_stream_capturing():
        raise FusedOpsError(
            f"warm_up: got {contract.name} while a graph is captured, expected a call before the capture; to fix: call "
            f"warm_up before torch.cuda.graph(...)"
        )
    indices = [] if device.type == "cpu" else [torch.empty(0, device=device).get_device()]
    with torch.inference_mode(False), torch.random.fork_rng(indices, device_type=device.type):
        wanted = [contract.parameters[at] for at in contract.gradient_indices]
        arguments = [_real(value, name in wanted) for name, value in zip(contract.parameters, given)]
        with torch.no_grad():
            contract.call_public(*arguments, backend=backend)
        leaves = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
        if leaves:
            with torch.enable_grad():
                results = contract.as_tuple(contract.call_public(*arguments, backend=backend))
            outputs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
            torch.autograd.grad(outputs, leaves, [torch.zeros_like(y) for y in outputs], allow_unused=True)
        module.synchronize(device)
    return decision


def _real(value: Any, differentiable: bool) -> Any:
    """Return a leaf with the memory of a tensor, or zeros for a spec; anything else as it is."""
    if isinstance(value, TensorSpec):
        zeros = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return zeros.requires_grad_(differentiable and zeros.is_floating_point())
    if isinstance(value, Tensor):
        leaf = value.detach()
        return leaf.requires_grad_() if value.requires_grad else leaf
    return value
