"""The header of a GGUF file without the vocabulary, for readers that make Python objects of each token."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

#: Bytes of a value, by its type in the file.
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_VERSIONS = (2, 3)


def write_header(source: BinaryIO, target: BinaryIO) -> int:
    """Write the header of a GGUF file (github.com/ggml-org/ggml, docs/gguf.md) without the arrays of its tokenizer.

    Their number is the ``vocab_size`` of the header, where it has none.

    Args:
        source: the file, at its begin.
        target: the file to write.

    Returns:
        the size of the header in ``source``, without the padding behind it.

    Raises:
        ValueError: ``source`` is no GGUF file of version 2 or 3, little-endian, or ends within its header.
    """
    header = _Header(source, target)
    magic = header.copied(4)
    version, tensors, values = header.numbers("<IQQ")
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError("it is no GGUF file of version 2 or 3, little-endian")
    for _ in range(values):
        header.copy_value()
    header.add_vocab_size()
    for _ in range(tensors):
        header.copied(*header.numbers("<Q"))  # the name
        (dims,) = header.numbers("<I")
        header.copied(8 * dims + 12)  # the sizes, the type, the place
    return source.tell()


class _Header:
    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._written: list[bytes] = []
        self._architecture, self._tokens = b"", 0

    def _read(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) != size:
            raise ValueError("it ends within its header")
        return data

    def copied(self, size: int) -> bytes:
        data = self._read(size)
        self._target.write(data)
        return data

    def numbers(self, format: str) -> tuple[int, ...]:
        return struct.unpack(format, self.copied(struct.calcsize(format)))

    def copy_value(self) -> None:
        """Copy a key and its value, unless it is an array of the tokenizer."""
        name = self._read(*struct.unpack("<Q", self._read(8)))
        (type,) = struct.unpack("<I", self._read(4))
        array = struct.unpack("<IQ", self._read(12)) if type == _ARRAY else None
        value = b"".join(self._elements(*(array or (type, 1))))
        if array and name.startswith(b"tokenizer."):
            if name == b"tokenizer.ggml.tokens":
                self._tokens = array[1]
            return
        self._write(name, type, (struct.pack("<IQ", *array) if array else b"") + value)
        if name == b"general.architecture":
            self._architecture = value[8:]

    def add_vocab_size(self) -> None:
        """Write the number of tokens where no value has it, and the number of values."""
        name = self._architecture + b".vocab_size"
        if self._tokens and name not in self._written:
            self._write(name, _UINT32, struct.pack("<I", self._tokens))
        end = self._target.tell()
        self._target.seek(16)
        self._target.write(struct.pack("<Q", len(self._written)))
        self._target.seek(end)

    def _write(self, name: bytes, type: int, value: bytes) -> None:
        self._target.write(struct.pack("<Q", len(name)) + name + struct.pack("<I", type) + value)
        self._written.append(name)

    def _elements(self, type: int, count: int) -> Iterator[bytes]:
        """Read elements of an array, those of a fixed size at once."""
        if type != _STRING:
            yield self._read(count * self._size(type))
            return
        for _ in range(count):
            length = self._read(8)
            yield length
            yield self._read(*struct.unpack("<Q", length))

    def _size(self, element: int) -> int:
        if element not in _BYTES:
            raise ValueError(f"a value has type {element}, which is none of its format")
        return _BYTES[element]
