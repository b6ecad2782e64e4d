"""compare_models: the log probabilities of two models, token by token, and the layers where they part."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fusedops.errors import InvalidInputError

Batch = Mapping[str, Any]
Run = Callable[[Any, Batch], Tensor]


class LayerDifference(NamedTuple):
    """The difference of a module's results in two models.

    Attributes:
        name: of the module, the same in both models.
        difference: the largest absolute difference, of all batches; inf where one model alone has a NaN or inf.
        size: the largest finite magnitude of the first model's result.

    >>> from fusedops.testing import LayerDifference
    >>> LayerDifference("model.norm", 0.25, 2.0).difference
    0.25
    """

    name: str
    difference: float
    size: float


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """The result of :func:`compare_models`.

    Attributes:
        tokens: (n, 3), int64: the batch, the row and the position of each token that is compared.
        logp: (2, n), float64: the log probability of the token by each model.
        layers: the modules that ran in both models and gave results of one shape, in the order of their first calls.

    >>> import torch
    >>> from fusedops.testing import ModelComparison
    >>> found = ModelComparison(torch.tensor([[0, 0, 1]]), torch.tensor([[-1.0], [-1.5]]), ())
    >>> found.largest, found.mean
    (0.5, 0.5)
    """

    tokens: Tensor
    logp: Tensor
    layers: tuple[LayerDifference, ...]

    @property
    def differences(self) -> Tensor:
        """Return the magnitude of the difference of each token's log probabilities, (n,)."""
        return (self.logp[0] - self.logp[1]).abs()

    @property
    def largest(self) -> float:
        """Return the largest difference; NaN where a log probability is NaN."""
        return self.differences.max().item() if self.logp.numel() else 0.0

    @property
    def mean(self) -> float:
        """Return the mean difference."""
        return self.differences.mean().item() if self.logp.numel() else 0.0

    def first_layer(self, tolerance: float = 0.0) -> LayerDifference | None:
        """Return the first module whose results are further apart than ``tolerance`` times its size, or None.

        Modules are in the order of their calls; one that holds others is called before them, and ends after them: so
        the innermost of those that differ from their first call on is named.
        """
        wide = [each for each in self.layers if not each.difference <= tolerance * each.size]
        for number, layer in enumerate(wide):
            if not any(each.name.startswith(f"{layer.name}.") or not layer.name for each in wide[number + 1 :]):
                return layer
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as data that JSON can hold."""
        return {
            "tokens": self.tokens.tolist(),
            "logp": self.logp.tolist(),
            "largest": self.largest,
            "mean": self.mean,
            "layers": [each._asdict() for each in self.layers],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: each token's difference, and each module's in units of its size. Needs matplotlib."""
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        figure, (tokens, layers) = pyplot.subplots(2, 1, figsize=(9, 7), layout="constrained")
        of_tokens = _numbers(self.differences)
        tokens.plot(of_tokens, ".", markersize=3)
        tokens.set(xlabel="token", ylabel="difference of log probabilities")
        layers.plot([each.difference / (each.size or 1.0) for each in self.layers], ".-", linewidth=0.5)
        layers.set(xlabel="module, in the order of calls", ylabel="largest difference / largest magnitude")
        for axes, numbers in ((tokens, of_tokens), (layers, [each.difference for each in self.layers])):
            if any(0 < number < float("inf") for number in numbers):
                axes.set_yscale("log")
        figure.savefig(os.fspath(path))
        pyplot.close(figure)

    def __str__(self) -> str:
        batches = set(map(int, _numbers(self.tokens[:, 0])))
        lines = [f"{self.logp.shape[1]} tokens of {len(batches)} batches"]
        if self.logp.numel():
            at = int(self.differences.nan_to_num(torch.inf).argmax())
            batch, row, position = map(int, _numbers(self.tokens[at]))
            lines.append(
                f"  log probability  largest difference {self.largest:.2g} (batch {batch}, row {row}, position "
                f"{position}), mean {self.mean:.2g}"
            )
        first = self.first_layer()
        if first is not None:
            size = f"{first.difference:.2g}, of numbers up to {first.size:.2g}"
            lines.append(f"  first module     {first.name or 'the model'}: {size}")
        elif self.layers:
            lines.append(f"  first module     none: {len(self.layers)} modules have the same bits")
        return "\n".join(lines)


def compare_models(
    a: nn.Module,
    b: nn.Module,
    batches: Iterable[Batch],
    *,
    run: Run | tuple[Run, Run] | None = None,
) -> ModelComparison:
    """Compare the log probabilities of two models, token by token, and find the modules where they part.

    A token's log probability is that which a model gives it after the tokens before it; where ``attention_mask`` is 0
    for one of the two positions, or a token is -100, it is left out.

    Args:
        a: a language model, in evaluation mode; its numbers are the expected ones.
        b: another, or ``a`` itself with another ``run``.
        batches: arguments of the models by name: ``input_ids`` (B, S), int64, and others such as ``attention_mask``.
        run: ``(model, batch) -> logits (B, S, V)``; a pair has one for each model, as to compare a prompt at once with
            one token at a time. None: ``model(**batch).logits``.

    Raises:
        InvalidInputError: a batch has no ``input_ids``, or the logits have other rows than it.

    >>> import torch
    >>> from fusedops.testing import compare_models
    >>> class Model(torch.nn.Module):
    ...     def __init__(self, shift):
    ...         super().__init__()
    ...         self.embedding, self.shift = torch.nn.Embedding.from_pretrained(torch.eye(4)), shift
    ...         self.head = torch.nn.Identity()
    ...     def forward(self, input_ids):
    ...         return self.head(self.embedding(input_ids) + self.shift * input_ids[..., None].eq(3))
    >>> batch = {"input_ids": torch.tensor([[0, 1, 2, 3]])}
    >>> def run(model, batch):
    ...     return model(**batch)
    >>> print(compare_models(Model(0.0), Model(0.0), [batch], run=run))
    3 tokens of 1 batches
      log probability  largest difference 0 (batch 0, row 0, position 1), mean 0
      first module     none: 3 modules have the same bits
    >>> print(compare_models(Model(0.0), Model(0.5), [batch], run=run).first_layer().name)
    head
    """
    runs = cast("tuple[Run, Run]", run if isinstance(run, tuple) else (run or _logits,) * 2)
    tokens: list[Tensor] = []
    logps: list[Tensor] = []
    layers: dict[str, LayerDifference] = {}
    for number, batch in enumerate(batches):
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise InvalidInputError(
                "compare_models: got a batch without input_ids (B, S), expected the tokens of each row; to fix: pass "
                'a mapping such as {"input_ids": ids}'
            )
        seen: list[dict[str, list[Tensor]]] = []
        both: list[Tensor] = []
        mask = _counts(ids, batch.get("attention_mask"))
        for model, compute in zip((a, b), runs):
            with torch.no_grad(), _recorded(model) as results:
                logits = compute(model, batch)
            if logits.dim() != 3 or logits.shape[:2] != ids.shape:
                raise InvalidInputError(
                    f"compare_models: got logits of shape {tuple(logits.shape)}, expected ({ids.shape[0]}, "
                    f"{ids.shape[1]}, V) of input_ids; to fix: pass run=, a function that returns these"
                )
            both.append(_log_probs(logits, ids)[mask].cpu())
            seen.append(results)
        tokens.append(torch.cat([torch.full((int(mask.sum()), 1), number), _positions(mask)], 1))
        logps.append(torch.stack(both))
        _compare(seen[0], seen[1], layers)
    empty = (torch.zeros(0, 3, dtype=torch.long), torch.zeros(2, 0, dtype=torch.float64))
    return ModelComparison(torch.cat([empty[0], *tokens]), torch.cat([empty[1], *logps], 1), tuple(layers.values()))


def _logits(model: Any, batch: Batch) -> Tensor:
    return model(**batch).logits


def _counts(ids: Tensor, mask: Any) -> Tensor:
    """Return True for each token that is compared: (B, S - 1), for the tokens from position 1 on."""
    counts = ids[:, 1:] != -100
    if isinstance(mask, Tensor) and mask.dim() == 2:
        counts = counts & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return counts


def _positions(mask: Tensor) -> Tensor:
    """Return the row and the position of each token."""
    found = mask.nonzero().cpu()
    return found + torch.tensor([0, 1])


def _log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    logp = torch.log_softmax(logits[:, :-1].double(), -1)
    return logp.gather(-1, ids[:, 1:, None].clamp(min=0).to(logp.device))[..., 0].to(ids.device)


@contextmanager
def _recorded(model: nn.Module) -> Generator[dict[str, list[Tensor]]]:
    """Record the first tensor of the results of each module's calls, in the order in which the modules are called."""
    results: dict[str, list[Tensor]] = {}

    def begin(name: str, module: nn.Module, args: Any) -> None:
        results.setdefault(name, [])

    def end(name: str, module: nn.Module, args: Any, result: Any) -> None:
        tensor = _first_tensor(result)
        if tensor is not None:
            results[name].append(tensor.detach().clone())

    handles: list[Any] = []
    modules: list[tuple[str, nn.Module]] = list(cast("Any", model).named_modules())
    for name, module in modules:
        handles.append(module.register_forward_pre_hook(partial(begin, name)))
        handles.append(module.register_forward_hook(partial(end, name)))
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(result: Any) -> Tensor | None:
    if isinstance(result, Tensor):
        return result
    values: list[Any] = []
    if isinstance(result, Mapping):
        values = list(cast("Mapping[str, Any]", result).values())
    elif isinstance(result, (tuple, list)):
        values = list(cast("list[Any]", result))
    return next((found for found in map(_first_tensor, values) if found is not None), None)


def _numbers(tensor: Tensor) -> list[float]:
    return cast("Any", tensor).tolist()


def _compare(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]], layers: dict[str, LayerDifference]) -> None:
    """Add the differences of one batch to those of the batches before."""
    for name, ours in a.items():
        theirs = b.get(name, [])
        if not ours or [each.shape for each in ours] != [each.shape for each in theirs]:
            continue
        pairs = [(one.double(), two.double().to(one.device)) for one, two in zip(ours, theirs)]
        difference = max(_difference(one, two) for one, two in pairs)
        size = max(_largest(one.nan_to_num(0.0, 0.0, 0.0)) for one, _ in pairs)
        before = layers.get(name, LayerDifference(name, 0.0, 0.0))
        layers[name] = LayerDifference(name, max(difference, before.difference), max(size, before.size))


def _difference(one: Tensor, two: Tensor) -> float:
    """Return the largest difference: 0 of equal infinities and of two NaN, inf where one alone is not finite."""
    same = (one == two) | (one.isnan() & two.isnan())
    return _largest((one - two).masked_fill(same, 0.0).nan_to_num(torch.inf))


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
