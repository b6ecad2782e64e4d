"""The structs of ``src/api.h``: the kinds of their fields, read from the header, so that a struct is written once.

``hatch_build.py`` loads this file by its path: it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

_STRUCT = re.compile(r"struct (\w+) \{(.*?)\n\};", re.DOTALL)
_METHOD = re.compile(r"[^;{}]*\([^)]*\)[^;{]*\{[^}]*\}")
_FIELDS = re.compile(r"(const )?(\w+)(\s.*)", re.DOTALL)
_FIELD = re.compile(r"(\*?)[A-Za-z_]\w*(?:\[(\d+)\])?")
_FUNCTION = re.compile(r"int fusedops_(\w+)\(const fusedops::(\w+)\* call\);")
_NUMBERS = {"int64_t": b"q", "double": b"d"}


def kinds_of_functions(header: str) -> dict[str, bytes]:
    """Return the exported functions of a header, each with a character for each field of its struct.

    "r" is the address of a tensor that is read (a pointer to const), "w" of one that is written, "q" an int64, "d" a
    double. A struct in a struct, or an array of them, has its fields in its place.

    Raises:
        ValueError: a field has another type.

    >>> header = '''
    ... struct Scaled {
    ...   const void *x, *factors;  // factors: null for none
    ...   void* y;
    ...   int64_t dtype, sizes[2];
    ...   double scale;
    ... };
    ... int fusedops_scaled(const fusedops::Scaled* call);
    ... '''
    >>> kinds_of_functions(header)
    {'scaled': b'rrwqqqd'}
    """
    header = re.sub("//.*", "", header)
    structs: dict[str, bytes] = {}
    for name, body in _STRUCT.findall(header):
        structs[name] = b"".join(_kinds(name, _METHOD.sub("", body) if "(" in body else body, structs))
    return {function: structs[struct] for function, struct in _FUNCTION.findall(header)}


def number_of_header(header: str) -> int:
    """Return a number, below 2**60, that tells this header from others, whatever their comments and spaces.

    A library is compiled with it: one of another header would read the fields of another struct.

    >>> number_of_header("int64_t rows;  // of x") == number_of_header("int64_t rows;")
    True
    >>> number_of_header("int64_t rows;") == number_of_header("double rows;")
    False
    """
    text = "".join(re.sub("//.*", "", header).split())
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def _kinds(struct: str, body: str, structs: dict[str, bytes]) -> Iterator[bytes]:
    for declaration in filter(None, map(str.strip, body.split(";"))):
        found = _FIELDS.fullmatch(declaration.replace("* ", " *"))
        fields = [_FIELD.fullmatch(field.strip()) for field in found[3].split(",")] if found else [None]
        for field in fields:
            if found is None or field is None:
                raise ValueError(f"src/api.h: got {declaration!r} in {struct}, expected a type and the names of fields")
            pointer = b"r" if found[1] else b"w"
            kind = pointer if field[1] else _NUMBERS.get(found[2]) or structs.get(found[2])
            if kind is None:
                raise ValueError(
                    f"src/api.h: got a field of type {found[2]} in {struct}, expected a pointer, int64_t, double or a "
                    f"struct above; to fix: use one of these, of 8 bytes"
                )
            yield kind * int(field[2] or 1)
