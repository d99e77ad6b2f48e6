"""timm: VisionTransformer and its distilled variant, built from plain blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from timm.layers.attention import Attention
from timm.layers.layer_scale import LayerScale
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from adamerge.core.errors import UnsupportedModel
from adamerge.models.host import Host
from adamerge.models.plain import read
from adamerge.runtime.view import BlockShape, Numbers


@dataclass(frozen=True)
class TimmBlock:
    """timm's pre-norm block as a View, in the host's own order of operations so that nothing changes in a bit."""

    block: Any

    @property
    def fused(self) -> bool:
        return self.block.attn.fused_attn

    @property
    def scale(self) -> float:
        return self.block.attn.scale

    @property
    def dropout(self) -> float:
        return self.block.attn.attn_drop.p if self.block.training else 0.0

    @property
    def shape(self) -> BlockShape:
        attn = self.block.attn
        return BlockShape(
            dim=attn.qkv.in_features,
            heads=attn.num_heads,
            key_dim=attn.head_dim,
            qkv=_linear_macs(attn.qkv),
            project=_linear_macs(attn.proj),
            mlp=_linear_macs(self.block.mlp),
        )

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attn = self.block.attn
        query, key, value = attn.qkv(self.block.norm1(x)).unflatten(-1, (3, attn.num_heads, attn.head_dim)).unbind(-3)
        return attn.q_norm(query), attn.k_norm(key), value

    def project(self, attended: Tensor) -> Tensor:
        attn = self.block.attn
        out = attn.proj_drop(attn.proj(attn.norm(attended.flatten(-2))))
        return self.block.drop_path1(self.block.ls1(out))

    def mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def numbers(self) -> Numbers | None:
        block, attn, mlp = self.block, self.block.attn, self.block.mlp
        scales = (block.ls1, block.ls2)
        if block.training or type(mlp) is not Mlp or any(type(s) not in (nn.Identity, LayerScale) for s in scales):
            return None
        return read(
            norm1=block.norm1,
            qkv=attn.qkv,
            project=attn.proj,
            gamma1=getattr(block.ls1, "gamma", None),
            norm2=block.norm2,
            fc1=mlp.fc1,
            act=mlp.act,
            fc2=mlp.fc2,
            gamma2=getattr(block.ls2, "gamma", None),
            idle=(attn.q_norm, attn.k_norm, attn.norm, mlp.norm),
            around=(block, attn, mlp, *scales),
        )


def host(model: nn.Module) -> Host:
    """The host view of a timm model; refused with the reason where a block is not timm's plain one."""
    if not isinstance(model, VisionTransformer):
        raise UnsupportedModel(
            f"timm's {type(model).__name__} is not supported; supported are VisionTransformer models "
            "(ViT, DeiT, DeiT distilled, DeiT-III, DINOv2). The nearest is vit_base_patch16_224."
        )
    found = Host(model, "blocks", (), model.num_prefix_tokens, model.has_class_token, _image_shape(model))
    return replace(found, views=tuple(_views(found.container)))


def _views(container: nn.Module) -> Iterator[TimmBlock]:
    for layer, block in enumerate(container.children()):
        if type(block) is not Block or type(block.attn) is not Attention:
            kind = type(block).__name__ if type(block) is not Block else type(block.attn).__name__
            raise UnsupportedModel(
                f"block {layer} of this model is a {kind}; supported are timm's Block with Attention. "
                "Models with parallel, post-norm, differential or rotary blocks are not supported yet."
            )
        # Older releases of timm have no gate at all.
        if getattr(block.attn, "gate", None) is not None:
            raise UnsupportedModel(
                f"block {layer} of this model gates its attention output, which is not supported yet"
            )
        yield TimmBlock(block)


def _image_shape(model: Any) -> tuple[int, int, int]:
    size = model.patch_embed.img_size
    height, width = size if size is not None else model.pretrained_cfg["input_size"][1:]
    return model.patch_embed.proj.in_channels, height, width


def _linear_macs(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
