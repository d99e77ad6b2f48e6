"""How the outputs of a merged and of the unmerged model are compared while a repair trains."""

import pytest
import torch

from adamerge.repairing.two_models import standardised_cosine


def tokens(seed: int) -> torch.Tensor:
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cosines_compare_channels_by_how_much_they_differ_from_their_mean():
    """Against the definition, number by number."""
    full, merged = tokens(0), tokens(1)
    found = standardised_cosine(full, merged)
    columns = full.flatten(0, 1)
    for image, row in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
        one, other = [], []
        for channel in range(4):
            mean = sum(columns[:, channel].tolist()) / 15
            spread = (sum((value - mean) ** 2 for value in columns[:, channel].tolist()) / 14) ** 0.5
            one.append((full[image, row, channel].item() - mean) / spread)
            other.append((merged[image, row, channel].item() - mean) / spread)
        length = sum(a * a for a in one) ** 0.5 * sum(b * b for b in other) ** 0.5
        assert found[image, row].item() == pytest.approx(sum(a * b for a, b in zip(one, other, strict=True)) / length)


def test_what_all_tokens_have_in_common_and_the_size_of_a_channel_do_not_count():
    full, merged = tokens(0), tokens(1)
    scale, shift = torch.tensor([1.0, 50.0, 0.1, 1.0]), torch.tensor([0.0, 1000.0, 3.0, -20.0])
    torch.testing.assert_close(
        standardised_cosine(full * scale + shift, merged * scale + shift), standardised_cosine(full, merged)
    )


def test_a_channel_that_never_varies_gives_finite_cosines():
    full, merged = tokens(0), tokens(1)
    full[..., 2] = 7
    merged[..., 2] = 7
    assert standardised_cosine(full, merged).isfinite().all()
