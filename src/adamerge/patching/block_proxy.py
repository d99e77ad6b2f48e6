"""A merging block that is an instance of the host's block class, for libraries that find blocks by class and hook."""

from functools import cache
from typing import Any

from torch import nn


@cache
def _proxy_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the block's class; called with `adamerge_call`, its forward pass is that call of the stack."""

    def forward(self: Any, x: Any, *args: Any, adamerge_call: Any = None, **kwargs: Any) -> Any:
        if adamerge_call is None:
            return base.forward(self, x, *args, **kwargs)
        return adamerge_call.run(x, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank_proxy, (base,), self.__dict__

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__doc__": f"A merging {base.__name__}."}
    return type(f"Merging{base.__name__}", (base,), members)


def _blank_proxy(base: type[nn.Module]) -> nn.Module:
    return object.__new__(_proxy_class(base))


def make_proxy(block: nn.Module, state: nn.Module) -> nn.Module:
    """A module of a subclass of the block's class, with the attributes of `state`: the block, or a proxy of it.

    Parameters, children and hooks are shared, by the same registries; other attributes are the proxy's own.
    """
    proxy = _blank_proxy(type(block))
    copy_attributes(state, proxy)
    return proxy


def proxy_conflict(proxy: nn.Module, block: nn.Module) -> str | None:
    """Whether another library changed the class of a proxy: `expected …, got …`; None where it did not."""
    expected = type(block) if proxy is block else _proxy_class(type(block))
    return None if type(proxy) is expected else f"expected class {expected.__name__}, got {type(proxy).__name__}"


def copy_attributes(source: nn.Module, target: nn.Module) -> None:
    """Give a block the attributes of its proxy, or the other way round."""
    if source is not target:
        # transformers 4 leaves a bound `forward` behind when it has recorded hidden states; it belongs to one module.
        target.__dict__.update({name: value for name, value in source.__dict__.items() if name != "forward"})
