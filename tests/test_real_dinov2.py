"""The real DINOv2 weights through timm and through transformers, where they lie beside the checkout."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

import adamerge
from adamerge.methods import adamerge as published
from adamerge.methods import tome

BESIDE = Path(__file__).resolve().parents[2] / "shared"
WEIGHTS = BESIDE / "weights" / "vit_small_patch14_reg4_dinov2.safetensors"
IMAGES = BESIDE / "data" / "imagenet-val-2k"
SIDE = 224

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not WEIGHTS.is_file() or not IMAGES.is_dir(), reason="no real weights and images beside us"),
]


def through_timm() -> Any:
    model: Any = timm.create_model("vit_small_patch14_reg4_dinov2", img_size=SIDE).eval()
    weights = {name: tensor.float() for name, tensor in load_file(WEIGHTS).items()}
    grid = [SIDE // 14] * 2
    weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], grid, num_prefix_tokens=0)
    model.load_state_dict(weights)
    return model


def pictures(model: Any, number: int) -> Tensor:
    change: Any = create_transform(**{**resolve_model_data_config(model), "input_size": (3, SIDE, SIDE)})
    paths = sorted(path for path in IMAGES.rglob("*") if path.is_file())[:: 400 // number][:number]
    return torch.stack([change(Image.open(path).convert("RGB")) for path in paths])


def through_transformers(source: Any) -> Any:
    """The same weights under transformers' names, of 4.x or 5.x."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=384, num_attention_heads=6, image_size=SIDE, patch_size=14, num_register_tokens=4
    )
    model = transformers.Dinov2WithRegistersModel(config).eval()
    weights: dict[str, Tensor] = source.state_dict()
    at = "embeddings."
    class_place = torch.zeros_like(weights["cls_token"])  # this model's class token has no place
    found = {
        f"{at}cls_token": weights["cls_token"],
        f"{at}register_tokens": weights["reg_token"],
        f"{at}mask_token": model.state_dict()[f"{at}mask_token"],
        f"{at}position_embeddings": torch.cat([class_place, weights["pos_embed"]], 1),
        f"{at}patch_embeddings.projection.weight": weights["patch_embed.proj.weight"],
        f"{at}patch_embeddings.projection.bias": weights["patch_embed.proj.bias"],
        "layernorm.weight": weights["norm.weight"],
        "layernorm.bias": weights["norm.bias"],
    }
    flat = "encoder.layer.0.attention.q_proj.weight" in model.state_dict()
    parts = [f"attention.{p}_proj" for p in "qkvo"]
    if not flat:
        parts = [f"attention.attention.{p}" for p in ("query", "key", "value")] + ["attention.output.dense"]
    for layer in range(12):
        mine, its = f"blocks.{layer}.", f"encoder.layer.{layer}."
        for end in ("weight", "bias"):
            projections = (*weights[f"{mine}attn.qkv.{end}"].chunk(3), weights[f"{mine}attn.proj.{end}"])
            found |= {f"{its}{part}.{end}": tensor for part, tensor in zip(parts, projections, strict=True)}
            for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                found[f"{its}{name}.{end}"] = weights[f"{mine}{name}.{end}"]
        for number in (1, 2):
            found[f"{its}layer_scale{number}.lambda1"] = weights[f"{mine}ls{number}.gamma"]
    model.load_state_dict(found)
    return model


def test_both_libraries_see_the_same_and_merge_the_same():
    """Four images: their plans are equal to the last token, their features to the rounding of float32."""
    one = through_timm()
    other = through_transformers(one)
    images = pictures(one, 4)
    with torch.inference_mode():
        features, same = one.forward_features(images), other(images).last_hidden_state
        torch.testing.assert_close(same, features, atol=2e-4, rtol=0)
        stats = adamerge.calibrate(one, images, r_max=14, progress=False)
        own = adamerge.calibrate(other, images, r_max=14, progress=False)
        torch.testing.assert_close(torch.tensor(own.mean), torch.tensor(stats.mean), atol=1e-4, rtol=1e-4)
        for recipe, twin in ((tome(12), tome(12)), (published(14, stats), published(14, own))):
            adamerge.apply(one, recipe)
            adamerge.apply(other, twin)
            features, same = one.forward_features(images), other(images).last_hidden_state
            assert adamerge.trace(one).merged.min() > 20
            assert torch.equal(adamerge.trace(one).slots(), adamerge.trace(other).slots())
            torch.testing.assert_close(same, features, atol=2e-3, rtol=0)
            maps = other(images, output_hidden_states=True).hidden_states
            assert [m.shape for m in maps] == [features.shape] * 13


def test_a_backbone_and_timms_intermediates_are_the_same_full_maps():
    one = through_timm()
    other = through_transformers(one)
    images = pictures(one, 2)
    with torch.inference_mode():
        adamerge.apply(one, tome(12))
        adamerge.apply(other, tome(12))
        mine = one.forward_intermediates(images, indices=[2, 5, 8, 11], intermediates_only=True)
        theirs = other(images, output_hidden_states=True).hidden_states
    for layer, m in zip((2, 5, 8, 11), mine, strict=True):
        assert m.shape == (2, 384, 16, 16)
        torch.testing.assert_close(theirs[layer + 1][:, 5:].mT.reshape(m.shape), m, atol=5e-3, rtol=1e-3)
