"""The subject of the conformance kit: one backend's kernels for one op, called so that no other backend can serve."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops._contract.kernel import Kernel
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import on_meta
from fusedops._dispatch.selection.stats import calls_since, marks
from fusedops._dispatch.serve import backward_plan, plan_for, select
from fusedops._policy.use import use
from fusedops._report.direction import Direction
from fusedops._verify.compare import is_rounding, with_choice
from fusedops._verify.result_form import as_tuple
from fusedops.testing._answers import kept
from fusedops.testing._empty import empty_outputs, empty_saved
from fusedops.testing._expected import (
    Expected,
    assert_within,
    expected,
    expected_forward,
    random_gradients,
    wide_outputs,
)
from fusedops.testing._failures import RuleError
from fusedops.testing._global_state import check_global_state, global_state
from fusedops.testing._kernel_calls import KernelCalls
from fusedops.testing._layouts import Form
from fusedops.testing._observed import (
    check_layout,
    check_own_memory,
    check_runs,
    memory_of,
    plain_masks,
    version_of,
)

_UNCHANGED = "no input is written, nor a gradient of an output"
_SAVED = "forward returns the outputs, then each saved value; one that is required is a tensor"


def _tensors_of(want: Expected) -> Iterator[Tensor]:
    return chain(want.outputs, want.grads, want.gradients.values(), want.saved.values())


def _form(results: Any) -> str:
    """Return the kind of a kernel's results as a phrase."""
    if isinstance(results, (tuple, list)):
        return f"a {type(cast('Any', results)).__name__} of {len(cast('list[Any]', results))}"
    return "None" if results is None else f"a {type(results).__name__}"


class Inputs(NamedTuple):
    """The gradients of the outputs, and what backward gets of forward: by the references, never by a kernel."""

    grads: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor | None, ...]


class Answer(NamedTuple):
    """The float64 answer of a call, and what backward gets for it."""

    want: Expected
    inputs: Inputs


class Subject(KernelCalls):
    """One backend's kernels for one op, run and compared with float64."""

    def __init__(self, backend: str, op: Op, device: str, elements: int, *, brief: bool = False) -> None:
        super().__init__(backend, op, device, elements, brief=brief)
        kinds = [parameter.kind for parameter in op.signature.parameters.values()]
        self.device_of_tensors = torch.empty(0, device=device).device
        self._positional = sum(kind is not Parameter.KEYWORD_ONLY for kind in kinds)

    def public(self, *args: Any) -> Any:
        """Call the public function with every argument by position, see ``Op.call_public``."""
        split = self._positional
        args = self.op.with_copies(args)
        results = self.op.function(*args[:split], **dict(zip(self.op.parameters[split:], args[split:])))
        return self.op.written_in(args) if self.op.written else results

    @contextmanager
    def alone(self, expected_runs: Mapping[Direction, int], unchanged: Mapping[str, Any]) -> Generator[None]:
        """Let only this backend serve the calls in the block.

        Raises:
            RuleError: another kernel ran too or instead, one of the ``unchanged`` arguments was written, or the
                process has another state, such as grad mode.
            NoBackendError: the backend's constraints refuse the call.
        """
        tensors = {name: value for name, value in unchanged.items() if isinstance(value, Tensor)}
        before = {name: memory_of(value) for name, value in tensors.items()}
        versions = {name: version_of(value) for name, value in tensors.items()}
        runs_before, state = marks(), global_state(self.device_of_tensors)
        try:
            with use(self.backend, fallback="raise", adapt="none"):
                yield
        finally:
            check_global_state(state, self.device_of_tensors)
        check_runs(calls_since(runs_before), self.backend, self.op.name, expected_runs)
        written = [name for name, value in tensors.items() if not torch.equal(memory_of(value), before[name])]
        if written:
            raise RuleError(
                f"got {' and '.join(written)} written by the call, expected every input unchanged",
                _UNCHANGED,
            )
        rewritten = [name for name, value in tensors.items() if version_of(value) != versions[name]]
        if rewritten:
            raise RuleError(
                f"got {' and '.join(rewritten)} written in place, with the bits that were there, expected no operation "
                f"that writes an input",
                _UNCHANGED,
            )

    def forward(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the outputs by the backend's forward alone, and check their layout."""
        with torch.no_grad(), self.alone({"forward": 1}, dict(zip(self.op.parameters, args))):
            outputs = self.each_output(self.public(*args), args)
        self.check_outputs(outputs, args)
        given = {} if self.op.written else dict(zip(self.op.parameters, args))
        check_own_memory(dict(zip(map(self.output_name, self.op.outputs), outputs)), given)
        return outputs

    def each_output(self, results: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the outputs of the public function, an empty tensor for each that the call does not have."""
        op = self.op
        if op.single:  # of several, the public function may return one
            self._check_form("forward", results, op.outputs, "output")
        outputs = list(op.as_tuple(results))
        for at, (name, y) in enumerate(zip(op.outputs, outputs)):
            given = name not in op.output_of or args[op.parameters.index(op.output_of[name])] is not None
            if given is (y is None):
                needed = "a tensor" if given else f"None, as {op.output_of[name]} is None"
                raise RuleError(
                    f"got {self.output_name(name)} as {type(y).__name__}, expected {needed}",
                    "an output is None where its argument is None, else a tensor",
                )
            if y is None:
                outputs[at] = torch.empty_like(empty_outputs(op, args)[at], device=self.device_of_tensors)
        return tuple(outputs)

    def forward_with_saved(self, args: Sequence[Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor | None]]:
        """Return the outputs and the saved values by name, as where a gradient is wanted, and check their layout."""
        op = self.op
        with torch.no_grad(), self.alone({"forward": 1}, dict(zip(op.parameters, args))):
            results = self.run_kernel(args, save=True)
        outputs, values = results[: len(op.outputs)], results[len(op.outputs) :]
        self.check_outputs(outputs, args)
        self._check_saved_layout(values, args)
        saved = {declared.name: value for declared, value in zip(op.saved, values)}
        named = {**dict(zip(map(self.output_name, op.outputs), outputs)), **saved}
        check_own_memory(named, dict(zip(op.parameters, args)))
        return outputs, saved

    def run_kernel(self, args: Sequence[Any], *, save: bool) -> tuple[Any, ...]:
        """Return everything that the forward kernel returns: the outputs, then the saved values."""
        op = self.op
        kernel = select(plan_for(op, args[0], None), tuple(args))
        results: Any = op.call_kernel(kernel.counted(), op.with_copies(args), save)
        self._check_forward_form(results)
        return cast("tuple[Any, ...]", results) if op.saved else op.as_tuple(results)

    def check_forms(self, call: Sequence[Any], directions: Sequence[Direction] = ("forward", "backward")) -> None:
        """Raise RuleError unless the kernels return a tensor where there is one result, else a tuple of all.

        Saved values have their layout too: what reads them fails in other words.
        """
        args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in call]
        with torch.no_grad():
            if "forward" in directions:
                results: Any = self.op.call_kernel(self.kernels["forward"].call, args, True)
                self._check_forward_form(results)
                if self.op.saved:
                    self._check_saved_layout(results[len(self.op.outputs) :], args)
            if "backward" in directions and "backward" in self.kernels:
                given = self.backward_arguments(self.inputs(args), args).values()
                self._check_form("backward", self.kernels["backward"].call(*given), self.op.differentiable, "gradient")

    @contextmanager
    def naming_forms(
        self, call: Sequence[Any], directions: Sequence[Direction] = ("forward", "backward")
    ) -> Generator[None]:
        """Where the block fails, raise what :meth:`check_forms` does: torch's own texts do not name the kernel."""
        try:
            yield
        except Exception:
            self.check_forms(call, directions)
            raise

    def _check_forward_form(self, results: Any) -> None:
        """Raise RuleError unless forward returned the outputs and, where the op has them, the saved values."""
        op = self.op
        if not op.saved:
            self._check_form("forward", results, op.outputs, "output")
            return
        names = (*op.outputs, *(value.name for value in op.saved))
        if type(results) is not tuple or len(cast("tuple[Any, ...]", results)) != len(names):
            raise RuleError(f"got {_form(results)} from forward, expected a tuple of {', '.join(names)}", _SAVED)

    def _check_saved_layout(self, values: Sequence[Any], args: Sequence[Any]) -> None:
        for declared, value, like in zip(self.op.saved, values, empty_saved(self.op, args)):
            if value is not None:
                check_layout(value, f"the saved value {declared.name}", like, args[0].device)
            elif not declared.optional:
                raise RuleError(
                    f"got None for the saved value {declared.name}, expected a tensor: it is required", _SAVED
                )

    def _check_form(self, direction: Direction, results: Any, names: Sequence[str], what: str) -> None:
        """Raise RuleError unless a kernel returned a tensor where there is one result, else a tuple of all."""
        if len(names) == 1 and not isinstance(results, Tensor):
            raise RuleError(
                f"got {_form(results)} from the {direction} kernel of {self.op.name}, expected a tensor",
                f"an op with one {what} returns it alone, not in a tuple",
            )
        if len(names) > 1 and (not isinstance(results, tuple) or len(cast("tuple[Any, ...]", results)) != len(names)):
            raise RuleError(
                f"got {_form(results)} from the {direction} kernel of {self.op.name}, expected a tuple of "
                f"{len(names)}: {', '.join(names)}",
                f"an op with several {what}s returns a tuple of them, None for one that is not wanted",
            )

    def check_outputs(self, outputs: Sequence[Tensor], args: Sequence[Any]) -> None:
        """Raise RuleError unless the outputs have the layout that the op gives them: one that is written, its own."""
        if self.op.written:
            return
        for name, y, like in zip(self.op.outputs, outputs, empty_outputs(self.op, args)):
            permuted = name in self.op.permuted
            check_layout(y, self.output_name(name), like, args[0].device, permuted=permuted)

    def backward_arguments(
        self, inputs: Inputs, args: Sequence[Any], needs: tuple[bool, ...] | None = None
    ) -> dict[str, Any]:
        """Return the arguments of backward by name; all gradients that exist are wanted unless ``needs`` differs."""
        needs = self.needs(args) if needs is None else needs
        return self.assembled(*inputs, args, needs)

    def gradients(
        self, inputs: Inputs, args: Sequence[Any], needs: tuple[bool, ...] | None = None
    ) -> dict[str, Tensor]:
        """Return the wanted gradients by the backend's backward alone, and check their layout."""
        needs = self.needs(args) if needs is None else needs
        call = self.backward_arguments(inputs, args, needs)
        given = tuple(call.values())
        with torch.no_grad(), self.alone({"backward": 1}, call):
            results: Any = self._run_backward(given)
        self._check_form("backward", results, self.op.differentiable, "gradient")
        each = (results,) if isinstance(results, Tensor) else cast("tuple[Tensor, ...]", results)
        named = {name: g for name, g, need in zip(self.op.differentiable, each, needs) if need}
        for name, gradient in named.items():
            like = args[self.op.parameters.index(name)]
            check_layout(gradient, f"the gradient of {name}", on_meta(like), args[0].device, permuted=True)
        check_own_memory({f"the gradient of {name}": gradient for name, gradient in named.items()}, call)
        return named

    def _run_backward(self, given: tuple[Any, ...]) -> Any:
        """Run backward as autograd calls it: the registered op is the subject of other checks."""
        plan = backward_plan(plan_for(self.op, given[0], None), self.backend)
        return select(plan, given).run(given)

    def plain_call(
        self, direction: Direction, args: Sequence[Any], form: Form | None = None
    ) -> Callable[[], tuple[Any, ...]]:
        """Return a function that makes the call and returns its results: nothing is observed, no mode is set.

        Args:
            direction: which kernel.
            args: a call's arguments.
            form: gives each tensor that the kernel gets another memory.
        """
        call = self.given_to(direction, args)
        given = tuple(form(each) if form and isinstance(each, Tensor) else each for each in call.values())

        def run() -> tuple[Any, ...]:
            with use(self.backend, fallback="raise", adapt="none"):
                return as_tuple(self.public(*given) if direction == "forward" else self._run_backward(given))

        return run

    def given_to(self, direction: Direction, args: Sequence[Any]) -> dict[str, Any]:
        """Return what the kernel of a direction gets for a call, by name."""
        if direction == "forward":
            return dict(zip(self.op.parameters, args))
        return self.backward_arguments(self.inputs(args), args)

    def answer(self, args: Sequence[Any], form: Form | None = None) -> Answer:
        """Return the float64 answer, and the gradients (in that ``form``), outputs and saved values for backward."""
        inputs = self.inputs(args, form)
        return Answer(self.expected(args, inputs.grads), inputs)

    def inputs(self, args: Sequence[Any], form: Form | None = None) -> Inputs:
        """Return what backward gets for a call, see :meth:`answer`: tensors of this call alone, on its device."""
        plain = plain_masks(args)
        known = kept(self.op, "inputs", plain, lambda: self._inputs(plain), chain.from_iterable)
        inputs = Inputs(*(tuple(each.to(self.device, copy=True) for each in part) for part in known))
        if form is None:
            return inputs
        return inputs._replace(grads=tuple(form(grad) if grad.dim() else grad for grad in inputs.grads))

    def _inputs(self, plain: Sequence[Any]) -> tuple[tuple[Tensor, ...], ...]:
        """Return what backward gets, in the dtypes of forward and on the CPU."""
        # kept for arguments of the same bits: torch sums those of another layout in another order
        plain = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in plain]
        outputs = wide_outputs(self.op, plain)
        rounded = tuple(y.to(like.dtype) for y, like in zip(outputs, empty_outputs(self.op, plain)))
        with torch.no_grad():
            on_cpu = [arg.detach().cpu() if isinstance(arg, Tensor) else arg for arg in plain]
            saved = self.op.saved_references(on_cpu, rounded)
        grads = random_gradients(self.op, plain, outputs)
        return tuple(grads), rounded, tuple(value.contiguous() for value in saved)

    def expected(self, args: Sequence[Any], grads: Sequence[Tensor]) -> Expected:
        """Return the float64 answer for these gradients of the outputs. What it holds must not be written."""
        plain = plain_masks(args)
        kernels, errors = self._with_errors()
        made = partial(expected, self.op, plain, grad=grads, kernels=kernels)
        return kept(self.op, f"gradients{errors}", (*plain, *grads), made, _tensors_of)

    def expected_forward(self, args: Sequence[Any]) -> Expected:
        """Return the float64 outputs and saved values. What it holds must not be written."""
        plain = plain_masks(args)
        kernels, errors = self._with_errors()
        return kept(self.op, f"outputs{errors}", plain, partial(expected_forward, self.op, plain, kernels), _tensors_of)

    def _with_errors(self) -> tuple[list[Kernel], str]:
        """Return the kernels that have an error of their own, and where these are defined."""
        kernels = [each.kernel for each in self.kernels.values() if each.kernel.extra_error]
        return kernels, "".join(f", {each.location}" for each in kernels)

    # ------------------------------------------------------------------------------------------ comparison

    def assert_right(
        self,
        direction: Direction,
        args: Sequence[Any],
        form: Form | None = None,
        saving: Sequence[bool] = (False, True),
    ) -> None:
        """Assert that every result of the kernel is within the op's tolerance of float64.

        Args:
            direction: which kernel.
            args: a call's arguments, as the kernel gets them.
            form: gives the gradients, which backward gets beside them, other strides.
            saving: of a forward kernel with saved values, the calls to make: without them, with them, or both.
        """
        if direction == "backward":
            answer = self.answer(args, form)
            self.assert_gradients(self.gradients(answer.inputs, args), answer.want, args)
            return
        want = None if self.op.evidence.pin_choice else self.expected_forward(args)
        if False in saving or not self.op.saved:
            outputs = self.forward(args)
            self.assert_outputs(outputs, want or self._of_choice(args, outputs), args)
        if True in saving and self.op.saved:
            outputs, saved = self.forward_with_saved(args)
            want = want or self._of_choice(args, outputs)
            self.assert_outputs(outputs, want, args)
            self.assert_saved(saved, want, args)

    def _of_choice(self, args: Sequence[Any], outputs: Sequence[Tensor]) -> Expected:
        """Return the answer for the integers that the kernel chose, where they are right ones."""
        return self.expected_forward(with_choice(self.op, plain_masks(args), outputs))

    def assert_outputs(self, outputs: Sequence[Tensor], want: Expected, args: Sequence[Any]) -> None:
        """Assert that the outputs are within the op's tolerance."""
        for name, y, wanted in zip(self.op.outputs, outputs, want.outputs):
            self._assert_within("forward", y, wanted, want, f"output {name}", self.output_name(name))

    def assert_gradients(self, gradients: Mapping[str, Tensor], want: Expected, args: Sequence[Any]) -> None:
        """Assert that gradients, by parameter, are within the op's tolerance."""
        for name, gradient in gradients.items():
            what = f"gradient of {name}"
            self._assert_within("backward", gradient, want.gradients[name], want, what, f"the {what}")

    def assert_saved(self, saved: Mapping[str, Tensor | None], want: Expected, args: Sequence[Any]) -> None:
        """Assert that saved values are their references': integers exactly, numbers within the op's tolerance."""
        for name, value in saved.items():
            if value is None:
                continue
            what = f"the saved value {name}"
            if not value.is_floating_point():
                if not torch.equal(value.cpu(), want.saved[name]):
                    raise AssertionError(f"got {what} with other elements than its reference, expected the same")
                continue
            self._assert_within("forward", value, want.saved[name], want, f"saved {name}", what)

    def _assert_within(
        self, direction: Direction, result: Tensor, wanted: Tensor, want: Expected, name: str, what: str
    ) -> None:
        """Assert that a result is within its limit, which is computed only where it is off by more than a rounding."""
        if not is_rounding(self.op, direction, result, wanted):
            assert_within(result, wanted, want.limits[name], what)

    def output_name(self, name: str) -> str:
        """Return an output's name for messages."""
        return "the output" if self.op.single else f"the output {name}"
