"""How a host library calls its blocks: which arguments it passes besides the tokens, and what it expects back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from adamerge.core.errors import BadOption

MASKS = "attention masks and merging do not go together; call adamerge.remove(model) first"
WEIGHTS = (
    "a merged model has no attention weights over the original patches; leave output_attentions out, or call "
    "adamerge.remove(model) first"
)


@dataclass(frozen=True)
class CallConvention:
    """What a host passes to a block besides the tokens, and what it expects back.

    Attributes:
        rotary_keyword: the keyword by which the host passes rotary tables, if it does.
        returns_tuple: whether a block returns a tuple whose first element is the tokens.
        hooked_by_class: whether the library finds blocks by their class and reads them by forward hooks (transformers
            does, to record hidden states).  The modules that run must then be instances of the block's own class.
        contiguous_tokens: whether the tokens are contiguous after the first block.  They are where the host computes
            `branch + tokens`; `tokens + branch` keeps the memory layout of `tokens`.  Sums over another layout round
            differently.
        clean_loop: whether every loop of the library over its blocks only hands tokens from one block to the next.
    """

    rotary_keyword: str | None = None
    returns_tuple: bool = False
    hooked_by_class: bool = False
    contiguous_tokens: bool = False
    clean_loop: bool = False

    def check_can_run(self, owner: nn.Module, blocks: Sequence[Any]) -> None:
        """Refuse gradient checkpointing, which would run a merged block twice."""
        checkpoints = any(getattr(part, "gradient_checkpointing", False) and part.training for part in (owner, *blocks))
        if checkpoints or getattr(owner, "grad_checkpointing", False):
            method = "gradient_checkpointing_disable()" if checkpoints else "set_grad_checkpointing(False)"
            renamed = " (transformers 5.23 calls it activation_checkpointing_disable)" if checkpoints else ""
            raise BadOption(
                "gradient checkpointing would run a merged block twice on different tokens; "
                f"call model.{method}{renamed} before running the merged model"
            )

    def records_tokens(self, blocks: Sequence[nn.Module]) -> bool:
        """Whether the library records the tokens between the blocks during this forward pass."""
        return False

    def ignores_hook(self, hook: Any) -> bool:
        """Whether a forward hook is the library's own, which `records_tokens` answers for."""
        return False

    def rotary_tables(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The rotary tables among the arguments of a call; masks and requests for attention weights are refused."""
        others = dict(kwargs)
        tables = others.pop(self.rotary_keyword, None) if self.rotary_keyword else None
        # transformers passes it by position until 4.56.
        if others.pop("output_attentions", None) or any(value is True for value in args):
            raise BadOption(WEIGHTS)
        causal = others.get("is_causal")
        if causal or any(isinstance(value, Tensor) for value in (*args, *others.values())):
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
