"""What follows the blocks, image by image on a CPU, where a product over a batch rounds by the size of the batch."""

from functools import cache, wraps
from typing import Any

import torch
from torch import nn


@cache
def _kind(base: type[nn.Module], method: str) -> type[nn.Module]:
    """A subclass that passes for its base, whose `method` takes one image at a time."""
    own = getattr(base, method)

    @wraps(own)
    def one_by_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In training, batch norms and dropout are about the batch.
        if self.training or not args or args[0].device.type != "cpu" or len(args[0]) < 2:
            return own(self, *args, **kwargs)
        x, *rest = args
        return torch.cat([own(self, image, *rest, **kwargs) for image in x.split(1)])

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank, (base, method), self.__dict__

    named = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(
        base.__name__, (base,), {**named, method: one_by_one, "__reduce_ex__": __reduce_ex__, "adamerge_base": base}
    )


def _blank(base: type[nn.Module], method: str) -> nn.Module:
    return object.__new__(_kind(base, method))


def singly(module: nn.Module, method: str) -> None:
    """Have `method` of a module run image by image.  The module stays the same object and keeps its class's name.

    Its class changes, not its attributes: copies of a module, replicas on other devices among them, have their own
    `self` then.
    """
    together(module)
    module.__class__ = _kind(type(module), method)


def together(module: nn.Module) -> None:
    """Undo `singly`."""
    module.__class__ = getattr(type(module), "adamerge_base", type(module))
