"""plan: a whole model against a device that need not exist."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn import Module

from fusedops._contract.device_spec import DeviceSpec
from fusedops._explain import is_here
from fusedops._plan.model import arguments, copied, run
from fusedops._plan.recorder import Recorder
from fusedops._plan.report import Plan
from fusedops._plan.shape_tensor import MakesShapeTensors, forget_cached, kept_tensors
from fusedops._plugins.registry import registry
from fusedops._policy.use import use
from fusedops._report.foreign_text import error_text
from fusedops._report.suggestion import unknown_name
from fusedops.errors import FusedOpsError, FusedOpsWarning, InvalidInputError


@torch.inference_mode(False)  # the tensors of a step of training have versions
def plan(
    model: Module,
    inputs: Any,
    *,
    device: str | torch.device | DeviceSpec,
    capability: tuple[int, int] | None = None,
    train: bool = False,
    generate: bool | int = False,
    policy: str | None = None,
) -> Plan:
    """Return which backend would serve each call of a model on a device that this machine need not have.

    The model runs without numbers and takes no memory of its size: its copy, after ``apply`` of
    ``fusedops.integrations.transformers`` or ``.diffusers``, or as it is where that has been applied. Integers that it
    makes itself keep their values. What depends on computed numbers is assumed, and listed. On a CPU the counts are
    those of :func:`fusedops.stats` after the same run.

    Args:
        model: a torch module; its tensors may be on the meta device.
        inputs: a tensor, a tuple of them, or a dict of its arguments; each may be a :class:`fusedops.TensorSpec`. For
            a model of transformers also the sizes of a batch: ``{"batch": 2, "length": 512}``.
        device: a device type, the name of a chip that a backend knows, such as "H100" or "A2", or a DeviceSpec; an
            index is left out. A device of this machine is asked what it has; of another one its own backend is taken
            for ready.
        capability: in place of the device's compute capability.
        train: plan a step of training: forward and backward, of the model's loss, else of the sum of its outputs.
        generate: plan a prompt and so many steps with the cache; True is one.
        policy: as of :func:`fusedops.use`.

    Raises:
        InvalidInputError: the model cannot be planned; the message has the reason.

    Warns:
        FusedOpsWarning: code outside of the model keeps tensors of the plan, such as a dict in which it caches.

    >>> import torch, fusedops
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    >>> plan = fusedops.plan(model, fusedops.TensorSpec((2, 64)), device="cpu", train=True, policy="eager")
    >>> [(row.op, row.direction, row.backend, row.calls) for row in plan.rows]
    [('layer_norm', 'forward', 'eager', 1), ('layer_norm', 'backward', 'eager', 1)]
    """
    if not isinstance(model, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInputError(
            f"plan: got model of type {type(model).__name__}, expected a torch.nn.Module; to fix: load it"
        )
    if train and generate:
        raise InvalidInputError("plan: got train and generate, expected one of them; to fix: make a plan of each")
    spec = device if isinstance(device, DeviceSpec) else device_named(str(device))
    spec = replace(
        spec, type=device_named(spec.type).type, capability=spec.capability if capability is None else capability
    )
    of_spec: Any = spec.capability
    if of_spec is not None and not (
        isinstance(of_spec, tuple) and [*map(type, cast("tuple[Any, ...]", of_spec))] == [int, int]
    ):
        raise InvalidInputError(
            f"plan: got capability {of_spec!r}, expected two integers; to fix: write (9, 0) for 9.0"
        )
    assume = False if not spec.chip and capability is None and is_here(spec.type) else frozenset(spec.packages)
    recorder = Recorder(spec, assume)
    notes: list[str] = []
    own = getattr(model, "_orig_mod", model)
    if own is not model or getattr(model, "_compiled_call_impl", None) is not None:
        notes.append("planned as the model runs without torch.compile")
    made = copied(own, recorder)
    with use(policy) if policy is not None else nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        applied = _applied(made)
        recorder.begin()
        if applied:
            notes.append(applied)
        try:
            with _random_state(), torch.device("cpu"), MakesShapeTensors(recorder):
                args, kwargs = arguments(made, inputs, recorder, train)
                run(made, args, kwargs, train, int(generate), recorder)
        except BaseException as error:  # a foreign forward may need the numbers
            forget_cached()
            if isinstance(error, FusedOpsError) or not isinstance(error, Exception):
                raise
            assumed = "".join(f"; assumed before: {text}" for text in recorder.assumed[-1:])
            raise InvalidInputError(
                f"plan: got {error_text(error)} in {type(own).__name__}{assumed}, expected a forward that runs without "
                "its numbers; to fix: see that it runs on this machine with the same inputs, pass its integers as "
                "tensors with values, and register a fake implementation of an op that has none"
            ) from error
    notes += dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, FusedOpsWarning))
    weights = sum(each.numel() * each.itemsize for each in made.parameters()) * (1 + train)
    if 0 < spec.memory < weights:
        what = "the weights and their gradients" if train else "the weights"
        notes.append(f"{what} take {weights / 2**30:.3g} GiB, more than the {spec.memory / 2**30:.3g} GiB of {spec}")
    del made, args, kwargs
    if kept := kept_tensors(recorder):
        text = (
            f"plan: got {kept} tensors without numbers that are kept outside of {type(own).__name__}, such as in a "
            "dict of its module or by a hook, expected none, since a real call may get them; to fix: clear that, or "
            "plan in a process of its own"
        )
        warnings.warn(text, FusedOpsWarning, stacklevel=3)  # beyond the context of inference mode
        notes.append(text)
    kind = "training" if train else "generation" if generate else "forward"
    return Plan(type(own).__name__, spec, kind, recorder.rows(), recorder.torch, recorder.assumed, notes)


def device_named(name: str) -> DeviceSpec:
    """Return a device by its type, or by the last word of a chip's name.

    Raises:
        InvalidInputError: neither torch nor a backend knows it.
    """
    backends = [record.backend for record in registry.records() if record.backend is not None]
    chips = {chip.chip.rpartition(" ")[2].lower(): chip for backend in backends for chip in backend.chips}
    if name.lower() in chips:
        return chips[name.lower()]
    base, _, index = name.partition(":")
    name = base if index.isdigit() else name
    if registry.unknown_device_type(name):
        kinds = {kind for backend in backends for kind in backend.device_types} - {"*"}
        raise InvalidInputError(f"plan: {unknown_name('device', name, [*chips, *kinds])}")
    return DeviceSpec(name)


@contextmanager
def _random_state() -> Generator[None]:
    """Leave the random numbers of torch, Python and NumPy as they are."""
    numpy: Any = sys.modules.get("numpy")
    state, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng(devices=[], device_type="cpu"):
        yield
    random.setstate(state)
    if numpy:
        numpy.random.set_state(of_numpy)


def _applied(model: Module) -> str:
    """Replace what the model computes by ops, unless that was done before; return a note."""
    try:
        from fusedops.integrations._replacement import replacement_of

        if any(each.__module__.startswith("diffusers.") for each in type(model).__mro__):
            from fusedops.integrations.diffusers import apply
        else:
            from fusedops.integrations.transformers import apply
    except ImportError as error:
        return f"not applied: {error}"
    if any(replacement_of(module) is not None for module in model.modules()):
        return "the model had been applied"
    apply(model)
    return ""
