"""Values of an op's contract: outputs, saved values, padding, sharding."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from fusedops._named_tuple import NamedTuple

# NamedTuples, not dataclasses: importing fusedops builds these classes, and a dataclass takes 0.4 ms to build


class Output(NamedTuple):
    """An output that is optional, has integers, or may be in any memory order; for others the name is enough.

    Args:
        name: of the output.
        of: the parameter that it belongs to. If that is None, the public function returns None for the output, and
            kernels an empty tensor.
        integer: True for integers, such as an index. The output has no gradient, and must equal the reference.
            Integer outputs come last.
        permuted: True where a kernel may choose the memory order of the dims, without gaps. In compiled code the
            output has the order that the op's ``empty`` gives, and gradients have the order of their inputs.
        written: True where the output is the parameter ``of`` itself, which the op writes. Kernels write it in place
            and return it, the reference returns a new tensor, and the public function returns None. All outputs of an
            op are written, or none.

    >>> import fusedops
    >>> fusedops.Output("rotated_k", of="k")
    Output(name='rotated_k', of='k', integer=False, permuted=False, written=False)
    """

    name: str
    of: str | None = None
    integer: bool = False
    permuted: bool = False
    written: bool = False


class Saved(NamedTuple):
    """A tensor that forward computes for backward and that is not an output.

    Args:
        name: the name of backward's parameter.
        reference: computes it in plain torch: the definition of its value, shape and dtype. Its parameters are named
            after parameters or outputs of the op, which are then kept for backward: a second derivative computes it
            again.
        optional: True where a kernel may return None for it; backward then recomputes what it needs.
        gradient_of: if the value is the gradient of a parameter, computed in forward: that parameter. A kernel returns
            None for it where that parameter does not require a gradient and another one does.

    >>> import fusedops
    >>> fusedops.Saved("rstd", lambda x, eps: (x.float().square().mean(-1) + eps).rsqrt()).optional
    False
    >>> fusedops.ops.OPS["rms_norm"].saved[0]
    Saved('rstd', rstd: 'Compute the saved value: rsqrt(mean(x**2, -1) + eps), (...).')
    """

    name: str
    reference: Callable[..., Tensor]
    optional: bool = False
    gradient_of: str | None = None

    def __repr__(self) -> str:
        """Return the name and the first paragraph of the reference's docstring, where the shape is; no address."""
        doc = " ".join((self.reference.__doc__ or "").partition("\n\n")[0].split())
        name = getattr(self.reference, "__name__", repr(self.reference))
        parts = [repr(self.name), f"{name}: {doc!r}" if doc else name]
        parts += ["optional=True"] if self.optional else []
        parts += [f"gradient_of={self.gradient_of!r}"] if self.gradient_of else []
        return f"Saved({', '.join(parts)})"


class Padding(NamedTuple):
    """A way to enlarge a call of an op, so that its cropped result is the result of the original call.

    Args:
        dims: the dims of the first parameter that can grow, counted from the end: (-2, -1).
        forward: ``(args, sizes) -> args``, the call with these dims grown to ``sizes``; its tensors are all real, or
            all specs. The result grows with the first parameter.
        backward: the same for the arguments of backward, which returns one gradient, of the first parameter.

    >>> import torch, fusedops
    >>> def grown(args, sizes):
    ...     return (torch.nn.functional.pad(args[0], (0, sizes[0] - args[0].shape[-1])), *args[1:])
    >>> fusedops.Padding((-1,), grown, grown).forward((torch.ones(3),), (5,))
    (tensor([1., 1., 1., 0., 0.]),)
    """

    dims: tuple[int, ...]
    forward: Callable[[Sequence[Any], tuple[int, ...]], tuple[Any, ...]]
    backward: Callable[[Sequence[Any], tuple[int, ...]], tuple[Any, ...]]


class Shard(NamedTuple):
    """One rank's part of a DTensor's whole: the whole's shape, the part's shape, and where the part starts.

    >>> import fusedops
    >>> fusedops.Shard(whole=(8, 16), part=(4, 16), start=(4, 0)).start
    (4, 0)
    """

    whole: tuple[int, ...]
    part: tuple[int, ...]
    start: tuple[int, ...]


class Ranks(Protocol):
    """The ranks of a call that an op combines: this rank's part, and what the op may ask of the others.

    Attributes:
        shard: this rank's part of the first parameter.
        saves: True where the saved values are wanted.
        shapes: the whole shape of each tensor argument, by name.
        backend: the policy for this call alone, or None.
    """

    @property
    def shard(self) -> Shard: ...

    @property
    def saves(self) -> bool: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def backend(self) -> str | None: ...

    def is_cut(self, dim: int) -> bool:
        """Return True where a dim of the first parameter is sharded."""
        ...

    def total(self, tensor: Tensor, dims: Sequence[int], kind: str) -> Tensor:
        """Return the "sum" or "max" of a tensor over the ranks that hold other parts of these dims."""
        ...

    def run(self, **changes: Any) -> tuple[Tensor, ...]:
        """Serve this rank's part with some arguments changed, by a kernel."""
        ...

    def place(self, dim: int) -> int:
        """Return this rank's index among the ranks that hold parts of a dim, which one mesh dim shards."""
        ...

    def bounds(self, dim: int, size: int) -> list[int]:
        """Return the start of each of these ranks' parts in a tensor of ``size`` along the dim, and the end."""
        ...

    def exchange(self, message: Tensor, dim: int, distance: int, received: int) -> Callable[[], Tensor]:
        """Send a flat tensor to the rank that is ``distance`` places after this one, or before if negative.

        All these ranks make the call. Returns a function that waits for the message to this rank: ``received`` elements
        from the rank ``distance`` places before it.
        """
        ...


class Combined(NamedTuple):
    """The combination of the ranks' results, for an op whose call on a rank's part is not independent.

    Args:
        dims: dims of :attr:`Sharding.whole` that may still be sharded, because the op combines them.
        applies: ``(arguments by name) -> bool``, True where other sharded dims are combined too.
        forward: ``(this rank's arguments by name, ranks) -> this rank's outputs and required saved values``; outputs
            alone if saved values are not wanted.
        backward: ``(this rank's arguments by name, ranks) -> gradients``.
        by_kernels: False where forward and backward are plain torch if one of ``dims`` is sharded, as no kernel takes
            such a part; outputs and their gradients then have the leading dims of the first parameter, or none. True
            where they call kernels for parts of the call; outputs are placed as without ``combined``.
    """

    dims: tuple[int, ...]
    applies: Callable[[Mapping[str, Any]], bool]
    forward: Callable[[Mapping[str, Any], Ranks], tuple[Tensor, ...]]
    backward: Callable[[Mapping[str, Any], Ranks], Any]
    by_kernels: bool = False


class Sharding(NamedTuple):
    """The rule of an op for DTensors. By default every dim of the first parameter may be sharded, and each rank's part
    is an independent call.

    Args:
        whole: the dims of the first parameter that every rank needs whole, such as (-1,) for a softmax.
        whole_of: ``(arguments by name) -> dims``, more such dims, where they depend on the call. For forward and for
            backward, as are the next two.
        dims_of: ``(arguments by name) -> dims by parameter``, for tensors that do not broadcast to the first parameter:
            the dim of the first parameter, counted from the end, that each of their dims goes with; None for a dim that
            every rank needs whole.
        shape_of: ``(arguments by name) -> shape`` to use in place of the first parameter's shape throughout this class,
            such as the logits' in a call that computes them. For forward and for backward. None: the first
            parameter's.
        replicated: the tensor parameters that are the same on every rank, such as a seed.
        adjust: ``(arguments by name, shard) -> arguments by name``, changes a rank's local call where it depends on the
            position of its part (a causal mask).
        forward: ``(arguments by name, shard) -> output``, serves a rank's part in plain torch where no kernel can,
            because a kernel counts positions from its part's own start; None where a kernel can.
        backward: the same for backward.
        applies: ``(arguments by name) -> bool``, True where ``forward`` and ``backward`` are needed for a call.
        reason: why a kernel cannot take a part, for the refusal.
        summed: True where outputs are sums over the dims of ``shape_of`` that they lack. If one of these is sharded,
            the outputs are ``Partial``.
        combined: how the ranks' results are combined, such as a loss that is a sum over rows; None where each rank's
            part is an independent call.

    >>> import fusedops
    >>> fusedops.Sharding(whole=(-1,)).replicated
    ()
    """

    whole: tuple[int, ...] = ()
    whole_of: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    dims_of: Callable[[Mapping[str, Any]], Mapping[str, tuple[int | None, ...]]] | None = None
    shape_of: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    replicated: tuple[str, ...] = ()
    adjust: Callable[[dict[str, Any], Shard], dict[str, Any]] | None = None
    forward: Callable[[Mapping[str, Any], Shard], Any] | None = None
    backward: Callable[[Mapping[str, Any], Shard], Any] | None = None
    applies: Callable[[Mapping[str, Any]], bool] | None = None
    reason: str = ""
    summed: bool = False
    combined: Combined | None = None


ROWS_ARE_INDEPENDENT = Sharding()


def loaded(value: Any) -> Any:
    """Return the object that a text "module:name" names, imported now; any other value unchanged."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    return getattr(import_module(module), name)
