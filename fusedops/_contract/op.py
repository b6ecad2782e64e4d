"""Op: the contract of one fused operation. Tests, benchmarks, tables, the command line and docs follow from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedops._contract import signature as signatures
from fusedops._contract.backward import BackwardCall
from fusedops._contract.constraint import Constraint, compile_check
from fusedops._contract.plain_argument import AnyTensor, conditions
from fusedops._contract.tensor_spec import TensorSpec, capability_of
from fusedops._contract.values import ROWS_ARE_INDEPENDENT, Output, Padding, Saved, Sharding, loaded
from fusedops._report.direction import Direction
from fusedops._report.reason import Reason
from fusedops._storages import is_freed
from fusedops.errors import InvalidInputError

if TYPE_CHECKING:
    from fusedops._contract.evidence import Evidence


class Op:
    """The contract of one fused operation. Every backend's kernels compute what ``reference`` computes.

    Args:
        function: the public function. Its name, parameters and defaults, without ``backend``, are the op's; its
            docstring is the op's documentation.
        constraints: the op's own conditions on the arguments. A violated one is an InvalidInputError.
        reference: the meaning of the op in plain differentiable torch. Takes the op's parameters in order, annotated
            with ``Tensor``, ``Tensor | None``, ``float``, ``int``, ``bool``, ``str`` or a pair of ints or None; or one
            NamedTuple of them, as every function of an op and its kernels may. The registered op has its defaults.
            Returns the output, or a tuple.
        backward: the gradient in plain differentiable torch. Its parameters are ``grad`` (``grad_<output>`` for each of
            several outputs but integers), then by name what forward keeps for it: outputs, saved values,
            parameters of the op, ``<parameter>_dtype``, ``needs`` (a bool for each of ``differentiable``), ``reuse``
            (see BackwardCall). Returns one gradient for each of ``differentiable``, None where not wanted; a tuple
            where there are several. None for an op without gradients, such as a draw: its outputs have none.
        differentiable: the tensor parameters that have a gradient.
        outputs: the outputs: the name of each, or an :class:`fusedops.Output`.
        output_dtype: from the arguments, the dtype of the output. None: the first argument's.
        empty: from the arguments, empty outputs with the right shapes, dtypes and device. None: one output of the first
            argument's shape.
        saved: what forward saves for backward besides outputs and arguments. A forward kernel of an op with saved
            values takes one more argument, ``save``, and returns the outputs, then the saved values (None without
            ``save``).
        passed_through: a tensor parameter whose gradient is the output's gradient itself, such as a residual.
        identity: takes the arguments of backward except ``needs``; True if the gradient of the first differentiable
            parameter is the output's gradient itself, as without dropout: no kernel computes it then.
        addend: a parameter that is added to the first one: its gradient is the same but for its dtype, which backward
            takes. If both are wanted in one dtype, autograd gets one tensor twice, and no kernel writes it twice.
        padding: how a call is padded to sizes that a kernel takes; None where it cannot be.
        sharding: the rule for DTensors, or its "module:NAME", imported when it is first read.
        prepare_args: returns the arguments with what the public function draws (a seed) or converts, to inspect a call
            that does not run.
        evidence: how kernels are checked, measured and described: an Evidence, or its "module:NAME", imported when it
            is first read.
        of_other_ops: parameters of the function with which it calls another op: this op does not have them.

    Raises:
        ValueError: reference, backward or a constraint does not fit the function.

    >>> import fusedops
    >>> fusedops.ops.OPS["bias_gelu"].parameters
    ('x', 'bias', 'approximate')
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        constraints: Sequence[Constraint],
        reference: Callable[..., Any],
        evidence: Evidence | str,
        backward: Callable[..., Any] | None = None,
        differentiable: tuple[str, ...] = (),
        outputs: tuple[str | Output, ...] = ("y",),
        output_dtype: Callable[..., torch.dtype] | None = None,
        empty: Callable[..., Any] | None = None,
        saved: tuple[Saved, ...] = (),
        passed_through: str | None = None,
        identity: Callable[..., bool] | None = None,
        addend: str | None = None,
        padding: Padding | None = None,
        sharding: Sharding | str = ROWS_ARE_INDEPENDENT,
        prepare_args: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
        of_other_ops: tuple[str, ...] = (),
    ) -> None:
        self.name, self.function = function.__name__, function
        self.reference, self.has_gradient = signatures.spread(reference), backward is not None
        self.backward = signatures.spread(backward or _no_backward)
        self.differentiable, self.passed_through, self.addend = differentiable, passed_through, addend
        self.constraints, self._evidence = tuple(constraints), evidence
        described = [Output(output) if isinstance(output, str) else output for output in outputs]
        self.outputs, self.single = tuple(output.name for output in described), len(described) == 1
        self.with_gradient = tuple(output.name for output in described if backward and not output.integer)
        self.integers = tuple(output.name for output in described if output.integer)
        self.output_of = {output.name: output.of for output in described if output.of is not None}
        self.permuted = tuple(output.name for output in described if output.permuted)
        self.written = tuple(output.of for output in described if output.written and output.of is not None)
        if self.written and (len(self.written) != len(described) or backward):
            raise ValueError(
                f"op {self.name}: got written outputs of {self.written} beside others or with backward, expected each "
                f"output to be a parameter that is written, and no gradients"
            )
        if bool(backward) != bool(differentiable):
            raise ValueError(f"op {self.name}: got differentiable {differentiable}, expected names with backward alone")
        if backward and (not self.with_gradient or self.with_gradient + self.integers != self.outputs):
            raise ValueError(
                f"op {self.name}: got outputs {outputs}, expected integers last, after one with a gradient"
            )
        self.saved = saved = tuple(item._replace(reference=signatures.spread(item.reference)) for item in saved)
        self.required_saved = tuple(value for value in saved if not value.optional)
        self.padding, self._sharding = padding, sharding
        self.prepare_args = prepare_args
        self.empty = self._empty if empty is None else signatures.spread(empty)
        self._output_dtype = output_dtype and signatures.spread(output_dtype)
        if padding is not None and (saved or not self.single):
            raise ValueError(f"op {self.name}: got padding, expected none with several outputs or saved values")
        self.signature, self.types, defaults = signatures.op_signature(function, self.reference, of_other_ops)
        self.defaults = defaults
        self.parameters, self.float_indices = tuple(self.types), signatures.float_indices(self.types)
        self.tensors = tuple(name for name, text in self.types.items() if text.startswith("Tensor"))
        self.required_tensors = tuple(name for name in self.tensors if self.types[name] == "Tensor")
        self.backward_types = signatures.annotation_texts(self.backward)
        self.backward_parameters = tuple(self.backward_types)
        without = self.integers if backward else self.outputs
        self.backward_call = BackwardCall(
            self.name, self.backward_parameters, self.parameters, self.tensors, self.outputs, without,
            saved, differentiable, passed_through, identity and signatures.spread(identity), addend,
        )  # fmt: skip
        # the arguments that serve.py checks for requires_grad
        self.gradient_indices = tuple(map(self.parameters.index, filter(None, (*differentiable, passed_through))))
        self.tensor_indices = tuple(map(self.parameters.index, self.tensors))
        self.written_indices = tuple(map(self.parameters.index, self.written))
        # keys of the plans for the usual device types, built once
        self.cpu_key, self.cuda_key = (self.name, "cpu"), (self.name, "cuda")

    @cached_property
    def evidence(self) -> Evidence:
        """The data by which the kernels are checked, measured and described. Loaded when it is first read."""
        return loaded(self._evidence)

    @cached_property
    def sharding(self) -> Sharding:
        """The rule for DTensors. Loaded when it is first read."""
        return loaded(self._sharding)

    @cached_property
    def conditions(self) -> tuple[Constraint, ...]:
        """The conditions of a call on every backend: plain arguments, and the op's constraints."""
        return conditions(self.parameters, self.float_indices, self.tensors, self.required_tensors, self.constraints)

    @cached_property
    def check(self) -> Callable[..., Constraint | None]:
        """The compiled check of :attr:`conditions`. Compiled when first read, then an attribute of the instance."""
        return compile_check(self.parameters, self.conditions, f"constraints of {self.name}", self.required_tensors)

    @cached_property
    def first_in_backward(self) -> Callable[[Mapping[str, Any], TensorSpec], TensorSpec] | None:
        """The function that rebuilds the spec of the first argument where backward does not receive it.

        None: it has the shape of the first output.
        """
        return next((item.rebuilt for item in self.constraints if item.rebuilds == self.parameters[0]), None)

    @cached_property
    def check_any_kind(self) -> Callable[..., Constraint | None]:
        """The compiled check of a call with tensors of any kind (fake ones, subclasses, specs) and any numbers."""
        tensors = [AnyTensor(name, name in self.required_tensors) for name in self.tensors]
        title = f"constraints of {self.name} on tensors of any kind"
        return compile_check(self.parameters, (*tensors, *self.constraints), title, self.required_tensors)

    def invalid(self, args: Sequence[Any]) -> Reason | None:
        """Return why a call is invalid on every backend, or None. Takes tensors of any kind, and specs."""
        bound = dict(zip(self.parameters, args))
        return next((reasons[0] for item in self.conditions if (reasons := item.reasons(bound))), None)

    def validate(self, args: Sequence[Any]) -> None:
        """Raise InvalidInputError if a call violates a constraint of the op.

        The compiled check takes 0.5 us, the reasons 14 us: they are built only if it refuses.
        """
        try:
            if self.check_any_kind(*args) is None:
                return
        except (AttributeError, TypeError, RuntimeError):
            pass  # an argument of another type, or a nested tensor, which has no shape: the reasons name it
        reason = self.invalid(args)
        if reason is not None:
            raise InvalidInputError(f"{self.name}: {reason}")

    # ---------------------------------------------------------------------------------------------------- calls

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call in the op's order, with defaults filled in."""
        return signatures.bound_arguments(self.name, self.signature, args, kwargs)

    def prepared(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with what the public function draws or converts."""
        return args if self.prepare_args is None else self.prepare_args(args)

    def specs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with each tensor replaced by its TensorSpec."""
        return tuple(TensorSpec.of(arg) if isinstance(arg, Tensor) else arg for arg in args)

    def bound_specs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a valid call's prepared arguments as specs, or raise InvalidInputError. Nothing is drawn."""
        bound = self.bind(args, kwargs)
        if any(isinstance(arg, Tensor) and arg.is_nested for arg in bound):  # it has no shape
            self.validate(bound)
        specs = self.prepared(self.specs(bound))
        self.validate(specs)
        return signatures.with_floats(specs, self.float_indices)

    def as_tuple(self, results: Any) -> tuple[Any, ...]:
        """Return the outputs as a tuple, even if there is only one."""
        return (results,) if isinstance(results, Tensor) or self.single else tuple(results)

    def outputs_of(self, results: Any) -> Any:
        """Return what the public function returns, from what a forward kernel returned."""
        if not self.saved:
            return results
        return results[0] if self.single else tuple(results[: len(self.outputs)])

    def absent_outputs_to_none(self, results: Any, args: Sequence[Any]) -> Any:
        """Return the outputs, with None for those that the call does not have (see ``output_of``)."""
        absent = [output for output, name in self.output_of.items() if args[self.parameters.index(name)] is None]
        if not absent:
            return results
        # by index: under torch.fx the results are one proxy, which cannot be iterated
        return tuple([None if name in absent else results[i] for i, name in enumerate(self.outputs)])

    def with_copies(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with copies of those that a call writes, of the same strides where these can be written.

        One that no kernel takes is not copied: sparse, nested, or with a storage that was freed.
        """
        copies = list(args)
        for index in self.written_indices:
            arg = args[index]
            if not isinstance(arg, Tensor) or arg.is_nested or arg.layout is not torch.strided or is_freed(arg):
                continue
            overlaps = any(size > 1 and not stride for size, stride in zip(arg.shape, arg.stride()))
            strides = arg.contiguous().stride() if overlaps else arg.stride()
            copies[index] = torch.empty_strided(arg.shape, strides, dtype=arg.dtype, device=arg.device).copy_(arg)
        return tuple(copies)

    def write(self, args: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Copy what the reference returned into the arguments that a call writes."""
        for index, result in zip(self.written_indices, results):
            if args[index] is not None:
                args[index].copy_(result)

    def count_writes(self, args: Sequence[Any]) -> None:
        """Count a write of each argument that a call has written, as torch's own functions do for autograd."""
        for index in self.written_indices:
            if args[index] is not None and not args[index].is_inference():
                torch.autograd.graph.increment_version(args[index])

    def call_kernel(self, run: Callable[..., Any], args: Sequence[Any], save: bool = False) -> Any:
        """Call a forward kernel, which takes ``save`` where the op has saved values."""
        return run(*args, save) if self.saved else run(*args)

    def reference_with_saved(self, *args: Any) -> Any:
        """Compute what a forward kernel returns, by the references. Takes ``save`` where the op has saved values.

        Arguments that a kernel writes are written.
        """
        if not self.saved:
            results = self.reference(*args)
            if self.written:
                self.write(args, results)
            return results
        inputs, save = args[:-1], args[-1]
        outputs = self.as_tuple(self.reference(*inputs))
        return (*outputs, *(self.saved_references(inputs, outputs) if save else [None] * len(self.saved)))

    def saved_references(self, args: Sequence[Any], outputs: Sequence[Any]) -> list[Tensor]:
        """Compute the saved values of a call by their references."""
        known = {**dict(zip(self.parameters, args)), **dict(zip(self.outputs, outputs))}
        parameters = [inspect.signature(value.reference).parameters for value in self.saved]
        return [value.reference(*(known[name] for name in names)) for value, names in zip(self.saved, parameters)]

    def call_public(self, *args: Any, backend: str | None = None) -> Any:
        """Call the public function with every argument by position.

        Of an op that writes arguments, the results are copies of these that the call has written.
        """
        args = self.with_copies(args)
        results = self.function(**dict(zip(self.parameters, args)), backend=backend)
        return self.written_in(args) if self.written else results

    def written_in(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments that a call writes."""
        return tuple(args[index] for index in self.written_indices)

    def backward_arguments(
        self, grads: Sequence[Any], results: Sequence[Any], args: Sequence[Any], needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """Return the arguments of backward from the outputs' gradients, forward's results and its arguments."""
        parts = self.backward_call
        return parts.arguments(grads, parts.tensors((*args, *results)), parts.values(args), needs)

    def _empty(self, *args: Any) -> Tensor:
        """Return an empty contiguous output of the first argument's shape."""
        dtype = self._output_dtype(*args) if self._output_dtype else None
        return torch.empty_like(args[0], dtype=dtype, memory_format=torch.contiguous_format)

    def placeholder_backward_args(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return arguments of backward for its constraints, before forward has run: x stands for outputs and grads.

        Saved values are None: a backward kernel has no constraints on them.
        """
        x: Any = args[0]
        if self._output_dtype is not None and (dtype := self._output_dtype(*args)) is not x.dtype:
            x = TensorSpec(tuple(x.shape), dtype, str(x.device), capability_of(x))
        outputs = [x] * len(self.outputs)
        grads = [x] * len(self.with_gradient)
        return self.backward_arguments(grads, [*outputs, *[None] * len(self.saved)], args, ())

    def parameters_of(self, direction: Direction) -> tuple[str, ...]:
        """Return the parameter names of forward or backward."""
        return self.parameters if direction == "forward" else self.backward_parameters

    def __repr__(self) -> str:
        return f"<Op {self.name}{signatures.signature_text(self.signature)}>"


def _no_backward() -> None:
    """Stand for the backward of an op without gradients, which nothing calls."""
