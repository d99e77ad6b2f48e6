"""Merged models as files of other engines: they give what the model gives, and a failure leaves nothing behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import which
from types import SimpleNamespace
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
from adamerge.core.stats import LayerStats
from adamerge.exporting import api, formats
from adamerge.exporting.backend import ExportStack
from adamerge.exporting.check import compare
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
ADAPTIVE = methods.adamerge(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))


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


# --- bad input ------------------------------------------------------------------------------------------------------


def refuse(error: type[Exception], text: str, folder: Path, *args: Any, **options: Any) -> None:
    """The export fails with this error, and the folder stays empty."""
    format = args[2] if len(args) > 2 else "onnx"
    suffix = formats.find_format(format).suffix if format in formats.FORMATS else ".onnx"
    with pytest.raises(error, match=text):
        adamerge.export(*args, path=folder / f"model{suffix}", **options)
    assert list(folder.iterdir()) == []


def test_bad_input_is_named_and_nothing_is_written(tmp_path):
    model, images = VIT.build(), VIT.images(2)
    tome = methods.tome(3)
    refuse(
        adamerge.AdamergeError,
        "format must be one of onnx, openvino, torch, aoti; got 'tensorrt'",
        tmp_path,
        model,
        images,
        "tensorrt",
    )
    refuse(
        adamerge.AdamergeError, r"does not merge; call adamerge.apply\(model, recipe\) first", tmp_path, model, images
    )
    refuse(adamerge.AdamergeError, "adapt to the image .*static=True", tmp_path, model, images, recipe=ADAPTIVE)
    refuse(adamerge.AdamergeError, "is not supported; supported are", tmp_path, nn.Linear(3, 3), images, recipe=tome)
    refuse(adamerge.AdamergeError, "there are no images", tmp_path, model, images[:0], recipe=tome)
    refuse(
        adamerge.AdamergeError,
        r"takes images of shape \(3, 64, 64\); got \(3, 32, 32\)",
        tmp_path,
        model,
        images[:, :, :32, :32],
        recipe=tome,
    )
    refuse(
        adamerge.AdamergeError,
        "takes a float32 model on a CPU; this one is torch.bfloat16",
        tmp_path,
        VIT.build().bfloat16(),
        images,
        recipe=tome,
    )
    hooked = VIT.build()
    hooked.blocks[1].register_forward_hook(lambda *_: None)
    refuse(adamerge.AdamergeError, "an exported model has no hooks", tmp_path, hooked, images, recipe=tome)


class Untraceable(nn.Module):
    """A head that torch.export cannot follow: what it does depends on the values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


def test_a_model_that_cannot_be_traced_is_named_and_restored(tmp_path):
    model, images = VIT.build(), VIT.images(2)
    model.head = Untraceable()
    blocks = model.blocks
    refuse(
        adamerge.AdamergeError,
        "torch.export cannot trace this VisionTransformer",
        tmp_path,
        model,
        images,
        recipe=methods.tome(3),
    )
    assert model.blocks is blocks


@pytest.mark.parametrize(
    ("format", "package"), [("onnx", "onnxruntime"), ("openvino", "openvino"), ("onnx", "onnxscript")]
)
def test_a_missing_engine_is_named_with_what_to_install(format, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    text = f"needs the package {package}, .* pip install 'adamerge\\[export\\]'"
    refuse(ImportError, text, tmp_path, VIT.build(), VIT.images(2), format, recipe=methods.tome(3))


def test_a_disk_without_room_is_refused_before_the_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(api.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    refuse(
        adamerge.AdamergeError,
        "the disk has 0.0 MB left and the export needs about",
        tmp_path,
        VIT.build(),
        VIT.images(2),
        "torch",
        recipe=methods.tome(3),
    )


FULL_DISK = """
import gc, resource, signal, sys
import adamerge
from hosts.zoo import ZOO
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
model, images = ZOO[0].build(), ZOO[0].images(2)
try:
    adamerge.export(model, images, "torch", sys.argv[1], recipe=adamerge.methods.tome(3))
except adamerge.AdamergeError as error:
    print(type(error).__name__, error)
gc.collect()
"""


def test_a_disk_that_is_full_while_the_file_is_written_leaves_nothing_behind(tmp_path):
    """Files are cut off at 20 kB here, which a program sees as it sees a full disk: when it writes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", FULL_DISK, str(tmp_path / "model.pt2")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("BadOutput cannot write") and "Is the disk full?" in done.stdout, done.stderr[-1500:]
    assert done.returncode == 0, "the process ended: an error in a destructor of torch"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_differs_is_not_put_in_place_and_the_old_one_stays(tmp_path, monkeypatch):
    target = tmp_path / "model.pt2"
    target.write_text("old")
    monkeypatch.setattr(api, "compare", lambda expected, given: compare({"output": expected["output"] + 1}, given))
    with pytest.raises(
        adamerge.AdamergeError, match="does not give what the model gives: 2 images, largest difference 1"
    ):
        adamerge.export(VIT.build(), VIT.images(2), "torch", target, recipe=methods.tome(3))
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt2"] and target.read_text() == "old"


# --- the check ------------------------------------------------------------------------------------------------------


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
