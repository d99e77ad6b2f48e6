"""Blocks around `torch.nn.MultiheadAttention`, which torchvision and open_clip share."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from adamerge.core.errors import UnsupportedModel
from adamerge.hosts.block_params import PlainBlockLayers, extract_params
from adamerge.runtime.block_view import AttendHeads, BlockShape, LinearParams, PlainBlockParams
from adamerge.runtime.hooks import call_as


@dataclass(frozen=True)
class MultiheadBlock:
    """A block as a View.  Fields are the names of the host's modules; an empty name means that there is none.

    Without gradients torch runs such a module by a fused kernel of its own.  Merging nothing then equals the host up
    to the rounding of that kernel; with gradients it is equal to the bit.
    """

    block: Any
    norm1: str
    attention: str
    after_attention: str
    norm2: str
    after_mlp: str

    @property
    def attn(self) -> nn.MultiheadAttention:
        return getattr(self.block, self.attention)

    @property
    def fused(self) -> bool:
        return True

    @property
    def scale(self) -> float:
        return self.attn.head_dim**-0.5

    @property
    def dropout(self) -> float:
        return self.attn.dropout if self.attn.training else 0.0

    @property
    def shape(self) -> BlockShape:
        dim, attn = self.attn.embed_dim, self.attn
        mlp = sum(part.weight.numel() for part in self.block.mlp.modules() if isinstance(part, nn.Linear))
        return BlockShape(dim, attn.num_heads, attn.head_dim, 3 * dim * dim, dim * dim, mlp)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._heads(getattr(self.block, self.norm1)(x))

    def project(self, attended: Tensor) -> Tensor:
        out = self.attn.out_proj(attended.flatten(-2))
        return getattr(self.block, self.after_attention)(out)

    def attention_branch(self, x: Tensor, attend: AttendHeads) -> Tensor:
        def forward(y: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            return self.attn.out_proj(attend(*self._heads(y), None).flatten(-2)), None

        y = getattr(self.block, self.norm1)(x)
        out, _ = call_as(self.attn, forward, y, y, y, need_weights=False)
        return getattr(self.block, self.after_attention)(out)

    @property
    def replaced(self) -> tuple[nn.Module, ...]:
        """The modules in whose place this view runs."""
        return self.block, self.attn

    def _heads(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attn = self.attn
        made = linear(y, attn.in_proj_weight, attn.in_proj_bias)
        query, key, value = made.unflatten(-1, (3, attn.num_heads, attn.head_dim)).unbind(-3)
        return query, key, value

    def mlp(self, x: Tensor) -> Tensor:
        out = self.block.mlp(getattr(self.block, self.norm2)(x))
        return getattr(self.block, self.after_mlp)(out) if self.after_mlp else out

    def params(self) -> PlainBlockParams | None:
        block, attn, mlp = self.block, self.attn, self.block.mlp
        after = [getattr(block, name) for name in (self.after_attention, self.after_mlp) if name]
        scales = [module for module in after if hasattr(module, "gamma")]
        steps = [module for module in mlp.children() if type(module) is not nn.Dropout]
        idle = [module for module in after if module not in scales and type(module) is not nn.Dropout]
        if block.training or not isinstance(mlp, nn.Sequential) or len(steps) != 3 or len(scales) not in (0, 2):
            return None
        gamma1, gamma2 = (module.gamma for module in scales) if scales else (None, None)
        layers = PlainBlockLayers(
            norm1=getattr(block, self.norm1),
            qkv=LinearParams(attn.in_proj_weight, attn.in_proj_bias),
            project=attn.out_proj,
            gamma1=gamma1,
            norm2=getattr(block, self.norm2),
            fc1=steps[0],
            act=steps[1],
            fc2=steps[2],
            gamma2=gamma2,
            idle=tuple(idle),
            around=(block, attn, *after, *mlp.modules()),
        )
        return extract_params(layers) if type(attn) is nn.MultiheadAttention else None


def check_attention(layer: int, attn: Any) -> None:
    """Refuse an attention module that does more than project, attend and project."""
    plain = type(attn) is nn.MultiheadAttention and attn._qkv_same_embed_dim and attn.batch_first
    if not plain or attn.bias_k is not None or attn.add_zero_attn:
        raise UnsupportedModel(
            f"the attention of block {layer} is a {type(attn).__name__} with other widths, extra keys or another "
            "order of dimensions; supported is torch's MultiheadAttention with batch_first=True and nothing added"
        )
