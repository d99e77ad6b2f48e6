"""Broken files at random: recipes, statistics, images and weights.  A named error or a right answer, nothing else.

JSON files get wrong values in one to three fields, or other bytes; images and weights get other bytes.
"""

import io
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import adamerge
from adamerge.cli.weights import load_weights
from adamerge.core.errors import AdamergeError
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.data.folders import Folder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import test_broken_files as broken  # pyright: ignore[reportMissingImports]

# Removed when the process ends.
TEMPORARY = tempfile.TemporaryDirectory(prefix="fuzz-files-")
FOLDER = Path(TEMPORARY.name)


def try_file(seed: int, number: int, loud: bool) -> tuple[str, list[str]]:
    """Break a file and read it: ("ran" or "refused", what is wrong)."""
    choose = random.Random(f"files {seed} {number}")
    kind = choose.choice(["recipe", "recipe", "recipe", "statistics", "image", "weights"])
    content = broken_content(choose, kind)
    if loud:
        print(kind, content[:20_000])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[kind](content)
    except AdamergeError as error:
        return "refused", [] if len(str(error)) > 20 else [f"{kind}: no message: {error!r}"]
    except Exception as error:
        return "ran", [f"{kind}: bare {type(error).__name__}: {str(error)[:200]}"]
    return "ran", []


def broken_content(choose: random.Random, kind: str) -> bytes:
    """The bytes of a broken file."""
    if kind in ("image", "weights"):
        return _other_bytes(choose, choose.choice(_images()) if kind == "image" else _weights())
    data = json.loads(choose.choice(_recipes()) if kind == "recipe" else _statistics())
    if choose.random() < 0.3:
        return _other_bytes(choose, json.dumps(data).encode())
    for _ in range(choose.choice([1, 1, 2, 3])):
        paths = list(broken.fields(data))
        path = choose.choice(paths)
        value = choose.choice([*broken.WRONG, ...])
        if path or value is not ...:
            data = broken.changed(data, path, value)
    return json.dumps(data).encode()


def _other_bytes(choose: random.Random, content: bytes) -> bytes:
    """Cut, overwrite, insert or repeat bytes, most often near the beginning, where headers are."""
    changed = bytearray(content)
    for _ in range(choose.choice([1, 1, 2, 5])):
        most = len(changed) if choose.random() < 0.4 else min(len(changed), 200)
        at, length = choose.randrange(max(most, 1)), choose.choice([1, 1, 2, 4, 8, 64])
        way = choose.randrange(5)
        if way == 0:
            del changed[at:]
        elif way == 1:
            del changed[at : at + length]
        elif way == 2:
            changed[at : at + length] = choose.randbytes(length)
        elif way == 3:
            changed[at:at] = choose.choice([choose.randbytes(length), b"9" * length, b"\xff" * length, b"\0" * length])
        else:
            changed[at:at] = changed[at : at + length]
    return bytes(changed)


# --- the files before they are broken -------------------------------------------------------------------------------


@cache
def _model() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    small: dict[str, Any] = dict(img_size=32, patch_size=8, embed_dim=16, num_heads=2, num_classes=4, mlp_ratio=1)
    return VisionTransformer(depth=broken.DEPTH, **small).eval()


@cache
def _recipes() -> tuple[str, ...]:
    return tuple(recipe.file_text() for recipe in broken.RECIPES.values())


@cache
def _statistics() -> str:
    return adamerge.calibrate(_model(), torch.randn(4, 3, 32, 32), broken.published(4), progress=False).file_text()


@cache
def _weights() -> bytes:
    from safetensors.torch import save

    return save(_model().state_dict())


@cache
def _images() -> tuple[bytes, ...]:
    from PIL import Image

    contents = []
    for name in ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"):
        file = io.BytesIO()
        Image.effect_noise((24, 16), 60).convert("RGB").save(file, name)
        contents.append(file.getvalue())
    return tuple(contents)


# --- readers --------------------------------------------------------------------------------------------------------


def _read_recipe(content: bytes) -> None:
    path = FOLDER / "recipe.json"
    path.write_bytes(content)
    recipe = Recipe.load(path)
    assert Recipe.from_json(recipe.to_json()) == recipe
    broken.run(_model(), recipe)  # pyright: ignore[reportArgumentType]


def _read_statistics(content: bytes) -> None:
    path = FOLDER / "stats.json"
    path.write_bytes(content)
    broken.run(_model(), broken.published(4).with_stats(LayerStats.load(path)))  # pyright: ignore[reportArgumentType]


def _read_image(content: bytes) -> None:
    (FOLDER / "images").mkdir(exist_ok=True)
    path = FOLDER / "images" / "broken.png"
    path.write_bytes(content)
    image, _, name = Folder(FOLDER / "images", lambda image: image, labelled=False)[0]
    assert name == str(path)
    if image is None:
        raise BadFile("the image cannot be read, which the loader counts and names")
    assert image.mode == "RGB"  # pyright: ignore[reportAttributeAccessIssue]


def _read_weights(content: bytes) -> None:
    path = FOLDER / "weights.safetensors"
    path.write_bytes(content)
    model = _model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load_weights(model, path)
    finally:
        model.load_state_dict(before)


class BadFile(AdamergeError):
    """An image file that the loader skips."""


READERS: dict[str, Callable[[bytes], None]] = {
    "recipe": _read_recipe,
    "statistics": _read_statistics,
    "image": _read_image,
    "weights": _read_weights,
}
