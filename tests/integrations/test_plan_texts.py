"""Every text of a plan, word for word."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from error_calls import INVALID, NO_BACKEND, POLICY
from error_texts import Table
from odd_model import Odd
from torch import Tensor, nn

import fusedops
from fusedops._cli import main
from fusedops._cli import plan as command
from fusedops._dispatch.selection.decide import decide
from fusedops._dispatch.selection.plan import make_plan
from fusedops._policy.context import active_policy
from fusedops.errors import FusedOpsWarning

TABLE = Table(__file__, "fakes")
pin = TABLE.pin


class Sharded(Tensor):
    """A tensor of a class of its own."""


def plan(model: Any, inputs: Any = None, device: str = "cpu", **options: Any) -> Callable[[], Any]:
    return lambda: fusedops.plan(model, torch.zeros(4, 64) if inputs is None else inputs, device=device, **options)


def sharded() -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(64))
    model[0].weight = nn.Parameter(torch.ones(64).as_subclass(Sharded))
    return model


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.ReLU()))


def that_holds_a_generator() -> nn.Module:
    model = nn.LayerNorm(4)
    model.lines = (each for each in ())
    return model


def raising(error: Exception) -> Callable[[Any], Any]:
    def then(_: Any) -> Any:
        raise error

    return then


def without_a_package() -> None:
    gelu = fusedops.kernel("bias_gelu")(lambda x, bias, approximate: x)
    options: Any = {"optional": True, "packages": ("a-package",), "needs": "a-package and a GPU"}
    fusedops.register(fusedops.Backend("packaged", ("cuda",), 1, (gelu,), **options))
    op, x = fusedops.ops.OPS["bias_gelu"], fusedops.TensorSpec((2, 4), torch.float16, "cuda")
    with fusedops.use("packaged", fallback="raise"):
        raise fusedops.NoBackendError(
            decide(make_plan(op, active_policy(), "cuda", assume=frozenset()), (x, None, "none"))
        )


def words(*argv: str) -> Callable[[], Any]:
    """A command, with the error that it would print on one line."""

    def run() -> None:
        options = main._parser("plan", argv).parse_args(argv)
        command.run(options)

    return run


HELD = torch.zeros(4, 64)


def kept() -> None:
    """A plan whose tensor the model's code keeps, as a dict of its module does."""
    cache: list[Tensor] = []
    plan(Odd(lambda y: cache.append(y) or y))()


pin("no module", plan(3), INVALID)
pin("two kinds of run", plan(nn.Linear(64, 2), train=True, generate=True), INVALID)
pin("training without a gradient", plan(nn.ReLU(), train=True), INVALID)
pin("generation of another model", plan(nn.Linear(64, 2), generate=True), INVALID)
pin("a device", plan(nn.Linear(64, 2), device="A22"), INVALID)
pin("a scripted model", plan(scripted()), INVALID)
pin("a sharded model", plan(sharded()), INVALID)
pin("a model without a copy", plan(that_holds_a_generator()), INVALID)
pin("sizes of another model", plan(nn.Linear(64, 2), {"batch": 1}), INVALID)
pin("a forward that raises", plan(Odd(raising(ValueError("mine")))), INVALID)
pin("a write to another tensor", plan(Odd(HELD.add_)), INVALID)
pin("a tensor that is kept", kept, FusedOpsWarning)
pin("a capability", plan(nn.Linear(64, 2), capability=9), INVALID)
pin("a command with a size that its config has not", words("plan", "OPTConfig:hiden_size=8"), INVALID)
pin("a command with data and changes", words("plan", "OPTConfig", "--json", "--compare", "plan.json"), INVALID)
pin("a device without a package", without_a_package, NO_BACKEND)
pin("a command without a model", words("plan", "nothing"), INVALID)
pin("a command with a config that is none", words("plan", "NoConfig"), INVALID)
pin(
    "a command with a config without a model",
    lambda: command._class_of(transformers, transformers.PretrainedConfig()),
    INVALID,
)
pin(
    "a command with a file that is no plan",
    words("plan", "OPTConfig:num_hidden_layers=1", "--compare", "none.json"),
    INVALID,
)
pin("a command that requires a backend", words("plan", "OPTConfig", "--require", "tritn"), POLICY)

test_a_text, test_no_text_is_left_over = TABLE.tests()
