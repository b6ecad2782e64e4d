"""The replacement of a router of experts: its logits, and the op for the choice and the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedops import ops
from fusedops.dtypes import no_autocast
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations.transformers._routers.choices import Routing
from fusedops.integrations.transformers._routers.small_router import ARGUMENT, Path


@dataclass(frozen=True)
class Logits:
    """The logits of a router.

    Attributes:
        weight: the path of the weight.
        bias: the path of a bias, which is added.
        layer: the path of the layer that the router calls, or None where it reads the weight.
        dtype: of the product: that of the tokens, that of the weight, or float32.
        widened: True where the logits are float32, whatever the dtype of the product.
        factor: of the logits.
        softcap: c of ``c * tanh(z / c)``, or 0.
        autocast: False where the router switches it off.
    """

    weight: Path
    bias: Path | None = None
    layer: Path | None = None
    dtype: Literal["input", "weight", "float32"] = "input"
    widened: bool = False
    factor: float = 1.0
    softcap: float = 0.0
    autocast: bool = True

    def of(self, module: Any, x: Tensor) -> Tensor:
        """Return the logits of the tokens x."""
        if self.autocast:
            z = self._product(module, x)
        else:
            with no_autocast(x.device.type):
                z = self._product(module, x)
        z = z.float() if self.widened else z
        z = z if self.factor == 1 else z * self.factor
        return torch.tanh(z / self.softcap) * self.softcap if self.softcap else z

    def _product(self, module: Any, x: Tensor) -> Tensor:
        weight: Tensor = reached(module, self.weight)
        if self.dtype == "float32":
            x = x.float()
        elif self.dtype == "weight" and weight.is_floating_point():
            x = x.to(weight.dtype)
        if self.layer is not None:
            return reached(module, self.layer)(x)
        bias: Tensor | None = None if self.bias is None else reached(module, self.bias)
        if self.dtype == "float32":
            weight, bias = weight.float(), None if bias is None else bias.float()
        return linear(x, weight, bias)


@dataclass(frozen=True)
class Router(Replacement):
    """The settings of a replaced router.

    Attributes:
        names: of the parameters of the router's forward: its tokens, and a bias.
        logits: how the logits are computed.
        routing: the arguments of the op.
        weights_dtype: that of the tokens, of the logits, or float32.
        ranks: of the tokens in the calls that were compared; of another, the router's own forward is called.
        flat: True where the results are matrices, whatever the rank of the tokens.
    """

    names: tuple[str, ...]
    logits: Logits
    routing: Routing
    weights_dtype: Literal["input", "logits", "float32"] = "float32"
    ranks: tuple[int, ...] = (2,)
    flat: bool = True
    op: str = "top_k_routing"

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the logits, and by the op the weights and the indices."""
        takes_bias = self.routing.bias == ARGUMENT
        if kwargs or len(args) != 1 + takes_bias:
            x, bias = self._arguments(args, kwargs)
        else:
            x, bias = args[0], args[1] if takes_bias else None
        if x is None or x.dim() not in self.ranks or (takes_bias and bias is None):
            return own_class(module).forward(module, *args, **kwargs)
        return self.computed(ops.top_k_routing, module, x, bias)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the tokens and the bias, or None for both where a call has other arguments."""
        values = {**dict(zip(self.names, args)), **kwargs}
        if len(values) != len(args) + len(kwargs) or not values.keys() <= {*self.names}:
            return None, None
        return values.get(self.names[0]), values.get(self.names[-1]) if self.routing.bias == ARGUMENT else None

    def computed(self, op: Any, module: Any, x: Tensor, bias: Tensor | None, index: Tensor | None = None) -> Any:
        """Return the logits, the weights and the indices by ``op``."""
        routing = self.routing
        z = self.logits.of(module, x.reshape(-1, x.shape[-1]) if self.flat else x)
        if routing.bias:  # a path
            bias = reached(module, routing.bias).reshape(-1)
        weights, chosen = op(
            z, routing.k, score=routing.score, bias=bias, groups=routing.groups, top_groups=routing.top_groups,
            group_score=routing.group_score, normalize=routing.normalize, eps=routing.eps, scale=routing.scale,
            index=index,
        )  # fmt: skip
        if self.weights_dtype == "float32":
            return z, weights.float(), chosen
        return z, weights.to(x.dtype if self.weights_dtype == "input" else z.dtype), chosen


def reached(module: Any, path: Path) -> Any:
    """Return the tensor or layer at a path below a module.

    >>> reached(torch.nn.Sequential(torch.nn.Linear(2, 3)), ("0", "weight")).shape
    torch.Size([3, 2])
    """
    for name in path:
        module = getattr(module, name)
    return module
