"""The types of Triton's interpreter, each made once a launch: an operation makes several, of which few differ.

Each operation on tensors makes the type of its result, whose name and shape are objects of Triton's language, and each
tensor computes its shape from its type again: half of the time of a kernel that works on many short rows. An operation
also asks for the type that its two operands have in common, and gives a number the shape of the other operand: where
both have one type there is nothing to convert, and the type of the number as a block is kept. A number of Python beside
a tensor is made a block once a launch. The types and the shapes that two tensors get in an operation are found once a
launch. What an assertion about integers computes is left out where it asserts nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from triton.runtime import interpreter

core = interpreter.tl.core
_Semantic = type(interpreter.interpreter_semantic)
_plain = (
    core.block_type.__init__,
    core.tensor.__init__,
    interpreter._get_np_dtype,
    core._unwrap_if_constexpr,
    _Semantic.broadcast_impl_value,
    _Semantic.binary_op_type_checking_impl,
    _Semantic.binary_op_sanitize_overflow_impl,
    _Semantic.cast,
)
# two operands of one of these types keep it in every operation; 16-bit numbers are divided in float32
_KEPT = {id(kind) for kind in (core.int32, core.int64, core.uint32, core.uint64, core.float32, core.float64)}

# of the launch in progress, by the type's id: the values hold the types, so that no other type gets one of these ids
_types: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_tensors: dict[int, tuple[Any, dict[str, Any]]] = {}
_numpy_types: dict[int, tuple[Any, Any]] = {}
_blocks: dict[tuple[int, int], tuple[Any, ...]] = {}  # of a number beside a block
_numbers: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # of Python, beside a tensor
_converted: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # of two tensors in an operation
_broadcasted: dict[tuple[int, int], tuple[Any, ...]] = {}  # of two blocks


def forget() -> None:
    """Remove what is kept: a launch makes pointer types of its own."""
    _types.clear()
    _tensors.clear()
    _numpy_types.clear()
    _blocks.clear()
    _numbers.clear()
    _converted.clear()
    _broadcasted.clear()


_LEAVES = {int, bool, float, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in _LEAVES else _plain[3](value)


def _new_type(cls: Any, element_ty: Any, shape: Any) -> Any:
    """Return the type of these elements and this shape, the same object each time."""
    if cls is not core.block_type:
        return object.__new__(cls)
    key = (id(element_ty), *map(_unwrap, shape.values if type(shape) is core.tuple else shape))
    known = _types.get(key)
    if known is None:
        known = _types[key] = (element_ty, object.__new__(cls))
    return known[1]


def _init_type(self: Any, element_ty: Any, shape: Any) -> None:
    if self.__dict__:
        return
    try:
        _plain[0](self, element_ty, shape)
    except BaseException:
        _types.clear()  # of a shape that is an error, each time
        raise


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    known = _tensors.get(id(type))
    if known is None:
        _plain[1](self, handle, type)
        _tensors[id(type)] = (type, {name: value for name, value in self.__dict__.items() if name != "handle"})
    else:
        self.__dict__.update(known[1])
        self.handle = handle


def _numpy_type(type: Any) -> Any:
    known = _numpy_types.get(id(type))
    if known is None:
        known = _numpy_types[id(type)] = (type, _plain[2](type))
    return known[1]


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    left, right = lhs.type, rhs.type
    if left is right:
        return lhs, rhs
    if type(left) is not core.block_type:
        return (_as_block(lhs, right), rhs) if type(right) is core.block_type else (lhs, rhs)
    if type(right) is not core.block_type:
        return lhs, _as_block(rhs, left)
    known = _broadcasted.get((id(left), id(right)))
    if known is None:
        blocks = _plain[4](self, lhs, rhs)
        shape = blocks[0].handle.data.shape
        _broadcasted[id(left), id(right)] = (shape, blocks[0].type, blocks[1].type, left, right)
        return blocks
    shape, left_block, right_block = known[:3]
    if left is not left_block:
        lhs = _block(np.broadcast_to(lhs.handle.data, shape), lhs, left_block)
    if right is not right_block:
        rhs = _block(np.broadcast_to(rhs.handle.data, shape), rhs, right_block)
    return lhs, rhs


def _block(data: Any, tensor: Any, type: Any) -> Any:
    """Return a block of these elements, which are those of ``tensor``."""
    return core.tensor(interpreter.TensorHandle(data, tensor.handle.dtype.scalar), type)


def _as_block(number: Any, block: Any) -> Any:
    """Return a block of the shape of ``block``, a type, that holds the number everywhere."""
    key = (id(block), id(number.type))
    known = _blocks.get(key)
    if known is None:
        new = block.with_element_ty(number.type.scalar)
        known = _blocks[key] = (tuple(map(_unwrap, new.shape)), new, block, number.type)
    data = np.empty(known[0], _numpy_type(number.handle.dtype))
    data[...] = number.handle.data
    return _block(data, number, known[1])


def _operands(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
    left, right = type(lhs), type(rhs)
    if left is right is core.tensor:
        if lhs.dtype is rhs.dtype and id(lhs.dtype) in _KEPT:
            return _broadcast(self, lhs, rhs)
        if not named:
            return _tensors_of_two_types(self, lhs, rhs, options)
    elif not named:
        if left is core.tensor and (right is float or right is int) and id(lhs.dtype) in _KEPT:
            return _beside(self, lhs, rhs, (lhs, rhs, *options), 1)
        if right is core.tensor and (left is float or left is int) and id(rhs.dtype) in _KEPT:
            return _beside(self, rhs, lhs, (lhs, rhs, *options), 0)
    return _plain[5](self, lhs, rhs, *options, **named)


def _tensors_of_two_types(semantic: Any, lhs: Any, rhs: Any, options: tuple[Any, ...]) -> Any:
    """Return the two operands, each in the type that an operation gives a tensor of its type beside the other one."""
    left, right = lhs.dtype, rhs.dtype
    key = (id(left), id(right), *options)
    known = _converted.get(key)
    if known is None:
        operands = _plain[5](semantic, lhs, rhs, *options)
        _converted[key] = (operands[0].dtype, operands[1].dtype, left, right)
        return operands
    if left is not known[0]:
        lhs = semantic.cast(lhs, known[0])
    if right is not known[1]:
        rhs = semantic.cast(rhs, known[1])
    return _broadcast(semantic, lhs, rhs)


def _beside(semantic: Any, tensor: Any, number: Any, args: tuple[Any, ...], at: int) -> Any:
    """Return the two operands, ``args[:2]``, with the number at ``at`` as a tensor like the other one."""
    # -0.0 equals 0.0
    key = (id(tensor.type), number, type(number), number == 0 and math.copysign(1.0, number), at, *args[2:])
    known = _numbers.get(key)
    if known is None:
        operands = _plain[5](semantic, *args)
        if operands[1 - at] is tensor:  # its type is that of the operation
            operands[at].handle.data.flags.writeable = False
            _numbers[key] = (tensor.type, operands[at])
        return operands
    return (tensor, known[1]) if at else (known[1], tensor)


def _cast(self: Any, input: Any, dst_ty: Any, *rest: Any, **named: Any) -> Any:
    return input if input.dtype is dst_ty else _plain[7](self, input, dst_ty, *rest, **named)


def _sanitize(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    if self.builder.options.debug:  # else the interpreter computes whether an integer overflows, and drops it
        _plain[6](self, lhs, rhs, binary_op)


def install() -> None:
    """Make each type once a launch, in this process."""
    core.block_type.__new__, core.block_type.__init__ = _new_type, _init_type
    core.tensor.__init__ = _init_tensor
    interpreter._get_np_dtype, core._unwrap_if_constexpr = _numpy_type, _unwrap
    _Semantic.broadcast_impl_value, _Semantic.binary_op_type_checking_impl = _broadcast, _operands
    _Semantic.binary_op_sanitize_overflow_impl, _Semantic.cast = _sanitize, _cast


def uninstall() -> None:
    """Return to the types as they are."""
    core.block_type.__new__ = lambda cls, *_: object.__new__(cls)  # object's own does not take arguments after another
    core.block_type.__init__, core.tensor.__init__ = _plain[:2]
    interpreter._get_np_dtype, core._unwrap_if_constexpr = _plain[2:4]
    _Semantic.broadcast_impl_value, _Semantic.binary_op_type_checking_impl = _plain[4:6]
    _Semantic.binary_op_sanitize_overflow_impl, _Semantic.cast = _plain[6:8]
    forget()
