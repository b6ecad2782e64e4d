"""Every text of the formats and the layers of packed weights, word for word."""

from collections.abc import Callable
from typing import Any

import torch
from error_calls import INVALID
from error_texts import Table

import fusedops.nn
from fusedops.constraints import PackedPart
from fusedops.ops import int8_linear, quantized_linear
from fusedops.quantization import Packed, dequantize, pack, quantize, quantize_rows, unpack

TABLE = Table(__file__, "fakes")
pin = TABLE.pin
ROW = torch.ones(64)
LAYER = fusedops.nn.QuantizedLinear(64, 3, format="Q8_0")
PACKED = quantize(torch.ones(3, 64), "Q8_0")
Q = ROW.to(torch.int8)

HUB = pack(torch.ones(3, 64), "MXFP4")
PARTS = {"scales": HUB.scales, "shape": (3, 64)}

pin("a format", lambda: quantize(ROW, "Q3_K"), INVALID)
pin("an integer weight", lambda: quantize(ROW.long(), "Q8_0"), INVALID)
pin("a number of weights", lambda: quantize(ROW, "Q4_K"), INVALID)
pin("a number of weights that no format takes", lambda: quantize(ROW[:9], "Q8_0"), INVALID)
pin("an infinite weight", lambda: quantize(ROW / 0, "Q8_0"), INVALID)
pin("large weights", lambda: quantize(ROW * 2e7, "Q8_0"), INVALID)
pin("float64 beyond float32", lambda: quantize(ROW.double() * 1e300, "Q4_1"), INVALID)
pin("small weights", lambda: quantize(ROW * 1e-6, "Q8_0"), INVALID)
pin("packed bytes", lambda: dequantize(PACKED[:, 1:], "Q8_0"), INVALID)
UP, DOWN = (pack(torch.ones(3, rows, 32), "MXFP4") for rows in (64, 32))
OF_EXPERTS: tuple[Any, ...] = (torch.ones(1, 32), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2), UP, DOWN)
CODES, CODES_FORMAT = (UP.codes, DOWN.codes), {"up_format": "MXFP4", "down_format": "MXFP4"}


def of_experts(**changes: Any) -> Callable[[], Any]:
    return lambda: fusedops.experts(**{**dict(zip(("x", "index", "weights", "up", "down"), OF_EXPERTS)), **changes})


pin("a layer's format", lambda: fusedops.nn.QuantizedLinear(64, 3, format="Q4_K"), INVALID)
pin(
    "a renormed embedding",
    lambda: fusedops.nn.QuantizedEmbedding.of(torch.nn.Embedding(3, 64, max_norm=1.0), "Q8_0"),
    INVALID,
)
pin("from_pretrained", lambda: fusedops.nn.QuantizedEmbedding.from_pretrained(torch.ones(3, 64)), INVALID)
pin("a write to a packed weight", lambda: LAYER.weight.data.copy_(ROW), INVALID)
pin("an assignment to a packed weight", lambda: setattr(LAYER, "weight", torch.nn.Parameter(ROW)), INVALID)
pin("a state dict of another format", lambda: LAYER.load_state_dict({"packed_Q4_0": ROW}, strict=False), RuntimeError)
pin("the call's format", lambda: quantized_linear(ROW, PACKED, format="Q3_K"), INVALID)
pin("the bytes of a row", lambda: quantized_linear(ROW, PACKED, format="Q4_0"), INVALID)
pin("the last dim of x", lambda: quantized_linear(ROW[:63], PACKED, format="Q8_0"), INVALID)
pin("the dtype of packed", lambda: quantized_linear(ROW, PACKED.float(), format="Q8_0"), INVALID)
pin("an integer row", lambda: quantize_rows(ROW.long()), INVALID)
pin("the shape of smooth", lambda: quantize_rows(ROW, smooth=ROW[1:]), INVALID)
pin("rows of INT8", lambda: dequantize(PACKED[:, 1:], "INT8"), INVALID)
pin("the scales of integers", lambda: int8_linear(Q, None, Q[None], ROW[:1]), INVALID)
pin("smooth beside integers", lambda: int8_linear(Q, ROW[0], Q[None], ROW[:1], smooth=ROW), INVALID)
pin("a floating weight", lambda: int8_linear(ROW, None, ROW[None], ROW[:1]), INVALID)
pin("a dtype of x", lambda: int8_linear(ROW.long(), None, Q[None], ROW[:1]), INVALID)
pin("a dtype of the result", lambda: int8_linear(ROW, None, Q[None], ROW[:1], dtype=torch.int8), INVALID)  # pyright: ignore
pin("a Packed's format", lambda: Packed("MXFP6", HUB.codes, shape=(3, 64)), INVALID)
pin("a Packed's rank", lambda: Packed("MXFP4", HUB.codes, HUB.scales, shape=(64,)), INVALID)
pin("the rank of columns", lambda: Packed("AWQ", HUB.codes, HUB.scales, shape=(2, 3, 64)), INVALID)
pin("a Packed's block", lambda: Packed("MXFP4", HUB.codes, HUB.scales, shape=(3, 63)), INVALID)
pin("a Packed's codes", lambda: Packed("MXFP4", HUB.codes[:2], **PARTS), INVALID)  # pyright: ignore
pin("a Packed without scales", lambda: Packed("MXFP4", HUB.codes, shape=(3, 64)), INVALID)
pin("a part that a format has not", lambda: Packed("MXFP4", HUB.codes, zeros=ROW, **PARTS), INVALID)  # pyright: ignore
pin("two devices", lambda: Packed("MXFP4", HUB.codes.to("meta"), **PARTS), INVALID)  # pyright: ignore
pin("a format by column", lambda: pack(ROW[None], "AWQ"), INVALID)
pin("integers to pack", lambda: pack(ROW[None].long(), "MXFP4"), INVALID)
pin("NaN to pack", lambda: pack(ROW[None] / 0, "MXFP4"), INVALID)
pin("a group", lambda: pack(ROW[None], "INT4_GROUP"), INVALID)
pin("bytes to unpack", lambda: unpack(PACKED), INVALID)  # pyright: ignore[reportArgumentType]
pin("a format beside a Packed", lambda: quantized_linear(ROW, HUB, format="Q8_0"), INVALID)
pin("a Packed of experts", lambda: quantized_linear(ROW, pack(torch.ones(2, 3, 64), "MXFP4")), INVALID)
pin("a weight beside a packed one", of_experts(down=torch.ones(3, 32, 31)), INVALID)
pin("packed and transposed", of_experts(transposed=True), INVALID)
pin("experts of another width", of_experts(x=torch.ones(1, 64)), INVALID)
pin("other experts of down", of_experts(down=pack(torch.ones(2, 32, 32), "MXFP4")), INVALID)
pin("the columns of down", of_experts(down=pack(torch.ones(3, 32, 64), "MXFP4")), INVALID)
FACTORS = (torch.ones(3, 2, 32), torch.ones(3, 64, 2))
pin("factors of LoRA", of_experts(up_lora=(*FACTORS, FACTORS[0])), INVALID)
pin("one factor of LoRA", of_experts(up_lora=FACTORS[0]), INVALID)
pin("a pair beside a factor of LoRA", of_experts(up_lora=FACTORS, up_lora_b=FACTORS[1]), INVALID)
pin("the factors the other way", of_experts(down_lora=FACTORS[::-1]), INVALID)
pin("the rank of a factor", of_experts(up_lora=(FACTORS[0][:, :1], FACTORS[1])), INVALID)
pin("an odd number of rows", of_experts(up=pack(torch.ones(3, 63, 32), "MXFP4")), INVALID)
pin("no block of activations", of_experts(up=pack(torch.ones(3, 66, 32), "MXFP4")), INVALID)
pin("a format beside Packed of experts", lambda: fusedops.quantized_experts(*OF_EXPERTS, up_format="Q8_0"), INVALID)
pin("scales of experts", lambda: fusedops.quantized_experts(*OF_EXPERTS[:3], *CODES, **CODES_FORMAT), INVALID)  # pyright: ignore
pin("no scales", lambda: quantized_linear(ROW, HUB.codes, format="MXFP4"), INVALID)
pin("sparse scales", lambda: quantized_linear(ROW, HUB.codes, format="MXFP4", scales=HUB.scales.to_sparse()), INVALID)  # pyright: ignore
pin("scales of bytes of GGUF", lambda: quantized_linear(ROW, PACKED, format="Q8_0", scales=HUB.scales), INVALID)
pin("experts as a layer", lambda: fusedops.nn.QuantizedLinear.of_packed(pack(torch.ones(2, 3, 64), "NF4")), INVALID)
pin("a part's name", lambda: PackedPart("codes", "packed", "format"), ValueError)

test_a_text, test_no_text_is_left_over = TABLE.tests()
