"""A merging block that passes for the host's own, for libraries that find blocks by class and watch them by hook."""

from functools import cache
from typing import Any

from torch import nn


@cache
def _proxy_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the block's class whose forward pass is a step of a run, where there is one."""

    def forward(self: Any, x: Any, *args: Any, adamerge_step: Any = None, **kwargs: Any) -> Any:
        if adamerge_step is None:
            return base.forward(self, x, *args, **kwargs)
        return adamerge_step.take(x, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank_proxy, (base,), self.__dict__

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__doc__": f"A merging {base.__name__}."}
    return type(f"Merging{base.__name__}", (base,), members)


def _blank_proxy(base: type[nn.Module]) -> nn.Module:
    return object.__new__(_proxy_class(base))


def make_proxy(block: nn.Module) -> nn.Module:
    """A module with the block's class, name, parameters, children and hooks: the very same registries.

    Only the attributes are its own, so that the block stays what it was.
    """
    twin = _blank_proxy(type(block))
    copy_attributes(block, twin)
    return twin


def copy_attributes(source: nn.Module, target: nn.Module) -> None:
    """Give a block the attributes of its stand-in, or the other way round."""
    if source is not target:
        # transformers 4 leaves a bound `forward` behind when it has recorded hidden states; it belongs to one module.
        target.__dict__.update({name: value for name, value in source.__dict__.items() if name != "forward"})
