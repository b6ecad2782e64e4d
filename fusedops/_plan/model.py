"""A model and its arguments without numbers, and the run of a plan."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter

from fusedops._contract.tensor_spec import TensorSpec
from fusedops._plan.shape_tensor import MOST_KNOWN, ShapeTensor, Watcher
from fusedops._report.foreign_text import error_text
from fusedops._torch import TENSOR_TYPES
from fusedops.errors import InvalidInputError


def without_numbers(tensor: Tensor, watcher: Watcher) -> Tensor:
    """Return a tensor of a plan like another one: integers with values are kept where they are few."""
    if not tensor.is_floating_point() and not tensor.is_meta and tensor.numel() <= MOST_KNOWN:
        return tensor.to("cpu", copy=True)  # a forward may count in it
    on_meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return ShapeTensor.of(on_meta, watcher).requires_grad_(tensor.requires_grad)


def copied(model: Module, watcher: Watcher) -> Module:
    """Return a copy of a model whose parameters and buffers have no numbers, and which is not compiled.

    Raises:
        InvalidInputError: it cannot be copied, or has parameters of a class of their own.
    """
    if isinstance(model, ScriptModule):
        raise InvalidInputError("plan: got a model of torch.jit, expected a torch.nn.Module; to fix: pass its source")
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in TENSOR_TYPES:
            raise InvalidInputError(
                f"plan: got {name} of class {type(tensor).__name__}, expected plain tensors; to fix: plan the model "
                "before it is sharded or quantized; one with the sizes of a rank gives the plan of that rank"
            )
        made = without_numbers(tensor.detach(), watcher)
        memo[id(tensor)] = Parameter(made, tensor.requires_grad) if isinstance(tensor, Parameter) else made
    for module in model.modules():  # what a forward keeps, such as a state, may be in a graph, which has no copy
        held = [each for each in vars(module).values() if isinstance(each, Tensor)]
        memo.update((id(each), without_numbers(each.detach(), watcher)) for each in held)
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:  # any error of a foreign __deepcopy__, or of a state that cannot be copied
        raise InvalidInputError(
            f"plan: got a {type(model).__name__} that cannot be copied: {error_text(error)}, expected a model that "
            "can; to fix: pass the model inside of it, such as model.module"
        ) from error
    for module in made.modules():
        vars(module)["_compiled_call_impl"] = None
    return made


def arguments(model: Module, inputs: Any, watcher: Watcher, labels: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of a model.

    Args:
        model: the model.
        inputs: one tensor, a tuple of them, or a mapping by name; each may be a TensorSpec. Or the sizes of a batch,
            ``{"batch": 2, "length": 512}``, of a model of transformers.
        watcher: of the tensors.
        labels: give a language model labels, where ``inputs`` are sizes.
    """

    def made(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return without_numbers(value, watcher)
        if not isinstance(value, TensorSpec):
            return value
        if value.dtype.is_floating_point:
            return ShapeTensor.of(torch.empty(value.shape, dtype=value.dtype, device="meta"), watcher)
        watcher.assume(f"each number of {name}, which has a shape alone, is 1")
        return torch.ones(value.shape, dtype=value.dtype)

    if isinstance(inputs, Mapping):
        named = dict(cast("Mapping[str, Any]", inputs))
        if named and {*named} <= {"batch", "length"}:
            named = _of_sizes(model, int(named.get("batch", 1)), int(named.get("length", 128)), labels)
        return (), {name: made(name, value) for name, value in named.items()}
    several = cast("tuple[Any, ...]", inputs if isinstance(inputs, tuple) else (inputs,))
    return tuple(made(f"argument {at}", value) for at, value in enumerate(several)), {}


def _of_sizes(model: Any, batch: int, length: int, labels: bool) -> dict[str, Any]:
    """Return inputs of these sizes for a model of transformers: tokens, images or sound."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", "input_ids")
    if config is None:
        raise InvalidInputError(
            f"plan: got sizes for a {type(model).__name__}, expected them for a model of transformers; to fix: pass "
            "its arguments, such as (fusedops.TensorSpec((2, 64)),)"
        )
    tokens = TensorSpec((batch, length), torch.int64)
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    if name == "input_ids":
        named: dict[str, Any] = {name: tokens}
    elif name == "pixel_values":
        config = getattr(config, "vision_config", config)
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        named = {name: TensorSpec((batch, getattr(config, "num_channels", 3), size, size), dtype)}
    elif name == "input_features":
        named = {name: TensorSpec((batch, config.num_mel_bins, 2 * config.max_source_positions), dtype)}
    else:
        named = {name: TensorSpec((batch, length), dtype)}
    target = "decoder_input_ids" if getattr(config, "is_encoder_decoder", False) else "input_ids"
    if target != name and target == "decoder_input_ids":
        named[target] = tokens
    is_language = callable(getattr(model, "get_output_embeddings", None)) and model.get_output_embeddings() is not None
    base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # below PEFT's
    if labels and is_language and "labels" in inspect.signature(base.forward).parameters and target in named:
        named["labels"] = tokens
    return named


def run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, steps: int, watcher: Watcher) -> None:
    """Run a model once: forward; forward and backward; or the generation of ``steps`` tokens after a prompt's."""
    model.train(train)
    if steps:
        if not callable(getattr(model, "generate", None)):
            raise InvalidInputError(
                f"plan: got generate for a {type(model).__name__}, expected a model with a method generate; to fix: "
                "leave it out"
            )
        kwargs = {name: value for name, value in kwargs.items() if name != "labels"}
        calls: list[None] = []

        def count(module: Any, args: Any) -> None:
            calls.append(None)

        with model.register_forward_pre_hook(count):
            model.generate(*args, **kwargs, max_new_tokens=steps + 1, min_new_tokens=steps + 1, do_sample=False)
        if len(calls) <= steps:  # such as a search with beams, which ends by computed numbers
            watcher.assume(f"the generation ended after {max(len(calls) - 1, 0)} of {steps} steps")
        return
    with torch.set_grad_enabled(train):
        outputs = model(*args, **kwargs)
        if train:
            loss = getattr(outputs, "loss", None)
            parts = _floating(loss if isinstance(loss, Tensor) else outputs)
            if not parts:
                raise InvalidInputError(
                    f"plan: got train for a {type(model).__name__} whose outputs have no gradient, expected parameters "
                    "or inputs that require one; to fix: leave it out"
                )
            is_number = len(parts) == 1 and parts[0].dim() == 0
            (parts[0] if is_number else torch.stack([each.float().sum() for each in parts]).sum()).backward()


def _floating(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values] if values.is_floating_point() and values.requires_grad else []
    parts = cast("Any", values.values() if isinstance(values, Mapping) else values)
    if not isinstance(values, (Mapping, tuple, list)):
        return []
    return [tensor for part in parts for tensor in _floating(part)]
