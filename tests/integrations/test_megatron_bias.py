"""Megatron's bias_gelu and bias_dropout_add: the drop-ins beside megatron-core itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron_peer
import pytest
import torch
from megatron_cases import DTYPES, assert_same, tensor, with_gradients
from torch import Tensor
from torch.testing import assert_close

import fusedops
from fusedops.compat import megatron as ours

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own

PAIRS = [
    *((dtype, dtype) for dtype in (*DTYPES, torch.float64)),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize(("dtype", "bias_dtype"), PAIRS)
@pytest.mark.parametrize("shape", [(16,), (1, 16), (6, 1), (6, 16)])
def test_gelu_as_megatron(peer: Any, dtype: torch.dtype, bias_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    y, bias = tensor(4, 6, 16, dtype=dtype), tensor(*shape, dtype=bias_dtype, seed=1)
    coarse = max(dtype, bias_dtype, key=lambda d: torch.finfo(d).eps)
    with megatron_peer.on_cpu():
        plain = with_gradients(peer.gelu.bias_gelu, bias, y)
        function = with_gradients(peer.gelu.GeLUFunction.apply, y, bias)
    # ten steps in the narrow dtype there, and sums of values up to 6
    assert_same(with_gradients(ours.bias_gelu, bias, y), plain, coarse, roundings=10)
    assert_same(with_gradients(ours.GeLUFunction.apply, y, bias), function, coarse, roundings=10)
    assert_same(with_gradients(ours.bias_gelu_impl, y, bias), function, coarse, roundings=10)


@pytest.mark.parametrize("dtypes", [*((d, d, d) for d in DTYPES), (torch.bfloat16, torch.float32, torch.bfloat16)])
def test_gelu_back_as_megatron(peer: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    g, bias, y = (tensor(*s, dtype=d, seed=n) for n, (s, d) in enumerate(zip([(6, 16), (16,), (6, 16)], dtypes)))
    with megatron_peer.on_cpu():
        want = peer.gelu.bias_gelu_back(g, bias, y)
    coarse = max(dtypes, key=lambda d: torch.finfo(d).eps)
    assert_same([ours.bias_gelu_back(g, bias, y)], [want], coarse, roundings=10)


def test_gelu_is_closer_than_megatron(peer: Any) -> None:
    """The sum is rounded once there and the rest at each step; here all is in float32."""
    y, bias = tensor(64, 256, dtype=torch.bfloat16), tensor(256, dtype=torch.bfloat16, seed=1)
    exact = torch.nn.functional.gelu(y.double() + bias.double(), approximate="tanh")
    with megatron_peer.on_cpu():
        theirs = (peer.gelu.bias_gelu(bias, y).double() - exact).abs().mean()
    assert (ours.bias_gelu(bias, y).double() - exact).abs().mean() < theirs


def test_gelu_without_a_bias() -> None:
    """According to Megatron's comment the bias is optional; its code then fails."""
    x = tensor(4, 16)
    want = with_gradients(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), x)
    assert_same(with_gradients(lambda x: ours.GeLUFunction.apply(x, None), x), want, torch.float32)
    assert_same(with_gradients(lambda x: ours.bias_gelu(None, x), x), want, torch.float32)
    assert_close(
        ours.bias_gelu_back(torch.ones_like(x), None, x), torch.func.grad(lambda x: ours.bias_gelu(None, x).sum())(x)
    )


def test_gelu_function_by_hand_in_a_subclass_and_compiled() -> None:
    x, bias = tensor(4, 16), tensor(16, seed=1)
    want = with_gradients(lambda x, bias: fusedops.bias_gelu(x, bias), x, bias)

    class Sub(ours.GeLUFunction):
        pass

    torch._dynamo.reset()
    compiled = torch.compile(ours.bias_gelu_impl, backend="aot_eager", fullgraph=True)
    for apply in (ours.GeLUFunction.apply, Sub.apply, compiled):
        assert_close(with_gradients(apply, x, bias), want)

    class Context:
        saved_tensors: tuple[Any, ...] = ()

        def save_for_backward(self, *tensors: Any) -> None:
            self.saved_tensors = tensors

    context = Context()
    y = ours.GeLUFunction.forward(context, x, bias)
    assert_close([y, *ours.GeLUFunction.backward(context, tensor(*y.shape, seed=9))], want)


# ------------------------------------------------------------------------------------------------- bias, dropout, add


def versions(library: Any, training: bool) -> list[Callable[..., Tensor]]:
    module = library if library is ours else library.dropout
    return [
        module.get_bias_dropout_add(training, True),
        module.get_bias_dropout_add(training, False),
        module.bias_dropout_add_unfused(training),
        module.bias_dropout_add_fused_train if training else module.bias_dropout_add_fused_inference,
        lambda pair, residual, prob: module._bias_dropout_add_func(pair, residual, prob, training),
    ]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("training", "p"), [(True, 0.0), (False, 0.0), (False, 0.3)])
def test_dropout_add_as_megatron(peer: Any, training: bool, p: float, dtype: torch.dtype, with_bias: bool) -> None:
    x, residual = tensor(4, 16, dtype=dtype), tensor(4, 16, dtype=dtype, seed=2)
    bias = tensor(16, dtype=dtype, seed=1) if with_bias else None

    def results(function: Callable[..., Tensor]) -> list[Tensor | None]:
        return with_gradients(lambda x, bias, residual: function((x, bias), residual, p), x, bias, residual)

    for mine, theirs in zip(versions(ours, training), versions(peer, training)):
        with megatron_peer.on_cpu():
            want = results(theirs)
        assert_same(results(mine), want, dtype)
        # without gradients: evaluation is in place, and the answer is x itself
        for library, function in ((ours, mine), (peer, theirs)):
            given, before = x.clone(), residual.clone()
            with megatron_peer.on_cpu() if library is peer else torch.no_grad():
                y = function((given, bias), residual, p)
            assert_same([y], want[:1], dtype)
            assert (y.data_ptr() == given.data_ptr()) is not training
            assert torch.equal(residual, before)


@pytest.mark.parametrize("needs", ["x", "bias", "residual"])
def test_evaluation_is_not_in_place_where_an_input_requires_grad(peer: Any, needs: str) -> None:
    for library in (ours, peer):
        tensors = {"x": tensor(4, 16), "bias": tensor(16, seed=1), "residual": tensor(4, 16, seed=2)}
        tensors[needs].requires_grad_()
        before = tensors["x"].detach().clone()
        with megatron_peer.on_cpu():
            y = versions(library, False)[0]((tensors["x"], tensors["bias"]), tensors["residual"], 0.1)
        assert y.requires_grad
        assert torch.equal(tensors["x"], before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_mixed_dtypes(peer: Any, dtype: torch.dtype, residual_dtype: torch.dtype, training: bool) -> None:
    x, bias, residual = tensor(4, 16, dtype=dtype), tensor(16, dtype=dtype, seed=1), tensor(4, 16, dtype=residual_dtype)
    before = x.clone()
    y = ours.get_bias_dropout_add(training, True)((x, bias), residual, 0.0)
    assert y.dtype == residual_dtype
    assert torch.equal(x, before)  # not in place: x cannot hold the answer
    with megatron_peer.on_cpu():
        theirs = peer.dropout.get_bias_dropout_add(training, True)((x.clone(), bias), residual, 0.0)
    # Megatron narrowed a float32 residual to x's dtype until 0.17 (Megatron#3504)
    assert theirs.dtype == (residual_dtype if peer.version >= (0, 17) else dtype)
    assert_same([y], [theirs.to(residual_dtype)], torch.bfloat16)


def test_fused_and_unfused_drop_the_same() -> None:
    """No peer's do: theirs draw in different orders."""
    x, bias, residual = tensor(64, 16), tensor(16, seed=1), tensor(64, 16, seed=2)
    drawn: list[Tensor] = []
    for function in versions(ours, True):
        torch.manual_seed(7)
        drawn.append(function((x, bias), residual, 0.4))
    kept = drawn[0] != residual
    for y in drawn[1:]:
        assert torch.equal(y != residual, kept)
        assert_close(y, drawn[0])
    assert 0.5 < kept.double().mean() < 0.7
    assert_close(drawn[0][kept], (residual + (x + bias) / 0.6)[kept])


def test_dropout_add_compiled() -> None:
    x, bias, residual = tensor(4, 16), tensor(16, seed=1), tensor(4, 16, seed=2)
    for training in (True, False):
        torch._dynamo.reset()
        function = ours.get_bias_dropout_add(training, True)
        given = x.clone()
        y = torch.compile(function, backend="aot_eager", fullgraph=True)((given, bias), residual, 0.0)
        assert_close(y, residual + x + bias)
        assert torch.equal(given, x if training else y)
