"""A router of experts with small weights of its own, which runs its own forward on logits that are given.

The tokens are unit vectors, so the columns of the weight are the logits, exactly and in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops.integrations._replacement import own_class
from fusedops.integrations._trial.twin import called, numbers, parameters_of, twin

Path = tuple[str, ...]  # the names from a module to a tensor or to a layer below it
ARGUMENT: Path = ()  # the second argument of a forward, as the bias of MiniMax-M2

_ROWS = 8  # tokens of a call
_MOST_TENSORS = 8  # a router has few: larger modules are not looked at
_MOST_EXPERTS = 2048
_SMALLEST = -60.0  # a sigmoid of -46 is 1e-20, the eps of DeepSeek-V3


class Result(NamedTuple):
    """The results of a router: (T, E), (T, k), (T, k)."""

    logits: Tensor
    weights: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Choices:
    """The choices of a router for given logits, and the random vectors that it had then.

    Attributes:
        logits: (N, E).
        vectors: (N, E) for each vector of E numbers.
        result: of the N rows.
        ordinary: (N,) True where the logits are of the size of a model's.
    """

    logits: Tensor
    vectors: Mapping[Path, Tensor]
    result: Result
    ordinary: Tensor


@dataclass
class SmallRouter:
    """A twin of a router: its sizes, and its tensors by their paths.

    Attributes:
        module: the router.
        weight: the path of the weight, (E, H).
        shapes: the shape and dtype of each parameter and buffer.
        names: of the parameters of the forward.
        rank: of the tokens, for which the forward does not raise.
        called_layers: the paths of the layers that its forward called.
    """

    module: Module
    weight: Path
    shapes: dict[Path, tuple[tuple[int, ...], torch.dtype]]
    names: tuple[str, ...]
    rank: int = 2
    called_layers: set[Path] = field(default_factory=lambda: set[Path]())

    @classmethod
    def of(cls, module: Module) -> SmallRouter | None:
        """Return the twin of a module with one matrix among few tensors, or None for another module."""
        if own_class(module).__module__.startswith("torch.nn."):
            return None
        names = tuple(each.name for each in parameters_of(own_class(module).forward) or ())
        tensors = dict(islice(chain(module.named_parameters(), module.named_buffers()), _MOST_TENSORS + 1))
        matrices = [name for name, each in tensors.items() if _is_matrix(each)]
        if len(matrices) != 1 or len(tensors) > _MOST_TENSORS or len(names) not in (1, 2):
            return None
        shapes = {tuple(name.split(".")): (tuple(each.shape), each.dtype) for name, each in tensors.items()}
        small = cls(module, tuple(matrices[0].split(".")), shapes, names)
        if not 1 < small.experts <= _MOST_EXPERTS or small.width < _ROWS:
            return None
        others = (each for name, each in tensors.items() if name != matrices[0] and each.is_floating_point())
        # the block of a router and its experts has one matrix too, and experts
        return small if all(each.numel() <= small.experts + small.width for each in others) else None

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.shapes[self.weight][0][0]

    @property
    def width(self) -> int:
        """The size of a token."""
        return self.shapes[self.weight][0][1]

    @cached_property
    def random_weight(self) -> Tensor:
        """A random weight, by which logits have the size of the tokens' numbers."""
        return numbers(29, self.experts, self.width) * self.width**-0.5

    @property
    def vectors(self) -> list[Path]:
        """The paths of vectors of E numbers."""
        paths = [
            path for path, (shape, dtype) in self.shapes.items()
            if math.prod(shape) == self.experts and dtype.is_floating_point
        ]  # fmt: skip
        return [*paths, ARGUMENT][: len(paths) + len(self.names) - 1]

    def twin(self, tensors: Mapping[Path, Tensor]) -> Any:
        """Return the router with these tensors; its others are random, or 0 where they are integers."""
        values: dict[Path, Tensor] = {}
        for seed, (path, (shape, dtype)) in enumerate(self.shapes.items(), 40):
            given = tensors.get(path)
            if given is not None:
                values[path] = given.view(shape)
            elif dtype.is_floating_point:
                values[path] = numbers(seed, math.prod(shape), dtype=tensors[self.weight].dtype).view(shape)
            else:
                values[path] = torch.zeros(shape, dtype=dtype, device="cpu")
        return self._twin_of(self.module, values, ())

    def _twin_of(self, module: Module, values: Mapping[Path, Tensor], path: Path) -> Any:
        def own(names: Iterator[str]) -> dict[str, Tensor | None]:
            return {name: values.get((*path, name)) for name in names}

        children: dict[str, Module] = {}
        for name, child in module.named_children():
            children[name] = self._twin_of(child, values, (*path, name))
            children[name].register_forward_hook(partial(self._note, (*path, name)))
        registered = module.__dict__
        return twin(module, own(registered["_parameters"]), children, own(registered["_buffers"]))

    def _note(self, path: Path, *rest: Any) -> None:
        self.called_layers.add(path)

    def run(self, router: Any, x: Tensor, argument: Tensor | None, function: Any = None) -> Any:
        """Return the results of a twin's own forward, or of a function in its place, or what it raised."""
        given = () if len(self.names) == 1 else (argument,)
        with torch.random.fork_rng(devices=[]):
            return called(function or own_class(self.module).forward, router, x.clone(), *given)

    def result_of(self, z: Tensor, vectors: Mapping[Path, Tensor]) -> Any:
        """Return the results for the logits z, (T, E), where the router adds no bias; or what it raised."""
        weight = torch.zeros(self.experts, self.width, dtype=torch.float32, device="cpu")
        weight[:, : len(z)] = z.T
        x = torch.eye(len(z), self.width, dtype=torch.float32, device="cpu")
        router = self.twin({**vectors, self.weight: weight})
        return self.run(router, x if self.rank == 2 else x[None], vectors.get(ARGUMENT))

    def read(self, result: Any, rows: int) -> Result | None:
        """Return the results as matrices, or None where they are not logits, weights and indices."""
        if not isinstance(result, tuple):
            return None
        values = cast("tuple[Any, ...]", result)
        if len(values) != 3 or not all(isinstance(each, Tensor) and each.dim() > 1 for each in values):
            return None
        logits, weights, index = cast("tuple[Tensor, Tensor, Tensor]", values)
        shapes = logits.shape[-1] == self.experts and weights.shape == index.shape
        if not (shapes and logits.is_floating_point() and weights.is_floating_point()) or logits.numel() == 0:
            return None
        if index.dtype not in (torch.int64, torch.int32) or logits.shape[:-1] != index.shape[:-1]:
            return None
        read = Result(*(each.detach().reshape(-1, each.shape[-1]) for each in (logits, weights, index.long())))
        inside = bool(((read.chosen >= 0) & (read.chosen < self.experts)).all())
        return read if inside and len(read.chosen) == rows else None

    def choices(self, still: Path | None, factor: float) -> Choices | None:
        """Return what the router chooses for logits of many sizes, or None where its results change their form.

        Args:
            still: the path of a vector that is 0, as a bias of the logits.
            factor: by which the router multiplies them.
        """
        parts: list[Choices] = []
        for z, shift, ordinary in _rows(self.experts):
            vectors: dict[Path, Tensor] = {}
            for seed, path in enumerate(self.vectors, 10):
                vector = numbers(seed, self.experts) + shift
                if not ordinary:
                    vector[0] -= 10  # of an expert that takes the whole of a softmax
                vectors[path] = torch.zeros_like(vector) if path == still else vector
            result = self.read(self.result_of(z / factor, vectors), len(z))
            if result is None:
                return None
            rows = {path: vector.expand(len(z), -1) for path, vector in vectors.items()}
            parts.append(Choices(z, rows, result, torch.full((len(z),), ordinary, device="cpu")))
        return Choices(
            torch.cat([part.logits for part in parts]),
            {path: torch.cat([part.vectors[path] for part in parts]) for path in self.vectors},
            Result(*(torch.cat(each) for each in zip(*(part.result for part in parts)))),
            torch.cat([part.ordinary for part in parts]),
        )

    def settings(self) -> list[float]:
        """Return the numbers among the attributes of the router and in the code of its class."""
        functions = (each for each in vars(own_class(self.module)).values() if isinstance(each, FunctionType))
        values = [*vars(self.module).values(), *chain(*(each.__code__.co_consts for each in functions))]
        found = [value for value in values if type(value) in (int, float) and math.isfinite(value)]
        return [*dict.fromkeys(found)]


def ordinary_rows(experts: int) -> Tensor:
    """Return logits of 8 tokens, from -3 to 3 in random orders: no two of a row are nearly equal."""
    rising = torch.linspace(-3, 3, experts, dtype=torch.float32, device="cpu")
    return torch.stack([rising[_order(seed, experts)] for seed in range(_ROWS)])


def _order(seed: int, experts: int) -> Tensor:
    return numbers(seed, experts).argsort()


def _rows(experts: int) -> Iterator[tuple[Tensor, float, bool]]:
    """Yield logits, a shift of the vectors, and True where the logits are of the size of a model's."""
    ordinary = ordinary_rows(experts)
    for shift in (0.0, -3.0):  # by -3 all choices are negative: some put 0 for those of other groups
        yield ordinary, shift, True
    yield ordinary / 10, 0.0, True  # the sum of a group's two best scores is in another order than its best one
    levels = torch.linspace(-10, _SMALLEST, _ROWS, dtype=torch.float32, device="cpu")[:, None]
    yield ordinary + levels, 0.0, False
    yield ordinary + 40, 0.0, False  # each sigmoid is 1
    for each in (levels, 2 * _SMALLEST):  # beside the first expert; the softmax of -120 is 0
        beside = ordinary + each
        beside[:, 0] = 0.0
        yield beside, 0.0, False


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.is_floating_point() and min(tensor.shape) > 1
