"""Merged models as files of other engines: they give what the model gives."""

import json
import os
from collections.abc import Callable
from shutil import which
from typing import Any

import pytest
import torch
from exporting.graphs import onnx_operators, openvino_operators, scatters
from hosts.zoo import ZOO, Member
from marks import mostly_slow
from torch import Tensor, nn

import adamerge
from adamerge import methods, presets
from adamerge.core.recipe import Recipe
from adamerge.exporting import formats, pairs
from adamerge.exporting.backend import ExportStack
from adamerge.exporting.check import compare
from adamerge.exporting.onnx_format import open_session
from adamerge.hosts.base import find_host
from adamerge.patching.stack import install

# The checker of types does not run inside a traced model.
pytestmark = pytest.mark.usefixtures("unchecked")

VIT = next(member for member in ZOO if str(member) == "timm/ViT")
RECIPES: dict[str, Recipe] = {
    "tome": methods.tome(3),
    "more than there are": methods.tome(30),
    "adamerge": methods.adamerge(r=3),
    "ours": methods.adamerge(
        r=3, affinity="cosine", split="alternating", direction="protecting", averaging="salience_size"
    ),
    "pitome": methods.pitome(3),
    "dsm": methods.dsm(3, 1),
    "tofu": methods.tofu(3),
    "evit": methods.evit(0.7),
    "vid_tldr": methods.vid_tldr(3),
    "random": methods.random(3),
    "preset": presets.protect(static=True, r=3.0),
    "none": methods.none(),
}


def merged(model: nn.Module, recipe: Recipe, run: Callable[[], Tensor]) -> Tensor:
    """What the reference gives."""
    with torch.no_grad(), adamerge.applied(model, recipe, "reference"):
        return run()


@pytest.mark.parametrize("name", RECIPES)
def test_the_operators_for_export_give_what_the_reference_gives(name):
    model, images, recipe = VIT.build(), VIT.images(6), RECIPES[name]
    expected, plain = (merged(model, each, lambda: VIT.see(model, images)) for each in (recipe, methods.none()))
    assert name == "none" or (expected - plain).abs().max() > 1e-3
    host = find_host(model)
    install(host, ExportStack(host, recipe))
    with torch.no_grad():
        torch.testing.assert_close(VIT.see(model, images), expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", ["tome", "ours", "dsm", "tofu"])
def test_with_large_tables_forbidden_the_operators_give_the_same(name, monkeypatch):
    """Where the matrix of one-hot rows would be large, the rows are made by comparisons."""
    model, images = VIT.build(), VIT.images(3)
    expected = merged(model, RECIPES[name], lambda: VIT.see(model, images))
    monkeypatch.setattr(pairs, "LARGEST_TABLE", 0)
    host = find_host(model)
    install(host, ExportStack(host, RECIPES[name]))
    with torch.no_grad():
        torch.testing.assert_close(VIT.see(model, images), expected, atol=3e-6, rtol=0)


def test_one_hot_rows_begin_with_zeros_and_are_the_same_from_a_table_and_by_comparisons(monkeypatch):
    index = torch.tensor([[0, 2], [1, 1]])
    want = torch.tensor([[[0, 1, 0, 0], [0, 0, 0, 1]], [[0, 0, 1, 0], [0, 0, 1, 0]]])
    assert torch.equal(pairs.one_hot(index, 3, before=1), want.float())
    monkeypatch.setattr(pairs, "LARGEST_TABLE", 0)
    assert torch.equal(pairs.one_hot(index, 3, before=1), want.bool())


def test_equal_values_merge_in_the_order_of_the_reference():
    """Of identical images all patches with the same neighbours are equal; ties go to the lower index."""
    model, images = VIT.build(), torch.zeros(2, *VIT.shape)
    with torch.no_grad():
        model.pos_embed.zero_()
    expected = merged(model, methods.tome(5), lambda: model.forward_features(images))
    host = find_host(model)
    install(host, ExportStack(host, methods.tome(5)))
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(images), expected, atol=3e-6, rtol=0)


@pytest.fixture(scope="module")
def vit_files(tmp_path_factory) -> dict[str, Any]:
    """The ViT exported in three formats: the model, images, what it gives, and the exports."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    folder = tmp_path_factory.mktemp("exported")
    model, images = VIT.build(), VIT.images(5)
    model.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0), "input_size": VIT.shape}
    adamerge.apply(model, methods.tome(3))
    made = {
        name: adamerge.export(model, images, name, folder / f"vit-{name}{formats.find_format(name).suffix}")
        for name in formats.FORMATS
        if name != "aoti"
    }
    with torch.no_grad():
        return {"model": model, "images": images, "output": model(images), "made": made}


def test_threads_of_onnx_runtime_do_not_go_on_spinning_after_a_run(vit_files):
    """They slowed down every other engine that ran in turn with it."""
    options = open_session(vit_files["made"]["onnx"].path).get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


@pytest.mark.parametrize("format", ["torch", "onnx", "openvino"])
def test_a_file_gives_what_the_model_gives_for_any_number_of_images(vit_files, format):
    made = vit_files["made"][format]
    run = formats.find_format(format).load(made.path, ("output",), "cpu")
    for number in (1, 2, 5):
        found = run(vit_files["images"][:number])["output"]
        torch.testing.assert_close(found, vit_files["output"][:number], atol=1e-5, rtol=0)
    assert made.check.passed and made.check.images == 5 and made.check.largest_difference < 1e-5
    assert made.check.agreement == 1 and made.check.kl < 1e-6


def test_no_graph_has_a_scatter(vit_files):
    """A scatter that reduces is missing in some engines and wrong in others; ToMe needs no scatter at all."""
    made = vit_files["made"]
    for operators in (onnx_operators(made["onnx"].path), openvino_operators(made["openvino"].path)):
        assert operators["MatMul"] > 3 and scatters(operators) == {}
    nodes = torch.export.load(made["torch"].path).graph.nodes
    names = {str(node.target) for node in nodes}
    assert len(names) > 10 and not [name for name in names if "scatter" in name or "index_add" in name]


@pytest.mark.parametrize("format", ["torch", "onnx", "openvino"])
def test_recipe_model_and_preprocessing_travel_in_the_file(vit_files, format):
    found = formats.find_format(format).read_metadata(vit_files["made"][format].path)
    assert found == vit_files["made"][format].metadata
    assert Recipe.from_json(json.dumps(found["recipe"])) == methods.tome(3)
    assert found["fingerprint"] == find_host(vit_files["model"]).fingerprint()
    assert found["preprocessing"]["mean"] == [0.1, 0.2, 0.3]
    assert found["input"] == {"name": "images", "image": list(VIT.shape)} and found["outputs"] == ["output"]


def test_an_export_leaves_the_model_alone_and_nothing_beside_the_files(vit_files):
    model, folder = vit_files["model"], vit_files["made"]["onnx"].path.parent
    assert sorted(os.listdir(folder)) == ["vit-onnx.onnx", "vit-openvino.bin", "vit-openvino.xml", "vit-torch.pt2"]
    with torch.no_grad():
        assert torch.equal(model(vit_files["images"]), vit_files["output"])
    assert adamerge.trace(model).r.tolist() == [[3, 3, 3]] * 5


@pytest.mark.slow
def test_aotinductor_compiles_a_file_that_gives_what_the_model_gives(tmp_path):
    if which("g++") is None and which("clang++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    model, images = VIT.build(), VIT.images(5)
    made = adamerge.export(model, images, "aoti", tmp_path / "vit.pt2", recipe=methods.tome(3))
    assert made.check.images == 5 and made.check.largest_difference < 1e-5
    expected = merged(model, methods.tome(3), lambda: model(images))
    run = formats.find_format("aoti").load(made.path, ("output",), "cpu")
    for number in (1, 3):
        torch.testing.assert_close(run(images[:number])["output"], expected[:number], atol=1e-5, rtol=0)
    assert formats.find_format("aoti").read_metadata(made.path) == made.metadata
    assert os.listdir(tmp_path) == ["vit.pt2"]


FEW = ("timm/DINOv3",)


@pytest.mark.parametrize("member", mostly_slow(ZOO, [member for member in ZOO if str(member) in FEW]), ids=str)
def test_every_family_exports_to_onnx_and_openvino(member: Member, tmp_path):
    member.require()
    model, images = member.build(), member.images()
    for format, operators in (("onnx", onnx_operators), ("openvino", openvino_operators)):
        made = adamerge.export(
            model, images, format, tmp_path / f"m{formats.find_format(format).suffix}", recipe=methods.tome(3)
        )
        assert made.check.largest_difference <= 1e-3 and made.check.differing == 0
        found = scatters(operators(made.path))
        assert not [name for name in found if name.startswith("reducing")]


def test_the_check_counts_images_that_differ_and_first_choices_that_agree():
    want = torch.tensor([[1.0, 2.0], [5.0, 1.0], [0.0, 1.0], [2.0, 0.0]])
    found = want.clone()
    found[1] = torch.tensor([1.0, 5.0])
    result = compare({"output": want}, {"output": found})
    assert (result.images, result.differing, result.agreement, result.largest_difference) == (4, 0.25, 0.75, 4.0)
    assert result.median_difference == 0 and result.kl is not None and result.kl > 0.5 and not result.passed
    broken = want.clone()
    broken[0, 0] = float("nan")
    assert compare({"output": want}, {"output": broken}).differing == 0.25
    assert compare({"tokens": want[:, None]}, {"tokens": want[:, None]}).agreement is None


def test_the_divergence_of_the_check_points_from_the_model_to_the_file():
    want, found = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    # 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1); the other way it is 0.37.
    assert compare({"logits": want}, {"logits": found}).kl == pytest.approx(0.5108, abs=1e-4)
