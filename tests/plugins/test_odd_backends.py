"""Backends with values of wrong types: each is a PluginError that names the backend, when it is registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state import backend_names

import fusedops
from fusedops import Backend, InvalidInputError, PluginError, TensorSpec, kernel


def function(x: Any, bias: Any, approximate: Any) -> Any:
    return torch.full_like(x, 7.0)


def function_of_two(x: Any, bias: Any) -> Any:
    return x


GOOD = kernel("bias_gelu")(function)


def mine(*kernels: Any, **fields: Any) -> Backend:
    return Backend(**{"name": "mine", "device_types": ("cpu",), "priority": -5, "kernels": kernels, **fields})


ODD: dict[str, tuple[Backend, str]] = {
    "a name that is an int": (mine(name=5), "backend 5: got name 5"),
    "an empty name": (mine(name=""), "backend '': got name ''"),
    "a device with an index": (mine(device_types=("cuda:0",)), "got device_types ('cuda:0',)"),
    "a device that is empty": (mine(device_types=("",)), "got device_types ('',)"),
    "a device that is misspelt": (mine(device_types=("cpu", "cdua")), "got device type 'cdua', "),
    "a device by another name": (mine(device_types=("GPU",)), "expected 'cuda'"),
    "a device that is an int": (mine(device_types=(0,)), "got device_types (0,)"),
    "no device": (mine(device_types=()), "got device_types ()"),
    "a list of devices": (mine(device_types=["cpu"]), "got device_types ['cpu']"),
    "a priority that is a float": (mine(priority=1.5), "got priority 1.5"),
    "no kernels": (mine(kernels=None), "got kernels of type NoneType"),
    "a generator of kernels": (mine(kernels=(each for each in (GOOD,))), "got kernels of type generator"),
    "a kernel instead of kernels": (mine(kernels=GOOD), "got kernels of type Kernel"),
    "a function in place of a kernel": (mine(function), "among its kernels, expected a kernel"),
    "a kernel without a signature": (mine(kernel("bias_gelu")(dict.update)), "a function without a signature"),
    "deviations that are a text": (mine(kernel("bias_gelu", deviations="abc")(function)), "'a'"),  # type: ignore[arg-type]
    "adaptations that are a text": (mine(kernel("bias_gelu", adapts="abc")(function)), "'a'"),  # type: ignore[arg-type]
    "variables that are numbers": (mine(variables=((1, 2),)), "got variables ((1, 2),)"),
    "tools that are numbers": (mine(tools=(1,)), "got tools (1,), expected a tuple of names"),
    "variables that are names": (mine(variables=("FUSEDOPS_X",)), "variables"),
}


@pytest.mark.parametrize(("backend", "part"), ODD.values(), ids=ODD.keys())
def test_an_odd_value_is_a_plugin_error_when_it_is_registered(backend: Backend, part: str) -> None:
    with pytest.raises(PluginError, match=r"^backend .*: got .*, expected .*; to fix: ") as error:
        fusedops.register(backend)
    assert part in str(error.value)
    assert "mine" not in backend_names()


def test_a_function_named_as_text_is_imported_and_checked_by_its_first_call() -> None:
    other = kernel("bias_gelu")(f"{__name__}:function_of_two")
    fusedops.register(mine(kernels=(other, kernel("bias_gelu", direction="backward")("no.module:function"))))
    with pytest.raises(
        PluginError, match=r"at [a-z_.]*test_odd_backends:function_of_two: got parameters \(x, bias\), expected "
    ):
        fusedops.bias_gelu(torch.ones(2), backend="mine")
    fusedops.unregister("mine")
    fusedops.register(mine(kernels=(kernel("bias_gelu")(f"{__name__}:function"),)))
    assert fusedops.bias_gelu(torch.ones(2), backend="mine").tolist() == [7.0, 7.0]


def test_a_device_type_that_only_its_library_adds_is_kept() -> None:
    fusedops.register(mine(GOOD, device_types=("musa",)))
    assert fusedops.explain("bias_gelu", TensorSpec((2,), device="musa"), None, backend="mine").backend == "mine"


def test_kernels_of_a_list_are_kept() -> None:
    fusedops.register(mine(kernels=[GOOD]))
    (info,) = [info for info in fusedops.backends() if info.name == "mine"]
    assert (info.state, info.ops) == ("ready", ("bias_gelu",))
    assert fusedops.bias_gelu(torch.ones(2), backend="mine").tolist() == [7.0, 7.0]


@pytest.mark.parametrize("result", [5, "an op", {"name": "an op"}, [5]])
def test_what_a_hook_returns_in_place_of_an_op_is_a_plugin_error(result: Any) -> None:
    class Plugin:
        fusedops_op = fusedops.hookimpl(lambda self: result)

    text = r"^plugin 'odd': got \w+ from fusedops_op, expected a fusedops.Op, or a list of them; to fix: "
    with pytest.raises(PluginError, match=text):
        fusedops.register(Plugin(), "odd")


def test_a_kernel_with_defaults_is_accepted_and_gets_every_argument() -> None:
    seen: list[Any] = []

    @kernel("bias_gelu")
    def noting(x: Any, bias: Any = "unused", approximate: Any = "unused") -> Any:
        seen.extend([bias, approximate])
        return x.clone()

    fusedops.register(mine(noting))
    fusedops.bias_gelu(torch.ones(2), backend="mine")
    assert seen == [None, "tanh"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorSpec((4.7,)),  # type: ignore[arg-type]
        lambda: TensorSpec(4),  # type: ignore[arg-type]
        lambda: TensorSpec(("4",)),  # type: ignore[arg-type]
        lambda: TensorSpec((-1,)),
        lambda: TensorSpec((4,), "float32"),  # type: ignore[arg-type]
        lambda: TensorSpec((4,), device=""),
        lambda: TensorSpec((4,), device=None),  # type: ignore[arg-type]
    ],
)
def test_a_spec_of_wrong_values_is_an_invalid_input_error(make: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^TensorSpec: got .*, expected .*; to fix: "):
        make()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_are_invalid_everywhere(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    for call in (
        lambda: fusedops.bias_gelu(nested),
        lambda: fusedops.bias_gelu(torch.ones(2), nested),
        lambda: fusedops.explain("bias_gelu", nested),
        lambda: fusedops.bind("bias_gelu", nested),
    ):
        with pytest.raises(InvalidInputError, match=r"^bias_gelu: got (x|bias) as a nested tensor, expected a strided"):
            call()
