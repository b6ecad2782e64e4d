"""The header of a GGUF file: read within the bytes that the file has, and written again without its vocabulary."""

from __future__ import annotations

import importlib
import math
import os
import struct
from typing import Any, BinaryIO, NamedTuple

from fusedops.errors import InvalidInputError
from fusedops.quantization import FORMATS

#: The format of a number, by its type in the file.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _UINT64 = 8, 9, 10
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # where the file has none
_MAX_DIMS = 4
_MAX_KEPT = 2**16  # bytes of a text, numbers of an array: the values of a config are shorter
#: The fix where another form of the model is needed.
OTHER = "load the model's own checkpoint, and call quantize(model)"
_AGAIN = "download the file again, since it was cut short or is damaged"


class TensorInfo(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: in the file.
        format: the name of its type, as ``fusedops.quantization.FORMATS`` has it.
        shape: of its numbers, in the order of torch.
        begin: the offset of its first byte in the file.
        size: in bytes.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    begin: int
    size: int


class LeftOut(NamedTuple):
    """A value that is not kept: texts of the vocabulary, or more than a config has."""

    length: int

    def __repr__(self) -> str:
        return f"an array or a text of {self.length}"


class Header(NamedTuple):
    """The header of a file.

    Attributes:
        name: of the file.
        values: by key, each a number, a text, a list of numbers or a ``LeftOut``.
        contents: type and bytes of the values that are kept, by key.
        tensors: in the order of the file.
    """

    name: str
    values: dict[str, Any]
    contents: dict[str, tuple[int, bytes]]
    tensors: list[TensorInfo]

    @property
    def architecture(self) -> str:
        """Return the name that the keys of the model's values begin with."""
        return self.values["general.architecture"]


def invalid(name: str, got: str, expected: str, fix: str = _AGAIN) -> InvalidInputError:
    """Return the error of a file."""
    return InvalidInputError(f"from_gguf: got {name}, {got}, expected {expected}; to fix: {fix}")


def read_header(file: BinaryIO) -> Header:
    """Read the header of a GGUF file (github.com/ggml-org/ggml, docs/gguf.md), and check every number of it.

    No more is read, kept or looped over than the file has bytes.

    Args:
        file: at its begin.

    Raises:
        InvalidInputError: it is no GGUF file of version 2 or 3, little-endian; it is one part of a split file, or cut
            short; a number of it contradicts its size or its other numbers.
    """
    size = os.fstat(file.fileno()).st_size
    source = _Source(file, os.path.basename(file.name), size)
    if source.take(min(4, size)) != b"GGUF" or source.numbers("I")[0] not in _VERSIONS:
        raise invalid(
            source.name,
            f"a file that begins otherwise, of {size} bytes",
            "a GGUF file of version 2 or 3, little-endian",
            "pass a .gguf file, and download it again if it is one",
        )
    tensors, count = source.numbers("QQ")
    source.need(13 * count + 24 * tensors, f"header of {count} values and {tensors} tensors")  # their smallest sizes
    header = Header(source.name, {}, {}, [])
    for _ in range(count):
        _read_value(source, header)
    _check_values(header)
    alignment = header.values.get("general.alignment", _ALIGNMENT)
    infos = [_read_tensor(source, header) for _ in range(tensors)]
    begin = -(-(size - source.left) // alignment) * alignment
    header.tensors.extend(each._replace(begin=begin + each.begin) for each in infos)
    _check_places(header, begin, alignment, size)
    return header


def write_header(header: Header, target: BinaryIO, more: dict[str, int]) -> None:
    """Write a GGUF file with the values that are kept, and tensors that have a name and one number.

    transformers takes the values of every architecture that a file has: only those of the file's own are written.

    Args:
        header: its values.
        target: the file to write.
        more: further values of the model by their key, without the architecture.
    """
    prefixes = ("general.", "tokenizer.", f"{header.architecture}.")
    contents = {key: content for key, content in header.contents.items() if key.startswith(prefixes)}
    contents.pop("general.alignment", None)
    contents |= {f"{header.architecture}.{key}": (_UINT64, struct.pack("<Q", more[key])) for key in more}
    target.write(b"GGUF" + struct.pack("<IQQ", _VERSIONS[-1], len(header.tensors), len(contents)))
    for key, (kind, content) in contents.items():
        target.write(_text(key) + struct.pack("<I", kind) + content)
    for tensor in header.tensors:
        target.write(_text(tensor.name) + struct.pack("<IQIQ", 1, 1, 0, 0))
    target.write(bytes(2 * _ALIGNMENT))  # the padding, and the number of all tensors


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(data := text.encode())) + data


class _Source:
    """A file that gives no more than it has."""

    def __init__(self, file: BinaryIO, name: str, left: int) -> None:
        self._file = file
        self.name = name
        self.left = left

    def need(self, size: int, what: str) -> None:
        if size > self.left:
            raise invalid(
                self.name, f"whose {what} needs {size} bytes of the {self.left} that are left", "a whole file"
            )

    def take(self, size: int, what: str = "header") -> bytes:
        self.need(size, what)
        self.left -= size
        return self._file.read(size)

    def skip(self, size: int, what: str) -> None:
        self.need(size, what)
        self.left -= size
        self._file.seek(size, os.SEEK_CUR)

    def numbers(self, format: str) -> tuple[int, ...]:
        return struct.unpack(f"<{format}", self.take(struct.calcsize(f"<{format}")))

    def text(self, what: str) -> str:
        (size,) = self.numbers("Q")
        data = self.take(size, what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise invalid(self.name, f"whose {what} is {data[:40]!r}", "a text in UTF-8") from None


def _read_value(source: _Source, header: Header) -> None:
    """Read a key and its value; keep it if it may be one of a config."""
    key = source.text("key")
    (kind,) = source.numbers("I")
    if key in header.values:
        raise invalid(source.name, f"which has the key {key} twice", "each key once")
    element, count = source.numbers("IQ") if kind == _ARRAY else (kind, 1)
    if element == _STRING:
        if kind == _ARRAY:
            source.need(8 * count, key)
            for _ in range(count):
                source.skip(source.numbers("Q")[0], key)
            header.values[key] = LeftOut(count)
            return
        (count,) = source.numbers("Q")
    elif element not in _NUMBERS:
        raise invalid(source.name, f"whose {key} has the type {element}", "a type of GGUF, and no array of arrays")
    format = f"<{count}{_NUMBERS.get(element, 's')}"
    size = count * struct.calcsize(f"<{_NUMBERS.get(element, 's')}")
    if count > _MAX_KEPT or (kind == _ARRAY and key.startswith("tokenizer.")):
        source.skip(size, key)
        header.values[key] = LeftOut(count)
        return
    data = source.take(size, key)
    value: Any = struct.unpack(format, data)
    if kind == _ARRAY:
        value, data = list(value), struct.pack("<IQ", element, count) + data
    else:
        (value,) = value
    if kind == _STRING:
        try:
            value, data = data.decode(), struct.pack("<Q", count) + data
        except UnicodeDecodeError:
            raise invalid(source.name, f"whose {key} is {data[:40]!r}", "a text in UTF-8") from None
    header.values[key] = value
    header.contents[key] = kind, data


def _check_values(header: Header) -> None:
    """Raise unless the values besides those of the model's config are right."""
    values = header.values
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise invalid(header.name, f"whose general.architecture is {architecture!r}", "the name of one")
    alignment = values.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 2**31 or alignment & (alignment - 1):
        raise invalid(header.name, f"whose general.alignment is {alignment!r}", "a power of two")
    if values.get("split.count", 0) not in (0, 1):
        raise invalid(
            header.name,
            f"part {values.get('split.no', '?')} (from 0) of a file that is split into {values['split.count']}",
            "a whole file",
            "merge the parts with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and pass the result",
        )


def _read_tensor(source: _Source, header: Header) -> TensorInfo:
    """Read the entry of a tensor, whose begin is that within the data."""
    gguf: Any = importlib.import_module("gguf")
    name = source.text("name of a tensor")
    (dims,) = source.numbers("I")
    if not 0 < dims <= _MAX_DIMS:
        raise invalid(source.name, f"whose {name} has {dims} dims", f"1 to {_MAX_DIMS}")
    shape = source.numbers(f"{dims}Q")[::-1]
    number, begin = source.numbers("IQ")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise invalid(
            source.name, f"whose {name} has the type {number}", "a type of the installed gguf", "pip install -U gguf"
        ) from None
    weights, bytes = gguf.GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % weights:
        raise invalid(
            source.name, f"whose {name} has the shape {shape}", f"rows of whole blocks of {kind.name}, {weights}"
        )
    # where the Hub has a format of the same name, of other bytes
    format = f"{kind.name}_GGUF" if f"{kind.name}_GGUF" in FORMATS else kind.name
    return TensorInfo(name, format, shape, begin, math.prod(shape) // weights * bytes)


def _check_places(header: Header, begin: int, alignment: int, size: int) -> None:
    """Raise unless the tensors are in the file, apart, and each has a name of its own."""
    tensors = sorted(header.tensors, key=lambda tensor: tensor.begin)
    names: set[str] = set()
    need, dense = begin, begin
    for tensor in tensors:
        if tensor.name in names:
            raise invalid(header.name, f"which has the tensor {tensor.name} twice", "each tensor once")
        names.add(tensor.name)
        if tensor.begin < need or (tensor.begin - begin) % alignment:
            raise invalid(
                header.name,
                f"whose {tensor.name} begins at byte {tensor.begin}",
                f"a multiple of {alignment} after byte {begin}, and no byte of another tensor",
            )
        need = tensor.begin + tensor.size
        dense += -(-tensor.size // alignment) * alignment
        if need > max(size, dense):
            raise invalid(header.name, f"whose {tensor.name} ends at byte {need} of {size}", "tensors within the file")
    if need > size:
        raise invalid(
            header.name,
            f"which has {size} bytes where its tensors need {need}",
            "a whole file",
            "download the file again, since the download was cut short",
        )
