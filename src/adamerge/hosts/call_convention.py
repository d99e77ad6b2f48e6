"""How a host library calls its blocks: what it passes besides the tokens, and what it expects back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from adamerge.core.errors import BadOption

MASKS = "attention masks and merging do not go together; call adamerge.remove(model) first"
WEIGHTS = (
    "a merged model has no attention weights over the original patches to give; leave output_attentions out, or call "
    "adamerge.remove(model) first"
)


@dataclass(frozen=True)
class CallConvention:
    """What a host passes to a block besides the tokens, and what it expects back.

    `tables` is the keyword of rotary tables.  `tuples` says whether a block returns a tuple.  `watched` says whether
    the library observes blocks by class and hook, so that the modules that run must be of the block's own class.
    `contiguous` says whether the host's first sum lays tokens out one after the other, because it names the branch
    before the tokens; means over another layout have other bits.
    """

    tables: str | None = None
    tuples: bool = False
    watched: bool = False
    contiguous: bool = False

    def check(self, owner: nn.Module, blocks: Sequence[Any]) -> None:
        """Refuse to start a run that the host would repeat or take apart."""
        checkpoints = any(getattr(part, "gradient_checkpointing", False) and part.training for part in (owner, *blocks))
        if checkpoints or getattr(owner, "grad_checkpointing", False):
            switch = "gradient_checkpointing_disable()" if checkpoints else "set_grad_checkpointing(False)"
            raise BadOption(
                "gradient checkpointing would run a merged block twice on different tokens; "
                f"call model.{switch} before running the merged model"
            )

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The rotary tables of a call; masks and requests for attention weights are refused."""
        given = dict(kwargs)
        tables = given.pop(self.tables, None) if self.tables else None
        # transformers passes it by place until 4.56.
        if given.pop("output_attentions", None) or any(value is True for value in args):
            raise BadOption(WEIGHTS)
        causal = given.get("is_causal")
        if causal or any(isinstance(value, Tensor) for value in (*args, *given.values())):
            raise BadOption(MASKS)
        if tables is None:
            return ()
        found = (tables,) if isinstance(tables, Tensor) else tuple(tables)
        if any(table.dim() not in (2, 3) for table in found):
            shapes = [tuple(table.shape) for table in found]
            raise BadOption(
                f"rotary tables must be (patches, k) or (heads, patches, k), the same for all images; got {shapes}. "
                "Switch patch dropout off."
            )
        return found
