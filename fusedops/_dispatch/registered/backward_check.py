"""The check of a backward call that autograd did not make: ``torch.ops.fusedops.<op>_backward`` and what calls it.

Kernels read memory by the sizes of one argument, so a gradient of another size would be read out of bounds. In a plain
call autograd gives each gradient the shape, dtype and device of its output: nothing is checked there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import plain
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec, on_meta
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints import Floating, SameShape
from fusedops.errors import InvalidInputError

_MOST_KEPT = 256  # results of an op's check; a model with more shapes begins again


class BackwardCheck:
    """The check of the arguments of an op's backward, by the forward call that they belong to.

    The forward call is rebuilt from the arguments. A tensor that backward does not take has the shape of the first
    output if it is the op's first parameter, or the one that ``first_in_backward`` infers, or ``passed_through``, the
    shape of another parameter by a ``SameShape`` constraint, that of the gradient of an output that is there only with
    it (``output_of``), and is None if it is optional and has no gradient. What cannot be rebuilt is not compared.

    Args:
        op: the op.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        # the check depends on shapes, dtypes, devices and numbers alone: a training loop has few of them
        self._reasons: dict[tuple[Any, ...], Reason | None] = {}

    def __call__(self, args: Sequence[Any]) -> None:
        """Raise InvalidInputError unless the arguments belong to a valid call. Symbolic sizes are not checked."""
        key: list[Any] = []
        for arg in args:  # raw metadata: a TensorSpec for each tensor takes 20 us
            if isinstance(arg, Tensor):
                key += arg.shape, arg.dtype, arg.device, arg.layout
            elif isinstance(arg, list):
                key.append(tuple(arg))  # pyright: ignore[reportUnknownArgumentType]
            else:
                key += type(arg), arg  # 1, 1.0 and True are equal, and different arguments
        known = tuple(key)
        try:
            reason = self._reasons[known]
        except KeyError:
            if len(self._reasons) >= _MOST_KEPT:
                self._reasons.clear()
            reason = self._reasons[known] = self._compute(args)
        if reason is not None:
            self._raise(reason)

    def _compute(self, args: Sequence[Any]) -> Reason | None:
        """Return why the arguments belong to no valid call, or None."""
        described: list[Any] = []
        for name, arg in zip(self._op.backward_parameters, args):
            if isinstance(arg, Tensor):
                if arg.layout is not torch.strided:
                    fix = f"convert it, as in {name}.to_dense()"
                    return Reason(ReasonCode.LAYOUT, f"{name} of layout {arg.layout}", "a strided tensor", fix)
                arg = TensorSpec.of(arg)
            described.append(tuple(arg) if isinstance(arg, list) else arg)  # pyright: ignore[reportUnknownArgumentType]
        return _reason(self._op, *described)

    def _raise(self, reason: Reason) -> None:
        raise InvalidInputError(f"{self._op.name}_backward: {reason}")


def has_symbolic_sizes(args: Sequence[Any]) -> bool:
    """Return True where a size is symbolic, as in a graph for any length: it is checked when the graph runs."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return any(type(size) is not int for tensor in tensors for size in tensor.shape)


def _reason(op: Op, *args: Any) -> Reason | None:
    """Return why a backward call is invalid, or None. Tensors are given as specs."""
    given = dict(zip(op.backward_parameters, args))
    first = op.backward_call.grads[0]
    for name, value in given.items():
        if isinstance(value, TensorSpec) and value.device != given[first].device:
            where = f"{name} on {value.device} and {first} on {given[first].device}"
            return Reason(ReasonCode.DEVICE, where, "one device", f"move it with {name}.to({first}.device)")
    for name in op.backward_call.grads:
        if reasons := Floating(name).reasons(given):
            return reasons[0]
    needs = given.get("needs", op.differentiable)
    if len(needs) != len(op.differentiable):
        names = ", ".join(op.differentiable)
        return Reason(ReasonCode.SIZE, f"needs of {len(needs)} values", f"one for each of {names}", "pass that many")
    known = {**_forward(op, given), **{name: given[name] for name in op.outputs if name in given}}
    for constraint in op.constraints:
        if all(name in known for name in constraint.names) and (reasons := constraint.reasons(known)):
            return reasons[0]
    outputs = _outputs(op, known)
    reason = _not_drawn(op, known) or _different_outputs(op, given, outputs)
    return reason or _different_saved(op, given, {**known, **outputs})


def _forward(op: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of forward that are given or follow from what is."""
    first: TensorSpec = given.get(op.outputs[0]) or given[op.backward_call.grads[0]]
    known: dict[str, Any] = {}
    grad_of = {parameter: given[f"grad_{output}"] for output, parameter in op.output_of.items()}
    same = {item.name: item.other for item in op.constraints if isinstance(item, SameShape)}
    for name, default in zip(op.parameters, op.defaults):
        dtype = given.get(f"{name}_dtype", first.dtype)
        if name in given:
            known[name] = given[name]
        elif name in grad_of:  # shape (0,) marks an absent output
            known[name] = None if grad_of[name].shape == (0,) else grad_of[name]
        elif name == op.parameters[0] and op.first_in_backward is not None:
            known[name] = op.first_in_backward(given, first.replace(dtype=dtype))
        elif name in (op.parameters[0], op.passed_through):
            known[name] = first.replace(dtype=dtype)
        elif name in op.tensors and isinstance(known.get(same.get(name, "")), TensorSpec):
            known[name] = known[same[name]].replace(dtype=dtype)
        elif name not in op.tensors and default is not inspect.Parameter.empty:
            known[name] = default
        elif name in op.tensors and name not in op.required_tensors and name not in op.differentiable:
            known[name] = None
    return known


def _outputs(op: Op, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specs of the outputs by name; none where the forward call cannot be rebuilt."""
    if any(name not in known for name in op.parameters):
        return {}
    x: TensorSpec = known[op.parameters[0]]
    outputs = op.as_tuple(op.empty(*(on_meta(known[name]) for name in op.parameters)))
    known_shape = op.parameters[0] in op.backward_parameters or op.first_in_backward is not None
    if tuple(outputs[0].shape) != x.shape and not known_shape:
        return {}  # the first parameter has another shape than the first output
    specs = (None if y is None else TensorSpec(tuple(y.shape), y.dtype, x.device) for y in outputs)
    return dict(zip(op.outputs, specs))


def _not_drawn(op: Op, known: Mapping[str, Any]) -> Reason | None:
    """Return a reason where forward would have drawn an argument, such as a seed, that is not given."""
    if op.prepare_args is None or any(name not in known for name in op.parameters):
        return None
    args = tuple(known[name] for name in op.parameters)
    for name, before, after in zip(op.parameters, args, op.prepare_args(args)):
        if before is None and after is not None:
            return Reason(ReasonCode.PRESENCE, f"{name} = None", f"the {name} of forward", f"pass that {name}")
    return None


def _different_outputs(op: Op, given: Mapping[str, Any], outputs: Mapping[str, Any]) -> Reason | None:
    """Return why a gradient or a kept output is not like the output, or None."""
    for name in op.outputs:
        output = outputs.get(name) or given.get(name)
        if output is None:
            continue
        for each in ("grad" if op.single else f"grad_{name}", name):
            if each in given and (reason := _difference(each, given[each], f"the output {name}", output)):
                return reason
    return None


def _different_saved(op: Op, given: Mapping[str, Any], known: Mapping[str, Any]) -> Reason | None:
    """Return why a saved value is not like its reference, or None."""
    for saved in op.saved:
        value, names = given.get(saved.name), inspect.signature(saved.reference).parameters
        if value is None or any(name not in known for name in names):
            continue
        like = saved.reference(*(on_meta(known[name]) for name in names))
        expected = TensorSpec(tuple(like.shape), like.dtype, value.device)
        if reason := _difference(saved.name, value, f"the saved value {saved.name}", expected):
            return reason
    return None


def _difference(name: str, got: TensorSpec, what: str, expected: TensorSpec) -> Reason | None:
    if got.shape != expected.shape:
        needed, fix = f"the shape of {what}, {expected.shape}", f"expand {name} to that shape"
        return Reason(ReasonCode.SIZE, f"{name} of shape {got.shape}", needed, fix)
    if got.dtype != expected.dtype:
        needed, fix = f"the dtype of {what}, {plain(expected.dtype)}", f"convert {name} to that dtype"
        return Reason(ReasonCode.DTYPE, f"{name} of {plain(got.dtype)}", needed, fix)
    return None
