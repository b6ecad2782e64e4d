"""The conformance kit on an op with two outputs, a required and an optional saved value: right and wrong kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopback import reference_kernels, with_parameters
from two_outputs import BACKEND, OP, add_center_scale, backward_kernel, forward_kernel, two_outputs

import fusedops
from fusedops import Backend, Kernel, testing

# the checks that a wrong kernel here may fail: the others run once, on the right backend
FORMS = ("kernel", "float64", "saved", "needs", "dtypes", "autograd")


pytestmark = pytest.mark.usefixtures("one_thread")


def run(plugin: Backend, names: tuple[str, ...] | None = FORMS) -> dict[str, testing.Result]:
    """Return the results of the kit's checks on a backend, by direction and name."""
    with two_outputs(plugin):
        checks = testing.checks(plugin.name, elements=2**11)
        return {
            f"{check.direction}/{check.name}": check.run() for check in checks if names is None or check.name in names
        }


def failed(plugin: Backend) -> dict[str, str]:
    """Return the first failure of each check that failed."""
    return {name: result.failures[0].seen for name, result in run(plugin).items() if result.failures}


def backward_with(name: str, change: Callable[[Any], Any]) -> Kernel:
    """Return the right backward kernel, with one of its arguments changed."""

    def backward(*args: Any) -> Any:
        given = dict(zip(OP.backward_parameters, args))
        return backward_kernel.function(**{**given, name: change(given[name])})

    return fusedops.kernel(OP.name, direction="backward")(with_parameters(backward, *OP.backward_parameters))


@pytest.mark.parametrize("kernels", ["its own", "the references"])
def test_the_kit_passes(kernels: str) -> None:
    plugin = BACKEND if kernels == "its own" else Backend("references", ("cpu",), -60, reference_kernels(OP))
    results = run(plugin, None)
    assert not [str(result) for result in results.values() if result.failures]
    assert all(result.cases for result in results.values())
    assert {"forward/saved", "backward/saved", "backward/needs", "both/compile"} <= set(results)


def test_a_forward_that_saves_no_optional_value_passes() -> None:
    def forward(x: Any, residual: Any, weight: Any, eps: Any, save: Any) -> Any:
        y, s, rstd, _ = forward_kernel.function(x, residual, weight, eps, save)
        return y, s, rstd, None

    assert not failed(Backend("no_mean", ("cpu",), -60, (fusedops.kernel(OP.name)(forward), backward_kernel)))


# by the fault: what it makes of y, s and the saved values rstd and mean, which are None without a gradient
FORWARD: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a wrong s": (
        lambda y, s, rstd, mean: (y, s * 1.05, rstd, mean),
        "forward/float64", "got the output s beyond the tolerance in",
    ),
    "outputs exchanged": (
        lambda y, s, rstd, mean: (s, y, rstd, mean),
        "forward/float64", "got the output y beyond the tolerance in",
    ),
    "a wrong rstd": (
        lambda y, s, rstd, mean: (y, s, rstd if rstd is None else rstd * 1.001, mean),
        "forward/saved", "got the saved value rstd beyond the tolerance in",
    ),
    "a wrong mean": (
        lambda y, s, rstd, mean: (y, s, rstd, mean if mean is None else mean + 0.01),
        "forward/saved", "got the saved value mean beyond the tolerance in",
    ),
    "no rstd": (
        lambda y, s, rstd, mean: (y, s, None, mean),
        "forward/saved", "got None for the saved value rstd, expected a tensor: it is required",
    ),
    "a flat rstd": (
        lambda y, s, rstd, mean: (y, s, rstd if rstd is None else rstd.squeeze(-1), mean),
        "forward/saved", "got the saved value rstd as float32",
    ),
    "a narrow rstd": (
        lambda y, s, rstd, mean: (y, s, rstd if rstd is None else rstd.to(torch.bfloat16), mean),
        "forward/saved", "got the saved value rstd as bfloat16",
    ),
    "three results": (
        lambda y, s, rstd, mean: (y, s, rstd),
        "forward/saved", "got a tuple of 3 from forward, expected a tuple of y, s, rstd, mean",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "check", "text"), FORWARD.values(), ids=FORWARD)
def test_a_wrong_forward_fails(change: Callable[..., Any], check: str, text: str) -> None:
    def forward(x: Any, residual: Any, weight: Any, eps: Any, save: Any) -> Any:
        return change(*forward_kernel.function(x, residual, weight, eps, save))

    failures = failed(Backend("wrong", ("cpu",), -60, (fusedops.kernel(OP.name)(forward), backward_kernel)))
    assert failures[check].startswith(text), failures


def test_saving_without_a_gradient_fails() -> None:
    def forward(x: Any, residual: Any, weight: Any, eps: Any, save: Any) -> Any:
        return forward_kernel.function(x, residual, weight, eps, True)

    failures = failed(Backend("saves", ("cpu",), -60, (fusedops.kernel(OP.name)(forward), backward_kernel)))
    assert failures == {"forward/saved": "got rstd and mean with save = False, expected None: no gradient is wanted"}


def test_a_backward_that_depends_on_its_own_forward_fails() -> None:
    """Forward saves rstd times 2, and backward divides it by 2: right together, wrong beside any other backend."""

    def forward(x: Any, residual: Any, weight: Any, eps: Any, save: Any) -> Any:
        y, s, rstd, mean = forward_kernel.function(x, residual, weight, eps, save)
        return y, s, rstd * 2 if save else None, mean

    kernels = (fusedops.kernel(OP.name)(forward), backward_with("rstd", lambda rstd: rstd / 2))
    results = run(Backend("pair", ("cpu",), -60, kernels))
    failures = {name for name, result in results.items() if result.failures}
    assert {"forward/saved", "backward/saved", "backward/float64"} <= failures
    assert "both/autograd" not in failures


def test_a_backward_that_requires_an_optional_value_fails() -> None:
    kernels = (forward_kernel, backward_with("mean", lambda mean: mean + 0))
    results = run(Backend("needs_mean", ("cpu",), -60, kernels))
    failures = {name: result for name, result in results.items() if result.failures}
    assert set(failures) == {"backward/saved"}
    assert {failure.case for failure in failures["backward/saved"].failures} == {
        f"{dtype}, mean None" for dtype in ("float16", "bfloat16", "float32", "float64")
    }


def test_a_backward_that_ignores_the_second_gradient_fails() -> None:
    kernels = (forward_kernel, backward_with("grad_s", lambda grad_s: grad_s * 0))
    failures = failed(Backend("one_grad", ("cpu",), -60, kernels))
    assert failures["backward/float64"].startswith("got the gradient of x beyond the tolerance in")
    assert "both/autograd" in failures


def test_expected_has_every_output_and_saved_value() -> None:
    x, residual = torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2)
    want = testing.expected(OP, (x, residual, None, 0.0), grad=(torch.zeros(1, 2), torch.ones(1, 2)))
    assert [y.tolist() for y in want.outputs] == [[[-1.0, 1.0]], [[1.0, 3.0]]]
    assert want.y is want.outputs[0]
    assert want.grad is want.grads[0]
    assert {name: value.tolist() for name, value in want.saved.items()} == {"rstd": [[1.0]], "mean": [[2.0]]}
    assert want.gradients["x"].tolist() == [[1.0, 1.0]]
    assert [*want.gradients] == ["x", "residual"]


def test_the_public_function() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with two_outputs():
        y, s = add_center_scale(x, torch.randn(3, 8))
        (y.sum() + s.sum()).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(3, 8))
