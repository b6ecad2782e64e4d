"""The values of the command line: tensors, dtypes, devices and numbers. Each error names the nearest valid value."""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import re
from typing import Any

import torch

from fusedops._cli.installation import devices
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._plugins.registry import registry
from fusedops._report.suggestion import unknown_name
from fusedops.constraints import DType
from fusedops.dtypes import STORAGE
from fusedops.errors import InvalidInputError

_SHORT = {name: each.dtype for each in STORAGE.values() for name in each.short}
_COMMON = (*_SHORT, *(each.name for each in STORAGE.values()), "bool", "uint8", "int8", "int16", "int32", "int64")


def dtype(name: str) -> torch.dtype:
    """Return a dtype by its name in torch, with or without ``torch.``, or a short one: bf16, fp16, fp32, fp64."""
    value = _SHORT.get(name, vars(torch).get(name.removeprefix("torch.")))
    if not isinstance(value, torch.dtype):
        raise InvalidInputError(unknown_name("dtype", name, _COMMON))
    return value


def floating_dtype(name: str) -> torch.dtype:
    """Return the same for a floating dtype; another one is an error."""
    value = dtype(name)
    if not value.is_floating_point:
        raise InvalidInputError(f"got --dtype {name!r}, expected a floating dtype; to fix: write it like bf16")
    return value


def device(text: str) -> str:
    """Return a device as torch writes it. This machine need not have it; its type must exist."""
    kind, colon, index = text.partition(":")
    if unknown := registry.unknown_device_type(kind):
        raise InvalidInputError(unknown)
    if colon and not re.fullmatch("[0-9]{1,3}", index):
        raise InvalidInputError(
            f"got device {text!r}, expected a device type, or one with an index; to fix: write it like {kind}:0"
        )
    return text


def usable_device(text: str) -> str:
    """Return a device that computes on this machine."""
    kind, _, index = device(text).partition(":")
    here = devices()
    if kind not in here:
        raise InvalidInputError(
            f"got device {text!r}, expected one that is on this machine: {', '.join(here)}; to fix: leave out "
            f"--device, or write --device {next(iter(here))}"
        )
    if index and int(index) >= len(here[kind]):
        last = f"{kind}:{len(here[kind]) - 1}"
        raise InvalidInputError(f"got device {text!r}, expected at most {last}; to fix: write --device {last}")
    return text


def default_dtype(op: Op, name: str, first: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor whose dtype is not written.

    It is that of the op's first tensor where the op accepts it, else float32, else the first that the op accepts.

    Args:
        op: the op.
        name: of the tensor.
        first: the dtype of the op's first tensor.
    """
    accepted = [each.dtypes for each in op.constraints if each.name == name and isinstance(each, DType)]
    for dtype in (first, torch.float32):
        if dtype.is_floating_point and all(dtype in dtypes for dtypes in accepted):
            return dtype
    return accepted[0][0] if accepted else torch.float32


def capability(text: str) -> tuple[int, int]:
    """Return a compute capability written as two numbers, such as ``9.0``."""
    parts = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})", text, re.ASCII)
    if parts is None:
        raise InvalidInputError(
            f"got compute capability {text!r}, expected two numbers; to fix: write it like --capability 9.0"
        )
    return int(parts[1]), int(parts[2])


def tensor(text: str, default: torch.dtype, on: str, has: tuple[int, int] | None = None) -> TensorSpec:
    """Return the spec of a tensor written as ``sizes[:dtype][@device]``, such as ``8,16,512,512:bf16@npu``.

    Args:
        text: as written. Sizes may be written as Python shows a shape, ``(8, 16)``, or as ``8x16``.
        default: the dtype where none is written.
        on: the device where none is written.
        has: the compute capability of the device; None: any.
    """
    rest, at, where = text.partition("@")
    sizes, colon, name = rest.partition(":")
    inner = re.fullmatch(r"\((.*?),? *\)", sizes)
    parts = re.split(", *|x", inner[1] if inner else sizes) if sizes not in ("", "()") else []
    if not all(re.fullmatch("[0-9]{1,18}", part) for part in parts):
        raise InvalidInputError(
            f"got tensor {text!r}, expected sizes[:dtype][@device]; to fix: write it like 8,16,512,512:bf16@npu"
        )
    return TensorSpec(tuple(map(int, parts)), dtype(name) if colon else default, device(where) if at else on, has)


def is_optional(op: Op, name: str) -> bool:
    """Return True where a parameter of an op may be None."""
    return "None" in _types(op, name)


def type_name(op: Op, name: str) -> str:
    """Return the type of a parameter without None: "float", "int", "bool", "str", "Tensor", ..."""
    return next((each for each in _types(op, name) if each != "None"), "str")


def is_flag(op: Op, name: str) -> bool:
    """Return True for a parameter that takes True and False, alone or beside texts."""
    return type_name(op, name) == "bool" or isinstance(op.signature.parameters[name].default, bool)


def _types(op: Op, name: str) -> list[str]:
    return [each.strip() for each in op.types[name].split("|")]


def scalar(op: Op, name: str, text: str) -> Any:
    """Return the value of an argument that is no tensor, by the type of the op's parameter."""
    kind = type_name(op, name)
    if is_optional(op, name) and text.lower() == "none":
        return None
    if kind == "str" and is_flag(op, name) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "bool":
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
        return _checked(op, name, text, value, "true or false", "true")
    if kind in ("int", "float"):
        number: Any = None
        with contextlib.suppress(ValueError):
            number = int(text) if kind == "int" else float(text)
        return _checked(op, name, text, number, "an integer" if kind == "int" else "a number", "1")
    if kind == "torch.dtype":
        return dtype(text)
    if kind != "str" and not kind.startswith("Literal"):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(text)
    return text


def _checked(op: Op, name: str, text: str, value: Any, expected: str, example: str) -> Any:
    if value is None:
        raise InvalidInputError(
            f"{op.name}: got {name} = {text!r}, expected {expected}; to fix: write it like {example}"
        )
    return value


def count(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a whole number of at least 1; to fix: write it like 65536"
        )
    return int(text)


def seconds(text: str) -> float:
    """Return a finite number above 0, for argparse."""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a number of seconds above 0; to fix: write it like 0.2"
        )
    return value
