"""Hosts of timm: VisionTransformer (blocks with pre-norm, post-norm or parallel branches, distilled) and Eva."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.layer_scale import LayerScale
from timm.layers.mlp import Mlp
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models._features import FeatureGetterNet
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import Tensor, nn

from adamerge.core.errors import UnsupportedModel
from adamerge.hosts.base import Host
from adamerge.hosts.block_params import PlainBlockLayers, extract_params
from adamerge.hosts.call_convention import CallConvention
from adamerge.hosts.timm_attention import call_attention, head_dim, linear_in, project_heads, separate_bias, split_heads
from adamerge.runtime.block_view import AttendHeads, BlockShape, LinearParams, PlainBlockParams, Rotation
from adamerge.runtime.hooks import call_as

SUPPORTED = (
    "VisionTransformer models (ViT, DeiT, DeiT distilled, DeiT-III, DINOv2, CLIP, SigLIP, MAE) and Eva models "
    "(EVA, EVA-02, DINOv3, PE, rotary ViTs)"
)
REASONS = {
    "Beit": "it adds a learned bias for every pair of positions, and a merged token has no single position",
    "VisionTransformerRelPos": "it adds a learned bias for every pair of positions",
    "Cait": "its heads mix before and after the softmax of attention",
    "Xcit": "it attends between channels and mixes neighbouring patches, which need their places",
    "SwinTransformer": "it attends in windows, which need every patch in its place",
    "SwinTransformerV2": "it attends in windows, which need every patch in its place",
    "VisionTransformerSAM": "it attends in windows, which need every patch in its place",
    "NaFlexVit": "its images have patches of their own number and place",
}


@dataclass(frozen=True)
class TimmBlock:
    """timm's pre-norm block as a View.  Operations run in timm's order, so that results are equal bit for bit."""

    block: Any

    @property
    def attn(self) -> Any:
        return self.block.attn

    @property
    def fused(self) -> bool:
        return self.attn.fused_attn

    @property
    def scale(self) -> float:
        return self.attn.scale

    @property
    def dropout(self) -> float:
        return self.attn.attn_drop.p if self.block.training else 0.0

    @property
    def shape(self) -> BlockShape:
        return _shape(self.attn, self.block.mlp)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split_heads(self.attn, self.block.norm1(x))

    def project(self, attended: Tensor) -> Tensor:
        return self.block.drop_path1(self.block.ls1(project_heads(self.attn, attended)))

    def mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def attention_branch(self, x: Tensor, attend: AttendHeads) -> Tensor:
        attended = call_attention(self.attn, self.block.norm1(x), attend)
        return self.block.drop_path1(self.block.ls1(attended))

    @property
    def replaced(self) -> tuple[nn.Module, ...]:
        """The modules in whose place this view runs."""
        return self.block, self.attn

    def params(self) -> PlainBlockParams | None:
        if type(self.block) is not Block:
            return None
        block, attn, mlp = self.block, self.attn, self.block.mlp
        scales = (block.ls1, block.ls2)
        if block.training or type(mlp) is not Mlp or any(type(s) not in (nn.Identity, LayerScale) for s in scales):
            return None
        layers = PlainBlockLayers(
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
        return extract_params(layers)


class PostNormBlock(TimmBlock):
    """timm's ResPostBlock: each branch ends with its norm."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split_heads(self.attn, x)

    def project(self, attended: Tensor) -> Tensor:
        return self.block.drop_path1(self.block.norm1(project_heads(self.attn, attended)))

    def attention_branch(self, x: Tensor, attend: AttendHeads) -> Tensor:
        return self.block.drop_path1(self.block.norm1(call_attention(self.attn, x, attend)))

    def mlp(self, x: Tensor) -> Tensor:
        return self.block.drop_path2(self.block.norm2(self.block.mlp(x)))


class ParallelBlock(TimmBlock):
    """timm's ParallelThingsBlock: its parallel attentions, as one attention with the heads of all."""

    @property
    def attn(self) -> Any:
        return self.block.attns[0].attn

    @property
    def shape(self) -> BlockShape:
        shapes = [_shape(side.attn, ffn.mlp) for side, ffn in zip(self.block.attns, self.block.ffns, strict=True)]
        sums = {name: sum(getattr(each, name) for each in shapes) for name in ("heads", "qkv", "project", "mlp")}
        return replace(shapes[0], **sums)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sides = [split_heads(side.attn, side.norm(x)) for side in self.block.attns]
        query, key, value = (torch.cat(parts, -2) for parts in zip(*sides, strict=True))
        return query, key, value

    def project(self, attended: Tensor) -> Tensor:
        sides = zip(self.block.attns, attended.chunk(len(self.block.attns), -2), strict=True)
        return torch.stack([side.drop_path(side.ls(project_heads(side.attn, part))) for side, part in sides]).sum(0)

    def attention_branch(self, x: Tensor, attend: AttendHeads) -> Tensor:
        def call(side: Any) -> Tensor:
            return call_as(side, lambda x: side.drop_path(side.ls(call_attention(side.attn, side.norm(x), attend))), x)

        return torch.stack([call(side) for side in self.block.attns]).sum(0)

    @property
    def replaced(self) -> tuple[nn.Module, ...]:
        return self.block, *(module for side in self.block.attns for module in (side, side.attn))

    def mlp(self, x: Tensor) -> Tensor:
        return torch.stack([ffn(x) for ffn in self.block.ffns]).sum(0)


class TimmRotaryBlock(TimmBlock):
    """timm's EvaBlock: queries and keys are rotated by tables of positions."""

    def turn(self, x: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
        return apply_rot_embed_cat(x, rows[0], half=getattr(self.attn, "rotate_half", False))

    def rotation(self, tables: tuple[Tensor, ...]) -> Rotation:
        sin, cos = tables[0].chunk(2, -1)
        return Rotation(cos, sin, interleaved=not getattr(self.attn, "rotate_half", False))

    def project(self, attended: Tensor) -> Tensor:
        return self.block.drop_path1(_scaled(project_heads(self.attn, attended), self.block.gamma_1))

    def attention_branch(self, x: Tensor, attend: AttendHeads) -> Tensor:
        attended = call_attention(self.attn, self.block.norm1(x), attend)
        return self.block.drop_path1(_scaled(attended, self.block.gamma_1))

    def mlp(self, x: Tensor) -> Tensor:
        return self.block.drop_path2(_scaled(self.block.mlp(self.block.norm2(x)), self.block.gamma_2))

    def params(self) -> PlainBlockParams | None:
        block, attn, mlp = self.block, self.attn, self.block.mlp
        if type(block) is not EvaBlock or block.training or type(mlp) is not Mlp or attn.qkv is None:
            return None
        layers = PlainBlockLayers(
            norm1=block.norm1,
            qkv=attn.qkv,
            project=attn.proj,
            gamma1=block.gamma_1,
            norm2=block.norm2,
            fc1=mlp.fc1,
            act=mlp.act,
            fc2=mlp.fc2,
            gamma2=block.gamma_2,
            idle=(attn.q_norm, attn.k_norm, attn.norm, mlp.norm),
            around=(block, attn, mlp),
        )
        found = extract_params(layers)
        if found is None or getattr(attn, "q_bias", None) is None:
            return found
        return replace(found, qkv=LinearParams(attn.qkv.weight, separate_bias(attn)))


class RotaryPostNormBlock(PostNormBlock):
    """timm's EvaBlockPostNorm: a rotary block in which each branch ends with its norm."""

    turn, rotation = TimmRotaryBlock.turn, TimmRotaryBlock.rotation


VIEWS = {
    Block: TimmBlock,
    ResPostBlock: PostNormBlock,
    ParallelThingsBlock: ParallelBlock,
    EvaBlock: TimmRotaryBlock,
    EvaBlockPostNorm: RotaryPostNormBlock,
}
ATTENTIONS = (Attention, EvaAttention, AttentionRope)


def host(model: nn.Module) -> Host:
    """The host of a timm model.  A model with a block that is not known is refused, with the reason."""
    inner = dict(model.named_children()).get("model")
    if isinstance(model, FeatureGetterNet) and isinstance(inner, (VisionTransformer, Eva)):
        return replace(host(inner), model=model)
    if not isinstance(model, (VisionTransformer, Eva)):
        name = type(model).__name__
        why = f": {REASONS[name]}" if name in REASONS else ""
        raise UnsupportedModel(
            f"timm's {name} is not supported{why}; supported are {SUPPORTED}. The nearest is vit_base_patch16_224."
        )
    rotary = isinstance(model, Eva)
    has_class = model.cls_token is not None if rotary else model.has_class_token
    convention = CallConvention("rope" if rotary else None)
    head = ((model, "forward_head"),)
    # `_pos_embed` is patched only where it is timm's own, not a subclass's.  `unwrap` sees through an earlier patch.
    own = inspect.unwrap(type(model)._pos_embed) is VisionTransformer._pos_embed
    positions = (model, "_pos_embed") if own else None
    found = Host(
        model=model,
        owner=model,
        attribute="blocks",
        views=(),
        prefix=model.num_prefix_tokens,
        class_token=has_class,
        image=_image_shape(model),
        convention=convention,
        head=head,
        positions=positions,
    )
    return replace(found, views=tuple(_views(found.container)), loop="forward_features" if rotary else None)


def _views(container: nn.Module) -> Iterator[TimmBlock]:
    for layer, block in enumerate(container.children()):
        attentions = [part for part in block.modules() if "attn_drop" in dict(part.named_children())]
        if type(block) not in VIEWS or any(type(attention) not in ATTENTIONS for attention in attentions):
            strange = [attention for attention in attentions if type(attention) not in ATTENTIONS]
            kind = type(block if type(block) not in VIEWS else strange[0]).__name__
            known = ", ".join(each.__name__ for each in (*VIEWS, *ATTENTIONS))
            raise UnsupportedModel(
                f"block {layer} of this model is a {kind}; supported are timm's {known}. Blocks whose MLP runs beside "
                "their attention, or whose attention is differential, are not supported."
            )
        # Older releases of timm have no attribute `gate`.
        if any(getattr(attention, "gate", None) is not None for attention in attentions):
            raise UnsupportedModel(
                f"block {layer} of this model gates its attention output, which is not supported yet"
            )
        yield VIEWS[type(block)](block)


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


def _shape(attn: Any, mlp: nn.Module) -> BlockShape:
    parts = (attn.qkv,) if attn.qkv is not None else (attn.q_proj, attn.k_proj, attn.v_proj)
    qkv, project = sum(map(_linear_macs, parts)), _linear_macs(attn.proj)
    dim = linear_in(parts[0]).in_features
    return BlockShape(dim, attn.num_heads, head_dim(attn), qkv, project, _linear_macs(mlp))


def _image_shape(model: Any) -> tuple[int, int, int]:
    size = model.patch_embed.img_size
    height, width = size if size is not None else model.pretrained_cfg["input_size"][1:]
    # The first convolution, because hybrid models have a network before the patches.
    first = next(part for part in model.patch_embed.modules() if isinstance(part, nn.Conv2d))
    return first.in_channels, height, width


def _linear_macs(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
