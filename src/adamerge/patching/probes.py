"""What enters a host's first block, caught on its way."""

from typing import Any

from torch import Tensor, nn

from adamerge.hosts.base import Host, image_entry
from adamerge.runtime import reference


class _Caught(Exception):
    """Ends a forward pass that was run only for its embedding."""


def embed(host: Host, model: nn.Module, batch: Tensor) -> tuple[reference.State, list[reference.Tables]]:
    """The tokens that enter the first block, whatever the host does to make them, and every block's rotary tables."""
    tokens: list[Tensor] = []
    tables: list[reference.Tables] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens.append(args[0])
        tables.append(host.calls.read(args[1:], kwargs))
        # Tables may differ from block to block; without any, the first block has told all there is.
        if host.calls.tables is None or len(tables) == host.depth:
            raise _Caught

    handles = [block.register_forward_pre_hook(catch, with_kwargs=True) for block in host.container.children()]
    try:
        image_entry(model)(batch)
    except _Caught:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return reference.start(tokens[0], host.prefix, host.class_token), tables * (host.depth // len(tables))
