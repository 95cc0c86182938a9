"""Element types: torch's and the contract's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from omni.rpc.errors import OmniError, Reason
from omni.v1 import tensor_pb2

_TO_WIRE: dict[torch.dtype, tensor_pb2.ElementType.ValueType] = {
    torch.bool: tensor_pb2.ELEMENT_TYPE_BOOL,
    torch.uint8: tensor_pb2.ELEMENT_TYPE_UINT8,
    torch.int8: tensor_pb2.ELEMENT_TYPE_INT8,
    torch.int16: tensor_pb2.ELEMENT_TYPE_INT16,
    torch.int32: tensor_pb2.ELEMENT_TYPE_INT32,
    torch.int64: tensor_pb2.ELEMENT_TYPE_INT64,
    torch.float16: tensor_pb2.ELEMENT_TYPE_FLOAT16,
    torch.bfloat16: tensor_pb2.ELEMENT_TYPE_BFLOAT16,
    torch.float32: tensor_pb2.ELEMENT_TYPE_FLOAT32,
    torch.float64: tensor_pb2.ELEMENT_TYPE_FLOAT64,
}
_MOST_DIMENSIONS = 8
_FROM_WIRE = {wire: dtype for dtype, wire in _TO_WIRE.items()}


def to_wire(dtype: torch.dtype) -> tensor_pb2.ElementType.ValueType:
    """The contract's name of a dtype; KeyError for one that it does not have."""
    return _TO_WIRE[dtype]


def view(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """`memory` (uint8 [n], n the tensor's size in bytes) seen as a tensor of `dtype` and `shape`; nothing is copied."""
    return memory.view(dtype).reshape(tuple(shape)) if memory.numel() else torch.empty(tuple(shape), dtype=dtype)


def described(handle: tensor_pb2.TensorHandle) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a handle.

    Raises:
        OmniError: TENSOR_LOST, when they do not fit its size in bytes.
    """
    dtype = _FROM_WIRE.get(handle.dtype)
    if dtype is None:
        raise _broken(handle, f"element type {handle.dtype} is unknown")
    if len(handle.shape) > _MOST_DIMENSIONS:
        raise _broken(handle, f"{len(handle.shape)} dimensions; at most {_MOST_DIMENSIONS} are taken")
    shape = tuple(handle.shape)
    if math.prod(shape) * dtype.itemsize != handle.size or any(length < 0 for length in shape):
        raise _broken(handle, f"{handle.size} bytes are no tensor of shape {shape} and dtype {dtype}")
    return dtype, shape


def _broken(handle: tensor_pb2.TensorHandle, what: str) -> OmniError:
    return OmniError(Reason.TENSOR_LOST, f"a handle of {handle.owner} is broken: {what}", replica=handle.owner)
