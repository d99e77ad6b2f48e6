"""The parameters of plain blocks in the dtype of autocast."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adamerge.runtime.block_view import LinearParams, PlainBlockParams


def cast_params(blocks: Sequence[PlainBlockParams | None], dtype: torch.dtype) -> list[PlainBlockParams | None]:
    """Blocks that compute in `dtype`: their linear layers are cast to it, and their norms give it.

    The parameters of norms and LayerScale stay as they are, as in the host.  All casts are one operation.  They are
    repeated at every pass, and by every replay of a CUDA graph, so that changes of the weights are always seen.
    """
    given = [tensor for block in blocks if block is not None for tensor in _tensors(block) if tensor.dtype != dtype]
    cast = [torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format) for tensor in given]
    if given:
        torch._foreach_copy_(cast, given)  # pyright: ignore[reportPrivateImportUsage]
    found = {id(tensor): copied for tensor, copied in zip(given, cast, strict=True)}

    def linear(layer: LinearParams) -> LinearParams:
        bias = None if layer.bias is None else found.get(id(layer.bias), layer.bias)
        return LinearParams(found.get(id(layer.weight), layer.weight), bias)

    def whole(block: PlainBlockParams) -> PlainBlockParams:
        return replace(
            block,
            norm1=replace(block.norm1, dtype=dtype),
            qkv=linear(block.qkv),
            project=linear(block.project),
            norm2=replace(block.norm2, dtype=dtype),
            fc1=linear(block.fc1),
            fc2=linear(block.fc2),
        )

    return [None if block is None else whole(block) for block in blocks]


def _tensors(block: PlainBlockParams) -> list[Tensor]:
    """Weights and biases of the linear layers of a block."""
    layers = (block.qkv, block.project, block.fc1, block.fc2)
    return [tensor for layer in layers for tensor in (layer.weight, layer.bias) if tensor is not None]
