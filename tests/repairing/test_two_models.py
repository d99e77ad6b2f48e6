"""How the patches of the merged and of the unmerged model are compared while a repair trains."""

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import Tensor

from adamerge.repairing.trainable import ParameterSwap
from adamerge.repairing.two_models import RIDGE, TwoModels, patch_loss, whitened
from adamerge.runtime import reference

IMAGES, PATCHES, CHANNELS = 3, 7, 4


def tokens(seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(IMAGES, PATCHES, CHANNELS, generator=random, dtype=torch.float64)


def test_patches_are_compared_by_the_inverse_covariance_of_the_unmerged_ones():
    """Against the definition, patch by patch."""
    full, merged = tokens(0), tokens(1)
    rows, others = full.flatten(0, 1), merged.flatten(0, 1)
    mean = rows.mean(0)
    covariance = torch.cov(rows.T, correction=0)
    inverse = torch.linalg.inv(covariance + RIDGE * covariance.trace() / CHANNELS * torch.eye(CHANNELS))
    total = 0.0
    for one, other in zip(rows, others, strict=True):
        plain = one @ other / (one @ one * (other @ other)) ** 0.5
        dot = (one - mean) @ inverse @ (other - mean)
        square, other_square = ((each - mean) @ inverse @ (each - mean) for each in (one, other))
        total += (1 - plain + 1 - dot / (square * other_square) ** 0.5 + (1 - dot / square) ** 2).item()
    assert patch_loss(full, merged).item() == pytest.approx(total / len(rows), rel=1e-4)


def test_patches_as_they_were_lose_nothing():
    assert patch_loss(tokens(0), tokens(0)).item() == pytest.approx(0, abs=1e-12)


def test_patches_that_shrink_toward_the_mean_lose_although_their_direction_from_it_is_kept():
    full = tokens(0)
    mean = full.mean((0, 1))
    halved = mean + (full - mean) / 2
    wanted, given = whitened(full, halved)
    torch.testing.assert_close(given, wanted / 2)
    turned = 1 - torch.nn.functional.cosine_similarity(full, halved, dim=-1).mean()
    assert patch_loss(full, halved).item() == pytest.approx(1 / 4 + turned.item())


def test_the_mean_and_the_size_of_a_channel_do_not_count_in_whitened_coordinates():
    full, merged = tokens(0) * torch.tensor([1.0, 50.0, 0.5, 1.0]) + torch.tensor([0.0, 1000.0, 3.0, -20.0]), tokens(1)
    wanted, _ = whitened(full, merged)
    assert wanted.mean((0, 1)).abs().max() < 1e-9
    # The small channels are between a tenth and all of the variance of the large one, which is 2,500 times theirs.
    spread = wanted.flatten(0, 1).var(0, correction=0)
    assert spread.max() <= 1


def test_images_of_one_colour_give_finite_gradients():
    full, merged = tokens(0), tokens(1)
    full[..., 2] = merged[..., 2] = 7
    full[0] = full.mean((0, 1))
    merged.requires_grad_()
    for unmerged in (full, torch.full_like(full, 3.0)):
        patch_loss(unmerged, merged).backward()
        assert merged.grad is not None and bool(merged.grad.isfinite().all())


def test_batches_of_adaptive_recipes_have_few_numbers_of_tokens(monkeypatch):
    model, images = build("vit", patch_size=8), pictures(4)
    recipe, found, step = RECIPES["adaptive"](model, images), [], reference.step

    def noted(state, view, given, depth):
        after = step(state, view, given, depth)
        found.append((given is recipe, after.x.shape[1]))
        return after

    monkeypatch.setattr(reference, "step", noted)
    TwoModels(model, recipe, ParameterSwap(model), "kl").compare(images)
    merged = {tokens for ours, tokens in found if ours}
    assert merged and max(merged) < 65 and all(tokens % reference.TRAINING_MULTIPLE == 0 for tokens in merged)
