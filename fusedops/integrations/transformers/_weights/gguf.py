"""from_gguf: a model of a GGUF file whose linear layers and embeddings keep the packed weights of the file."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import tempfile
import warnings
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Parameter

from fusedops._report.foreign_text import error_text
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations.transformers._weights.gguf_config import check_values, dropped_values, set_values
from fusedops.integrations.transformers._weights.gguf_header import (
    OTHER,
    Header,
    LeftOut,
    TensorInfo,
    read_header,
    write_header,
)
from fusedops.integrations.transformers._weights.packed import pack, packed_model
from fusedops.quantization import FORMATS, dequantize

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYERS = (Linear, Embedding)
_MOST_NAMED = 8
_PACKAGES = ("gguf", "accelerate")  # which read a file, besides transformers


def from_gguf(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, auto_class: Any = None) -> Any:
    """Load a model of transformers from a GGUF file; linear layers and embeddings keep the packed weights of the file.

    The logits are those of ``from_pretrained(..., gguf_file=...)``, which unpacks every weight, up to the order of
    sums, and the memory is that of the file. A weight is unpacked where its layer is neither a ``Linear`` nor an
    ``Embedding``, or where the file has its columns in another order. Needs the packages gguf and accelerate.

    Args:
        path: of a file whose architecture transformers can read.
        dtype: of the other parameters and of the result of embeddings; the packed weights are exact in any.
        auto_class: the class that makes the model from its config, such as ``transformers.AutoModel``. None:
            ``transformers.AutoModelForCausalLM``.

    Returns:
        the model, on the CPU, in evaluation mode.

    Raises:
        ImportError: a package that reads it is missing.
        InvalidInputError: the file is no GGUF file, cut short, one part of a split file or contradicts itself: every
            length, offset and size is compared with the bytes of the file before it is used; transformers cannot read
            its architecture in this way; a tensor has a format that ``fusedops.quantization`` lacks; a parameter is not
            in the file.

    Warns:
        FusedOpsWarning: the file has tensors, or values such as the scaling of rotary embeddings, that transformers
            leaves out and without which the model computes something else.

    >>> from fusedops.integrations.transformers import from_gguf
    >>> from_gguf("no.gguf")
    Traceback (most recent call last):
    fusedops.errors.InvalidInputError: from_gguf: got path = 'no.gguf', which does not exist, expected ...
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "which does not exist"
        raise InvalidInputError(
            f"from_gguf: got path = {path!r}, {kind}, expected a GGUF file; to fix: pass the path of the file; for "
            f"one of the Hub that is huggingface_hub.hf_hub_download(repo, name)"
        )
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ImportError(
                f"from_gguf: got no package {package}, expected {' and '.join(_PACKAGES)}; "
                f"to fix: pip install {' '.join(_PACKAGES)}",
                name=package,
            )
    with open(path, "rb") as file, torch.device("cpu"):  # whatever the default device
        header = read_header(file)
        model, names, processor, dropped = _build(header, dtype, auto_class)
        given, others = _match(header, model, names)
        _load(model, file, header.tensors, given, processor, dtype)
    if dropped := others + dropped:
        more = f" and {len(dropped) - _MOST_NAMED} more" if len(dropped) > _MOST_NAMED else ""
        warnings.warn(
            f"from_gguf: got {header.name} with {', '.join(dropped[:_MOST_NAMED])}{more}, expected what transformers "
            f"gives to {type(model).__name__}: the model is loaded without it, and may compute something else; "
            f"to fix: {OTHER}",
            FusedOpsWarning,
            stacklevel=2,
        )
    packed_model(model, model.modules())
    return model.train(False)


def _build(header: Header, dtype: torch.dtype, auto_class: Any) -> tuple[Any, dict[str, str], Any, list[str]]:
    """Return a model on the meta device, its parameters by the tensors of the file, a processor, and dropped values.

    transformers reads the config from a file, by the package gguf, which has hundreds of bytes of Python objects for
    each token: it reads one whose header has no vocabulary.
    """
    transformers: Any = importlib.import_module("transformers")
    accelerate: Any = importlib.import_module("accelerate")
    reading: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    defaults = _defaults(header)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "header.gguf")
        with open(path, "wb") as written:
            write_header(header, written, defaults)
        with _foreign(header):
            parsed = reading.load_gguf_checkpoint(path)["config"]
    mapping = reading.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    mapping = mapping.get(parsed["model_type"].removesuffix("_text"), {})
    check_values(header, mapping)
    with _foreign(header):
        processor = reading.TENSOR_PROCESSORS.get(header.architecture, reading.TensorProcessor)(config=parsed)
        if "vocab_size" in defaults:  # not read for each architecture
            parsed.setdefault("vocab_size", defaults["vocab_size"])
        config = transformers.AutoConfig.for_model(**parsed)
        set_values(header, mapping, config)
        with accelerate.init_empty_weights(include_buffers=False):
            model = (auto_class or transformers.AutoModelForCausalLM).from_config(config, dtype=dtype)
        model.tie_weights()
        names = reading.get_gguf_hf_weights_map(model, processor)
    return model, names, processor, dropped_values(header, mapping, config)


@contextlib.contextmanager
def _foreign(header: Header) -> Generator[None]:
    """Raise an InvalidInputError where transformers or gguf raise any error for the values of a file."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise InvalidInputError(
            f"from_gguf: got {header.name}, expected a file that transformers reads: "
            f"{' '.join(error_text(error).split()).rstrip('.')}; to fix: {OTHER}"
        ) from error


def _defaults(header: Header) -> dict[str, int]:
    """Return the values that a file has in another way, as llama.cpp reads them."""
    tokens = header.values.get("tokenizer.ggml.tokens")
    rows = next((each.shape[0] for each in header.tensors if each.name == "token_embd.weight"), None)
    heads = header.values.get(f"{header.architecture}.attention.head_count")
    defaults = {"vocab_size": tokens.length if isinstance(tokens, LeftOut) else rows, "attention.head_count_kv": heads}
    return {
        key: value
        for key, value in defaults.items()
        if type(value) is int and value > 0 and f"{header.architecture}.{key}" not in header.values
    }


def _match(header: Header, model: Any, names: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters by the tensor that each is given, and the tensors that are dropped."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    given: dict[str, Any] = {}
    taken: set[int] = set()
    for tensor in header.tensors:
        parameter = parameters.get(names.get(tensor.name, ""))
        if parameter is None or id(parameter) in taken:
            continue
        if math.prod(tensor.shape) != parameter.numel():
            raise _other_shape(tensor, parameter)
        taken.add(id(parameter))
        given[tensor.name] = parameter
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in taken]
    if missing:
        raise InvalidInputError(
            f"from_gguf: got a file without {', '.join(missing[:3])}, expected every parameter of "
            f"{type(model).__name__}; to fix: {OTHER}"
        )
    return given, [tensor.name for tensor in header.tensors if tensor.name not in given]


def _load(
    model: Any,
    file: BinaryIO,
    tensors: list[TensorInfo],
    given: dict[str, Any],
    processor: Any,
    dtype: torch.dtype,
) -> None:
    """Give the parameters of a model, which are on the meta device, the tensors of a file."""
    holders: dict[int, list[tuple[Any, str]]] = {}  # tied parameters have several
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, leaf))
    for tensor in tensors:
        if tensor.name not in given:
            continue
        parameter = given[tensor.name]
        modules = holders[id(parameter)]
        data = _read(file, tensor)
        rows = _order_of_rows(tensor, processor) if tensor.format in FORMATS else None
        if rows is not None and all(type(module) in _LAYERS and leaf == "weight" for module, leaf in modules):
            if tensor.shape != tuple(parameter.shape):
                raise _other_shape(tensor, parameter)
            weight = Parameter(data[rows] if rows.numel() else data, requires_grad=False)
            for module, _ in modules:
                pack(module, weight, tensor.format)
            continue
        try:
            values = processor.process(
                _values(data, tensor).numpy(), tensor.name, parsed_parameters={"tensors": {}}
            ).weights
        except Exception as error:
            raise _other_shape(tensor, parameter) from error
        loaded = Parameter(torch.from_numpy(values.copy()).to(dtype))
        if loaded.shape != parameter.shape:
            raise _other_shape(tensor, parameter)
        for module, leaf in modules:
            setattr(module, leaf, loaded)


def _other_shape(tensor: TensorInfo, parameter: Tensor) -> InvalidInputError:
    return InvalidInputError(
        f"from_gguf: got {tensor.name} of shape {tensor.shape}, expected {tuple(parameter.shape)}; to fix: {OTHER}"
    )


def _read(file: BinaryIO, tensor: TensorInfo) -> Tensor:
    """Return the data of a tensor, which has memory of its own: no page of the file is mapped."""
    if tensor.format not in FORMATS and tensor.format not in _PLAIN:
        raise InvalidInputError(
            f"from_gguf: got {tensor.name} in {tensor.format}, expected one of {', '.join([*FORMATS, *_PLAIN])}; "
            f"to fix: use a file of another quantization"
        )
    file.seek(tensor.begin)
    data = torch.from_numpy(numpy.fromfile(file, numpy.uint8, tensor.size))
    if tensor.format in FORMATS:
        return data.view(*tensor.shape[:-1], -1)
    return data.view(_PLAIN[tensor.format]).view(tensor.shape)


def _values(data: Tensor, tensor: TensorInfo) -> Tensor:
    """Return the numbers of a tensor of the file in float32."""
    return dequantize(data, tensor.format) if tensor.format in FORMATS else data.float()


def _order_of_rows(tensor: TensorInfo, processor: Any) -> Tensor | None:
    """Return the rows of the file in the model's order, as transformers changes it; empty: the same order.

    Two columns of row numbers take the place of the weight. None where more than the order of rows changes.
    """
    if len(tensor.shape) != 2:
        return None
    count = tensor.shape[0]
    numbers = torch.arange(count).repeat(2, 1).t().contiguous()
    numbers[:, 1] += count
    try:
        processed = processor.process(numbers.float().numpy().copy(), tensor.name)
        got = torch.from_numpy(processed.weights.copy()).long()
    except (ValueError, KeyError, TypeError):
        return None
    if processed.name != tensor.name or got.shape != numbers.shape:
        return None
    rows = got[:, 0]
    if not torch.equal(got[:, 1], rows + count) or not torch.equal(rows.sort().values, numbers[:, 0]):
        return None
    return rows[:0] if torch.equal(rows, numbers[:, 0]) else rows
