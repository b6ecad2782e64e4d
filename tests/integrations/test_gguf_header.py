"""The header of a GGUF file without its vocabulary, beside the reader of the package gguf."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import llama, write

from fusedops.integrations.transformers import from_gguf
from fusedops.integrations.transformers._weights.gguf_header import read_header, write_header

gguf: Any = pytest.importorskip("gguf")


def test_every_value_but_the_vocabulary_is_in_the_header(tmp_path: Path) -> None:
    whole, short = tmp_path / "whole.gguf", tmp_path / "short.gguf"
    types = gguf.GGUFValueType
    writer = gguf.GGUFWriter(whole, "llama")
    for kind in ("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT32", "FLOAT64"):
        writer.add_key_value(f"llama.{kind}", 3, types[kind])
    writer.add_bool("llama.bool", True)
    writer.add_string("llama.string", "Straße")
    writer.add_array("llama.strings", ["", "two"])
    writer.add_array("llama.numbers", [1, 2, 3])
    writer.add_uint32("qwen2.block_count", 2**31)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(300)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 300)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_tensor("first", torch.ones(3, 2).numpy())
    writer.add_tensor("second", torch.ones(5).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with whole.open("rb") as source, short.open("wb") as target:
        header = read_header(source)
        write_header(header, target, {"vocab_size": 300})
    want, got = gguf.GGUFReader(whole), gguf.GGUFReader(short)
    left = {"tokenizer.ggml.scores", "tokenizer.ggml.tokens", "llama.strings", "qwen2.block_count"}
    assert want.fields.keys() - got.fields.keys() == left
    assert all(header.values[key].length == len(want.fields[key].data) for key in left - {"qwen2.block_count"})
    assert got.fields.keys() - want.fields.keys() == {"llama.vocab_size"}
    assert got.fields["llama.vocab_size"].contents() == 300
    for name in got.fields.keys() & want.fields.keys() & header.values.keys():
        assert got.fields[name].contents() == want.fields[name].contents() == header.values[name], name
    assert [each.name for each in got.tensors] == ["first", "second"]
    for left, right in zip(header.tensors, want.tensors):
        assert (left.name, left.format, left.begin) == (right.name, right.tensor_type.name, right.data_offset)
        assert (*left.shape, left.size) == (*right.data.shape, right.n_bytes)


def test_no_token_has_objects_of_python(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", llama(vocab_size=2000), "Q8_0", tokens=2000)
    peaks: list[int] = []

    def measured(load: Callable[[Path], Any]) -> Any:
        tracemalloc.start()
        loaded = load(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return loaded

    loaded = measured(from_gguf)
    measured(gguf.GGUFReader)
    assert peaks[0] < peaks[1] / 2
    assert loaded.config.vocab_size == 2000
    assert loaded.config.eos_token_id == 2
