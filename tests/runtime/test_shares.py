"""Budgets that keep a share of the tokens count those of the image, not those of the longest image of its batch."""

from dataclasses import replace

import pytest
import torch
from hosts.families import build, pictures

import adamerge
from adamerge.core.budget import Keep
from adamerge.core.evidence import Evidence
from adamerge.core.match import Bipartite, Keys, SameWindow, SimilarityOnly, no_links
from adamerge.methods import tome
from adamerge.methods.papers.pitome import ByEnergy, Ratio


@pytest.mark.parametrize("budget, counts", [(Ratio(0.5), [5, 2]), (Keep(0.5, (0.0,)), [4, 1])], ids=["ratio", "keep"])
def test_a_share_is_of_the_tokens_that_an_image_has(budget, counts):
    size = torch.ones(2, 10)
    evidence = Evidence(torch.randn(2, 10, 4), size, layer=0, depth=3, count=torch.tensor([10, 4]))
    assert torch.as_tensor(budget(no_links(size), evidence)).tolist() == counts


def test_an_image_merges_as_many_tokens_alone_as_among_longer_ones():
    """Windows leave some images with fewer links than the budget asks for, so that lengths differ."""
    model, images, budget = build("vit"), pictures(8), Ratio(0.6)
    links = Bipartite(ByEnergy(0.5, budget), Keys(), SimilarityOnly(), SameWindow(1.0))
    adamerge.apply(model, replace(tome(1), links=links, budget=budget), "reference")
    with torch.inference_mode():
        model(images)
        together = adamerge.trace(model).r
        assert len(set(map(tuple, together.tolist()))) > 1
        for image in range(len(images)):
            model(images[image : image + 1])
            assert torch.equal(adamerge.trace(model).r[0], together[image]), image
