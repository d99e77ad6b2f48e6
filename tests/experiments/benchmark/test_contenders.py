"""Which contenders run in a benchmark, and on which images."""

import pytest
import torch
from clocks import run, save_images
from hosts.families import RECIPES, build, pictures

from adamerge.core.errors import BadImages, BadOption
from adamerge.experiments.benchmark import (
    MERGED,
    Entry,
    Way,
    contenders,
    drawn_images,
    folder_images,
    make_entries,
    twin,
)
from adamerge.flops import meter
from adamerge.methods import METHODS, tome
from adamerge.patching.apply import apply
from adamerge.search.solve import solve
from adamerge.search.target import Target
from adamerge.search.variants import Variant

# --- contenders ------------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was_found_and_its_twin_has_the_same_parameters(clock):
    model = build("vit").train()
    apply(model, tome(2))
    blocks, keys = model.blocks, list(model.state_dict())
    run(model)
    assert model.blocks is blocks and model.training and list(model.state_dict()) == keys
    copy = twin(model)
    assert copy is not model and copy.blocks is not blocks
    assert all(a is b for a, b in zip(copy.parameters(), model.parameters(), strict=True))


def test_every_contender_gives_the_outputs_of_its_recipe(model):
    images = pictures(4)
    ways = {name: way for name, way in MERGED.items() if not way.captured}
    chosen = RECIPES["adaptive"](model, images)
    prices = meter(model)
    found = list(contenders.merged_contenders(model, Entry("it", chosen), ways, prices))
    with torch.inference_mode():
        expected = apply(twin(model), chosen)(images)
        for contender in found:
            torch.testing.assert_close(contender.prepare(images)(images), expected, rtol=1e-4, atol=1e-4)


def test_what_depends_on_the_images_is_not_captured_blindly(model):
    images = pictures(4)
    ways = {"graph": Way(contenders.graph, captured=True, runtime="reference")}
    for name, number in (("tome", 1), ("adaptive", 0)):
        entry = Entry(name, RECIPES[name](model, images))
        assert len(list(contenders.merged_contenders(model, entry, ways, meter(model)))) == number


def test_entries_are_what_solve_finds(model):
    images = pictures(5, seed=1)
    variants = {"tome": Variant("tome"), "it": Variant("adamerge", {"affinity": "cosine"})}
    native = {"tome r=2": Variant("tome", {"r": 2})}
    entries = make_entries(model, images, variants, [0.2], native=native, cost="paper", tolerance=0.03, progress=False)
    assert [entry.method for entry in entries] == ["tome", "it", "tome r=2"]
    for entry, (label, variant) in zip(entries[:2], variants.items(), strict=True):
        options = {"cost": "paper", "tolerance": 0.03, "options": variant.options}
        found = solve(model, images, METHODS[variant.method], Target(cut=0.2), **options)
        assert (entry.recipe, entry.knob, entry.target) == (found.recipe, found.knob, "cut 20 %"), label
    assert entries[1].recipe and entries[1].recipe.stats is not None
    assert (entries[2].recipe, entries[2].knob, entries[2].target) == (tome(2), 2, "native")
    with pytest.raises(BadOption, match="there is no variant 'foo'"):
        make_entries(model, images, ["foo"], [0.2])


@pytest.mark.slow
def test_the_real_ways_of_this_device_run(model):
    rows = run(model, rounds=2)
    assert [row.way for row in rows if row.method == "none"] == ["eager", "compiled"]
    assert not any(row.error for row in rows)


# --- images ----------------------------------------------------------------------------------------------------------


def test_drawn_images_have_the_models_size_and_normalisation():
    from adamerge.embedded import load, preprocess, scenes

    torch.testing.assert_close(drawn_images(load(), 3, seed=5), preprocess(scenes(0, 3, seed=5).images))
    small = drawn_images(build("vit").to(torch.bfloat16), 2, seed=0)
    assert small.shape == (2, 3, 64, 64) and small.dtype == torch.bfloat16


def test_images_of_a_folder_need_no_labels_of_the_model_and_get_its_size(model, tmp_path):
    root = save_images(tmp_path / "images", 6)
    (root / "class0" / "broken.png").write_bytes(b"nothing")
    images, files = folder_images(model, root, 10, workers=0)
    assert images.shape == (6, 3, 64, 64)
    assert "broken.png" in (files.complaint() or "")
    (tmp_path / "none" / "a").mkdir(parents=True)
    (tmp_path / "none" / "a" / "broken.png").write_bytes(b"nothing")
    with pytest.raises(BadImages, match=r"none of the images in .* could be read"):
        folder_images(model, tmp_path / "none", 3, workers=0)
