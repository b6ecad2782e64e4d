"""A module's own forward beside the op that may replace it: values, gradients, and what else a call does.

It runs with gradients, small and large, in evaluation and in training, with one token and with 40, and with a NaN.
A call must leave torch's generator, its arguments and the module as they are, and may not ask how many tokens it has,
nor count them or take a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from fusedops.integrations._replacement import InEvaluation, Replacement
from fusedops.integrations._trial.twin import Raised, called, near, numbers

_TOLERANCE = 1e-3  # of gradients, of float32
_FORWARD = "its forward"
_OTHER = "its gradients are others than the op's"
_IN_TRAINING = "in training it computes something else"
_NOT_FINITE = "hides numbers that are not finite"
_SIZES: Any = (cast("Any", Tensor.shape).__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel)
_PARTS: Any = (torch.split, Tensor.split, torch.chunk, Tensor.chunk, torch.tensor_split, Tensor.tensor_split)
# functions that count along a dim; and those for which a number of tokens is a shape, not a number
_COUNTS = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}
_SHAPES = {
    "view", "reshape", "unflatten", "expand", "repeat", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty",
    "split", "split_with_sizes",
}  # fmt: skip
_ROWS: Any = (torch.unbind, Tensor.unbind)  # Python's iteration calls it

Call = Sequence[Tensor]
TOKENS = ((2, 20), (1, 1), (40,), (1,))  # the shapes of calls without their last dim: many tokens, and one


def seen_whole(
    found: Replacement,
    own: Module,
    forward: Callable[..., Any],
    expected: Callable[..., Any],
    calls: Iterable[Call],
    tolerance: float,
    narrow: bool = False,
) -> Replacement | str:
    """Return a replacement for both modes or for evaluation alone, or the reason why there is none.

    Args:
        found: a replacement whose values agree.
        own: a twin of the module, with parameters of floating dtypes.
        forward: takes the twin and the tensors of a call.
        expected: takes the tensors of a call, and computes the same by the reference of an op.
        calls: of many tokens, and of few. The first that does not raise among those of few is compared.
        tolerance: of the values.
        narrow: True where the calls are narrower than the model's, so that the code may not ask for the width either.
    """

    def run(*tensors: Tensor) -> Any:
        return forward(own, *tensors)

    each_call = iter(calls)
    first = next(each_call)
    if isinstance(called(run, *first), Raised):
        return f"its forward raises for {' x '.join(map(str, first[0].shape[:-1]))} tokens"
    calls = [first, *islice((call for call in each_call if not isinstance(called(run, *call), Raised)), 1)]
    for training in (False, True):
        for each in own.modules():
            each.training = training  # not by train(), which a class may have for itself
        reason = reason_of_calls(run, expected, calls, tolerance, own, narrow=narrow)
        if reason is not None:
            return InEvaluation.of(found, _IN_TRAINING) if training else reason
    return found


def reason_of_calls(
    run: Callable[..., Any],
    expected: Callable[..., Any],
    calls: Iterable[Call],
    tolerance: float,
    module: Module | None = None,
    *,
    subject: str = _FORWARD,
    asks: bool = True,
    narrow: bool = False,
    fixed: int = 0,
) -> str | None:
    """Return what a function does that another does not, or None. The last ``fixed`` tensors have no gradients.

    >>> x = torch.ones(2, 3)
    >>> reason_of_calls(lambda x: 2 * x.detach(), lambda x: 2 * x, [(x,)], 1e-6)
    "its gradients are others than the op's"
    >>> reason_of_calls(lambda x: 2 * x if len(x.shape) < 9 and x.shape[0] < 9 else x, lambda x: 2 * x, [(x,)], 1e-6)
    'its forward asks for a number of tokens'
    """
    parameters = () if module is None else module.parameters()
    own = [each.requires_grad_() for each in parameters if each.is_floating_point()]
    for at, call in enumerate(calls):
        leaves = [*(each.clone() for each in call), *own]
        for leaf in leaves[: len(call) - fixed]:
            leaf.requires_grad_(leaf.is_floating_point())
        inputs = [each.clone() for each in leaves[: len(call)]]
        watch, scale = Watch(inputs, module, asks, narrow), 10.0 ** (6 * at)  # a large one shows where it is limited
        wanted = _with_gradients(expected, inputs, leaves, scale)
        result = _with_gradients(run, inputs, leaves, scale, watch)
        if watch.reason is not None:
            return f"{subject} {watch.reason}"
        if len(result[0]) != len(wanted[0]) or not all(map(near, result[0], wanted[0], [tolerance] * len(wanted[0]))):
            return f"{subject} computes something else with gradients"
        if not all(map(near, result[1], wanted[1], [_TOLERANCE] * len(wanted[1]))):
            return _OTHER if subject == _FORWARD else f"the gradients of {subject} are others than the op's"
        if not _same_where_not_finite(
            run, expected, call, (torch.nan, torch.inf, -torch.inf) if asks and at else (torch.nan,)
        ):
            return f"{subject} {_NOT_FINITE}"
    return None


def _same_where_not_finite(
    run: Callable[..., Any], expected: Callable[..., Any], call: Call, numbers: tuple[float, ...]
) -> bool:
    """Return True where a NaN in the first tensor of a call reaches the same numbers of both functions.

    And an infinity no fewer of the first than of the second, which may have the limit of its formula.
    """
    for number in numbers:
        own, others = (_finite(function, call, number) for function in (run, expected))
        if len(own) != len(others):
            return False
        if any((each & ~other if number == number else each ^ other).any() for each, other in zip(own, others)):
            return False
    return True


def _finite(function: Callable[..., Any], call: Call, number: float) -> list[Tensor]:
    """Return where the results of a call are finite whose first element is a number."""
    first, *rest = (each.clone() for each in call)
    first.view(-1)[0] = number
    return [each.isfinite() for each in _listed(called(function, first, *rest)) if isinstance(each, Tensor)]


def _listed(result: Any) -> list[Any]:
    return [*result] if isinstance(result, (tuple, list)) else [result]


def _with_gradients(
    run: Callable[..., Any], inputs: Sequence[Tensor], leaves: Sequence[Tensor], scale: float, watch: Any = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors among the results of a call, and the gradients of the leaves."""

    def computed() -> Any:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            if watch is None:
                result = run(*inputs)
            else:
                with watch:
                    result = run(*inputs)
            results = _listed(result)
            tensors = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
            sums = [(each * scale * numbers(7, *each.shape, dtype=each.dtype)).sum() for each in tensors]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found: Any = torch.autograd.grad(sums, wanted, allow_unused=True) if sums else [None] * len(wanted)
            gradients = [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, wanted)]
        return [each.detach() for each in results if isinstance(each, Tensor)], gradients

    result = called(computed)
    return ([], []) if isinstance(result, Raised) else result


class Watch(TorchFunctionMode):
    """Watches a call: what it draws, what it changes, and whether the number of tokens decides something.

    Args:
        inputs: tensors that the call gets.
        module: whose parameters and buffers it may read.
        asks: False where the code may ask for the number of tokens.
        narrow: True where it may not ask for the width.

    Attributes:
        reason: after the call, what it did beside its results, or None.
    """

    def __init__(
        self, inputs: Iterable[Tensor], module: Module | None = None, asks: bool = True, narrow: bool = False
    ) -> None:
        super().__init__()
        self._inputs, self._module = list(inputs), module
        self._asked: list[str] = []
        self._asked_width: list[str] = []
        self._asks, self._narrow = asks, narrow
        self.reason: str | None = None

    def __enter__(self) -> Watch:
        """Note how things are before the call."""
        self._generator, self._before = torch.get_rng_state(), self._state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Compare with how things are after the call."""
        super().__exit__(*error)
        versions, own = self._state()
        if not torch.equal(torch.get_rng_state(), self._generator):
            self.reason = "draws random numbers"
        elif versions != self._before[0]:
            self.reason = "changes its arguments"
        elif own != self._before[1]:
            self.reason = "changes the module"
        elif self._asked and self._asks:
            self.reason = "asks for a number of tokens"
        elif self._asked_width:
            self.reason = "asks for a width"

    def _state(self) -> tuple[list[int], list[Any]]:
        modules = [] if self._module is None else [*self._module.modules()]
        own: list[Any] = [(name, id(value)) for module in modules for name, value in vars(module).items()]
        for module in modules:
            tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            own += [(id(each), each._version) for each in tensors]
        return [each._version for each in self._inputs], own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; the sizes that it returns note what they are asked."""
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__len__ or _counts(func, args, kwargs or {}) or self._takes_apart(func, args, kwargs or {}):
            self._asked.append(func.__name__)
        if func not in _SIZES:
            return result
        if isinstance(result, torch.Size):
            return torch.Size(
                [*(_Tokens.of(each, self._asked) for each in result[:-1]), *map(self._width, result[-1:])]
            )
        last = len(args) > 1 and args[1] in (-1, args[0].dim() - 1)
        return self._width(result) if last else _Tokens.of(result, self._asked)

    def _width(self, size: int) -> int:
        return _Tokens.of(size, self._asked_width) if self._narrow else size

    def _takes_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True where a tensor is taken apart at a place that a longer one would have, or row by row."""
        if func is Tensor.__getitem__:
            return _cuts_beyond(args[0], args[1])
        if func in _ROWS:
            return any(args[0] is each for each in self._inputs)
        if func not in _PARTS or len(args) < 2 or type(args[1]) is not int:
            return False
        return args[1] > args[0].shape[args[2] if len(args) > 2 else kwargs.get("dim", 0)]


def _counts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a function that counts, or that computes with a number of tokens, as arange does."""
    given = [*args, *kwargs.values()]
    name = func.__name__.rstrip("_")
    return name in _COUNTS or (name not in _SHAPES and any(isinstance(each, _Tokens) for each in given))


def _cuts_beyond(x: Tensor, index: Any) -> bool:
    """Return True where a slice has a bound beyond the size of its dim: of a longer tensor it takes a part."""
    indices = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
    parts = [each for each in indices if each is not None]
    at = next((at for at, each in enumerate(parts) if each is Ellipsis), len(parts))
    sliced: list[tuple[Any, int]] = [*zip(parts[:at], x.shape), *zip(reversed(parts[at + 1 :]), reversed(x.shape))]
    return any(
        type(bound) is int and abs(bound) > size
        for part, size in sliced
        if type(part) is slice
        for bound in cast("tuple[Any, ...]", (part.start, part.stop))
    )


class _Tokens(int):
    """A number that notes each question by which a forward may take another way."""

    asked: list[str]
    is_size: bool

    @classmethod
    def of(cls, size: int, asked: list[str], is_size: bool = True) -> _Tokens:
        """Return a size, or a number computed from sizes."""
        made = cls(size)
        made.asked, made.is_size = asked, is_size
        return made


def _noting(name: str) -> Any:
    plain = getattr(int, name)

    def method(self: _Tokens, *args: Any) -> Any:
        if not self.is_size or (args != (0,) and name != "__bool__"):  # no tokens at all have no results that differ
            self.asked.append(name)
        return plain(self, *args)

    return method


def _computing(name: str) -> Any:
    plain = getattr(int, name)

    def method(self: _Tokens, *args: Any) -> Any:
        result = plain(self, *args)
        return _Tokens.of(result, self.asked, False) if type(result) is int else result

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "truediv", "rtruediv", "pow", "int", "float"):
    setattr(_Tokens, f"__{_name}__", _noting(f"__{_name}__"))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "neg"):
    setattr(_Tokens, f"__{_name}__", _computing(f"__{_name}__"))
