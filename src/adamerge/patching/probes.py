"""Probes stand in the place of a host's blocks: they catch the tokens that enter, pass them on, or give others."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from adamerge.hosts.base import BlockStack, Host
from adamerge.patching.stack import install
from adamerge.runtime import reference


class Probe(BlockStack):
    """A module that a host calls, loops over or slices as it does its own block container.

    It stands for all blocks at once: a host that loops over its blocks sees `repeats` of it.
    """

    def __init__(self, host: Host, repeats: int = 1):
        super().__init__()
        self.convention, self.repeats = host.convention, repeats
        # In a tuple, so that nn.Module does not register it.
        self._container = (host.container,)

    @property
    def container(self) -> nn.Module:
        return self._container[0]

    def output(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What the host gets for the tokens `x` and the other arguments of its call."""
        raise NotImplementedError

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = self.output(x, args, kwargs)
        return (tokens,) if self.convention.returns_tuple else tokens

    def __iter__(self) -> Iterator["Probe"]:
        return iter([self] * self.repeats)

    def __len__(self) -> int:
        return len(list(self.container.children()))

    def __getitem__(self, which: int | slice) -> Any:
        """A slice is for hosts that loop; a number gives the host's own block, to read its attributes."""
        return [self] * self.repeats if isinstance(which, slice) else list(self.container.children())[which]


class PassThrough(Probe):
    """Gives the host its tokens back unchanged, after `observe(tokens)`."""

    def __init__(self, host: Host, observe: Callable[[Tensor], None]):
        super().__init__(host)
        self.observe = observe

    def output(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.observe(x)
        return x


class GivenTokens(Probe):
    """Gives the host `tokens`, in the shape that leaves its last block, whatever enters."""

    def __init__(self, host: Host, tokens: Tensor):
        super().__init__(host)
        self.tokens = tokens

    def output(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self.tokens


class _InputCaught(Exception):
    """Ends a forward pass once all that enters the blocks has been seen."""


class _InputProbe(Probe):
    """Catches the tokens that enter the first block and the rotary tables of every block, then ends the pass."""

    def __init__(self, host: Host):
        super().__init__(host, repeats=host.depth)
        self.tokens: list[Tensor] = []
        self.tables: list[reference.Tables] = []

    def output(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.tokens.append(x)
        self.tables.append(self.convention.rotary_tables(args, kwargs))
        # Tables may differ from block to block; a host without tables has nothing more to show after the first call.
        if self.convention.rotary_keyword is None or len(self.tables) == self.repeats:
            raise _InputCaught
        return x


def embed(host: Host, model: nn.Module, batch: Tensor) -> tuple[reference.State, list[reference.Tables]]:
    """The tokens that enter the first block, as the host makes them of a batch, and every block's rotary tables."""
    probe, blocks = _InputProbe(host), host.blocks
    install(host, probe)
    try:
        (host.entry or model)(batch)
    except _InputCaught:
        pass
    finally:
        install(host, blocks)
    state = reference.start(probe.tokens[0], host.prefix, host.class_token)
    return state, probe.tables * (host.depth // len(probe.tables))
