"""Tiny models of every supported family, with random weights, and the recipes to try on them."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from timm.layers.mlp import SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import tome

M = TypeVar("M", bound=nn.Module)

DEPTH = 3
TINY: dict[str, Any] = dict(img_size=64, patch_size=16, embed_dim=48, depth=DEPTH, num_heads=4, num_classes=10)

# What writes into the residual stream, as the libraries call it.
WRITERS = (
    "attn.proj.weight",
    "fc2.weight",
    "patch_embed.proj.weight",
    "o_proj.weight",
    "out_proj.weight",
    "output.dense.weight",
    "down_proj.weight",
    "weights_out.weight",
    "c_proj.weight",
    "mlp.3.weight",
    "conv1.weight",
    "conv_proj.weight",
    "projection.weight",
    "patch_embedding.weight",
    "patch_embeddings.weight",
)

FAMILIES: dict[str, Callable[..., VisionTransformer]] = {
    "vit": partial(VisionTransformer, **TINY),
    "deit_distilled": partial(VisionTransformerDistilled, **TINY),
    "deit3": partial(VisionTransformer, **TINY, init_values=1e-6, no_embed_class=True),
    "dinov2": partial(VisionTransformer, **TINY, init_values=1e-5, mlp_ratio=4.0, mlp_layer=SwiGLUPacked),
    "dinov2_registers": partial(VisionTransformer, **TINY, init_values=1e-5, reg_tokens=4, no_embed_class=True),
    "average_pool": partial(VisionTransformer, **TINY, class_token=False, global_pool="avg", fc_norm=True),
    "average_pool_with_class_token": partial(VisionTransformer, **TINY, global_pool="avg"),
    "qk_norm": partial(VisionTransformer, **TINY, qk_norm=True),
    "pre_norm": partial(VisionTransformer, **TINY, pre_norm=True),
    "map_pool": partial(VisionTransformer, **TINY, class_token=False, global_pool="map"),
}


def build(family: str, seed: int = 0, **options) -> VisionTransformer:
    """A model of the family in evaluation mode.

    Every parameter is random, of order one in its effect: a LayerScale near 0 or a head of zeros would make any two
    models agree.
    """
    model = FAMILIES[family](**options).eval()
    return randomised(model, seed)


def randomised(model: M, seed: int) -> M:
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.dim() < 2:
            scale = name.endswith(("weight", "gamma", "gamma_1", "gamma_2", "lambda1"))
            parameter.data = 1 + 0.2 * noise if scale else 0.2 * noise
        elif name.endswith("weight"):
            # Writers stay small: long tokens saturate the softmax of their dot products,
            # and salience would be rounding.
            gain = 0.4 if name.endswith(WRITERS) else 1.0
            parameter.data = noise * gain * parameter[0].numel() ** -0.5
        else:
            parameter.data = 0.3 * noise
    return model


def pictures(number: int = 5, seed: int = 7, side: int = 64) -> Tensor:
    """Images from plain to rich, so that adaptive counts differ."""
    random = torch.Generator().manual_seed(seed)
    rich = torch.randn(number, 3, side, side, generator=random)
    plain = torch.randn(number, 3, 1, 1, generator=random).expand_as(rich)
    share = torch.linspace(0.1, 1, number)[:, None, None, None]
    return share * rich + (1 - share) * plain


def measured(model: nn.Module, images: Tensor, recipe: Recipe) -> LayerStats:
    """Statistics of a recipe on some images, by a forward pass that merges nothing."""
    stats = adamerge.calibrate(model, images, recipe, passes=1, progress=False)
    return LayerStats(stats.mean, stats.std)


FLIPPED: dict[str, Any] = dict(
    alpha=2.0,
    temperature=0.7,
    affinity="cosine",
    split="alternating",
    direction="protecting",
    averaging="salience_size",
    proportional_attention=True,
)

RECIPES: dict[str, Callable[[nn.Module, Tensor], Recipe]] = {
    "adaptive": lambda model, images: published(6.0, measured(model, images, published(6.0))),
    "flipped": lambda model, images: published(6.0, measured(model, images, published(6.0, **FLIPPED)), **FLIPPED),
    "fixed": lambda model, images: published(r=3),
    "tome": lambda model, images: tome(3),
}
