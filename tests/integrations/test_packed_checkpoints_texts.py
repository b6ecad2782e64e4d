"""Every text of from_packed, word for word: what is no packed checkpoint, and tensors that contradict their layers."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_calls import INVALID
from error_texts import Table
from packed_checkpoints import KINDS, write_packed

from fusedops.integrations.transformers import from_packed

for package in ("bitsandbytes", "compressed_tensors"):
    pytest.importorskip(package)
TABLE = Table(__file__)
pin = TABLE.pin
LAYER = "model.layers.0.mlp.up_proj"
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 8}
Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]


def loaded(kind: str, change: Change) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_packed(Path(folder), kind, change, **SIZES)
        return from_packed(folder)


def refused(name: str, kind: str, change: Change) -> None:
    pin(name, lambda: loaded(kind, change), INVALID)


def values(**changes: Any) -> Change:
    return lambda tensors, config: config["quantization_config"].update(changes)


def without(leaf: str) -> Change:
    return lambda tensors, config: tensors.pop(f"{LAYER}.{leaf}")


def cut(leaf: str) -> Change:
    return lambda tensors, config: tensors.update({f"{LAYER}.{leaf}": tensors[f"{LAYER}.{leaf}"][:-1]})


def more(**tensors_by_name: torch.Tensor) -> Change:
    return lambda tensors, config: tensors.update({key.replace("__", "."): x for key, x in tensors_by_name.items()})


def state(**changes: Any) -> Change:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        known = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
        tensors[STATE] = torch.tensor(list(json.dumps(known).encode()), dtype=torch.uint8)

    return change


def unpacked(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in [each for each in tensors if "_proj" in each]:
        if name.endswith("weight"):
            tensors[name] = torch.zeros(tensors[name].shape)
        else:
            del tensors[name]


def tied(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True
    tensors["lm_head.weight"], scales = KINDS["fbgemm_fp8"].pack(tensors["lm_head.weight"])[0].values()
    tensors["lm_head.weight_scale"] = scales


def narrow(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["intermediate_size"] = 100
    config["quantization_config"]["ignore"] = []


def of_gpt_oss(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "mxfp4"}
    for name in [each for each in tensors if "_proj" in each]:
        del tensors[name]
    tensors["model.layers.0.mlp.experts.down_proj_blocks"] = CODES.view(torch.uint8)


CODES = torch.zeros(2, 2, dtype=torch.int8)
pin("no quantization_config", lambda: loaded("awq", lambda _, config: config.pop("quantization_config")), INVALID)
pin("an option of its own", lambda: from_packed("folder", device_map="cpu"), INVALID)
refused("another method", "awq", values(quant_method="hqq"))
refused("8 bits of bitsandbytes", "bitsandbytes", values(load_in_4bit=False, load_in_8bit=True))
refused("transforms", "float-quantized", values(transform_config={"config_groups": {"a": {}}}))
refused("no packed layer", "fp8", unpacked)
refused("no norm", "fp8", lambda tensors, config: tensors.pop("model.norm.weight"))
refused("no scales of float8", "fp8", without("weight_scale_inv"))
refused("no codes of words", "gptq", without("qweight"))
refused("fewer scales of float8", "fp8", lambda tensors, config: tensors.update({f"{LAYER}.weight_scale_inv": CODES}))
refused("fewer rows of scales", "float-quantized", cut("weight_scale"))
refused("fewer codes", "awq", cut("qweight"))
refused("codes of float16", "fp8", lambda tensors, _: tensors.update({f"{LAYER}.weight": torch.zeros(128, 128).half()}))
refused("a dtype", "fp8", lambda tensors, _: tensors.update({f"{LAYER}.weight": torch.zeros(2, dtype=torch.uint16)}))
refused("other blocks", "fp8", values(weight_block_size=[64, 64]))
refused("another shape", "pack-quantized", lambda t, _: t.update({f"{LAYER}.weight_shape": torch.tensor([128, 64])}))
refused("rows of no whole block", "mxfp4-pack-quantized", narrow)
refused("8 bits of words", "gptq", values(bits=8))
refused("another layout of GPTQ", "gptq", values(checkpoint_format="marlin"))
refused("another layout of AWQ", "awq", values(version="gemv"))
refused("columns in another order", "gptq", lambda t, _: t.update({f"{LAYER}.g_idx": t[f"{LAYER}.g_idx"].flip(0)}))
refused("fp4 of bitsandbytes", "bitsandbytes", state(quant_type="fp4"))
refused("no state of bitsandbytes", "bitsandbytes", without("weight.quant_state.bitsandbytes__nf4"))
refused("no JSON", "bitsandbytes", cut("weight.quant_state.bitsandbytes__nf4"))
refused("other numbers", "bitsandbytes", lambda t, _: t[f"{LAYER}.weight.quant_map"].zero_())
refused("no outer scales", "bitsandbytes, nested", without("weight.nested_absmax"))
refused("fewer inner scales", "bitsandbytes, nested", cut("weight.absmax"))
refused("a packed head that is tied", "fbgemm_fp8", tied)
refused("groups of float8", "float-quantized", values(config_groups={"a": {"weights": {"strategy": "group"}}}))
refused("experts of gpt-oss", "mxfp4-pack-quantized", of_gpt_oss)
refused("packed experts", "fp8", more(model__layers__0__mlp__experts__0__up_proj__weight=CODES))
refused("a packed embedding", "fp8", more(model__embed_tokens__weight=CODES))

test_a_text, test_no_text_is_left_over = TABLE.tests()
