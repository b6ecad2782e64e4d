"""Layers with packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedops._torch import is_plain, is_traced, is_transformed
from fusedops.errors import InvalidInputError
from fusedops.nn._packed_weight import NoGradient, PackedWeight, embedded, refused_write, unpacked_rows
from fusedops.ops import int8_linear, quantized_linear
from fusedops.quantization import (
    INT8,
    LAYER_FORMATS,
    SCALED,
    Packed,
    bytes_of_row,
    dequantize,
    int8_parts,
    pack,
    quantize,
)

#: The name of the packed bytes, as a parameter and in state dicts: bytes of another format have another name.
KEYS = {format: f"packed_{format}" for format in (*LAYER_FORMATS, *SCALED)}
PARTS = ("scales", "global_scale", "zeros")  # of a Packed beside its codes: buffers, named after the codes
_GROUP = 128  # columns of a scale of INT4_GROUP, where they divide a row; else it is that of a whole row


def weight_state(weight: Tensor) -> dict[str, Any]:
    """Return the attributes of a weight that the packed one does not have: those of the user, and ``requires_grad``."""
    return {**vars(weight), "requires_grad": weight.requires_grad}


def packed_value(weight: Tensor, format: str) -> Packed:
    """Return a weight, (N, K) or (E, N, K), packed in one of ``SCALED``, as the layers of each module have it."""
    columns = weight.shape[-1]
    return pack(weight, format, group=columns if columns % _GROUP else _GROUP)


class _QuantizedLayer(torch.nn.Module):
    """The base of both layers: a packed weight, and the dtype that the layer has unpacked.

    Attributes:
        format: of the packed weight.
        weight_dtype: the dtype of the unpacked weight; ``module.to(dtype)`` changes it.
        weight_state: ``requires_grad`` and the other attributes that the weight had.
        full_name: of the layer in its model.
    """

    format: str
    weight_dtype: torch.dtype
    weight_state: Mapping[str, Any] = MappingProxyType({})
    full_name: str = ""

    def _empty(self, rows: int, columns: int, format: str, device: Any, dtype: torch.dtype | None) -> None:
        size = bytes_of_row(columns, format) if format in KEYS else None
        if size is None:
            raise InvalidInputError(
                f"{type(self).__name__}: got format = {format!r} for rows of {columns} weights, expected one of "
                f"{', '.join(KEYS)} whose block divides them; to fix: use another format or an unpacked layer"
            )
        self.format, self.weight_dtype = format, dtype or torch.get_default_dtype()
        if format in SCALED:
            self._hold_value(packed_value(torch.zeros(rows, columns, device=device), format))
            return
        self._hold(Parameter(torch.zeros(rows, size, dtype=torch.uint8, device=device), requires_grad=False))

    @classmethod
    def _of_value(cls, value: Packed, dtype: torch.dtype | None) -> Any:
        """Return a layer that keeps a packed weight, without the rest of the layer."""
        check_rank(cls.__name__, value)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made.weight_dtype = dtype or torch.get_default_dtype()
        made._hold_value(value)
        return made

    def _hold(self, packed: Parameter) -> None:
        super().register_parameter(KEYS[self.format], packed)

    def _hold_value(self, value: Packed) -> None:
        """Keep the tensors of a packed weight: the codes as the parameter, what is beside them as buffers."""
        self.format = value.format
        self._hold(Parameter(value.codes, requires_grad=False))
        for name, part in value.tensors().items():
            if name != "codes":
                self.register_buffer(f"{KEYS[value.format]}_{name}", part)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return what is beside the codes, by the names of :class:`fusedops.quantization.Packed`; often nothing."""
        own: dict[str, Any] = self._buffers
        named = ((name, own.get(f"{KEYS[self.format]}_{name}")) for name in PARTS)
        return {name: part for name, part in named if part is not None}

    @property
    def value(self) -> Packed:
        """Return the packed weight as a value, which shares its tensors with the layer; not of INT8."""
        rows, columns = self.weight.shape
        return Packed(self.format, self.packed.detach(), **self.parts, shape=(rows, columns))

    def name_gradient(self, name: str) -> None:
        """Let an error for a gradient of the packed weight name the layer."""
        self.full_name = name
        vars(self.packed)["requires_grad_"] = NoGradient(self.packed, name)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if self.full_name:
            self.name_gradient(self.full_name)

    @property
    def packed(self) -> Parameter:
        """Return the packed weight: uint8, (rows, bytes of a row), without a gradient."""
        key = KEYS[self.format]
        own: dict[str, Any] = self._parameters
        return own[key] if key in own else getattr(self, key)

    @property
    def weight(self) -> Any:
        """Return the weight to be read. Its shape, dtype and device cost nothing, each use of its numbers an unpack."""
        packed = self.packed
        if is_traced() or is_transformed() or not is_plain((packed,)):
            return self.dequantize()
        return PackedWeight.of(packed, self.format, self.weight_dtype, self.parts)

    @weight.setter
    def weight(self, value: Any) -> None:
        self._tie(value)

    def _tie(self, value: Any) -> None:
        """Take the weight of another packed layer; any other is refused."""
        if not isinstance(value, PackedWeight) or (value.format, value.shape) != (self.format, self.weight.shape):
            raise refused_write(f"an assignment of {type(value).__name__}")
        self._hold(value.packed)
        for name, part in value.parts.items():
            self.register_buffer(f"{KEYS[self.format]}_{name}", part)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Register a parameter. torch calls it for each assignment of one, that of ``weight`` included."""
        if name == "weight":
            self._tie(param)
        elif isinstance(param, PackedWeight):  # as torch.nn.utils.prune moves a weight away
            raise refused_write(name)
        else:
            super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {f"{KEYS[self.format]}_{name}": part for name, part in self.parts.items()}
        super()._apply(fn, recurse)
        for name, part in before.items():  # a scale keeps its dtype: a rounded one is another weight
            self._buffers[name] = part.to(self.packed.device)
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = prefix + KEYS[self.format]
        given = state_dict.get(own)
        if isinstance(given, Tensor) and given.dtype is not torch.uint8:  # copy_ would round a mean of bytes to bytes
            error_msgs.append(
                f"{type(self).__name__}: got {own} of {given.dtype}, expected the packed bytes, uint8; to fix: average "
                f"or convert the unpacked weights, then quantize"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        error_msgs += [
            f"{type(self).__name__}: got {other} in the state dict, expected {own}; to fix: quantize the model with "
            f"the format of the state dict, or load unpacked weights before quantize"
            for other in (prefix + name for name in ("weight", *KEYS.values()))
            if other in state_dict and other != own
        ]

    def dequantize(self) -> Tensor:
        """Return the weight, unpacked, in ``weight_dtype``."""
        return unpacked_rows(self.packed.detach(), self.format, self.weight_dtype, self.parts)


class QuantizedLinear(_QuantizedLayer, torch.nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A linear layer with a packed weight, for trained weights: :func:`fusedops.quantized_linear` as a module.

    Of the format "INT8" it is :func:`fusedops.int8_linear`, which rounds the rows of the input to 8 bits too.

    The weight has no gradient; the input and the bias have one, so that adapters can be trained on it.

    Args:
        in_features: a multiple of the block of the format.
        out_features: rows of the weight.
        bias: True for a bias.
        format: one of ``fusedops.quantization.FORMATS``, "INT8", or a format of the Hub by row, such as "MXFP4".
        device: of the parameters.
        dtype: of the bias, and of the unpacked weight.

    Raises:
        InvalidInputError: the format is unknown, or its block does not divide ``in_features``.

    >>> import torch, fusedops
    >>> layer = fusedops.nn.QuantizedLinear.of(torch.nn.Linear(64, 3), "Q4_0")
    >>> layer, layer(torch.ones(2, 64)).shape
    (QuantizedLinear(in_features=64, out_features=3, bias=True, format=Q4_0), torch.Size([2, 3]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self._empty(out_features, in_features, format, device, dtype)
        zeros = Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)

    @classmethod
    def of_packed(
        cls, packed: Packed, bias: Parameter | None = None, *, dtype: torch.dtype | None = None
    ) -> QuantizedLinear:
        """Return the layer of a packed weight (N, K), whose tensors it keeps; dtype: of the unpacked weight.

        >>> import torch, fusedops
        >>> fusedops.nn.QuantizedLinear.of_packed(fusedops.quantization.pack(torch.ones(3, 64), "MXFP4"))
        QuantizedLinear(in_features=64, out_features=3, bias=False, format=MXFP4)
        """
        made = cls._of_value(packed, dtype)
        made.out_features, made.in_features = packed.shape
        made.register_parameter("bias", bias)
        return made

    @classmethod
    def of(cls, linear: torch.nn.Linear, format: str) -> QuantizedLinear:
        """Return the layer with the weight of another one, packed; the bias is shared."""
        if format in SCALED:
            made = cls.of_packed(packed_value(linear.weight, format), dtype=linear.weight.dtype)
            made.weight_state, made.bias = weight_state(linear.weight), linear.bias
            return made
        made = cls(
            linear.in_features, linear.out_features, False, format=format, device="meta", dtype=linear.weight.dtype
        )
        made._hold(Parameter(quantize(linear.weight, format), requires_grad=False))
        made.weight_state = weight_state(linear.weight)
        made.bias = linear.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ dequantize(weight).T + bias``; with "INT8", of the input rounded to 8 bits."""
        own: dict[str, Any] = self._parameters
        format = self.format
        try:  # without torch's __getattr__, which takes up to 1 us for each
            packed, bias = own[KEYS[format]], own["bias"]
        except KeyError:  # of a wrapper: a parametrization
            packed, bias = self.packed, self.bias
        if format == INT8:
            return int8_linear(input, None, *int8_parts(packed), bias)
        if format not in SCALED:
            return quantized_linear(input, packed, bias, format=format)
        parts = self.parts
        scales, divisor, zeros = (parts.get(name) for name in PARTS)
        return quantized_linear(input, packed, bias, format=format, scales=scales, global_scale=divisor, zeros=zeros)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"


def check_rank(name: str, packed: Packed) -> None:
    """Raise for a packed weight that is not one of a layer."""
    if len(packed.shape) != 2:
        raise InvalidInputError(
            f"{name}: got a Packed of shape {packed.shape}, expected (N, K); to fix: pass the weight of one expert, as "
            f"in packed[0]"
        )


class QuantizedEmbedding(_QuantizedLayer, torch.nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An embedding with a packed weight. The rows that are looked up are unpacked; there is no gradient.

    Args:
        num_embeddings: rows of the weight.
        embedding_dim: a multiple of the block of the format.
        format: one of ``fusedops.quantization.FORMATS``, "INT8", or a format of the Hub by row, such as "MXFP4".
        device: of the weight.
        dtype: of the result.

    Raises:
        InvalidInputError: the format is unknown, or its block does not divide ``embedding_dim``.

    >>> import torch, fusedops
    >>> layer = fusedops.nn.QuantizedEmbedding.of(torch.nn.Embedding(10, 32), "Q8_0")
    >>> layer, layer(torch.tensor([[1, 9]])).shape
    (QuantizedEmbedding(10, 32, format=Q8_0), torch.Size([1, 2, 32]))
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        format: str,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self._sizes(num_embeddings, embedding_dim)
        self._empty(num_embeddings, embedding_dim, format, device, dtype)

    def _sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm = None, None
        self.norm_type = 2.0
        self.scale_grad_by_freq, self.sparse = False, False

    @classmethod
    def of_packed(cls, packed: Packed, *, dtype: torch.dtype | None = None) -> QuantizedEmbedding:
        """Return the layer of a packed weight (rows, K), whose tensors it keeps; dtype: of the result.

        >>> import torch, fusedops
        >>> fusedops.nn.QuantizedEmbedding.of_packed(fusedops.quantization.pack(torch.ones(3, 64), "NF4"))
        QuantizedEmbedding(3, 64, format=NF4)
        """
        made = cls._of_value(packed, dtype)
        made._sizes(*packed.shape)
        return made

    @classmethod
    def of(cls, embedding: torch.nn.Embedding, format: str) -> QuantizedEmbedding:
        """Return the layer with the weight of another one, packed."""
        if embedding.max_norm is not None:
            raise InvalidInputError(
                f"QuantizedEmbedding: got an embedding with max_norm = {embedding.max_norm}, which changes its weight, "
                f"expected None; to fix: leave the embedding unpacked"
            )
        if format in SCALED:
            made = cls.of_packed(packed_value(embedding.weight, format), dtype=embedding.weight.dtype)
            made.weight_state, made.padding_idx = weight_state(embedding.weight), embedding.padding_idx
            return made
        size = embedding.num_embeddings, embedding.embedding_dim
        made = cls(*size, format=format, device="meta", dtype=embedding.weight.dtype)
        made._hold(Parameter(quantize(embedding.weight, format), requires_grad=False))
        made.weight_state = weight_state(embedding.weight)
        made.padding_idx = embedding.padding_idx
        return made

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse torch's way to make a layer of a weight, which has no format."""
        raise InvalidInputError(
            f"{cls.__name__}: got from_pretrained, expected of(embedding, format); to fix: "
            f"{cls.__name__}.of(torch.nn.Embedding.from_pretrained(weight), format)"
        )

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the weight, (..., embedding_dim) for input (...), in ``weight_dtype``.

        Indices are those of ``torch.nn.Embedding``, with its errors: int64 or int32, from 0 to ``num_embeddings - 1``.
        """
        codes = torch.embedding(self.packed, input)
        if self.format not in SCALED:
            return dequantize(codes, self.format, self.weight_dtype)
        return embedded(codes, self.format, self.weight_dtype, self.parts, input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"
