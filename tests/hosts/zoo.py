"""Every supported family as a tiny model with random weights, built offline.  The README's list is made from this one.

Host libraries are imported when a member is built, so that the list itself is cheap to read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

PATCHES = 16
IMAGE = (3, 64, 64)
VIDEO = (4, 3, 64, 64)

See = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Member:
    """A family: its library, what it is called, an example by the library's own name, and a tiny model of it.

    `see` runs the model on images and gives one tensor.  `noise` is how far merging nothing may be from the host while
    no gradient is wanted: torch then runs MultiheadAttention by a kernel of its own.
    """

    library: str
    name: str
    example: str
    make: Callable[..., nn.Module]
    shape: tuple[int, ...] = IMAGE
    see: See = lambda model, images: model(images)
    noise: float = 0.0
    patches: int = PATCHES
    since: str = "0"
    # Features of all images times a matrix in a line of the host's own, which rounds by how many images there are.
    ends_in_a_product: bool = False

    def require(self) -> None:
        """Skip the test where the library is missing or older than the family."""
        import pytest

        pytest.importorskip(self.library, minversion=self.since)

    def __str__(self) -> str:
        return f"{self.library}/{self.name}".replace(" ", "_")

    def build(self, seed: int = 0) -> Any:
        """A model in evaluation mode with every parameter random; as made, some heads are zeros and all scales tiny."""
        from hosts.families import randomised

        torch.manual_seed(seed)
        return randomised(self.make().eval(), seed)

    def images(self, number: int = 4, seed: int = 7) -> Tensor:
        """Inputs from plain to rich, so that adaptive counts differ."""
        random = torch.Generator().manual_seed(seed)
        rich = torch.randn(number, *self.shape, generator=random)
        plain = torch.randn(number, *self.shape[:-2], 1, 1, generator=random).expand_as(rich)
        share = torch.linspace(0.1, 1, number).view(-1, *(1 for _ in self.shape))
        return share * rich + (1 - share) * plain


# --- timm -----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = dict(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, num_classes=10)


def _family(name: str) -> nn.Module:
    from hosts.families import FAMILIES

    return FAMILIES[name]()


def _vit(**options: Any) -> nn.Module:
    import timm.layers
    from timm.models import vision_transformer

    named = {"block_fn": vision_transformer, "act_layer": timm.layers, "norm_layer": timm.layers}
    found = {key: getattr(named[key], value) if key in named else value for key, value in options.items()}
    return vision_transformer.VisionTransformer(**SMALL, **found)


def _eva(**options: Any) -> nn.Module:
    from timm.models.eva import Eva

    return Eva(**SMALL, **options)


ROTARY: dict[str, Any] = dict(use_rot_pos_emb=True, ref_feat_shape=(4, 4))
TIMM = [
    Member("timm", "ViT", "vit_base_patch16_224", partial(_family, "vit")),
    Member("timm", "DeiT distilled", "deit_base_distilled_patch16_224", partial(_family, "deit_distilled")),
    Member("timm", "DeiT-III", "deit3_base_patch16_224", partial(_family, "deit3")),
    Member("timm", "DINOv2", "vit_giant_patch14_dinov2", partial(_family, "dinov2")),
    Member("timm", "DINOv2 with registers", "vit_small_patch14_reg4_dinov2", partial(_family, "dinov2_registers")),
    Member("timm", "average pooling", "vit_base_patch16_gap_224", partial(_family, "average_pool")),
    Member("timm", "MAE", "vit_base_patch16_224.mae", partial(_family, "average_pool_with_class_token")),
    Member("timm", "query and key norms", "vit_betwixt_patch16_reg4_gap_256", partial(_family, "qk_norm")),
    Member("timm", "CLIP", "vit_base_patch16_clip_224", partial(_vit, pre_norm=True, act_layer="QuickGELU")),
    Member("timm", "SigLIP", "vit_base_patch16_siglip_224", partial(_family, "map_pool")),
    Member("timm", "post-norm", "vit_base_patch16_rpn_224", partial(_vit, block_fn="ResPostBlock", init_values=0.1)),
    Member("timm", "parallel", "vit_small_patch16_18x2_224", partial(_vit, block_fn="ParallelThingsBlock")),
    Member("timm", "EVA", "eva_giant_patch14_224", partial(_eva, init_values=0.1, global_pool="avg")),
    Member("timm", "EVA-02", "eva02_base_patch14_224", partial(_eva, **ROTARY, swiglu_mlp=True, scale_mlp=True)),
    Member(
        "timm",
        "EVA-02 large",
        "eva02_large_patch14_224",
        partial(_eva, **ROTARY, swiglu_mlp=True, scale_mlp=True, qkv_fused=False),
    ),
    Member(
        "timm",
        "DINOv3",
        "vit_small_patch16_dinov3",
        partial(
            _eva,
            use_rot_pos_emb=True,
            rope_type="dinov3",
            rope_rotate_half=True,
            num_reg_tokens=4,
            use_abs_pos_emb=False,
            init_values=1e-5,
        ),
    ),
    Member(
        "timm",
        "Perception Encoder",
        "vit_pe_core_base_patch16_224",
        partial(
            _eva,
            **ROTARY,
            attn_type="rope",
            use_pre_transformer_norm=True,
            attn_pool_num_heads=4,
            global_pool="map",
        ),
    ),
    Member(
        "timm",
        "rotary ViT with mixed tables",
        "vit_small_patch16_rope_mixed_224",
        partial(_eva, use_rot_pos_emb=True, rope_type="mixed", attn_type="rope"),
    ),
    Member("timm", "rotary post-norm", "Eva(use_post_norm=True)", partial(_eva, **ROTARY, use_post_norm=True)),
]

# --- transformers ---------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = dict(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=64, patch_size=16
)
TEXT: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    vocab_size=99,
    max_position_embeddings=8,
    bos_token_id=0,
    eos_token_id=98,
)
WORDS = torch.tensor([[0, 5, 6, 7, 8, 9, 10, 98], [0, 15, 16, 17, 18, 19, 20, 98]])


def _transformers(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**{**CONFIG, **options}))


def _pair(model: str, config: str) -> nn.Module:
    import transformers

    text = {**TEXT, "projection_size": 48}
    return getattr(transformers, model)(getattr(transformers, config)(text_config=text, vision_config=CONFIG))


def _logits(model: Any, images: Tensor) -> Tensor:
    return model(images).logits


def _pooled(model: Any, images: Tensor) -> Tensor:
    return model(images).pooler_output


def _hidden(model: Any, images: Tensor) -> Tensor:
    return model(images).last_hidden_state


def _maps(model: Any, images: Tensor) -> Tensor:
    return torch.cat(model(images).feature_maps, 1)


def _match(model: Any, images: Tensor) -> Tensor:
    return model(input_ids=WORDS.to(images.device), pixel_values=images).logits_per_image


def _llava() -> nn.Module:
    import transformers

    text = transformers.LlamaConfig(**{**TEXT, "max_position_embeddings": 64}, num_key_value_heads=2)
    vision = transformers.CLIPVisionConfig(**CONFIG)
    # The index is what 4.50 calls the id.
    ids: dict[str, Any] = dict(image_token_id=97, image_token_index=97)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **ids)
    return transformers.LlavaForConditionalGeneration(config)


def _answered(model: Any, images: Tensor) -> Tensor:
    words = torch.tensor([[0, 5, *[97] * PATCHES, 7, 8]]).expand(len(images), -1)
    return model(input_ids=words.to(images.device), pixel_values=images).logits[:, -1]


def _hf(name: str, model: str, config: str, see: See, example: str, since: str = "4.50", **options: Any) -> Member:
    make = partial(_transformers, model, config, **options)
    return Member("transformers", name, example, make, see=see, since=since)


TRANSFORMERS = [
    _hf("ViT", "ViTForImageClassification", "ViTConfig", _logits, "google/vit-base-patch16-224", num_labels=10),
    _hf(
        "DeiT",
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        _logits,
        "facebook/deit-base-distilled-patch16-224",
        num_labels=10,
    ),
    _hf("ViT-MSN", "ViTMSNModel", "ViTMSNConfig", _hidden, "facebook/vit-msn-small"),
    _hf("I-JEPA", "IJepaModel", "IJepaConfig", _hidden, "facebook/ijepa_vith14_1k"),
    _hf("DINOv2", "Dinov2Model", "Dinov2Config", _pooled, "facebook/dinov2-base", layerscale_value=0.5),
    _hf("DINOv2 giant", "Dinov2Model", "Dinov2Config", _pooled, "facebook/dinov2-giant", use_swiglu_ffn=True),
    _hf(
        "DINOv2 backbone",
        "Dinov2Backbone",
        "Dinov2Config",
        _maps,
        "AutoBackbone",
        out_features=["stage1", "stage2", "stage3"],
    ),
    _hf(
        "DINOv2 with registers",
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        _pooled,
        "facebook/dinov2-with-registers-base",
        num_register_tokens=4,
    ),
    _hf(
        "DINOv3",
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        _pooled,
        "facebook/dinov3-vits16-pretrain-lvd1689m",
        since="4.56",
        num_register_tokens=4,
    ),
    _hf("CLIP vision", "CLIPVisionModel", "CLIPVisionConfig", _pooled, "openai/clip-vit-base-patch32"),
    Member(
        "transformers",
        "CLIP",
        "openai/clip-vit-base-patch32",
        partial(_pair, "CLIPModel", "CLIPConfig"),
        see=_match,
        ends_in_a_product=True,
    ),
    _hf("SigLIP vision", "SiglipVisionModel", "SiglipVisionConfig", _pooled, "google/siglip-base-patch16-224"),
    Member(
        "transformers",
        "SigLIP",
        "google/siglip-base-patch16-224",
        partial(_pair, "SiglipModel", "SiglipConfig"),
        see=_match,
        ends_in_a_product=True,
    ),
    Member("transformers", "LLaVA", "llava-hf/llava-1.5-7b-hf", _llava, see=_answered, since="4.50"),
    Member(
        "transformers",
        "VideoMAE",
        "MCG-NJU/videomae-base-finetuned-kinetics",
        partial(
            _transformers,
            "VideoMAEForVideoClassification",
            "VideoMAEConfig",
            num_frames=4,
            tubelet_size=2,
            num_labels=10,
        ),
        shape=VIDEO,
        see=_logits,
        patches=2 * PATCHES,
    ),
]

# --- torchvision and open_clip --------------------------------------------------------------------------------------


def _torchvision() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(64, 16, 3, 4, 48, 96, num_classes=10)


def _open_clip(**vision: Any) -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    seen: dict[str, Any] = dict(layers=3, width=48, head_width=12, patch_size=16, image_size=64, mlp_ratio=2.0)
    text = CLIPTextCfg(context_length=8, vocab_size=99, width=32, heads=2, layers=2)
    return CLIP(24, CLIPVisionCfg(**{**seen, **vision}), text)


def _encoded(model: Any, images: Tensor) -> Tensor:
    return model.encode_image(images)


OTHERS = [
    Member("torchvision", "ViT", "vit_b_16", _torchvision, noise=1e-5),
    Member("open_clip", "CLIP", "ViT-B-32", _open_clip, see=_encoded, noise=1e-5, ends_in_a_product=True),
    Member(
        "open_clip",
        "CLIP with LayerScale",
        "ViT-M-16-alt",
        partial(_open_clip, ls_init_value=0.1),
        see=_encoded,
        noise=1e-5,
        ends_in_a_product=True,
    ),
    Member(
        "open_clip",
        "CLIPA",
        "ViT-L-14-CLIPA",
        partial(_open_clip, pool_type="avg", final_ln_after_pool=True, no_ln_pre=True),
        see=_encoded,
        noise=1e-5,
        ends_in_a_product=True,
    ),
    Member(
        "open_clip",
        "towers from timm",
        "ViT-B-16-SigLIP",
        partial(_open_clip, timm_model_name="test_vit", timm_pool="", timm_proj="linear", image_size=160),
        shape=(3, 160, 160),
        see=_encoded,
        patches=100,
    ),
]

ZOO = [*TIMM, *TRANSFORMERS, *OTHERS]
