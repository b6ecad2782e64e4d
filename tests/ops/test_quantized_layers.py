"""Layers whose weight is packed in a format of the Hub: their values, state dicts, moves and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fusedops.errors import InvalidInputError
from fusedops.nn import QuantizedEmbedding, QuantizedLinear
from fusedops.quantization import SCALED, pack, unpack

every_format = pytest.mark.parametrize("format", SCALED)


@every_format
def test_a_linear_layer_has_the_numbers_of_its_packed_weight(format: str) -> None:
    linear, x = torch.nn.Linear(256, 40), torch.randn(3, 256)
    layer = QuantizedLinear.of(linear, format)
    weight = unpack(pack(linear.weight, format))
    assert torch.equal(layer.dequantize(), weight)
    assert torch.equal(layer.weight + 0, weight)
    assert torch.equal(unpack(layer.value), weight)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, linear.bias), rtol=1e-5, atol=1e-5)
    of_value = QuantizedLinear.of_packed(pack(linear.weight, format), linear.bias)
    assert torch.equal(of_value(x), layer(x))


@every_format
def test_an_embedding_has_the_rows_of_its_packed_weight(format: str) -> None:
    layer = QuantizedEmbedding.of(torch.nn.Embedding(200, 256), format)
    index = torch.tensor([[0, 130, 199], [127, 128, 0]])
    assert torch.equal(layer(index), layer.dequantize()[index])
    assert layer(index[:0]).shape == (0, 3, 256)


@every_format
def test_a_state_dict_has_the_tensors_and_the_format(format: str) -> None:
    layer = QuantizedLinear.of(torch.nn.Linear(256, 40), format)
    weight = layer.dequantize()
    again = QuantizedLinear(256, 40, format=format)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.dequantize(), weight)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.dequantize(), weight)
    with pytest.raises(RuntimeError, match=f"got packed_{format} in the state dict"):
        QuantizedLinear(256, 40, format="Q8_0").load_state_dict(layer.state_dict())


@every_format
def test_a_dtype_does_not_round_the_scales(format: str) -> None:
    layer = QuantizedLinear.of(torch.nn.Linear(256, 40), format)
    weight = layer.dequantize()
    layer.to(torch.bfloat16)
    assert layer.dequantize().dtype == torch.bfloat16
    assert torch.equal(layer.dequantize(), weight.bfloat16())
    assert torch.equal(layer.float().dequantize(), weight)


def test_a_weight_of_experts_is_no_layer() -> None:
    with pytest.raises(InvalidInputError, match="the weight of one expert"):
        QuantizedLinear.of_packed(pack(torch.ones(2, 3, 64), "MXFP4"))


@pytest.mark.parametrize(("format", "columns"), [("FP8_ROW", 33), ("FP8_BLOCK", 130), ("INT4_GROUP", 40)])
def test_a_row_of_a_packed_weight_may_be_no_multiple_of_32(format: str, columns: int) -> None:
    packed = pack(torch.randn(3, columns), format, group=8)
    layer, x = QuantizedLinear.of_packed(packed), torch.randn(2, columns)
    assert (layer.in_features, layer.out_features) == (columns, 3)
    torch.testing.assert_close(layer(x), x @ unpack(packed).t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(QuantizedEmbedding.of_packed(packed)(torch.tensor([2])), unpack(packed)[2:])
