"""What PiToMe compares, and the margins it takes."""

import pytest
import torch

from adamerge.core.budget import Fixed
from adamerge.core.errors import BadOption
from adamerge.methods import pitome
from adamerge.methods.papers.pitome import ByEnergy


def test_energies_compare_every_token_with_every_token_and_then_sources_with_targets():
    assert ByEnergy(0.9, Fixed(3)).pairs(torch.tensor([7, 8])).tolist() == [7 * 7 + 3 * 4, 8 * 8 + 4 * 4]


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), True, "0.9"])
def test_a_margin_that_is_no_finite_number_is_refused(unchecked, margin):
    with pytest.raises(BadOption) as caught:
        pitome(3, margin=margin)
    assert str(caught.value) == f"margin must be a finite number; got {margin!r}"
