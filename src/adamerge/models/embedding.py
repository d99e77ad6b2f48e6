"""What enters a host's first block, caught on its way."""

from typing import Any

from torch import Tensor, nn

from adamerge.models.host import Host, eyes
from adamerge.runtime import padded


class _Caught(Exception):
    """Ends a forward pass that was run only for its embedding."""


def embed(host: Host, model: nn.Module, batch: Tensor) -> tuple[padded.State, list[padded.Tables]]:
    """The tokens that enter the first block, whatever the host does to make them, and every block's rotary tables."""
    tokens: list[Tensor] = []
    tables: list[padded.Tables] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens.append(args[0])
        tables.append(host.calls.read(args[1:], kwargs))
        # Tables may differ from block to block; without any, the first block has told all there is.
        if host.calls.tables is None or len(tables) == host.depth:
            raise _Caught

    handles = [block.register_forward_pre_hook(catch, with_kwargs=True) for block in host.container.children()]
    try:
        eyes(model)(batch)
    except _Caught:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return padded.start(tokens[0], host.prefix, host.class_token), tables * (host.depth // len(tables))
