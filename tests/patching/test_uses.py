"""What people do with the modules of a merged model, and what they are told where it cannot work."""

import copy
from typing import Any

import pytest
import torch
from hosts.families import build, pictures
from hosts.zoo import ZOO
from timm.models._features import FeatureGetterNet
from timm.models._features_fx import create_feature_extractor
from timm.utils.attention_extract import AttentionExtract
from torch import Tensor, nn

import adamerge
from adamerge.core.errors import BadOption, HookNotCalled, PatchConflict, UnsupportedModel
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.flops import meter
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome
from adamerge.patching.apply import stack_of

ADAPTIVE = published(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))


def merged(recipe: Recipe | None = None) -> Any:
    return adamerge.apply(build("vit"), recipe or tome(2))


# --- hooks that cannot run, and methods that were replaced -----------------------------------------------------------


@pytest.mark.parametrize("path", ["", "attn"])
def test_a_forward_of_its_own_that_would_not_run_is_refused_and_named(path):
    model: Any = build("vit")
    part = model.blocks[1].get_submodule(path)
    part.forward = part.forward
    where = rf"`forward` was replaced on {'attn of ' if path else ''}block 1"
    with pytest.raises(HookNotCalled, match=where):
        adamerge.apply(model, tome(2))
    assert isinstance(model.blocks, nn.Sequential), "nothing was changed"
    del part.forward
    adamerge.apply(model, tome(2))
    part.forward = part.forward
    with pytest.raises(HookNotCalled, match=where):
        model(pictures(1))
    del part.forward
    assert model(pictures(1)).shape == (1, 10)


def test_a_hook_on_a_module_that_no_view_calls_is_refused_and_named():
    member = next(member for member in ZOO if str(member) == "transformers/VideoMAE")
    member.require()
    model, images = member.build(), member.images()
    adamerge.apply(model, tome(2))
    uncalled = stack_of(model).block(1).get_submodule("attention")
    handle = uncalled.register_forward_hook(lambda *_: None)
    with pytest.raises(HookNotCalled, match="there is a hook on attention of block 1, which a merged model does not"):
        member.see(model, images)
    adamerge.remove(model)
    with pytest.raises(HookNotCalled, match="there is a hook on attention of block 1"):
        adamerge.apply(model, tome(2))
    handle.remove()
    adamerge.apply(model, tome(2))


def test_hooks_on_the_container_run_before_and_after():
    model: Any = build("vit")
    seen: list[str] = []
    model.blocks.register_forward_hook(lambda *_: seen.append("early"))
    adamerge.apply(model, tome(2))
    model.blocks.register_forward_hook(lambda *_: seen.append("late"))
    model(pictures(1))
    adamerge.remove(model)(pictures(1))
    assert seen == ["early", "late"] * 2


def test_hooks_of_the_whole_process_see_the_blocks_and_change_nothing():
    model, images = merged(ADAPTIVE), pictures(3)
    seen: list[str] = []
    with torch.inference_mode():
        expected = model(images)
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        try:
            got = model(images)
        finally:
            handle.remove()
    torch.testing.assert_close(got, expected)
    assert seen.count("Block") == 3 and seen.count("Attention") == 9, "attention runs once for every image"


def test_timm_extracts_the_attention_of_merged_tokens_by_hooks():
    model, images = merged(), pictures(2)
    for block in model.blocks:
        block.attn.fused_attn = False
    found = AttentionExtract(model, method="hook")(images)
    assert [tuple(weights.shape) for weights in found.values()] == [(2, 4, n, n) for n in (17, 15, 13)]
    for weights in found.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_calibration_says_that_it_does_not_call_a_hook_on_a_block():
    model: Any = build("vit")
    handle = model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hook on block 1; calibration .* do not call hooks on a block"):
        adamerge.calibrate(model, pictures(4), published(6.0), progress=False)
    handle.remove()
    model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    adamerge.calibrate(model, pictures(4), published(6.0), progress=False)


# --- graphs and wrappers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm/ViT", "torchvision/ViT", "timm/DINOv3", "open_clip/CLIP"])
def test_torch_fx_is_refused_with_what_to_do_instead(name, unchecked):
    member = next(member for member in ZOO if str(member) == name)
    member.require()
    model: Any = adamerge.apply(member.build(), ADAPTIVE)
    tower = model.visual if name == "open_clip/CLIP" else model
    with pytest.raises(BadOption, match=r"torch.fx cannot trace a merged model, .* forward hooks on the blocks"):
        torch.fx.symbolic_trace(tower)


def test_extractors_by_torch_fx_are_refused_before_and_after(unchecked):
    with pytest.raises(BadOption, match=r"torch.fx cannot trace"):
        create_feature_extractor(merged(), {"blocks.1": "features"})
    with pytest.raises(UnsupportedModel, match=r"a graph that torch.fx made .* pass the model itself"):
        adamerge.apply(create_feature_extractor(build("vit"), {"blocks.1": "features"}), tome(2))


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_trace_of_fixed_counts_is_right_for_other_batches(unchecked):
    model = merged()
    with torch.no_grad():
        traced: Any = torch.jit.trace(model, pictures(2))
        for images in (pictures(2, seed=3), pictures(5)):
            torch.testing.assert_close(traced(images), model(images))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["timm/ViT", "timm/DINOv3"])
def test_a_torchscript_trace_of_adaptive_counts_is_refused(name):
    member = next(member for member in ZOO if str(member) == name)
    with torch.no_grad(), pytest.raises(BadOption, match=r"torch.jit.trace would record how many tokens merge"):
        torch.jit.trace(adamerge.apply(member.build(), ADAPTIVE), member.images(2))


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_trace_of_packed_blocks_takes_the_reference(unchecked):
    model = adamerge.apply(build("vit"), tome(2), "packed")
    with torch.no_grad():
        traced: Any = torch.jit.trace(model, pictures(2))
        torch.testing.assert_close(traced(pictures(3)), model(pictures(3)))


@pytest.mark.filterwarnings("ignore")
def test_torchscript_refuses_to_compile_a_merged_model_and_says_what_to_do():
    with pytest.raises(BadOption, match=r"torch.jit.script cannot compile .* by adamerge.export or torch.export"):
        torch.jit.script(merged())


def test_features_only_models_merge():
    model, images = FeatureGetterNet(build("vit"), out_indices=(0, 1)), pictures(2)
    plain = model(images)
    adamerge.apply(model, none())
    assert all(torch.equal(a, b) for a, b in zip(model(images), plain, strict=True))
    adamerge.apply(model, tome(2))
    first, last = model(images)
    assert first.shape == last.shape == (2, 48, 4, 4) and adamerge.trace(model).merged.tolist() == [4, 4]
    assert [len(torch.unique(last[0].flatten(1), dim=1).T)] == [12]
    assert all(torch.equal(a, b) for a, b in zip(adamerge.remove(model)(images), plain, strict=True))


def test_blocks_are_cut_off_before_merging_not_after():
    model: Any = merged()
    images = pictures(2)
    with pytest.raises(PatchConflict, match=r"prune_intermediate_layers would cut .* adamerge.remove\(model\), prune"):
        FeatureGetterNet(model, out_indices=(1,))
    assert len(model.blocks) == 3
    adamerge.remove(model)
    model.prune_intermediate_layers([1])
    adamerge.apply(model, tome(2))
    assert len(model.forward_intermediates(images, intermediates_only=True)) == 2


# --- blocks as modules -----------------------------------------------------------------------------------------------


def test_a_loop_over_the_blocks_reads_and_changes_them():
    model, images = merged(), pictures(2)
    before, heads = model(images), []
    for block in model.blocks:
        heads.append(block.attn.num_heads)
        block.requires_grad_(False)
        block.mlp = nn.Sequential(copy.deepcopy(block.mlp), nn.Tanh())
    assert heads == [4] * 3 and not any(p.requires_grad for p in model.blocks.parameters())
    after = model(images)
    assert not torch.allclose(after, before)
    assert torch.equal(adamerge.apply(adamerge.remove(model), tome(2))(images), after)


def test_blocks_of_a_merged_model_are_not_exchanged():
    model, images = merged(), pictures(2)
    before, another = model(images), copy.deepcopy(model.blocks[0])

    def by_name() -> None:
        own = model.blocks[1]
        setattr(model.blocks, "1", another)
        try:
            model(images)
        finally:
            setattr(model.blocks, "1", own)

    def by_number() -> None:
        model.blocks[1] = another

    def cut() -> None:
        del model.blocks[2]

    for change in (by_name, by_number, cut, lambda: model.blocks.append(another), lambda: model.blocks.pop(2)):
        with pytest.raises(PatchConflict, match=r"cannot be exchanged, added or deleted.* adamerge.remove\(model\)"):
            change()
    assert torch.equal(model(images), before)
    plain: Any = adamerge.remove(model)
    plain.blocks[1] = another
    assert not torch.equal(adamerge.apply(model, tome(2))(images), before)


class Adapter(nn.Module):
    """A linear layer with a correction of low rank, as adapters are written by hand."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("runtime", ["reference", "packed"])
def test_adapters_may_wrap_layers_before_and_after(runtime):
    model: Any = adamerge.apply(build("vit"), tome(2), runtime)
    images = pictures(2)
    with torch.inference_mode():
        before, cost = model(images), meter(adamerge.remove(model)).unmerged
        adamerge.apply(model, tome(2), runtime)
        for block in model.blocks:
            block.attn.qkv, block.attn.proj = Adapter(block.attn.qkv), Adapter(block.attn.proj)
        after = model(images)
        assert not torch.allclose(after, before)
        assert meter(adamerge.remove(model)).unmerged != cost
        assert torch.equal(adamerge.apply(model, tome(2), runtime)(images), after)
