"""The drop-in for Slapo's fused_bias, beside its formula in float64, and beside Slapo itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import fusedops
from fusedops.compat import slapo
from fusedops.errors import InvalidInputError

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def formula(u: Tensor) -> Tensor:
    """HF's new_gelu, in float64."""
    u = u.double()
    return u / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def assert_within(got: Tensor, want: Tensor) -> None:
    tolerance = fusedops.ops.OPS["bias_gelu"].evidence.gradient_tolerance[got.dtype]
    assert_close(got.double(), want, atol=tolerance.absolute, rtol=tolerance.relative)


@cache
def peer() -> Any:
    """Slapo's file itself; the whole package would import much more."""
    try:
        file = importlib.metadata.distribution("slapo").locate_file("slapo/op/fused_bias.py")
    except importlib.metadata.PackageNotFoundError:
        # no dev dependency: its wheel installs a package called `tests`, which hides ours
        pytest.skip("needs slapo 0.0.3: pip install --no-deps --target DIR slapo==0.0.3, and PYTHONPATH=DIR")
    spec = importlib.util.spec_from_file_location("slapo_fused_bias", str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses TorchScript, which torch calls deprecated
        spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_slapo(dtype: torch.dtype) -> None:
    x, bias, grad = tensor(6, 16, dtype=dtype), tensor(16, dtype=dtype, seed=1), tensor(6, 16, dtype=dtype, seed=2)
    # ten steps in the narrow dtype there, and sums of values up to 6; sqrt(2 / pi) has 8 digits in one of the two
    tolerance = max(10 * {torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps), 3e-8)
    calls: list[Any] = [
        lambda library, x, bias: library.BiasGeLUFunction.apply(x, bias),
        lambda library, x, bias: library.BiasGeLUFunction.bias_gelu(bias, x),
        lambda library, x, bias: library.bias_new_gelu(x, bias),
        lambda library, x, bias: library.new_gelu(x) + bias,
        lambda library, x, bias: library.bias_dropout(x, bias, 0.0),
        lambda library, x, bias: library.bias_dropout(x, bias, 0.3, False, True),
    ]
    for call in calls:
        found: list[list[Tensor]] = []
        for library in (slapo, peer()):
            leaves = [t.clone().requires_grad_() for t in (x, bias)]
            y = call(library, *leaves)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
        assert_close(*found, atol=tolerance, rtol=tolerance)
    back = [library.BiasGeLUFunction.bias_gelu_back(grad, bias, x) for library in (slapo, peer())]
    assert_close(*back, atol=tolerance, rtol=tolerance)
    for library in (slapo, peer()):  # in place is the sum, in both
        before = x.clone()
        library.bias_dropout(x, bias, 0.5, True, True)
        assert torch.equal(x, before)


def test_names_and_parameters() -> None:
    def parameters(function: Any) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(function).parameters.items()}

    none = inspect.Parameter.empty
    assert parameters(slapo.new_gelu) == {"inp": none}
    assert parameters(slapo.bias_new_gelu) == {"inp": none, "bias": none}
    assert parameters(slapo.BiasGeLUFunction.forward) == {"ctx": none, "inp": none, "bias": none}
    assert parameters(slapo.BiasGeLUFunction.backward) == {"ctx": none, "grad_output": none}
    assert parameters(slapo.bias_dropout) == {"x": none, "bias": none, "p": 0.5, "training": True, "inplace": False}
    assert list(parameters(slapo.BiasGeLUFunction.bias_gelu)) == ["bias", "y"]
    assert list(parameters(slapo.BiasGeLUFunction.bias_gelu_back)) == ["g", "bias", "y"]
    assert issubclass(slapo.BiasGeLUFunction, torch.autograd.Function)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(dtype: torch.dtype) -> None:
    x, bias, grad = tensor(6, 16, dtype=dtype), tensor(16, dtype=dtype, seed=1), tensor(6, 16, dtype=dtype, seed=2)
    wide = [t.double().requires_grad_() for t in (x, bias)]
    want = formula(wide[0] + wide[1])
    gradients = torch.autograd.grad(want, wide, grad.double())
    for function in (slapo.BiasGeLUFunction.apply, slapo.bias_new_gelu):
        leaves = [t.clone().requires_grad_() for t in (x, bias)]
        y = function(*leaves)
        assert y.dtype == dtype
        assert_within(y.detach(), want.detach())
        for leaf, got, wanted in zip(leaves, torch.autograd.grad(y, leaves, grad), gradients):
            assert (got.shape, got.dtype) == (leaf.shape, leaf.dtype)
            assert_within(got, wanted)
    assert_within(slapo.new_gelu(x), formula(x))
    assert_within(slapo.BiasGeLUFunction.bias_gelu(bias, x), want.detach())
    assert_within(slapo.BiasGeLUFunction.bias_gelu_back(grad, bias, x), gradients[0])


def test_gelu_in_a_subclass_compiled_and_transformed() -> None:
    x, bias = tensor(6, 16), tensor(16, seed=1)

    class Sub(slapo.BiasGeLUFunction):
        pass

    torch._dynamo.reset()
    compiled = torch.compile(slapo.BiasGeLUFunction.apply, backend="aot_eager", fullgraph=True)
    want = torch.func.grad(lambda x: formula(x + bias).sum())(x)
    for apply in (slapo.BiasGeLUFunction.apply, Sub.apply, compiled):
        leaf = x.clone().requires_grad_()
        apply(leaf, bias).sum().backward()
        assert_close(leaf.grad, want)
    assert_close(torch.func.grad(lambda x: slapo.BiasGeLUFunction.apply(x, bias).sum())(x), want)


@pytest.mark.parametrize("inplace", [True, False])
def test_bias_dropout(inplace: bool) -> None:
    x, bias = tensor(64, 16, dtype=torch.float32), tensor(16, dtype=torch.float32, seed=1)
    before = x.clone()
    assert_close(slapo.bias_dropout(x, bias, 0.0, True, inplace), x + bias)
    assert_close(slapo.bias_dropout(x, bias, 0.7, False, inplace), x + bias)
    assert not slapo.bias_dropout(x, bias, 1.0, True, inplace).any()
    torch.manual_seed(5)
    y = slapo.bias_dropout(x, bias, inplace=inplace)
    torch.manual_seed(5)
    assert torch.equal(y, fusedops.bias_dropout(x, bias, 0.5))
    assert 0.4 < (y != 0).double().mean() < 0.6
    assert_close(y[y != 0], (2 * (x + bias))[y != 0])
    assert torch.equal(x, before)  # in the original too, in place is the sum


def test_bias_dropout_of_a_probability_that_is_none() -> None:
    with pytest.raises(InvalidInputError, match=r"got p = 1\.5"):
        slapo.bias_dropout(tensor(4), tensor(4), 1.5)
    with pytest.raises(ValueError, match="dropout probability"):  # the original's, and ours is a ValueError
        torch.nn.functional.dropout(tensor(4), 1.5)
