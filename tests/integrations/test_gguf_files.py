"""GGUF files of strangers: a wrong one is an InvalidInputError, and what a model does not take is warned of."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_bytes import ARRAY, STRING, Parts, mutations, parts, text
from gguf_files import llama, write, write_mapped

from fusedops import FusedOpsWarning
from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import from_gguf
from fusedops.integrations.transformers._weights.gguf_config import dropped_values, set_values
from fusedops.integrations.transformers._weights.gguf_header import Header
from fusedops.nn import QuantizedLinear
from fusedops.quantization import dequantize, quantize

gguf: Any = pytest.importorskip("gguf")

TINY = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 32, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
LARGER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(3, 25).view(2, 11)
UINT32, FLOAT32 = 4, 6


@pytest.fixture
def plain(tmp_path: Path) -> Parts:
    return parts(write(tmp_path / "model.gguf", llama(**TINY), "F16").read_bytes())


def loaded(folder: Path, data: bytes) -> Any:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return from_gguf(path)


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def header(*numbers: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQQ", 3, *numbers) + bytes(100)


def changed(key: str, kind: int, content: bytes) -> Any:
    return lambda whole: whole.changed(key.encode(), kind, content).file()


def first(**changes: Any) -> Any:
    return lambda whole: whole.with_tensor(0, **changes).file()


def without(key: str) -> Any:
    return lambda whole: whole._replace(values=tuple(each for each in whole.values if each[0] != key.encode())).file()


def of_architecture(name: bytes) -> Any:
    def make(whole: Parts) -> bytes:
        values = tuple((key.replace(b"llama", name), kind, content) for key, kind, content in whole.values)
        values = tuple((key, kind, content.replace(text(b"llama"), text(name))) for key, kind, content in values)
        return whole._replace(values=values).file()

    return make


HEADS = "llama.attention.head_count"
WRONG = {
    "a key of 2**64 - 1 bytes": (lambda _: header(1, 1, 2**64 - 1), "key needs 18446744073709551615 bytes of the 100"),
    "a key of 2**48 bytes": (lambda _: header(1, 1, 2**48), "key needs 281474976710656 bytes"),
    "2**60 values": (lambda _: header(1, 2**60, 0), "header of 1152921504606846976 values and 1 tensors needs"),
    "2**60 tensors": (lambda _: header(2**60, 0, 0), "1152921504606846976 tensors needs"),
    "2**62 numbers": (changed("x.y", ARRAY, struct.pack("<IQ", 10, 2**62)), r"x\.y needs 36893488147419103232 bytes"),
    "2**61 texts": (changed("x.y", ARRAY, struct.pack("<IQ", STRING, 2**61)), r"x\.y needs 18446744073709551616"),
    "an array of arrays": (changed("x.y", ARRAY, struct.pack("<IQ", ARRAY, 1)), r"x\.y has the type 9"),
    "a type of no value": (changed("x.y", 13, b""), r"x\.y has the type 13"),
    "a value more": (lambda whole: whole.file(len(whole.values) + 1), "model.gguf, whose"),
    "a key twice": (lambda whole: whole._replace(values=(*whole.values, whole.values[3])).file(), "key .* twice"),
    "a text of other bytes": (changed("general.name", STRING, text(b"\xff\xff")), "general.name is .*UTF-8"),
    "no architecture": (without("general.architecture"), "general.architecture is None"),
    "a number for the architecture": (changed("general.architecture", 4, u32(7)), "general.architecture is 7"),
    "t5": (of_architecture(b"t5"), "T5Config"),
    "deci": (of_architecture(b"deci"), "identifier: deci"),
    "an alignment of 0": (changed("general.alignment", 4, u32(0)), "general.alignment is 0, expected a power of two"),
    "an alignment of 48": (changed("general.alignment", 4, u32(48)), "general.alignment is 48"),
    "0 heads": (changed(HEADS, 4, u32(0)), "head_count is 0, expected a number above 0"),
    "3 heads": (changed(HEADS, 4, u32(3)), "hidden size"),
    "no heads": (without(HEADS), "no llama.attention.head_count"),
    "no eps": (without("llama.attention.layer_norm_rms_epsilon"), "no llama.attention.layer_norm_rms_epsilon"),
    "NaN": (changed("llama.rope.freq_base", FLOAT32, struct.pack("<f", torch.nan)), "freq_base is nan"),
    "a text for blocks": (
        changed("llama.block_count", STRING, text(b"abc")),
        "block_count is 'abc', expected a number",
    ),
    "2**31 blocks": (changed("llama.block_count", 4, u32(2**31)), "block_count is 2147483648, expected at most 1,"),
    "a hidden size of 2**30": (changed("llama.embedding_length", 4, u32(2**30)), "embedding_length .* at most 64,"),
    "heads of 2**31": (changed("llama.rope.dimension_count", 4, u32(2**31)), "dimension_count .* at most 64,"),
    "another hidden size": (changed("llama.embedding_length", 4, u32(16)), r"shape \(32, 32\), expected \(32, 16\)"),
    "an offset of 2**64 - 32": (first(offset=2**64 - 32), "token_embd.weight ends at byte 184467440737095"),
    "an offset within a tensor": (first(offset=2048), "begins at byte .* no byte of another tensor"),
    "an odd offset": (
        lambda whole: (
            whole.with_tensor(-1, offset=whole.tensors[-1].offset + 4)._replace(body=whole.body + bytes(32)).file()
        ),
        "begins at byte .* a multiple of 32",
    ),
    "a shape of 2**124": (
        lambda whole: whole.with_tensor(-1, shape=(2**62, 2**62)).file(),
        "bytes where its tensors need",
    ),
    "a shape of 0": (first(shape=(32, 0)), r"shape \(0, 32\), expected rows"),
    "a row of half a block": (first(shape=(16, 64), kind=8), "rows of whole blocks of Q8_0, 32"),
    "5 dims": (first(shape=(1,) * 5), "5 dims, expected 1 to 4"),
    "no dims": (first(shape=()), "0 dims"),
    "a type of no tensor": (first(kind=99), "token_embd.weight has the type 99"),
    "a tensor twice": (first(name=b"output.weight"), "tensor output.weight twice"),
    "a download cut short": (
        lambda whole: whole.file()[:-99],
        r"which has \d+ bytes where its tensors need \d+.*cut short",
    ),
    "the part of a file": (
        lambda whole: whole.changed(b"split.count", 2, b"\3\0").changed(b"split.no", 2, b"\1\0").file(),
        r"part 1 \(from 0\) of a file that is split into 3.*llama-gguf-split --merge",
    ),
    "nothing": (lambda _: b"", "begins otherwise, of 0 bytes"),
    "a large text": (changed("llama.block_count", STRING, text(bytes(2**17))), "block_count is an array or a text of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file(tmp_path: Path, plain: Parts, name: str) -> None:
    make, words = WRONG[name]
    with memory(2**28), pytest.raises(InvalidInputError, match=words) as caught:
        loaded(tmp_path, make(plain))
    assert re.match("from_gguf: got .*, expected .*; to fix: ", str(caught.value))


def test_the_error_of_transformers_is_the_cause(tmp_path: Path, plain: Parts) -> None:
    with pytest.raises(InvalidInputError) as caught:
        loaded(tmp_path, plain.changed(HEADS.encode(), 4, u32(3)).file())
    assert type(caught.value.__cause__).__module__.startswith("huggingface_hub")


def test_shapes_are_compared_before_a_tensor_is_read(
    tmp_path: Path, plain: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numpy.fromfile", None)
    with pytest.raises(InvalidInputError, match=r"token_embd.weight of shape \(32, 32\), expected \(33, 32\)"):
        loaded(tmp_path, plain.changed(b"llama.vocab_size", UINT32, u32(33)).file())


@pytest.mark.parametrize(
    ("key", "kind", "content", "words"),
    [
        ("rope.scaling.type", STRING, text(b"linear"), "llama.rope.scaling.type = 'linear', expected"),
        ("rope.scaling.factor", FLOAT32, struct.pack("<f", 4), "llama.rope.scaling.factor = 4.0, expected"),
        ("final_logit_softcapping", FLOAT32, struct.pack("<f", 30), "final_logit_softcapping = 30.0"),
        ("attention.sliding_window", UINT32, u32(9), "attention.sliding_window = 9"),
        ("attention.causal", 7, b"\0", "attention.causal = False"),
        ("some.list", ARRAY, struct.pack("<IQ2f", FLOAT32, 2, 1, 2), r"some.list = \[1.0, 2.0\]"),
        ("attention.layer_norm_epsilon", FLOAT32, struct.pack("<f", 1e-4), "layer_norm_epsilon = "),
    ],
)
def test_a_value_that_is_dropped(tmp_path: Path, plain: Parts, key: str, kind: int, content: bytes, words: str) -> None:
    with pytest.warns(FusedOpsWarning, match=f"got model.gguf with .*{words}.*; to fix: ") as caught:
        loaded(tmp_path, plain.changed(f"llama.{key}".encode(), kind, content).file())
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("key", "kind", "content"),
    [
        ("llama.rope.scaling.type", STRING, text(b"none")),
        ("llama.rope.scaling.factor", FLOAT32, struct.pack("<f", 0)),
        ("llama.attention.key_length", UINT32, u32(16)),
        ("llama.attention.causal", 7, b"\1"),
        ("llama.expert_count", UINT32, u32(0)),
        ("general.file_type", UINT32, u32(7)),
        ("general.tags", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"x")),
        ("tokenizer.chat_template", STRING, text(b"x" * 2**17)),
        ("split.count", 2, b"\1\0"),
    ],
)
def test_a_value_that_changes_no_number(tmp_path: Path, plain: Parts, key: str, kind: int, content: bytes) -> None:
    loaded(tmp_path, plain.changed(key.encode(), kind, content).file())


def test_tensors_that_are_dropped(tmp_path: Path, plain: Parts) -> None:
    whole, more = plain, []
    for name in (b"rope_freqs.weight", *(b"blk.0.more.%d" % index for index in range(9))):
        more.append(plain.tensors[-1]._replace(name=name, shape=(8,), kind=0, offset=len(whole.body) + 32 * len(more)))
    whole = plain._replace(tensors=(*plain.tensors, *more), body=plain.body + bytes(32 * len(more)))
    with pytest.warns(FusedOpsWarning, match=r"rope_freqs.weight, .*blk.0.more.6 and 2 more, expected"):
        loaded(tmp_path, whole.file())


def test_without_heads_of_keys_there_are_as_many_as_of_queries(tmp_path: Path) -> None:
    model = llama(**{**TINY, "num_key_value_heads": 2})
    whole = parts(write(tmp_path / "model.gguf", model, "F16").read_bytes())
    got = loaded(tmp_path, without("llama.attention.head_count_kv")(whole))
    with torch.no_grad():
        torch.testing.assert_close(got(IDS).logits, model.half().float()(IDS).logits)


SMALL = {"embedding_length": 64, "block_count": 2, "attention.head_count": 4}
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=40, n_embd=64, n_layer=2, n_head=4, n_positions=24, n_inner=96)
        ),
        {"context_length": 24, "feed_forward_length": 96, "attention.layer_norm_epsilon": 1e-5},
    ),
    "starcoder2": (
        lambda: transformers.Starcoder2ForCausalLM(
            transformers.Starcoder2Config(**LARGER, intermediate_size=96, vocab_size=40)
        ),
        {"feed_forward_length": 96, "attention.head_count_kv": 2, "attention.layer_norm_epsilon": 1e-5},
    ),
    "lfm2": (
        lambda: transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(
                **LARGER,
                intermediate_size=96,
                vocab_size=40,
                norm_eps=1e-2,
                layer_types=["conv", "full_attention"],
                block_auto_adjust_ff_dim=False,
            )
        ),
        {
            "feed_forward_length": 96,
            "attention.head_count_kv": [0, 2],
            "attention.layer_norm_rms_epsilon": 1e-2,
            "rope.freq_base": 1e6,
            "shortconv.l_cache": 3,
        },
    ),
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_sizes_and_values_are_those_of_the_file(tmp_path: Path, architecture: str) -> None:
    make, values = OTHERS[architecture]
    torch.manual_seed(0)
    model = make().eval()
    got = from_gguf(write_mapped(tmp_path / "model.gguf", architecture, model, SMALL | values))
    with torch.no_grad():
        torch.testing.assert_close(got(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_each_value_that_transformers_reads_is_used_or_named() -> None:
    reading: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    found: dict[str, list[str]] = {}
    for kind, mapping in reading.GGUF_TO_TRANSFORMERS_MAPPING["config"].items():
        of_text = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}.get(kind, kind)
        if of_text not in transformers.CONFIG_MAPPING:
            continue
        config, known = (transformers.AutoConfig.for_model(of_text) for _ in range(2))
        unread = {key: name for key, name in mapping.items() if name and not hasattr(known, name)}
        unused = [key for key, name in mapping.items() if name is None and key.startswith("rope.")]
        values: dict[str, Any] = {key: 7e-3 if "eps" in key else 7 for key in unread}
        for key, name in unread.items():
            setattr(config, name, values[key])  # as transformers passes it
        values |= dict.fromkeys(unused, 5)
        parsed = {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in values.items()}
        of_file = Header("model.gguf", parsed, {}, [])
        set_values(of_file, mapping, config)
        named = dropped_values(of_file, mapping, config)
        for key, value in values.items():
            used = any(vars(config)[name] == value for name in vars(known) if name != unread.get(key))
            if not used and f"{kind}.{key} = {value!r}" not in named:
                found.setdefault(key, []).append(kind)
    assert found.keys() <= {
        "context_length",
        "attention.head_count_kv",
        "attention.key_length",
        "decoder_start_token_id",
    }


@contextmanager
def memory(more: int) -> Iterator[None]:
    """Let the process have so many more bytes of addresses, where that can be limited."""
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def files(folder: Path) -> list[tuple[bytes, int]]:
    """Return files and their alignments: plain; packed, with a vocabulary; tied, with all types of values."""
    packed = parts(write(folder / "packed.gguf", llama(**TINY, tied=False), "Q8_0", tokens=32).read_bytes())
    sizes = {**TINY, "intermediate_size": 256}
    blocks = parts(write(folder / "blocks.gguf", llama(**sizes, tied=True), "F16").read_bytes())
    down = next(i for i, each in enumerate(blocks.tensors) if each.name == b"blk.0.ffn_down.weight")
    begin = blocks.tensors[down].offset
    body = (
        blocks.body[:begin] + fusedops_q4(blocks.body[begin : begin + 2 * 256 * 32]) + blocks.body[begin + 512 * 32 :]
    )
    several = blocks._replace(body=body).with_tensor(down, kind=12)
    for kind, format in enumerate("BbHhIif?"):
        several = several.changed(b"llama.x%d" % kind, kind, struct.pack(f"<{format}", 1))
    several = several.changed(b"general.tags", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"one") + text(b""))
    several = several.changed(b"llama.numbers", ARRAY, struct.pack("<IQ3I", UINT32, 3, 1, 2, 3))
    return [
        (write(folder / "plain.gguf", llama(**TINY), "F16").read_bytes(), 32),
        (packed.file(), 32),
        (several.changed(b"general.alignment", UINT32, u32(16)).file(alignment=16), 16),
    ]


def fusedops_q4(data: bytes) -> bytes:
    """Return numbers of float16 in Q4_K, with the bytes that are left over."""
    from fusedops.quantization import quantize

    packed = quantize(torch.frombuffer(bytearray(data), dtype=torch.float16).view(32, 256), "Q4_K").numpy().tobytes()
    return packed + bytes(len(data) - len(packed))


def check_weights(path: Path, model: Any) -> None:
    """Check that the weights are those that the package gguf reads, up to the order of rows."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for name, parameter in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        packed = parameter.dtype is torch.uint8
        tensor = tensors.get(f"{names.get_name(stem)}.{'weight' if packed else leaf}")
        if tensor is None:
            assert stem == "lm_head", name
            continue
        assert not packed or leaf == f"packed_{tensor.tensor_type.name}", name
        data = tensor.data.copy()
        want = torch.from_numpy(data if packed else gguf.dequantize(data, tensor.tensor_type))
        got = parameter.detach()
        assert want.shape == got.shape, name
        if "q_proj" in name or "k_proj" in name:
            want, got = (each.flatten().sort().values for each in (want, got))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=name)


def check_mutations(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Load changed files, as many of each; return how many were taken and refused."""
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    counts, path = Counter[str](), folder / "changed.gguf"
    for seed, (data, alignment) in enumerate(files(folder)):
        for other in itertools.chain([data], itertools.islice(mutations(data, alignment, seed), count)):
            path.write_bytes(other)
            outcome = result(path)
            if isinstance(outcome, InvalidInputError):
                assert "; to fix: " in str(outcome)
                assert other is not data, outcome
                counts["refused"] += 1
            else:
                check_weights(path, outcome)
                counts["taken"] += 1
    return counts


def result(path: Path) -> Any:
    with warnings.catch_warnings(), memory(2**29):
        warnings.simplefilter("ignore", FusedOpsWarning)
        try:
            return from_gguf(path)
        except InvalidInputError as error:
            return error


def test_some_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = check_mutations(tmp_path, 100, monkeypatch)
    assert min(counts["taken"], counts["refused"]) > 50


@pytest.mark.slow
def test_2000_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = check_mutations(tmp_path, 667, monkeypatch)
    assert min(counts["taken"], counts["refused"]) > 400


@pytest.mark.parametrize("format", ["MXFP4_GGUF", "NVFP4_GGUF"])
def test_blocks_of_e2m1_are_read(format: str, tmp_path: Path) -> None:
    """The names of their types are those of other formats of the Hub."""
    source = llama(**{**TINY, **LARGER})
    model = from_gguf(write(tmp_path / "model.gguf", source, format))
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    assert {each.format for each in layers.values()} == {format}
    down = "model.layers.0.mlp.down_proj"
    want = dequantize(quantize(source.get_submodule(down).weight, format), format)
    assert torch.equal(layers[down].dequantize().float(), want)
