"""Constraint: a condition on a call's arguments as data, and the compiled check of several constraints."""

from __future__ import annotations

import itertools
import linecache
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops._report.reason import Reason, ReasonCode

Arguments = Mapping[str, Any]
_compiled = itertools.count()
# attributes of tensors that a compiled check reads once: each takes 0.05 to 0.1 us
_READ_ONCE = re.compile(r"\b[a-z_]\w*\.(?:shape|dtype|is_cpu)\b")


class Boundary(NamedTuple):
    """One case at an edge of a constraint: ``args`` differ from the base case in one value, and are taken or not.

    >>> import fusedops
    >>> from fusedops.constraints import Dim
    >>> edges = Dim("x", (-1,), at_most=8).boundaries({"x": fusedops.TensorSpec((2, 8))})
    >>> [(edge.args["x"].shape, edge.taken) for edge in edges]
    [..., ((2, 8), True), ((2, 9), False)]
    """

    label: str
    args: Arguments
    taken: bool


class Constraint:
    """One condition on the argument ``name``. None meets it, unless the class sets ``none_is_met`` to False.

    A subclass implements :meth:`expression`, :meth:`reasons`, :meth:`describe` and :meth:`boundaries`; :meth:`examples`
    is optional. The compiled check and the reasons must agree: a property test compares them.

    Args:
        name: the argument.

    >>> from fusedops.constraints import Constraint, Dim
    >>> constraint = Dim("x", (-1,), multiple_of=8)
    >>> isinstance(constraint, Constraint), constraint.names, constraint.describe()
    (True, ('x',), 'x: dim -1 a multiple of 8')
    """

    code = ReasonCode.SIZE  # of every reason of this constraint
    none_is_met = True
    reads_shapes = False  # True where the compiled check reads the shapes of all its tensors, which a nested one lacks

    rebuilds: str | None = None  # the argument that :meth:`rebuilt` returns

    def __init__(self, name: str) -> None:
        if type(name) is not str or not name.isidentifier():
            raise ValueError(
                f"{type(self).__name__}: got name {name!r}, expected a parameter's name; to fix: write it as a str"
            )
        self.name = name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arguments that the constraint reads."""
        return (self.name,)

    def expression(self, constants: dict[str, object]) -> str:
        """Return Python source that is true where the constraint is met, for an argument that is not None.

        It may read only shapes, strides, dtypes, layouts and devices of tensors, and values of other arguments: a call
        that is equal to a recent one in all of these is not checked again.

        Values that have no literal go into ``constants`` under a new name, see :func:`constant`.
        """
        raise NotImplementedError

    def reasons(self, args: Arguments) -> list[Reason]:
        """Return why the arguments violate the constraint; empty where they meet it."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the constraint as a phrase for tables."""
        raise NotImplementedError

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        """Yield cases just inside and just outside the constraint, made from a call ``args`` that meets it."""
        raise NotImplementedError

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        """Return values of the argument that meet the constraint, each under a label that names argument and value.

        The conformance kit makes its calls from them. A tensor is a TensorSpec that differs from the one in ``args``
        only in what the constraint restricts. Empty where the constraint has none.
        """
        return {}

    def follow(self, args: Arguments) -> TensorSpec | None:
        """Return the argument resized to fit another tensor, or None if the constraint ties no size to another tensor.

        The conformance kit calls it after it has resized the other tensor. Without it, equal trailing sizes stay
        equal.
        """
        return None

    def fitted(self, args: Arguments) -> Any:
        """Return the argument for the other ones: what :meth:`follow` returns, or the argument as it is.

        A constraint that decides whether there is an argument returns None where there must be none.
        """
        return self.follow(args) or args[self.name]

    def rebuilt(self, args: Arguments, like: TensorSpec) -> TensorSpec:
        """Infer the spec of the argument :attr:`rebuilds` from the other arguments: the inverse of :meth:`follow`.

        For the check of a backward that does not receive the op's first argument. ``like`` has its dtype and leading
        dims.
        """
        return like

    def test(self, constants: dict[str, object]) -> str:
        """Return :meth:`expression`, also true where the argument is None and None meets the constraint."""
        expression = self.expression(constants)
        return f"({self.name} is None or ({expression}))" if self.none_is_met else f"({expression})"

    def to_dict(self) -> dict[str, object]:
        """Return the constraint as JSON-ready data."""
        return {"type": type(self).__name__, **{key: plain(value) for key, value in vars(self).items()}}

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({fields})"


def compile_check(
    parameters: Sequence[str],
    constraints: Sequence[Constraint],
    title: str = "constraints",
    never_none: Collection[str] = (),
) -> Callable[..., Constraint | None]:
    """Compile the check of a call's arguments.

    Args:
        parameters: the names of the arguments, in order.
        constraints: tested in this order.
        title: names the source in tracebacks.
        never_none: arguments that the constraints themselves require.

    Returns:
        A function of the arguments that returns the first violated constraint, or None where all are met.

    >>> import torch
    >>> from fusedops.constraints import Rank, compile_check
    >>> check = compile_check(("x",), [Rank("x", 2)])
    >>> check(torch.ones(2, 4)), check(torch.ones(4))
    (None, Rank(name='x', ranks=(2,)))
    """
    constants: dict[str, object] = {}
    tests = [item.expression(constants) for item in constraints]
    shapes = {attribute for test in tests for attribute in _READ_ONCE.findall(test) if attribute.endswith(".shape")}
    for shape in sorted(shapes):  # where a shape is read, its length costs less than dim()
        name = shape.removesuffix(".shape")
        if name in never_none:
            tests = [re.sub(rf"\b{name}\.dim\(\)", f"len({shape})", test) for test in tests]
    repeated = Counter(attribute for test in tests for attribute in _READ_ONCE.findall(test))
    read: set[str] = set()
    lines = [f"def check({', '.join(parameters)}):"]
    # one test for None serves all the constraints on an optional argument
    for (name, skip_none), group in itertools.groupby(
        enumerate(constraints), lambda item: (item[1].name, item[1].none_is_met)
    ):
        indent, positions = "    ", [position for position, _ in group]
        for attribute in dict.fromkeys(a for position in positions for a in _READ_ONCE.findall(tests[position])):
            if repeated[attribute] > 1 and attribute not in read and attribute.split(".")[0] in never_none:
                read.add(attribute)
                lines.append(f"{indent}{_local(attribute)} = {attribute}")
        if skip_none and name not in never_none:
            lines.append(f"{indent}if {name} is not None:")
            indent *= 2
        for position in positions:
            test = _READ_ONCE.sub(lambda found: _local(found[0]) if found[0] in read else found[0], tests[position])
            lines.append(f"{indent}if not ({test}): return constraint_{position}")
            constants[f"constraint_{position}"] = constraints[position]
    return compiled("\n".join([*lines, "    return None"]) + "\n", title, constants)["check"]


def compiled(source: str, title: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run source in the namespace ``names``, and return the namespace. Tracebacks show the lines of the source."""
    filename = f"<fusedops: {title} #{next(_compiled)}>"
    exec(compile(source, filename, "exec"), names)
    # entries without a time are not checked against the disk
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return names


def _local(attribute: str) -> str:
    """Return the name of the variable that holds ``x.shape`` in a compiled check."""
    return f"its_{attribute.replace('.', '_')}"


def reasons_of(constraint: Constraint, args: Arguments) -> list[Reason]:
    """Return the reasons for a violated constraint: at least one, even if its ``reasons`` returns none."""
    rule = constraint.describe()
    fallback = Reason(
        constraint.code, f"a value of {constraint.name} that violates it", rule, f"change it to meet: {rule}"
    )
    return constraint.reasons(args) or [fallback]


def constant(constants: dict[str, object], value: object) -> str:
    """Return a new name in ``constants`` for a value that has no literal (a dtype, infinity, a function).

    >>> from math import inf
    >>> from fusedops.constraints import constant
    >>> constants = {}
    >>> f"x < {constant(constants, inf)}", constants
    ('x < constant_0', {'constant_0': inf})
    """
    key = f"constant_{len(constants)}"
    constants[key] = value
    return key


def plain(value: object) -> object:
    """Return a value of a constraint as JSON-ready data."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Constraint):
        return value.to_dict()
    if isinstance(value, (tuple, frozenset)):
        return [plain(item) for item in cast("tuple[object, ...]", value)]
    return value


def is_tensor(value: object) -> bool:
    """Return True for a tensor and for a TensorSpec."""
    return isinstance(value, (Tensor, TensorSpec))


def shown(value: object) -> str:
    """Return a value as text for a message. Only the size of a tensor is read; a large integer is shortened."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.numel()} element{'s' * (value.numel() != 1)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def listed(values: Sequence[object], word: str = "or") -> str:
    """Return values as a list in a sentence.

    >>> from fusedops.constraints import listed
    >>> listed(["a", "b", "c"])
    'a, b or c'
    """
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}"
