"""from_gguf: a model of a GGUF file whose linear layers and embeddings keep the packed weights of the file."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from io import BufferedReader
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Parameter

from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers._gguf_header import write_header
from fusedops.integrations.transformers._packed import pack
from fusedops.quantization import FORMATS, dequantize

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYERS = (Linear, Embedding)


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
        InvalidInputError: ``path`` is no file; transformers cannot read its architecture in this way; a tensor has a
            format that ``fusedops.quantization`` lacks; a parameter is not in the file.

    >>> from fusedops.integrations.transformers import from_gguf
    >>> from_gguf("absent.gguf")
    Traceback (most recent call last):
    fusedops.errors.InvalidInputError: from_gguf: got path = 'absent.gguf', expected a file; to fix: download it first
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise InvalidInputError(f"from_gguf: got path = {path!r}, expected a file; to fix: download it first")
    transformers: Any = importlib.import_module("transformers")
    accelerate: Any = importlib.import_module("accelerate")
    reading: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    try:
        parsed, architecture, tensors = _read(path, reading)
    except ValueError as error:
        raise InvalidInputError(
            f"from_gguf: got {os.path.basename(path)}, expected a file that transformers reads: "
            f"{str(error).rstrip('.')}; to fix: load the model's own checkpoint, and call quantize(model)"
        ) from error
    processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(config=parsed)
    config = transformers.AutoConfig.for_model(**parsed)
    with accelerate.init_empty_weights(include_buffers=False):
        model = (auto_class or transformers.AutoModelForCausalLM).from_config(config, dtype=dtype)
    model.tie_weights()
    with open(path, "rb") as file:
        _load(model, file, tensors, processor, reading.get_gguf_hf_weights_map(model, processor), dtype)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise InvalidInputError(
            f"from_gguf: got a file without {', '.join(missing[:3])}, expected every parameter of "
            f"{type(model).__name__}; to fix: load the model's own checkpoint, and call quantize(model)"
        )
    return model.train(False)


class _Tensor(NamedTuple):
    """A tensor of a file.

    Args:
        name: in the file.
        format: the name of its type.
        shape: of ``dtype``; of a packed tensor in bytes.
        dtype: of its elements.
        begin: the place of its first byte in the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    dtype: Any
    begin: int

    def read(self, file: BufferedReader) -> Tensor:
        """Return its data, which has memory of its own: no page of the file is mapped."""
        file.seek(self.begin)
        data = numpy.fromfile(file, self.dtype, count := math.prod(self.shape))
        if data.size != count:
            raise InvalidInputError(
                f"from_gguf: got a file that ends within {self.name}, expected {count * data.itemsize} bytes of it; "
                f"to fix: download the file again"
            )
        return torch.from_numpy(data.reshape(self.shape))


def _read(path: str, reading: Any) -> tuple[dict[str, Any], str, list[_Tensor]]:
    """Return the config, the architecture and the tensors of a file.

    transformers reads the config from a file, by the package gguf, which has hundreds of bytes of Python objects for
    each token: it reads one whose header has no vocabulary, and whose tensors are a hole.
    """
    with tempfile.TemporaryDirectory() as folder, open(path, "rb") as file:
        header = os.path.join(folder, "header.gguf")
        with open(header, "wb") as written:
            size = write_header(file, written)
            written.truncate(written.tell() + os.path.getsize(path))
        parsed = reading.load_gguf_checkpoint(header)["config"]
        reader: Any = importlib.import_module("gguf").GGUFReader(header)
        (architecture,) = reading.read_field(reader, "general.architecture")
        begin = -(-size // int(reader.alignment)) * int(reader.alignment)
        tensors = [
            _Tensor(
                each.name,
                each.tensor_type.name,
                each.data.shape,
                each.data.dtype,
                begin + each.data_offset - int(reader.data_offset),
            )
            for each in reader.tensors
        ]
        del reader  # the folder can be removed where a mapped file cannot
    return parsed, architecture, tensors


def _load(
    model: Any, file: BufferedReader, tensors: list[_Tensor], processor: Any, names: dict[str, str], dtype: torch.dtype
) -> None:
    """Give the parameters of a model, which are on the meta device, the tensors of a file."""
    holders: dict[int, list[tuple[Any, str]]] = {}  # tied parameters have several
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, leaf))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for tensor in tensors:
        parameter = parameters.get(names.get(tensor.name, ""))
        if parameter is None or not parameter.is_meta:
            continue
        modules = holders[id(parameter)]
        format, data = tensor.format, tensor.read(file)
        rows = _order_of_rows(tensor.name, data, processor) if format in FORMATS else None
        if rows is not None and all(type(module) in _LAYERS and leaf == "weight" for module, leaf in modules):
            shape = (data.shape[0], data.shape[1] // FORMATS[format].bytes * FORMATS[format].weights)
            _check_shape(tensor.name, shape, parameter)
            weight = Parameter(data[rows] if rows.numel() else data, requires_grad=False)
            for module, _ in modules:
                pack(module, weight, format)
            continue
        values = processor.process(_values(tensor.name, data, format).numpy(), tensor.name).weights
        loaded = Parameter(torch.from_numpy(values.copy()).to(dtype))
        _check_shape(tensor.name, tuple(loaded.shape), parameter)
        for module, leaf in modules:
            setattr(module, leaf, loaded)


def _check_shape(name: str, shape: tuple[int, ...], parameter: Tensor) -> None:
    if shape != tuple(parameter.shape):
        raise InvalidInputError(
            f"from_gguf: got {name} of shape {shape}, expected {tuple(parameter.shape)}; to fix: load the model's own "
            f"checkpoint, and call quantize(model)"
        )


def _values(name: str, data: Tensor, format: str) -> Tensor:
    """Return the numbers of a tensor of the file in float32."""
    if format in FORMATS:
        return dequantize(data, format)
    if format not in _PLAIN:
        raise InvalidInputError(
            f"from_gguf: got {name} in {format}, expected one of {', '.join([*FORMATS, *_PLAIN])}; to fix: use a "
            f"file of another quantization"
        )
    return (data.view(_PLAIN[format]) if data.dtype is torch.uint8 else data).float()


def _order_of_rows(name: str, data: Tensor, processor: Any) -> Tensor | None:
    """Return the rows of the file in the model's order, as transformers changes it; empty: the same order.

    Two columns of row numbers take the place of the weight. None where more than the order of rows changes.
    """
    if data.dim() != 2:
        return None
    numbers = torch.arange(data.shape[0]).repeat(2, 1).t().contiguous()
    numbers[:, 1] += data.shape[0]
    try:
        processed = processor.process(numbers.float().numpy().copy(), name)
        got = torch.from_numpy(processed.weights.copy()).long()
    except (ValueError, KeyError, TypeError):
        return None
    if processed.name != name or got.shape != numbers.shape:
        return None
    rows = got[:, 0]
    if not torch.equal(got[:, 1], rows + data.shape[0]) or not torch.equal(rows.sort().values, numbers[:, 0]):
        return None
    return rows[:0] if torch.equal(rows, numbers[:, 0]) else rows
