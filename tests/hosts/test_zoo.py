"""The contract that every supported family keeps, whatever library it comes from."""

import copy
import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import timm
import torch
import torchvision
from hosts.zoo import ZOO, Member
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.hosts.base import LIBRARIES, find_host, image_entry
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome
from adamerge.patching.apply import stack_of
from adamerge.patching.stack import install, installed
from adamerge.runtime.block_view import RotaryView, View


@dataclass(frozen=True)
class Case:
    """A member, a model of it, some images, and what the model makes of them."""

    member: Member
    model: Any
    images: Tensor
    plain: Tensor

    def see(self, images: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return self.member.see(self.model, self.images if images is None else images)

    def merged(self, recipe: Recipe) -> Tensor:
        adamerge.apply(self.model, recipe)
        return self.see()

    def adaptive(self) -> Recipe:
        """The published recipe with the statistics of these images."""
        stats = adamerge.calibrate(self.model, self.images, published(6.0), passes=1, progress=False)
        return published(6.0, LayerStats(stats.mean, stats.std))


@pytest.fixture(params=ZOO, ids=str)
def member(request) -> Member:
    request.param.require()
    return request.param


@pytest.fixture
def case(member: Member) -> Case:
    model, images = member.build(), member.images()
    with torch.no_grad():
        return Case(member, model, images, member.see(model, images))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance * max(1.0, float(b.abs().max())), rtol=0)


# --- nothing merged, nothing changed --------------------------------------------------------------------------------


def test_merging_nothing_changes_nothing(case):
    """To the bit; only torch's own kernel for MultiheadAttention, used without gradients, rounds otherwise."""
    assert case.plain.std() > 0.005, "outputs without spread would agree by accident"
    with_gradients = case.member.see(case.model, case.images)
    for recipe in (none(), tome(0), published(r=0)):
        out = case.merged(recipe)
        assert torch.equal(case.member.see(case.model, case.images), with_gradients)
        if case.member.noise:
            close(out, case.plain, case.member.noise)
        else:
            assert torch.equal(out, case.plain)


def test_training_without_merging_changes_no_bit(case):
    case.model.train()
    torch.manual_seed(3)
    host = case.member.see(case.model, case.images)
    adamerge.apply(case.model, none())
    torch.manual_seed(3)
    assert torch.equal(case.member.see(case.model, case.images), host)


# --- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tome", "fixed", "adaptive"])
def test_merging_merges_and_leaves_the_shape_alone(case, name):
    recipe = {"tome": tome(3), "fixed": published(r=3), "adaptive": None}[name] or case.adaptive()
    out, trace = case.merged(recipe), adamerge.trace(case.model)
    assert out.shape == case.plain.shape and out.dtype == case.plain.dtype and out.isfinite().all()
    assert (out - case.plain).abs().max() > 1e-3
    assert trace.patches == case.member.patches and trace.merged.min() >= 0
    if name == "adaptive":
        assert len({tuple(row) for row in trace.r.tolist()}) > 1
    else:
        assert trace.r.tolist() == [[3] * find_host(case.model).depth] * len(case.images)


def test_an_image_gets_the_same_result_alone_and_among_strangers(case):
    for recipe in (tome(3), case.adaptive()):
        together, r = case.merged(recipe), adamerge.trace(case.model).r
        for image in range(len(case.images)):
            alone = case.see(case.images[image : image + 1])
            assert torch.equal(adamerge.trace(case.model).r, r[image : image + 1])
            if recipe.ragged and not case.member.ends_in_a_product:
                assert torch.equal(alone, together[image : image + 1])
            close(alone, together[image : image + 1])


def test_images_one_by_one_and_padded_to_the_longest_get_the_same_result(case):
    adamerge.apply(case.model, case.adaptive(), "reference")
    alone, r = case.see(), adamerge.trace(case.model).r
    stack_of(case.model).selector.per_image_on_cpu = False
    close(case.see(), alone)
    assert torch.equal(adamerge.trace(case.model).r, r)


def test_every_patch_leaves_with_the_feature_of_its_token(case):
    """What comes out of the blocks has the host's own shape, so that whatever pools it weighs tokens by size."""
    left: list[Tensor] = []
    adamerge.apply(case.model, tome(3))
    stack = stack_of(case.model)
    with torch.no_grad():
        x = torch.randn(2, stack.prefix + case.member.patches, stack.views[0].shape.dim)
        tables = _tables(case)
        for call in stack[:]:
            out = call.run(x, (), tables)
            x = out[0] if isinstance(out, tuple) else out
            left.append(x)
    slots = adamerge.trace(case.model).slots()
    assert [out.shape for out in left] == [x.shape] * len(left)
    for image in range(2):
        patches = left[-1][image, stack.prefix :]
        assert len(patches.unique(dim=0)) == len(slots[image].unique()) == case.member.patches - 3 * len(left)


def _tables(case: Case) -> dict[str, Any]:
    """The rotary tables that the host hands its first block."""
    host, caught = find_host(case.model), []
    blocks = installed(host)
    assert blocks is not None
    install(host, host.container)
    first = next(host.container.children())
    handle = first.register_forward_pre_hook(lambda _, args, kwargs: caught.append(kwargs), with_kwargs=True)
    image_entry(case.model)(case.images)
    handle.remove()
    install(host, blocks)
    name = host.convention.rotary_keyword
    return {name: caught[0][name]} if name and caught[0].get(name) is not None else {}


def test_a_gradient_reaches_what_it_reaches_without_merging(case):
    def reached() -> set[str]:
        case.model.zero_grad(set_to_none=True)
        case.member.see(case.model, case.images).square().sum().backward()
        grads = {name: parameter.grad for name, parameter in case.model.named_parameters()}
        assert all(grad is None or grad.isfinite().all() for grad in grads.values())
        return {name for name, grad in grads.items() if grad is not None and grad.abs().sum() > 0}

    plain = reached()
    assert len(plain) > 20
    for recipe in (tome(3), case.adaptive()):
        adamerge.apply(case.model, recipe)
        assert reached() == plain


# --- parameters, checkpoints, copies --------------------------------------------------------------------------------


def test_keys_and_parameters_stay_what_they_are(case):
    keys, parameters = list(case.model.state_dict()), dict(case.model.named_parameters())
    out = case.merged(tome(3))
    assert list(case.model.state_dict()) == keys
    assert {name: id(p) for name, p in case.model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    other = case.member.build(seed=1)
    case.model.load_state_dict(other.state_dict())
    assert not torch.equal(case.see(), out)
    expected = replace(case, model=other).merged(tome(3))
    assert torch.equal(case.see(), expected)


def test_removing_gives_the_same_container_and_the_same_bits_back(case):
    host = find_host(case.model)
    container, blocks = getattr(host.owner, host.attribute), list(host.container.children())
    case.merged(tome(3))
    assert adamerge.remove(case.model) is case.model
    assert getattr(host.owner, host.attribute) is container and list(container.children()) == blocks
    assert torch.equal(case.see(), case.plain)
    adamerge.remove(case.model)
    assert torch.equal(case.see(), case.plain)


def test_applying_twice_is_applying_once(case):
    once = case.merged(tome(3))
    assert torch.equal(case.merged(tome(3)), once)
    case.merged(tome(1))
    assert torch.equal(case.merged(tome(3)), once)
    adamerge.remove(case.model)
    assert torch.equal(case.see(), case.plain)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_survives_applying_and_removing(member, training):
    model = member.build().train(not training)
    adamerge.apply(model, tome(2)).train(training)
    adamerge.apply(model, tome(3))
    assert {m.training for m in model.modules()} == {training}
    adamerge.remove(model)
    assert {m.training for m in model.modules()} == {training}


def test_a_copy_merges_like_the_original_and_shares_nothing(case):
    out = case.merged(tome(3))
    twin = replace(case, model=copy.deepcopy(case.model))
    assert torch.equal(twin.see(), out)
    for parameter in case.model.parameters():
        nn.init.normal_(parameter)
    assert torch.equal(twin.see(), out) and not torch.equal(case.see(), out)
    adamerge.remove(twin.model)
    assert torch.equal(twin.see(), case.plain)


def test_state_and_model_can_be_pickled(case):
    out = case.merged(tome(3))
    case.model.load_state_dict(pickle.loads(pickle.dumps(case.model.state_dict())))
    assert torch.equal(case.see(), out)
    if any(module._forward_hooks for module in case.model.modules()):
        pytest.skip("hooks by which transformers records hidden states cannot be pickled, merged or not")
    file = io.BytesIO()
    torch.save(case.model, file)
    file.seek(0)
    loaded = replace(case, model=torch.load(file, weights_only=False))
    assert torch.equal(loaded.see(), out)
    adamerge.remove(loaded.model)
    assert torch.equal(loaded.see(), case.plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_merged_model_moves_to_every_precision_and_back(case, dtype):
    case.model.to(dtype)
    try:
        case.see(case.images.to(dtype))
    except RuntimeError as error:
        pytest.skip(f"the host itself does not run in {dtype}: {error}")
    case.model.load_state_dict(case.member.build().state_dict())
    case.model.to(torch.float32)
    case.merged(tome(3))
    case.model.to(dtype)
    out = case.see(case.images.to(dtype))
    assert out.dtype == dtype and out.isfinite().all()
    assert adamerge.trace(case.model).layers[0].size.dtype == torch.promote_types(dtype, torch.float32)
    case.model.to(torch.float32)
    adamerge.remove(case.model)
    close(case.see(), case.plain, 0.1)


def test_a_merged_model_moves_to_another_device(case):
    case.merged(tome(3))
    meta = copy.deepcopy(case.model).to("meta")
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    adamerge.remove(meta)
    assert {p.device.type for p in meta.parameters()} == {"meta"}


# --- what the rest of the library needs -----------------------------------------------------------------------------


def test_every_family_is_calibrated_both_ways_and_priced(case):
    """Where nothing can be merged both ways see the same tokens, so that their statistics agree."""
    keep = case.see()
    one, other = (
        adamerge.calibrate(case.model, case.images, r_max=0.5, how=how, progress=False)
        for how in ("iterative", "sequential")
    )
    assert one.depth == find_host(case.model).depth
    close(torch.tensor(other.mean), torch.tensor(one.mean), 1e-4)
    assert torch.equal(case.see(), keep)
    full = adamerge.flops.meter(case.model).unmerged()
    case.merged(tome(3))
    with torch.no_grad():
        image_entry(case.model)(case.images)
    assert (adamerge.flops.cost(case.model).paper < full.paper).all()


def test_views_take_tokens_padded_and_packed(case):
    """Leading dimensions are free, for runtimes that keep all tokens of a batch in one row."""
    host = find_host(case.model)
    for view in host.views:
        assert isinstance(view, View)
        x = torch.randn(2, 5, view.shape.dim)
        with torch.no_grad():
            attended = torch.randn(2, 5, view.shape.heads, view.shape.key_dim)
            padded = (*view.qkv(x), view.project(attended), view.mlp(x))
            packed = (*view.qkv(x.flatten(0, 1)), view.project(attended.flatten(0, 1)), view.mlp(x.flatten(0, 1)))
        assert padded[0].shape == (2, 5, view.shape.heads, view.shape.key_dim)
        for a, b in zip(padded, packed, strict=True):
            close(b, a.flatten(0, 1))
    assert isinstance(host.views[0], RotaryView) == bool(host.convention.rotary_keyword)


def real(member: Member) -> nn.Module:
    """The model that stands in the README as an example of a family, without weights."""
    if member.library == "timm":
        return timm.create_model(member.example)
    if member.library == "torchvision":
        return torchvision.models.get_model(member.example)
    open_clip = pytest.importorskip("open_clip")
    config = open_clip.get_model_config(member.example)
    vision = open_clip.CLIPVisionCfg(**config["vision_cfg"])
    return open_clip.model._build_vision_tower(config["embed_dim"], vision)


OFFLINE = [member for member in ZOO if member.library != "transformers" and "(" not in member.example]


@pytest.mark.parametrize("member", OFFLINE, ids=str)
def test_the_example_of_a_family_is_supported_and_like_the_tiny_one(member):
    """transformers' examples are names on the hub, for which a network is needed."""
    with torch.device("meta"):
        model = real(member)
    host, tiny = find_host(model), find_host(member.build())
    assert type(host.views[0]) is type(tiny.views[0]) and type(host.convention) is type(tiny.convention)


def test_the_zoo_has_every_library():
    assert {member.library for member in ZOO} == set(LIBRARIES)
    assert len({str(member) for member in ZOO}) == len(ZOO)
