"""Models of other libraries on the command line, each with its own preprocessing."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from PIL import Image
from safetensors.torch import save_file
from test_commands import call

from adamerge.cli.loading import load_model
from adamerge.data.folders import folder_loader

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes with two images each, wider than high."""
    root, random = tmp_path / "images", torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(2):
            picture = torch.randint(256, (48, 80, 3), generator=random, dtype=torch.uint8)
            Image.fromarray(picture.numpy()).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny ViT of transformers with two classes, as `save_pretrained` writes it, with its image processor."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    config = transformers.ViTConfig(**sizes, image_size=64, patch_size=16, num_labels=2)
    torch.manual_seed(0)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64}, image_mean=[0.1, 0.2, 0.3], resample=2)
    processor.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_folder_of_transformers_is_calibrated_evaluated_priced_and_timed(saved, images, tmp_path, capsys):
    name, stats, out = f"transformers:{saved}", tmp_path / "stats.json", tmp_path / "out.json"
    words = ["--model", name, "--data", str(images), "--workers", "0"]
    assert call("calibrate", *words, "--r-max", "4", "--out", str(stats)) == 0
    assert call("eval", *words, "--r-max", "4", "--stats", str(stats), "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["images"] == 4 and report["model"] == name
    assert 0 < report["gmacs_true"] < report["gmacs_true_unmerged"]
    assert call("flops", "--model", name, "--method", "tome", "--r", "2") == 0
    assert "16 patch tokens + 1 prefix, 3 blocks" in capsys.readouterr().out
    rows = tmp_path / "bench.csv"
    quick = ["--batch", "2", "--rounds", "1", "--inner", "1", "--methods", "", "--native", "tome:r=2"]
    assert call("bench", "--model", name, *quick, "--unmerged", "eager", "--ways", "reference", "--out", str(rows)) == 0
    assert "transformers" in rows.read_text().splitlines()[1]
    compared = ["--methods", "tome", "--cut", "0.2", "--calibration", str(images), "--out", str(tmp_path / "out")]
    assert call("compare", *words, *compared) == 0


def test_a_folder_of_transformers_sees_images_as_its_own_processor_makes_them(saved, images):
    from transformers import AutoImageProcessor

    model = load_model(f"transformers:{saved}", None, False, "cpu", "fp32")
    (batch,) = folder_loader(model, images, workers=0)
    files = sorted(images.rglob("*.png"))
    wanted = AutoImageProcessor.from_pretrained(saved)(
        [Image.open(file).convert("RGB") for file in files], return_tensors="pt"
    )["pixel_values"]
    # Resizing works on bytes in one library and on floats in another.
    torch.testing.assert_close(batch.images, wanted, atol=2.5 / 255 / 0.5, rtol=0)


def test_weights_that_would_have_to_be_unpickled_are_not_read(saved, images, capsys):
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")
    words = ["--model", f"transformers:{saved}", "--data", str(images), "--method", "tome", "--r", "2"]
    assert call("eval", *words, "--workers", "0") == 1
    assert "transformers could not load" in " ".join(capsys.readouterr().err.split())


def test_a_processor_that_crops_is_followed(saved, images):
    from transformers import AutoImageProcessor, CLIPImageProcessor

    CLIPImageProcessor(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64}).save_pretrained(saved)
    model = load_model(f"transformers:{saved}", None, False, "cpu", "fp32")
    (batch,) = folder_loader(model, images, workers=0)
    files = sorted(images.rglob("*.png"))
    wanted = AutoImageProcessor.from_pretrained(saved)(
        [Image.open(file).convert("RGB") for file in files], return_tensors="pt"
    )["pixel_values"]
    assert (batch.images - wanted).abs().mean() < 0.02


def test_torchvision_weights_come_from_a_file_with_the_preprocessing_of_their_tag(tmp_path, images):
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.vit_b_32()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    name = "torchvision:vit_b_32"
    found = load_model(name, tmp_path / "w.safetensors", False, "cpu", "fp32")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), found.state_dict().values(), strict=True))
    transform = torchvision.models.ViT_B_32_Weights.DEFAULT.transforms()
    (batch,) = folder_loader(found, images, workers=0, labelled=False)
    wanted = torch.stack([transform(Image.open(file).convert("RGB")) for file in sorted(images.rglob("*.png"))])
    torch.testing.assert_close(batch.images, wanted, atol=1e-5, rtol=0)


def test_torchvision_is_priced_and_its_tags_choose_the_image_size(capsys):
    assert call("flops", "--model", "torchvision:vit_b_16.IMAGENET1K_SWAG_E2E_V1", "--method", "none") == 0
    assert "576 patch tokens + 1 prefix, 12 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, told",
    [
        ("transformers:", "names no model; transformers: is followed by a folder"),
        ("transformers:nowhere/at-all", "is no folder here; give the folder that save_pretrained wrote"),
        ("torchvision:", "torchvision: is followed by one of its names"),
        ("torchvision:vit_z", "torchvision has no model 'vit_z'; supported are vit_b_16"),
        ("torchvision:vit_b_16", "--weights FILE.safetensors for a local file, or --pretrained to download"),
        ("torchvision:vit_b_16.V9", "vit_b_16 has no weights 'V9'; choose from IMAGENET1K_V1"),
        ("keras:vit", "Models of other libraries are named transformers:… or torchvision:…"),
    ],
)
def test_a_name_that_means_nothing_gets_a_message(name, told, capsys):
    weights = [] if name.endswith((":", "at-all", "vit_b_16")) else ["--pretrained"]
    assert call("eval", "--model", name, *weights, "--method", "none") == 1
    assert told in capsys.readouterr().err


def test_an_empty_folder_is_refused(tmp_path, capsys):
    pytest.importorskip("transformers")
    assert call("eval", "--model", f"transformers:{tmp_path}", "--method", "none") == 1
    assert "transformers could not load" in capsys.readouterr().err


def test_weights_of_another_image_size_have_their_positions_resampled(tmp_path):
    """As timm itself does it."""
    import timm
    from timm.models.vision_transformer import checkpoint_filter_fn

    small = timm.create_model("vit_tiny_patch16_224")
    large: Any = timm.create_model("vit_tiny_patch16_224", img_size=96)
    save_file(small.state_dict(), tmp_path / "w.safetensors")
    large.load_state_dict(checkpoint_filter_fn(small.state_dict(), large))
    found = load_model("vit_tiny_patch16_224", tmp_path / "w.safetensors", False, "cpu", "fp32", image_size=96)
    assert all(torch.equal(a, b) for a, b in zip(large.state_dict().values(), found.state_dict().values(), strict=True))


@pytest.mark.skipif(
    Version(version("timm")) <= Version("1.0.22"), reason="this timm takes the safetensors of a folder for a pickle"
)
def test_a_folder_in_timms_own_format_is_loaded_by_timm(tmp_path):
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2)
    save_for_hf(model, tmp_path, safe_serialization=True)
    found = load_model(f"local-dir:{tmp_path}", None, False, "cpu", "fp32")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), found.state_dict().values(), strict=True))


def test_a_backbone_is_tuned_on_a_folder_of_any_classes(images, tmp_path):
    """No labels are used, so that they need not be the model's."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    torch.manual_seed(0)
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=64, patch_size=16))
    model.save_pretrained(tmp_path / "dinov2")
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "dinov2")
    for number in range(8):
        (images / "a" / f"{number}.png").write_bytes((images / "b" / f"{number % 2}.png").read_bytes())
    recipe = tmp_path / "recipe.json"
    words = ["--data", str(images), "--workers", "0", "--cut", "0.2", "--tries", "2", "--out", str(recipe)]
    assert call("tune", "--model", f"transformers:{tmp_path / 'dinov2'}", *words) == 0
    assert recipe.exists()
