"""What follows the blocks, image by image on a CPU, where a product over a batch rounds by the size of the batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adamerge.patching.module_patch import patch


def call_per_image(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `own` for each image."""
    # In training, batch norms and dropout are about the batch.
    if self.training or not args or args[0].device.type != "cpu" or len(args[0]) < 2:
        return own(self, *args, **kwargs)
    x, *rest = args
    return torch.cat([own(self, image, *rest, **kwargs) for image in x.split(1)])


def run_per_image(module: nn.Module, method: str) -> None:
    """Have `method` of a module run image by image."""
    patch(module, method, call_per_image)
