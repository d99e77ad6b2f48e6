"""Recipe and statistics files with one broken field: an error that names the reason, or a recipe that runs."""

import json
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import adamerge
from adamerge.core.combine import BySalience, MeanNorm
from adamerge.core.match import Alternating, Bipartite, Keys, Protect
from adamerge.core.recipe import Recipe
from adamerge.core.salience import AttentionShare, ClassShare, Sharpness
from adamerge.methods import METHODS, ats, dsm, dymu, evit, none, pitome, random, tofu, tome, vid_tldr
from adamerge.methods import adamerge as published

DEPTH = 3
STATS = adamerge.LayerStats(
    (0.3, 0.2, 0.1), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), images=5, how="iterative", passes=2, model={}, recipe={}
)
RECIPES: dict[str, Recipe] = {
    "adamerge": published(4, STATS),
    "tome": tome(2),
    "pitome": pitome(2),
    "pitome, ratio": pitome(ratio=0.8),
    "dsm": dsm(2),
    "tofu": tofu(2),
    "evit": evit(0.7),
    "ats": ats(9),
    "dymu": dymu(2, STATS),
    "vid_tldr": vid_tldr(2),
    "random": random(2),
    "none": none(),
    "protect": replace(
        dymu(2, STATS), salience=ClassShare(), links=Bipartite(Alternating(), Keys(), Protect()), combine=MeanNorm()
    ),
    "attention": replace(tome(2), salience=AttentionShare(), weight=BySalience()),
    "sharpness": replace(tome(2), salience=Sharpness()),
}
NESTED: list[Any] = []
for _ in range(100):
    NESTED = [NESTED]
WRONG: list[Any] = [
    None,
    True,
    False,
    "false",
    "",
    "nan",
    0,
    3,
    -1,
    2.5,
    1e30,
    -1e300,
    10**25,
    10**400,
    math.nan,
    math.inf,
    [],
    [1],
    [1, 2, 3],
    [1, 2, "3"],
    [True, False, True],
    ["dot"],
    {},
    {"plain": 3},
    {"plain": {}},
    {"part": "Nothing"},
    {"part": None},
    {"part": "Fixed", "r": 1},
    {"part": "Uniform"},
    {"part": "BySize"},
    {"part": "Average"},
    {"part": "Keys"},
    {"part": "Alternating"},
    {"part": "SalientFirst"},
    {"part": "Everywhere"},
    {"part": "Everything"},
    {"part": "IntoOne"},
    {"part": "AtRandom"},
    {"part": "LayerStats", "mean": [1, 1, 1], "std": [1, 1, 1]},
    NESTED,
]


def fields(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values in JSON data."""
    yield path
    if isinstance(data, dict):
        for name in data:
            yield from fields(data[name], (*path, name))
    if isinstance(data, list):
        # One entry stands for the others.
        for index in range(min(1, len(data))):
            yield from fields(data[index], (*path, index))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The data with another value at a path; without this field where the value is `...`."""
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    if value is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = value if len(path) == 1 else changed(data[path[0]], path[1:], value)
    return copy


def broken(data: Any) -> Iterator[tuple[str, str]]:
    """What was broken, and the text of the file."""
    for path in fields(data):
        for value in [*WRONG, ...]:
            if path or value is not ...:
                name = f"{'.'.join(map(str, path))} = {str(value)[:40]}"
                yield name, json.dumps(changed(data, path, value))
        inside = data
        for step in path:
            inside = inside[step]
        if isinstance(inside, dict):
            yield f"{'.'.join(map(str, path))} with another field", json.dumps(changed(data, (*path, "other"), 3))


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=DEPTH, num_heads=2, num_classes=4, mlp_ratio=1
    ).eval()


def run(model: VisionTransformer, recipe: Recipe) -> None:
    with torch.inference_mode(), warnings.catch_warnings():
        # Statistics of another recipe.
        warnings.simplefilter("ignore", UserWarning)
        output = adamerge.apply(model, recipe)(torch.zeros(2, 3, 32, 32))
    assert output.shape == (2, 4)


def test_every_method_is_here():
    assert set(METHODS) <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_broken_recipe_is_refused_or_runs(name, model, tmp_path, unchecked):
    path, ran, refused, bare = tmp_path / "recipe.json", 0, 0, []
    RECIPES[name].save(path)
    for what, text in broken(json.loads(path.read_text())):
        path.write_text(text)
        try:
            recipe = Recipe.load(path)
            run(model, recipe)
            ran += 1
            assert Recipe.from_json(recipe.to_json()) == recipe
        except adamerge.AdamergeError as error:
            refused += 1
            assert len(str(error)) > 20
        except Exception as error:
            bare.append(f"{what}: {type(error).__name__}: {str(error)[:100]}")
    assert not bare, "\n".join([f"{len(bare)} bare errors, {refused} refused, {ran} ran", *bare])
    assert ran and refused > 10 * DEPTH


@pytest.mark.parametrize("name", ["z-score", "threshold"])
def test_broken_statistics_are_refused_or_used(name, model, tmp_path, unchecked):
    path, ran, refused, bare = tmp_path / "stats.json", 0, 0, []
    recipe = published(4) if name == "z-score" else dymu(2)
    stats = adamerge.calibrate(model, torch.randn(4, 3, 32, 32), recipe, progress=False)
    replace(stats, recipe={"site": "before_block"}).save(path)
    for what, text in broken(json.loads(path.read_text())):
        path.write_text(text)
        try:
            run(model, recipe.with_stats(adamerge.LayerStats.load(path)))
            ran += 1
        except adamerge.AdamergeError as error:
            refused += 1
            assert len(str(error)) > 20
        except Exception as error:
            bare.append(f"{what}: {type(error).__name__}: {str(error)[:100]}")
    assert not bare, "\n".join([f"{len(bare)} bare errors, {refused} refused, {ran} ran", *bare])
    assert ran and refused > 10 * DEPTH


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("salience", 3, "the field 'salience' of Recipe must be a salience part; got 3"),
        ("budget", None, "the field 'budget' of Recipe must be a budget part; got None"),
        ("proportional_attention", "false", "'proportional_attention' of Recipe must be true or false; got 'false'"),
        ("site", ["x"], "the field 'site' of Recipe must be one of before_block, after_attention; got ('x',)"),
        ("weight", {"part": "Average"}, "the field 'weight' of Recipe must be a weight part; got Average()"),
        ("links", {"part": "Keys"}, "the field 'links' of Recipe must be a matching part; got Keys()"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_error_names_the_field_of_a_recipe(field, value, text):
    data = json.loads(published(4, STATS).to_json())
    with pytest.raises(adamerge.AdamergeError, match=re.escape(text)):
        Recipe.from_json(json.dumps({**data, field: value}))


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("stats", 3, "the field 'stats' of ZScore must be a LayerStats part or null; got 3"),
        ("r_max", 10**400, "the field 'r_max' of ZScore must be a finite number or a list of finite numbers; got 1000"),
        ("r_max", "9", "the field 'r_max' of ZScore must be a finite number or a list of finite numbers; got '9'"),
        ("alpha", True, "the field 'alpha' of ZScore must be a finite number; got True"),
        ("temperature", math.nan, "the field 'temperature' of ZScore must be a finite number; got nan"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_error_names_the_field_of_a_budget(field, value, text):
    data = json.loads(published(4, STATS).to_json())
    data["budget"][field] = value
    with pytest.raises(adamerge.AdamergeError, match=re.escape(text)):
        Recipe.from_json(json.dumps(data))


@pytest.mark.parametrize("load", [Recipe.load, adamerge.LayerStats.load], ids=["recipe", "statistics"])
@pytest.mark.parametrize("depth", [300, 3_000, 200_000])
def test_a_file_nested_too_deeply_is_refused(load, depth, tmp_path):
    path: Path = tmp_path / "deep.json"
    for opening, closing in (("[", "]"), ('{"part": ', "}")):
        path.write_text(opening * depth + "1" + closing * depth)
        with pytest.raises(adamerge.AdamergeError):
            load(path)
    path.write_text('{"schema": 1, "recipe": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(adamerge.AdamergeError):
        load(path)
