"""On a CPU what follows the blocks of an adaptive recipe runs image by image, and nothing of that stays behind."""

import copy
import io
import pickle
from typing import Any

import pytest
import timm
import torch
from hosts.families import FAMILIES, RECIPES, build, pictures
from hosts.zoo import ZOO, Member
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.evaluation import evaluate
from adamerge.hosts.base import find_host
from adamerge.methods import adamerge as published
from adamerge.methods import tome
from adamerge.patching.apply import temporarily_patched

ADAPTIVE = published(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))


def adaptive(model: nn.Module) -> Recipe:
    """An adaptive recipe for a model of any depth."""
    depth = find_host(model).depth
    return ADAPTIVE.with_stats(LayerStats((0.3,) * depth, (0.1,) * depth))


def kinds(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module, _ in find_host(model).head]


@pytest.fixture(params=ZOO, ids=str)
def member(request) -> Member:
    request.param.require()
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.mark.parametrize("name", ["adaptive", "flipped"])
@torch.no_grad()
def test_the_parts_of_a_forward_pass_give_what_the_whole_gives_alone_and_among_strangers(family, name):
    model, images = build(family, num_classes=1000), pictures(9)
    adamerge.apply(model, RECIPES[name](model, images))
    together = model(images)
    features = model.forward_features(images)
    assert torch.equal(model.forward_head(features), together)
    before = model.forward_head(features, pre_logits=True)
    for image in range(len(images)):
        one = slice(image, image + 1)
        assert torch.equal(model(images[one]), together[one])
        assert torch.equal(model.forward_head(features[one]), together[one])
        assert torch.equal(model.forward_head(features[one], pre_logits=True), before[one])


@torch.no_grad()
def test_image_features_of_a_model_with_two_towers_do_not_depend_on_the_batch():
    pytest.importorskip("transformers")
    for member in ZOO:
        if str(member) not in ("transformers/CLIP", "transformers/SigLIP"):
            continue
        model, images = adamerge.apply(member.build(), ADAPTIVE), member.images(9)

        def see(images: Tensor, model: Any = model) -> Tensor:
            out = model.get_image_features(images)
            return out if isinstance(out, Tensor) else out.pooler_output

        together = see(images)
        assert all(torch.equal(see(images[i : i + 1])[0], together[i]) for i in range(9))


def test_another_head_runs_image_by_image_as_well():
    model: Any = adamerge.apply(build("vit"), ADAPTIVE)
    model.reset_classifier(300)
    images = pictures(9)
    with torch.no_grad():
        assert torch.equal(model(images[3:4])[0], model(images)[3])
    head = model.head
    adamerge.remove(model)
    assert model.head is head and type(model) is type(build("vit"))


def test_classes_keep_their_names_and_come_back(member):
    model = member.build()
    before, text, owner = kinds(model), repr(model), find_host(model).fingerprint()["class"]
    for _ in range(2):
        adamerge.apply(model, adaptive(model))
        assert all(issubclass(now, own) and now is not own for now, own in zip(kinds(model), before, strict=True))
        assert [kind.__qualname__ for kind in kinds(model)] == [kind.__qualname__ for kind in before]
        assert find_host(model).fingerprint()["class"] == owner
    adamerge.apply(model, tome(3))
    for (module, method), own in zip(find_host(model).head, before, strict=True):
        alike = getattr(type(module), method) is getattr(own, method)
        assert alike, "a batch whose images keep the same counts runs as the host runs it"
    adamerge.apply(model, adaptive(model))
    adamerge.remove(model)
    assert kinds(model) == before and repr(model) == text


def test_whoever_borrows_a_model_gives_the_classes_back():
    model = build("vit")
    plain = type(model)
    with temporarily_patched(model):
        adamerge.apply(model, ADAPTIVE)
    assert type(model) is plain
    adamerge.apply(model, ADAPTIVE)
    merging = type(model)
    with temporarily_patched(model):
        adamerge.remove(model)
        assert type(model) is plain
    assert type(model) is merging is not plain


def test_the_unmerged_side_of_an_evaluation_runs_as_the_host_runs_it():
    model, images = build("vit", num_classes=1000), pictures(9)
    with torch.inference_mode():
        plain = model(images)
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda _, args, out: seen.append(out))
    evaluate(model, [(images, torch.zeros(9, dtype=torch.long))], ADAPTIVE, progress=False)
    handle.remove()
    assert torch.equal(seen[0], plain)


def test_a_copy_and_a_file_of_a_model_run_image_by_image_and_can_be_undone(member):
    model, images = member.build(), member.images()
    plain = kinds(model)
    with torch.no_grad():
        unmerged = member.see(model, images)
        adamerge.apply(model, adaptive(model))
        out = member.see(model, images)
        twins = [copy.deepcopy(model)]
        if not any(module._forward_hooks for module in model.modules()):  # transformers' own cannot be pickled
            twins.append(pickle.loads(pickle.dumps(model)))
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twins.append(torch.load(file, weights_only=False))
        for twin in twins:
            assert torch.equal(member.see(twin, images), out)
            assert kinds(twin) == kinds(model)
            assert torch.equal(member.see(adamerge.remove(twin), images), unmerged)
            assert kinds(twin) == plain
        assert torch.equal(member.see(model, images), out), "what is undone in a copy stays in the original"


def test_a_gradient_is_the_sum_of_the_gradients_of_the_images(member):
    model, images = member.build(), member.images()
    adamerge.apply(model, adaptive(model))

    def gradients(batches: list[Tensor]) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        for batch in batches:
            member.see(model, batch).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    together, alone = gradients([images]), gradients(list(images.split(1)))
    assert together.keys() == alone.keys()
    for name, gradient in together.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(alone[name], gradient, atol=1e-4 * scale, rtol=0)


def test_training_runs_the_head_on_the_whole_batch():
    model: Any = build("vit", drop_rate=0.5).train()
    calls: list[int] = []
    adamerge.apply(model, ADAPTIVE)
    own = model.head_drop.forward
    model.head_drop.forward = lambda x: (calls.append(len(x)), own(x))[1]
    model(pictures(5))
    assert calls == [5]
    model.eval()(pictures(5))
    assert calls == [5, 1, 1, 1, 1, 1]


def test_a_hook_on_a_layer_of_the_head_sees_the_whole_batch():
    model: Any = adamerge.apply(build("vit"), ADAPTIVE)
    seen: list[Tensor] = []
    with torch.no_grad():
        expected = model(pictures(5))
        model.head.register_forward_hook(lambda _, args, out: seen.append(out))
        got = model(pictures(5))
    assert len(seen) == 1 and torch.equal(seen[0], got)
    torch.testing.assert_close(got, expected)


def test_real_heads_of_every_timm_kind_are_found():
    """Bigger heads round differently where tiny ones agree by luck."""
    for name in ("deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "vit_base_patch16_siglip_224"):
        with torch.device("meta"):
            model = timm.create_model(name)
        assert [method for _, method in find_host(model).head] == ["forward_head"]
