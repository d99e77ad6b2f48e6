"""Runs the head per image on a CPU, because the rounding of a matrix product depends on the batch size."""

from collections.abc import Callable
from typing import Any

import torch

from adamerge.hosts.base import Methods
from adamerge.patching.module_patch import MethodPatch


def call_per_image(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `own` for each image and concatenate.  In training, batch norm and dropout need the whole batch."""
    if self.training or not args or args[0].device.type != "cpu" or len(args[0]) < 2:
        return own(self, *args, **kwargs)
    x, *rest = args
    return torch.cat([own(self, image, *rest, **kwargs) for image in x.split(1)])


def per_image_patches(methods: Methods) -> tuple[MethodPatch, ...]:
    """The patches that have these methods run per image."""
    return tuple(MethodPatch(module, method, call_per_image) for module, method in methods)
