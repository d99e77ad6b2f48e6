"""Probes: modules in the place of a host's blocks that record the tokens, return them unchanged, or return others."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from adamerge.hosts.base import BlockStack, Host
from adamerge.patching.stack import install
from adamerge.runtime import reference
from adamerge.runtime.hooks import HookFinder


class Probe(BlockStack):
    """A module that a host calls, loops over or slices like its own block container.

    It replaces all blocks.  A host that loops over its blocks calls it `repeats` times.
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
        """The tokens to return for the tokens `x` and the other arguments of the host's call."""
        raise NotImplementedError

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = self.output(x, args, kwargs)
        return (tokens,) if self.convention.returns_tuple else tokens

    def __iter__(self) -> Iterator["Probe"]:
        return iter([self] * self.repeats)

    def __len__(self) -> int:
        return len(list(self.container.children()))

    def __getitem__(self, which: int | slice) -> Any:
        """For a slice, what a loop calls; for a number, the host's own block, because hosts read its attributes."""
        return [self] * self.repeats if isinstance(which, slice) else list(self.container.children())[which]


class PassThrough(Probe):
    """Calls `observe(tokens)` and returns the tokens unchanged."""

    def __init__(self, host: Host, observe: Callable[[Tensor], None]):
        super().__init__(host)
        self.observe = observe

    def output(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.observe(x)
        return x


class GivenTokens(Probe):
    """Returns `tokens`, which have the shape of the last block's output, for any input."""

    def __init__(self, host: Host, tokens: Tensor):
        super().__init__(host)
        self.tokens = tokens

    def output(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self.tokens


class _InputCaught(Exception):
    """Ends a forward pass once the input of the blocks is recorded."""


class _InputProbe(Probe):
    """Records the tokens that enter the first block and the rotary tables of every block, then ends the pass."""

    def __init__(self, host: Host):
        super().__init__(host, repeats=host.depth)
        self.tokens: list[Tensor] = []
        self.tables: list[reference.Tables] = []

    def output(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.tokens.append(x)
        self.tables.append(self.convention.rotary_tables(args, kwargs))
        # Tables may differ from block to block.  Without tables the first call is enough.
        if self.convention.rotary_keyword is None or len(self.tables) == self.repeats:
            raise _InputCaught
        return x


def embed(host: Host, model: nn.Module, batch: Tensor) -> tuple[reference.State, list[reference.Tables]]:
    """The tokens that enter the first block for a batch, as a state, and the rotary tables of every block."""
    hooks = HookFinder(list(host.container.children()), host.views, host.convention.ignores_hook).find()
    if hooks is not None and hooks.whole:
        warnings.warn(
            f"{hooks.reason}; calibration and tuning run the parts of blocks one by one, and do not call hooks on a "
            "block or on its attention as a whole. Put it on a part (a norm, a projection, the MLP) if it changes "
            "tokens, or remove it meanwhile.",
            stacklevel=2,
        )
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
