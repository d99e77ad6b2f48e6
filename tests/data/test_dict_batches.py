"""Loaders may give dicts, as those of transformers and datasets do; a wrong batch is refused by name."""

from collections import UserDict
from typing import Any

import pytest
import torch

import adamerge
from adamerge.core.errors import BadImages
from adamerge.data.batches import batches, labelled_batches
from adamerge.embedded import load, preprocess, scenes

IMAGES, LABELS = torch.rand(3, 3, 8, 8), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize(("images", "labels"), [("pixel_values", "labels"), ("image", "label")])
def test_dicts_give_images_and_labels(kind, images, labels):
    data = [kind({images: IMAGES, labels: LABELS, "ids": [1, 2, 3]})]
    assert [batch is IMAGES for batch in batches(data)] == [True]
    ((got, truth),) = labelled_batches(data)
    assert got is IMAGES and torch.equal(truth, LABELS)


def test_labels_may_be_a_list():
    ((_, truth),) = labelled_batches([{"pixel_values": IMAGES, "labels": [0, 2, 1]}])
    assert torch.equal(truth, LABELS)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (
            {"pixels": IMAGES, "labels": LABELS},
            "a batch that is a dict has its images under 'pixel_values' or 'images' or 'image'; this one has 'pixels', "
            "'labels'",
        ),
        (
            {"pixel_values": IMAGES, "target": LABELS},
            "a batch that is a dict has its labels under 'labels' or 'label'; this one has 'pixel_values', 'target'",
        ),
        (
            IMAGES,
            "expected batches of (images, labels), or dicts with pixel_values and labels; it gave images without "
            "labels",
        ),
        (
            (IMAGES, LABELS[:2]),
            "expected one whole number as the label of each of 3 images; got torch.int64 of shape (2,)",
        ),
        (
            (IMAGES, torch.eye(3)),
            "expected one whole number as the label of each of 3 images; got torch.float32 of shape (3, 3)",
        ),
    ],
)
def test_a_batch_without_images_or_labels_is_refused(batch: Any, told):
    with pytest.raises(BadImages) as caught:
        list(labelled_batches([batch]))
    assert str(caught.value) == told


def test_evaluate_is_public_and_gives_the_same_figures_for_dicts():
    model = load()
    drawn = scenes(0, 4)
    images = preprocess(drawn.images)
    found = [
        adamerge.evaluate(model, data, adamerge.methods.tome(8), progress=False)
        for data in ([(images, drawn.labels)], [{"pixel_values": images, "label": drawn.labels}])
    ]
    assert torch.equal(found[0].kl, found[1].kl) and found[0].kl.min() > 0
    assert torch.equal(found[0].full_top1, found[1].full_top1)
