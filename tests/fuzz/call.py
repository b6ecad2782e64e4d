"""One random call as data, and as the lines of Python that make its tensors: what runs is what a failure prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["grad", "no_grad", "inference"]
Channel = Literal["argument", "use", "set_policy"]

#: Expressions of special values, by name of the dtype's kind.
EXTREMES = {
    "inf": "math.inf",
    "-inf": "-math.inf",
    "nan": "math.nan",
    "max": "torch.finfo({dtype}).max",
    "min": "torch.finfo({dtype}).min",
    "tiny": "torch.finfo({dtype}).tiny",
    "denormal": "torch.finfo({dtype}).smallest_normal / 4",
    "-0.0": "-0.0",
}


@dataclass(frozen=True)
class Layout:
    """Strides and storage of a tensor.

    Attributes:
        lines: a statement that gives the contiguous tensor ``{name}`` of shape ``{shape}`` this layout. The memory
            between its elements holds other values.
        rank: the fewest dimensions.
        floating: True where the tensor must be float32 or float64 on the CPU.
    """

    lines: str
    rank: int = 0
    floating: bool = False


LAYOUTS: Mapping[str, Layout] = {
    "contiguous": Layout(""),
    "transposed": Layout("{name} = {name}.mT.contiguous().mT", 2),
    "turned": Layout("{name} = {name}.transpose(0, -1).contiguous().transpose(0, -1)", 2),
    "stepped": Layout("{name} = torch.stack([torch.full_like({name}, 7), {name}], -1)[..., 1]"),
    "columns": Layout("{name} = torch.cat([{name}, torch.full_like({name}, 7)], -1)[..., :{last}]", 1),
    "rows": Layout("{name} = torch.stack([{name}, torch.full_like({name}, 7)], 1)[:, 0]", 1),
    "offset": Layout("{name} = torch.cat([{name}.new_ones(3), {name}.reshape(-1)])[3:].view({shape})"),
    "expanded": Layout("{name} = {name}[:1].expand({shape})", 1),
    "expanded last": Layout("{name} = {name}[..., :1].expand({shape})", 1),
    "expanded all": Layout("{name} = {name}.reshape(-1)[0].expand({shape})"),
    "negated": Layout("{name} = torch.complex(torch.zeros_like({name}), -{name}).conj().imag", 0, True),
    "negative bit": Layout("{name} = torch._neg_view(-{name})"),
}
#: Of LAYOUTS, that of integers alone.
OF_INTEGERS = "negative bit"


@dataclass(frozen=True)
class Made:
    """A tensor to make.

    Attributes:
        shape: its sizes.
        dtype: such as "float32".
        device: where it is.
        values: "normal", "small", "large", "zero" or "one"; for integers and masks an expression with ``{shape}`` and
            ``{generator}``.
        seed: of its numbers.
        extremes: (index in the flattened tensor, name of a special value).
        layout: a name of LAYOUTS.
        odd_bytes: for masks, True elements are bytes other than 1.
        alias: the name of a tensor of the call that it shares memory with, and how: "same" for the same object, else
            the index of its part, such as "[0]", or "" for all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    values: str = "normal"
    seed: int = 0
    extremes: tuple[tuple[int, str], ...] = ()
    layout: str = "contiguous"
    odd_bytes: bool = False
    alias: tuple[str, str] | None = None

    @property
    def floating(self) -> bool:
        return "float" in self.dtype

    def lines(self, name: str) -> list[str]:
        """Return the statements that make the tensor under this name."""
        if self.alias is not None:
            other, how = self.alias
            return [f"{name} = {other}" + ("" if how == "same" else f".detach(){how}")]
        layout = LAYOUTS[self.layout]
        form = {"name": name, "shape": self.shape, "last": self.shape[-1] if self.shape else 1}
        lines = [f"{name} = {self._numbers()}"]
        if self.extremes:
            lines += [f"{name}.view(-1)[{at}] = {self._extreme(kind)}" for at, kind in self.extremes]
        if self.odd_bytes:
            lines.append(f"{name} = {name} * 254")
        if self.device != "cpu":
            lines.append(f'{name} = {name}.to("{self.device}")')
        lines += [layout.lines.format(**form)] * bool(layout.lines)
        if self.odd_bytes and self.dtype == "bool":
            lines.append(f"{name} = {name}.view(torch.bool)")
        return lines

    def _extreme(self, kind: str) -> str:
        return EXTREMES[kind].format(dtype=f"torch.{self.dtype}")

    def _numbers(self) -> str:
        generator = f"generator=torch.Generator().manual_seed({self.seed})"
        dtype = "uint8" if self.odd_bytes else self.dtype
        if not self.floating:
            return f"({self.values.format(shape=self.shape, generator=generator)}).to(torch.{dtype})"
        if self.values == "zero":
            return f"torch.zeros({self.shape}, dtype=torch.{dtype})"
        factor = {"normal": " * 3", "small": " * 1e-3", "large": " * 30", "one": " * 0 + 1"}[self.values]
        return f"(torch.randn({self.shape}, {generator}){factor}).to(torch.{dtype})"

    @property
    def ordinary(self) -> bool:
        """True where float64 and a kernel must agree on every element: no special values, no wide range."""
        return not self.extremes and self.values != "large"


@dataclass(frozen=True)
class Call:
    """A call of an op, with everything around it.

    Attributes:
        op: its name.
        backend: the policy text of the call.
        args: by parameter; a Made for each tensor.
        wanted: the parameters whose gradients are wanted.
        grads: the layout of the outputs' gradients and the seed of their numbers.
        mode: grad, no_grad or inference.
        channel: how the policy is set.
        fallback: the fallback level.
        adapt: the adapt setting.
        situation: what the call gets into after it was compared, see situations.py; empty for nothing.
    """

    op: str
    backend: str
    args: Mapping[str, Any] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    grads: tuple[str, int] = ("contiguous", 0)
    mode: Mode = "grad"
    channel: Channel = "argument"
    fallback: str = "silent"
    adapt: str = "none"
    situation: str = ""

    def tensors(self) -> dict[str, Made]:
        """Return the tensors by parameter."""
        return {name: value for name, value in self.args.items() if isinstance(value, Made)}

    def body(self) -> str:
        """Return the program of the call, for a namespace with torch, math, fusedops and check."""
        lines: list[str] = []
        aliases = {name: made for name, made in self.tensors().items() if made.alias}
        for name, made in {**{n: m for n, m in self.tensors().items() if not m.alias}, **aliases}.items():
            lines += made.lines(name)
            if name in self.wanted and not (made.alias and made.alias[1] == "same"):
                lines.append(f"{name} = {name}.detach().requires_grad_()")
        values = ", ".join(f'"{n}": {n if isinstance(v, Made) else written(v)}' for n, v in self.args.items())
        options = {"grads": self.grads, "mode": self.mode, "channel": self.channel}
        options |= {"fallback": self.fallback, "adapt": self.adapt, "situation": self.situation}
        lines.append(f'outcome = check("{self.op}", {{{values}}}, "{self.backend}", **{options!r})')
        return "\n".join(lines) + "\n"

    def program(self, plugins: tuple[str, ...] = ()) -> str:
        """Return the program of the call as a script, run from the root of the repository."""
        given = f"({', '.join(map(repr, plugins))},)" if plugins else ""
        return (
            "import math\n\nfrom tests.fuzz.machine import prepare\n\n"
            f"prepare({given})  # every backend that this machine can try\n"
            "import torch\n\nimport fusedops\nfrom tests.fuzz.check import check\n\n" + self.body()
        )


def written(value: Any) -> str:
    """Return a value that is no tensor as Python source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
