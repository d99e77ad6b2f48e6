"""Which hosts the tuner refuses, and in which words."""

import pytest
from families import pictures
from zoo import ZOO

import adamerge
from adamerge.core.errors import UnsupportedModel


@pytest.mark.parametrize("member", [m for m in ZOO if m.library == "transformers"][:1], ids=str)
def test_hosts_that_loop_over_their_blocks_are_refused(member):
    with pytest.raises(UnsupportedModel, match="tuning runs a model's blocks itself, which it cannot yet do for"):
        adamerge.tune(member.build(), pictures(8), cut=0.3, progress=False)
