"""The constraints on the shapes of rotary_embedding, whose layout depends on ``seq_dim``."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fusedops._contract.tensor_spec import TensorSpec
from fusedops._storages import check_storages
from fusedops.constraints import Arguments, Beside, ReasonCode, broadcasts, constant

Shape = tuple[int, ...]

_TENSORS = (Tensor, TensorSpec)


def heads_fit(k: Shape, q: Shape, seq_dim: int) -> bool:
    """Return True where k has the sizes of q except the number of heads."""
    heads = -3 if seq_dim == -2 else -2
    return len(k) == len(q) and k[:heads] == q[:heads] and k[heads + 1 :] == q[heads + 1 :]


def angles_fit(cos: Shape, q: Shape, seq_dim: int) -> bool:
    """Return True where cos is (S, R/2), or (..., S, R/2) with leading dims that broadcast to q's, and R <= D.

    A head dim of size 1 beside that of q is accepted.
    """
    heads = -3 if seq_dim == -2 else -2
    if len(cos) == len(q) and cos[heads] == 1:
        cos = (*cos[:heads], *cos[heads + 1 :])
    return (
        len(cos) >= 2 and cos[-2] == q[seq_dim] and 2 * cos[-1] <= q[-1] and broadcasts(tuple(cos[:-2]), tuple(q[:-3]))
    )


def without_head_dim(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a call with cos and sin without a head dim of size 1."""
    q, k, cos, sin, interleaved, seq_dim = args
    if not (isinstance(cos, _TENSORS) and isinstance(q, _TENSORS)) or cos.dim() != q.dim() or cos.dim() < 3:
        return args
    if not isinstance(sin, _TENSORS) or cos.is_nested or sin.is_nested or sin.shape != cos.shape:
        return args  # a constraint refuses it; a nested tensor has no shape
    heads = -3 if seq_dim == -2 else -2
    if cos.shape[heads] != 1:
        return args
    if isinstance(cos, TensorSpec) and isinstance(sin, TensorSpec):
        shape = (*cos.shape[:heads], *cos.shape[heads + 1 :])
        return (q, k, cos.replace(shape=shape), sin.replace(shape=shape), interleaved, seq_dim)
    if isinstance(cos, Tensor) and isinstance(sin, Tensor):
        try:
            return (q, k, cos.squeeze(heads), sin.squeeze(heads), interleaved, seq_dim)
        except RuntimeError:  # torch makes no view of a tensor whose storage was freed
            check_storages("rotary_embedding", ("cos", "sin"), (cos, sin))
            raise
    return args


class _Fits(Beside):
    """A constraint on the shape of a tensor compared with the shape of ``q``, which has at least 3 dims."""

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, q: str, seq_dim: str) -> None:
        super().__init__(name, q)
        self.seq_dim = seq_dim

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other, self.seq_dim)

    def fits(self, shape: Shape, q: Shape, seq_dim: int) -> bool:
        """Return True where the shape is accepted."""
        raise NotImplementedError

    def sizes(self, q: str, seq: str) -> str:
        """Return the accepted shapes as a phrase, from the texts of q's shape and of its length."""
        raise NotImplementedError

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, self.fits)}({self.name}.shape, {self.other}.shape, {self.seq_dim})"

    def accepts(self, tensor: Any, q: Any, seq_dim: int) -> bool:
        return self.fits(tensor.shape, q.shape, seq_dim)

    def rule(self) -> str:
        return self.sizes(self.other, "S")

    def needed(self, tensor: Any, q: Any, seq_dim: int) -> str:
        return self.sizes(f"{self.other} {tuple(q.shape)}", str(q.shape[seq_dim]))

    def values(self, tensor: TensorSpec, q: TensorSpec, seq_dim: int) -> Iterator[tuple[str, TensorSpec]]:
        shapes = {tensor.shape, tensor.shape[1:], (1, *tensor.shape), (2, *tensor.shape)}
        for dim, size in enumerate(tensor.shape):
            shapes |= {(*tensor.shape[:dim], other, *tensor.shape[dim + 1 :]) for other in (1, size + 1, 8 * size)}
        return self.shaped(tensor, sorted(shapes))


class Heads(_Fits):
    """The tensor has the shape of ``q`` except the number of heads."""

    def fits(self, shape: Shape, q: Shape, seq_dim: int) -> bool:
        return heads_fit(tuple(shape), tuple(q), seq_dim)

    def sizes(self, q: str, seq: str) -> str:
        return f"the sizes of {q} except the number of heads"

    def fix_of(self, tensor: Any, q: Any, seq_dim: int) -> str:
        return f"pass {self.name} of the same tokens, and seq_dim for the layout of both"


class Angles(_Fits):
    """The tensor has one entry for each rotated pair of each position: (S, R/2), or (..., S, R/2) with R <= D."""

    def fits(self, shape: Shape, q: Shape, seq_dim: int) -> bool:
        return angles_fit(tuple(shape), tuple(q), seq_dim)

    def sizes(self, q: str, seq: str) -> str:
        return (
            f"({seq}, R/2) or (..., {seq}, R/2) with R at most the last dim of {q}, leading dims as its own or 1, and "
            f"no head dim or one of size 1"
        )

    def fix_of(self, tensor: Any, q: Any, seq_dim: int) -> str:
        return (
            f"pass one entry for each rotated pair: of a doubled one {self.name}[..., : R // 2], or "
            f"{self.name}[..., ::2] if interleaved"
        )

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        angle, q, seq_dim = (args[name] for name in self.names)
        if angle is None or q.dim() < 3 or seq_dim not in (-2, -3):
            return {}
        length, width, lead = q.shape[seq_dim], q.shape[-1], tuple(q.shape[:-3])
        shapes = {
            "of all of a head": (length, width // 2),
            "of one pair": (length, min(1, width // 2)),
            "of no pair": (length, 0),
            "of each batch": (*lead, length, width // 2),
            "of one batch": (*(1 for _ in lead), length, width // 2),
        }
        return {f"{self.name} {label}": angle.replace(shape=shape) for label, shape in shapes.items()}
