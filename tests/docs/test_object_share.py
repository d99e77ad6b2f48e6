"""The count of object patches, against an example that can be counted by hand."""

import torch
from scripts import load_script

share = load_script("object_share")


def test_a_small_example():
    """Patches a a b c c c with the first three object: tokens a (object), b (object), c (not)."""
    found = share.shares(torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([1, 1, 1, 0, 0, 0]).bool())
    assert found.tolist() == [0.5, 3.0, 2 / 3, 1 / 3, 0.0]


def test_a_patch_is_object_if_half_of_it_is():
    masks = torch.zeros(1, 32, 32)
    masks[0, :16, :8] = 1
    masks[0, :16, 16:23] = 1
    assert share.object_patches(masks).tolist() == [[True, False, False, False]]
