"""Signatures of ops: parameters, annotations as text, and the arguments of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, cast

from fusedops._report.suggestion import nearest_name
from fusedops.errors import InvalidInputError


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the fields of its arguments object as parameters; unchanged if it has no such object.

    An arguments object is a parameter whose annotation is a NamedTuple: the parameters of an op or of its backward,
    listed once.

    >>> from typing import NamedTuple
    >>> class Args(NamedTuple):
    ...     x: int
    ...     y: int
    >>> def total(a: Args, save: bool): return a.x + a.y if save else 0
    >>> spread(total)(1, 2, True), [*inspect.signature(spread(total)).parameters]
    (3, ['x', 'y', 'save'])
    >>> spread(total)(1, save=True, y=2)
    3
    """
    objects = [(name, kind) for name, kind in _annotated(function) if hasattr(kind, "_fields")]
    if not objects:
        return function
    (name, kind), *others = objects
    parameters = inspect.signature(function).parameters
    if others:
        raise ValueError(
            f"{function.__qualname__}: got two arguments objects, expected one; to fix: write one NamedTuple with the "
            f"fields of both"
        )
    start = list(parameters).index(name)
    stop = start + len(kind._fields)
    new = cast("Callable[..., Any]", tuple.__new__)

    def in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in order, with keyword arguments and defaults filled in."""
        bound = chosen.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def spreading(*args: Any, **kwargs: Any) -> Any:
        args = args if not kwargs and len(args) >= stop else in_order(args, kwargs)
        return function(*args[:start], new(kind, args[start:stop]), *args[stop:])

    def spreading_first(*args: Any, **kwargs: Any) -> Any:
        args = args if not kwargs and len(args) >= stop else in_order(args, kwargs)
        return function(new(kind, args[:stop]), *args[stop:])

    def spreading_all(*args: Any, **kwargs: Any) -> Any:
        return function(new(kind, args if not kwargs and len(args) >= stop else in_order(args, kwargs)))

    calls = spreading_all if len(parameters) == 1 else spreading_first if start == 0 else spreading
    chosen: Any = wraps(function)(calls)
    kept = list(parameters.values())
    chosen.__signature__ = inspect.Signature([*kept[:start], *_fields_of(kind), *kept[start + 1 :]])
    return chosen


@lru_cache(64)  # the kernels of several backends have one arguments object
def _fields_of(kind: Any) -> list[inspect.Parameter]:
    by, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    described = [
        (field, kind._field_defaults.get(field, none), _text(kind.__annotations__[field])) for field in kind._fields
    ]
    return [inspect.Parameter(field, by, default=default, annotation=text) for field, default, text in described]


def _annotated(function: Any) -> list[tuple[str, Any]]:
    """Return the parameters of a Python function with their annotations. A text is looked up in the module."""
    known: dict[str, Any] = getattr(function, "__globals__", {})
    kinds: dict[str, Any] = getattr(function, "__annotations__", {})
    return [
        (name, known.get(kind) if isinstance(kind, str) else kind) for name, kind in kinds.items() if name != "return"
    ]


def op_signature(
    function: Callable[..., Any], reference: Callable[..., Any], of_other_ops: Collection[str] = ()
) -> tuple[inspect.Signature, dict[str, str], tuple[Any, ...]]:
    """Return the signature of a public function without ``backend``, and its parameters' types as text and defaults.

    Those of other ops are left out.

    The types are the reference's: the public function may accept more, such as a number for a seed. A default is the
    reference's if it has one, else the public function's.

    Raises:
        ValueError: the reference has other parameters.
    """
    signature = inspect.signature(function)
    public = {name: p for name, p in signature.parameters.items() if name not in ("backend", *of_other_ops)}
    parameters = inspect.signature(reference).parameters
    if list(parameters) != list(public):
        raise ValueError(
            f"op {function.__name__}: got a reference of ({', '.join(parameters)}), expected ({', '.join(public)}); "
            f"to fix: give it the parameters of the function, without backend"
        )
    none = inspect.Parameter.empty
    defaults = tuple(public[name].default if p.default is none else p.default for name, p in parameters.items())
    types = {name: _annotation_text(p) for name, p in parameters.items()}
    return signature.replace(parameters=list(public.values())), types, defaults


def bound_arguments(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call in order, with defaults filled in; InvalidInputError where they do not fit."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        text = str(error).removeprefix("got ").replace("missing a required argument:", "no argument")
        unknown = next((key for key in kwargs if key not in signature.parameters), None)
        near = None if unknown is None else nearest_name(unknown, list(signature.parameters))
        fix = "give each argument once" if near is None else f"write {near!r}"
        raise InvalidInputError(f"{name}: got {text}, expected {signature_text(signature)}; to fix: {fix}") from None
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def annotation_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the annotations of a function's parameters as text: ``"Tensor | None"``, however they are written."""
    return {name: _annotation_text(p) for name, p in inspect.signature(function).parameters.items()}


def float_indices(types: Mapping[str, str]) -> tuple[int, ...]:
    """Return the indices of the floats among parameters, from their annotations as text."""
    return tuple(index for index, text in enumerate(types.values()) if text.startswith("float"))


def with_floats(args: tuple[Any, ...], indices: Collection[int]) -> tuple[Any, ...]:
    """Return the arguments with each integer at these indices as a float.

    torch takes integers of at most 64 bits, and a formula may have twice the number.
    """
    for index in indices:
        if type(args[index]) is int:
            return tuple(float(arg) if i in indices and type(arg) is int else arg for i, arg in enumerate(args))
    return args


def _text(annotation: Any) -> str:
    forward = getattr(annotation, "__forward_arg__", annotation)  # of a NamedTuple's field
    return forward if isinstance(forward, str) else inspect.formatannotation(forward)


def _annotation_text(parameter: inspect.Parameter) -> str:
    text = _text(parameter.annotation)
    text = text.replace("torch.Tensor", "Tensor").replace("typing.", "")
    return f"{text[9:-1]} | None" if text.startswith("Optional[") else text


def signature_text(signature: inspect.Signature) -> str:
    """Return a signature without annotations, for a message."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
