"""from_packed: checkpoints of the Hub with packed experts, by the packages of their formats."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import IDS, experts_of, logits
from packed_checkpoints import KINDS, compressed_fp4, share_of_a_load, write_mixture

from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply, from_packed, quantize

for package in ("bitsandbytes", "compressed_tensors"):
    pytest.importorskip(package)
WIDE: dict[str, Any] = {"moe_intermediate_size": 128}
FORMATS = {
    "mxfp4": "MXFP4",
    "fp8": "FP8_BLOCK",
    "fp8 tensors": "FP8_ROW",
    "pack-quantized": "INT4_GROUP",
    "pack-quantized with zeros": "INT4_GROUP",
    "mxfp4-pack-quantized": "MXFP4",
    "gptq": "INT4_GROUP",
    "bitsandbytes": "NF4",
    "nvfp4 of one divisor": "NVFP4",
}
NVFP4 = KINDS["nvfp4-pack-quantized"]
ONE_DIVISOR = NVFP4._replace(pack=partial(compressed_fp4, largest=0.5))  # of gate and up, as vLLM asks


@pytest.mark.parametrize("kind", FORMATS)
def test_the_logits_are_those_of_the_unpacked_weights(tmp_path: Path, kind: str) -> None:
    of_kind = ONE_DIVISOR if kind == "nvfp4 of one divisor" else kind
    plain = write_mixture(tmp_path, of_kind, **(WIDE if kind != "mxfp4" else {}))
    model = from_packed(tmp_path)
    assert {each._fusedops_replacement.format for each in experts_of(model)} == {FORMATS[kind]}
    want = logits(plain)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    apply(model).remove()  # which leaves packed experts
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    quantize(model.bfloat16().float(), skip=["*"], experts=True).remove()  # scales keep their dtype
    for own, other in zip(experts_of(model), experts_of(plain)):
        torch.testing.assert_close(own.gate_up_proj, other.gate_up_proj, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(own.down_proj, other.down_proj, rtol=1e-6, atol=1e-9)


def test_gradients_through_packed_experts(tmp_path: Path) -> None:
    plain = write_mixture(tmp_path, "mxfp4")
    model = from_packed(tmp_path)
    for each in (model, plain):
        each(input_ids=IDS, labels=IDS).loss.backward()
    got, want = (each.model.embed_tokens.weight.grad for each in (model, plain))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def without(name: str) -> Any:
    return lambda tensors, values: tensors.pop(name)


@pytest.mark.parametrize(
    ("kind", "change", "sizes", "message"),
    [
        ("fp8", without("model.layers.1.mlp.experts.3.up_proj.weight"), WIDE, "layers.1.mlp.experts.3.up"),
        ("fp8", None, {}, "gate_proj.weight of 32 rows, expected a multiple of 128"),
        ("mxfp4", without("model.layers.0.mlp.experts.down_proj_scales"), {}, "experts.down_proj_scales"),
        (
            "nvfp4-pack-quantized",
            None,
            WIDE,
            r"experts\.0\.gate_proj\.weight_global_scale = \d+ and \S+\.up_proj",
        ),
    ],
)
def test_a_wrong_checkpoint_names_what_is_wrong(
    tmp_path: Path, kind: str, change: Any, sizes: dict[str, int], message: str
) -> None:
    write_mixture(tmp_path, kind, change, **sizes)
    with pytest.raises(InvalidInputError, match=message):
        from_packed(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "pack-quantized"])
def test_the_most_memory_of_a_load_is_near_that_of_the_file(tmp_path: Path, kind: str) -> None:
    count, sizes = ("num_local_experts" if kind == "mxfp4" else "num_experts"), {"hidden_size": 512}
    inner = "intermediate_size" if kind == "mxfp4" else "moe_intermediate_size"
    write_mixture(tmp_path / "small", kind, **(WIDE if kind != "mxfp4" else {}))
    write_mixture(tmp_path, kind, **sizes, num_hidden_layers=4, **{count: 8, inner: 512})
    assert 0.9 < share_of_a_load(tmp_path) < 1.6
