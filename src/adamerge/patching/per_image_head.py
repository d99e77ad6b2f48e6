"""Runs the head per image on a CPU, because the rounding of a matrix product depends on the batch size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adamerge.hosts.base import BlockStack, Methods
from adamerge.patching.module_patch import MethodPatch
from adamerge.runtime.hooks import REGISTRIES


def call_per_image(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `own` for each image and concatenate.

    In training, batch norm and dropout need the whole batch; so do hooks on the layers of the head.
    """
    if self.training or not args or args[0].device.type != "cpu" or len(args[0]) < 2 or _hooked_inside(self):
        return own(self, *args, **kwargs)
    x, *rest = args
    return torch.cat([own(self, image, *rest, **kwargs) for image in x.split(1)])


def _hooked_inside(module: nn.Module) -> bool:
    """Whether there are hooks on parts of a module, besides the blocks.  Hooks on the module itself see all images."""
    parts = (part for child in module.children() if not isinstance(child, BlockStack) for part in child.modules())
    return any(getattr(part, name) for part in parts for name in REGISTRIES)


def per_image_patches(methods: Methods) -> tuple[MethodPatch, ...]:
    """The patches that have these methods run per image."""
    return tuple(MethodPatch(module, method, call_per_image) for module, method in methods)
