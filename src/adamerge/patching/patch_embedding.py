"""Computes the patch embedding, a convolution without overlap, as one matrix product.

In half precision on a GPU the convolution of vendor libraries takes many times as long.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adamerge.patching.module_patch import MethodPatch, unpatched_class


def patch_embedding_patches(model: nn.Module) -> tuple[MethodPatch, ...]:
    """The patches by which a model computes its patch embedding as a matrix product."""
    return tuple(MethodPatch(module, "forward", patch_embedding_by_matmul) for module in patch_convolutions(model))


def patch_convolutions(model: nn.Module) -> tuple[nn.Conv2d, ...]:
    """The convolutions of a model that cut images into patches: they read every pixel once."""
    found = [
        module for module in model.modules() if isinstance(module, nn.Conv2d) and unpatched_class(module) is nn.Conv2d
    ]
    return tuple(
        module
        for module in found
        if module.kernel_size == module.stride
        and module.kernel_size != (1, 1)
        and module.padding == (0, 0)
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def patch_embedding_by_matmul(own: Callable[..., Tensor], self: Any, images: Tensor) -> Tensor:
    """The output of the convolution `own`, `(b, d, h, w)`, with the memory layout of tokens."""
    return convolve_by_matmul(self, images) if matmul_pays(self, images) else own(self, images)


def matmul_pays(convolution: nn.Conv2d, images: Tensor) -> bool:
    """Whether the matrix product is faster here and no gradient is needed."""
    sides = zip(images.shape[2:], convolution.kernel_size, strict=True)
    return half_precision_inference(images, convolution.weight) and all(side % size == 0 for side, size in sides)


def half_precision_inference(x: Tensor, weight: Tensor) -> bool:
    """Whether this is inference in half precision on CUDA, and not compiled."""
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
    )


def convolve_by_matmul(convolution: nn.Conv2d, images: Tensor) -> Tensor:
    """The convolution of images `(b, c, h, w)` whose sides are multiples of the patch's: `(b, d, h / p, w / p)`."""
    (b, _, height, width), (tall, wide) = images.shape, convolution.kernel_size
    cut = images.unflatten(3, (width // wide, wide)).unflatten(2, (height // tall, tall))
    patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
    tokens = linear(patches, convolution.weight.flatten(1), convolution.bias)
    return tokens.view(b, height // tall, width // wide, convolution.out_channels).permute(0, 3, 1, 2)
