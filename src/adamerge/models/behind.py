"""What follows the blocks, image by image on a CPU, where a product over a batch rounds by the size of the batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adamerge.models.guise import put_on

# Methods that make a model's output of the tokens, each of a module.
Behind = tuple[tuple[nn.Module, str], ...]


def one_by_one(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `own` for each image."""
    # In training, batch norms and dropout are about the batch.
    if self.training or not args or args[0].device.type != "cpu" or len(args[0]) < 2:
        return own(self, *args, **kwargs)
    x, *rest = args
    return torch.cat([own(self, image, *rest, **kwargs) for image in x.split(1)])


def singly(module: nn.Module, method: str) -> None:
    """Have `method` of a module run image by image."""
    put_on(module, method, one_by_one)
