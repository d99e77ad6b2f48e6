"""Digests tell tensors and settings apart, and keep the definition that journals rely on."""

import hashlib

import torch

from adamerge.digest import SAMPLES, digest_json, digest_tensors


def test_the_digest_of_images_is_the_one_in_journals_of_version_0_1_0():
    """The formula of 0.1.0's tuner, written out: a journal is resumed only where its digest is found again."""
    batches = [torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    expected = hashlib.sha256()
    for batch in batches:
        expected.update(batch.flatten()[:: max(1, batch.numel() // 4096)].double().cpu().numpy().tobytes())
    assert digest_tensors(batches) == expected.hexdigest()


def test_a_small_tensor_enters_with_every_value():
    labels = torch.arange(SAMPLES)
    changed = labels.clone()
    changed[1234] = -1
    assert digest_tensors([labels]) != digest_tensors([changed])
    assert digest_tensors([labels]) == digest_tensors([labels.double()])


def test_the_order_of_keys_does_not_matter_and_values_do():
    assert digest_json({"a": 1, "b": [2, "c"]}) == digest_json({"b": [2, "c"], "a": 1})
    assert digest_json({"a": 1}) != digest_json({"a": 2})
