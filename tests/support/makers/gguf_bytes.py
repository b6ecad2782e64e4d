"""The bytes of a GGUF file, in parts that can be changed one by one."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
NUMBERS = (
    0,
    1,
    2,
    9,
    2**7,
    2**8 - 1,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**48,
    2**62,
    2**63,
    2**64 - 32,
    2**64 - 1,
)


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


class Tensor(NamedTuple):
    """The entry of a tensor; its shape is in the order of the file."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int


class Parts(NamedTuple):
    """A file.

    Attributes:
        values: key, type and bytes of each.
        tensors: their entries.
        body: the bytes behind the header and its padding.
        fields: place and size in bytes of each number of the header.
    """

    values: tuple[tuple[bytes, int, bytes], ...]
    tensors: tuple[Tensor, ...]
    body: bytes
    fields: tuple[tuple[int, int], ...] = ()

    def changed(self, key: bytes, kind: int, content: bytes) -> Parts:
        """Return the parts with another value in place of a key's, or one more."""
        values = tuple((key, kind, content) if each[0] == key else each for each in self.values)
        return self._replace(values=values if key in [each[0] for each in values] else (*values, (key, kind, content)))

    def with_tensor(self, index: int, **changes: Any) -> Parts:
        """Return the parts with changes to the entry of a tensor."""
        entries = list(self.tensors)
        entries[index] = entries[index]._replace(**changes)
        return self._replace(tensors=tuple(entries))

    def file(self, count: int | None = None, alignment: int = 32) -> bytes:
        """Return the bytes of the file; count: of the values, where the header has another number."""
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.values) if count is None else count)
        header += b"".join(text(key) + struct.pack("<I", kind) + content for key, kind, content in self.values)
        for name, shape, kind, offset in self.tensors:
            header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        return header + bytes(-len(header) % alignment) + self.body


def parts(data: bytes, alignment: int = 32) -> Parts:
    """Return the parts of a file that is right."""
    place, fields = 4, list[tuple[int, int]]()

    def number(size: int) -> int:
        nonlocal place
        fields.append((place, size))
        place += size
        return int.from_bytes(data[place - size : place], "little")

    def string() -> bytes:
        nonlocal place
        size = number(8)
        place += size
        return data[place - size : place]

    def skip(kind: int) -> None:
        string() if kind == STRING else number(SIZES[kind])

    number(4)
    count, values = number(8), []
    for _ in range(number(8)):
        key, kind, begin = string(), number(4), place
        element, length = (number(4), number(8)) if kind == ARRAY else (kind, 1)
        for _ in range(length):
            skip(element)
        values.append((key, kind, data[begin:place]))
    tensors = []
    for _ in range(count):
        name, dims = string(), number(4)
        tensors.append(Tensor(name, tuple(number(8) for _ in range(dims)), number(4), number(8)))
    return Parts(tuple(values), tuple(tensors), data[-(-place // alignment) * alignment :], tuple(fields))


def mutations(data: bytes, alignment: int, seed: int) -> Iterator[bytes]:
    """Yield files that differ from one: first every number of its header, then parts and bytes at random, for ever."""
    whole, random_ = parts(data, alignment), random.Random(seed)
    places = [(place, size, number) for place, size in whole.fields for number in (*NUMBERS, -1, len(data))]
    random_.shuffle(places)
    header = len(data) - len(whole.body)
    while True:
        if places and random_.random() < 0.5:
            place, size, number = places.pop()
            old = int.from_bytes(data[place : place + size], "little")
            new = (old + number if abs(number) == 1 else number) % 256**size
            yield data[:place] + new.to_bytes(size, "little") + data[place + size :]
            continue
        changed, other = bytearray(data), whole
        match random_.randrange(8):
            case 0:  # bytes of the header
                for _ in range(random_.choice((1, 1, 2, 8))):
                    changed[random_.randrange(header)] = random_.randrange(256)
            case 1:  # bytes of anywhere
                changed[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
            case 2:  # cut short
                del changed[random_.choice((random_.randrange(len(data)), random_.randrange(header))) :]
            case 3:  # bytes more, or fewer
                place = random_.randrange(header)
                changed[place : place + random_.choice((0, 1, 8))] = random_.randbytes(random_.choice((0, 1, 8, 32)))
            case 4:  # two values or tensors change places, or one is there twice or not at all
                field: Any = random_.choice(("values", "tensors"))
                rows = list(getattr(whole, field))
                left, right = random_.randrange(len(rows)), random_.randrange(len(rows))
                match random_.randrange(3):
                    case 0:
                        rows[left], rows[right] = rows[right], rows[left]
                    case 1:
                        rows.append(rows[left])
                    case _:
                        del rows[left]
                other = whole._replace(**{field: tuple(rows)})
            case 5:  # a value is another one's
                (key, _, _), (_, kind, content) = random_.choice(whole.values), random_.choice(whole.values)
                other = whole.changed(key, kind, content)
            case 6:  # an entry of a tensor is another one's in part
                field = random_.choice(Tensor._fields)
                row = random_.choice(whole.tensors)
                other = whole.with_tensor(random_.randrange(len(whole.tensors)), **{field: getattr(row, field)})
            case _:  # a value is an array, a text or a number out of range
                element = random_.choice((*SIZES, STRING, ARRAY))
                content = struct.pack("<IQ", element, random_.choice((0, 1, 2, 2**40, 2**62))) + random_.randbytes(16)
                key, _, _ = random_.choice(whole.values)
                kind = random_.choice((ARRAY, 4, 5, 6, 7, 12))
                other = whole.changed(key, kind, content if kind == ARRAY else random_.randbytes(SIZES[kind]))
        yield bytes(changed) if other is whole else other.file(alignment=alignment)
