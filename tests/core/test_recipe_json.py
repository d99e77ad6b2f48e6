"""A recipe is the same when read back from JSON, and other JSON is refused."""

import json

import pytest
import torch
from examples import OPTIONS

from adamerge.core.errors import BadOption
from adamerge.core.parts import part, to_json
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge, none, tome

STATS = LayerStats((0.3,), (0.1,))
ALL = [
    adamerge(r_max, stats, alpha=alpha, temperature=temperature, proportional_attention=proportional, **options)
    for options in OPTIONS
    for r_max, stats, alpha, temperature, proportional in [
        (9.0, None, 1.0, 1.0, False),
        (14.5, LayerStats((0.25, 0.5), (0.0, 1e-9), images=3, model={"sketch": [1.5]}), -2.0, 0.5, True),
    ]
] + [adamerge(r=5, **options) for options in OPTIONS]


def test_every_recipe_comes_back_from_json_as_it_was():
    for recipe in [*ALL, tome(0), tome(7, proportional_attention=False), none()]:
        text = recipe.to_json()
        assert Recipe.from_json(text) == recipe
        assert Recipe.from_json(text).to_json() == text
        assert Recipe.from_json(json.dumps(json.loads(text))) == recipe


def test_statistics_inside_a_recipe_keep_the_recipe_they_were_measured_for():
    """What `calibrate` writes there is JSON of a recipe, and must stay JSON."""
    inner = json.loads(adamerge(9.0).to_json())
    recipe = adamerge(9.0, LayerStats((0.1,), (0.2,), model={"sketch": [1.0, 2.0]}, recipe=inner))
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_an_unknown_part_is_refused_with_the_parts_there_are():
    text = adamerge(r=3).to_json().replace('"Sequential"', '"Spiral"')
    with pytest.raises(BadOption, match=r"unknown part 'Spiral'; this version knows .*Alternating, .*ZScore"):
        Recipe.from_json(text)


@pytest.mark.parametrize("text", ['{"part": ["os.system"]}', '{"part": {}}', '{"part": null}', '{"site": "x"}', "{}"])
def test_a_part_without_a_proper_name_is_refused(text):
    with pytest.raises(BadOption, match="unknown part"):
        Recipe.from_json(text)


def test_a_part_with_other_fields_is_refused():
    text = adamerge(r=3).to_json().replace('"affinity"', '"metric"')
    with pytest.raises(
        BadOption, match=r"the part Centrality cannot be made from {'metric': 'dot'}: .*unexpected keyword"
    ):
        Recipe.from_json(text)


def test_statistics_whose_model_is_no_mapping_are_refused():
    data = json.loads(adamerge(9.0, STATS).to_json())
    data["budget"]["stats"]["model"] = 3
    with pytest.raises(BadOption) as caught:
        Recipe.from_json(json.dumps(data))
    assert str(caught.value) == "the field 'model' of LayerStats must be a mapping; got 3"


@pytest.mark.parametrize("text", ["", "adamerge", "{"])
def test_text_that_is_not_json_is_refused(text):
    with pytest.raises(BadOption, match=r"a recipe is JSON text as `Recipe\.to_json` writes it; this is not JSON: "):
        Recipe.from_json(text)


@pytest.mark.parametrize(
    "text, kind", [("[1]", "tuple"), ("3", "int"), ("null", "NoneType"), ('{"part": "Uniform"}', "Uniform")]
)
def test_json_of_something_else_is_refused(text, kind):
    with pytest.raises(BadOption, match=f"a recipe is JSON text as `Recipe.to_json` writes it; this describes {kind}"):
        Recipe.from_json(text)


def test_a_part_that_json_cannot_hold_is_refused():
    with pytest.raises(BadOption, match=r"a recipe is made of parts, numbers, texts and lists; .* is neither"):
        to_json(torch.ones)


@pytest.mark.parametrize("text", ['{"schema": 1, "recipe": ' + "1" * 5000 + "}", 3], ids=["5,000 digits", "a number"])
def test_what_python_cannot_read_as_json_is_refused(text, unchecked):
    with pytest.raises(BadOption, match="this is not JSON: "):
        Recipe.from_json(text)


@pytest.mark.parametrize("schema", [True, 1.0, "1", None, 2])
def test_only_the_number_of_the_schema_is_taken(schema):
    content = {"schema": schema, "recipe": json.loads(adamerge(r=3).to_json())}
    with pytest.raises(BadOption, match=r"a recipe's file has schema 1 and a recipe; this one has schema "):
        Recipe.from_json(json.dumps(content))
    assert Recipe.from_json(json.dumps({**content, "schema": 1})) == adamerge(r=3)


def test_two_parts_may_not_share_a_name():
    class Uniform:
        pass

    with pytest.raises(BadOption, match="there is a part called 'Uniform' already"):
        part(Uniform)
