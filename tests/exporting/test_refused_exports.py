"""Exports that cannot be made: the reason is named, nothing is left behind, and an older file stays."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hosts.zoo import ZOO
from torch import Tensor, nn

import adamerge
from adamerge import methods
from adamerge.core.stats import LayerStats
from adamerge.exporting import api, formats
from adamerge.exporting.check import compare

# The checker of types does not run inside a traced model.
pytestmark = pytest.mark.usefixtures("unchecked")

VIT = next(member for member in ZOO if str(member) == "timm/ViT")
ADAPTIVE = methods.adamerge(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))


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
