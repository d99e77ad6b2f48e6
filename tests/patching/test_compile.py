"""Merged models compiled, exported and wrapped for several devices."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import ADAPTIVE, CHOSEN, FIXED
from hosts.families import build, pictures
from hosts.zoo import ZOO, Member
from marks import mostly_slow
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

import adamerge
from adamerge.hosts.base import image_entry
from adamerge.methods import tome
from adamerge.patching import stack
from adamerge.patching.apply import stack_of

SCRIPT = Path(__file__).with_name("compiling.py")


@pytest.fixture(params=[member for member in ZOO if str(member) in CHOSEN], ids=str)
def member(request) -> Member:
    request.param.require()
    return request.param


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 cannot follow dataclasses.replace and breaks the graph"
)
def test_merged_models_compile_to_one_graph():
    """How many tokens an image keeps is known only when it runs: the blocks of an adaptive budget are one operator.

    `fullgraph` raises on the first break.  In a new interpreter, because the checker of types does not compile.
    """
    paths = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 6 and max(found.values()) < 1e-5


def test_the_operator_of_all_blocks_hands_each_layer_its_own_rotary_tables(monkeypatch):
    member = next(member for member in ZOO if str(member) == "timm/rotary_ViT_with_mixed_tables")
    member.require()
    model, images = member.build(), member.images(3)
    with torch.no_grad():
        tables = model.rope.get_embed()
        expected = adamerge.apply(model, ADAPTIVE, "reference")(images)
        adamerge.apply(model, ADAPTIVE)
        answers = [True]
        # The stack believes once that a compiler follows it; the operator then calls the stack again.
        monkeypatch.setattr(stack, "followed_by_compiler", lambda: bool(answers and answers.pop()))
        found = model(images)
    assert not answers and len(tables) == 3
    assert all(float((tables[0] - table).abs().max()) > 0.1 for table in tables[1:])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch cannot leave operators out")
def test_the_cuda_graphs_of_compilers_leave_the_operators_out():
    """They would keep what the blocks keep between calls from being freed, which torch refuses."""
    for name in ("merged_blocks", "gradients_of_merged_blocks"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.adamerge, name).default.tags


@pytest.mark.parametrize("runtime, hooked", [("auto", False), ("auto", True), ("reference", False)])
def test_gradients_that_cannot_be_recomputed_on_the_reference_are_followed_by_a_compiler(runtime, hooked, monkeypatch):
    """A hook takes part in them, and who asks for the reference wants it to run once."""
    model = adamerge.apply(build("vit", depth=3), ADAPTIVE, runtime)
    if hooked:
        stack_of(model).block(1).register_forward_hook(lambda _, args, out: None)
    asked: list[int] = []

    def run_opaque(number, x, tables, parameters):
        asked.append(len(parameters))
        return x

    monkeypatch.setattr(stack, "followed_by_compiler", lambda: True)
    monkeypatch.setattr(stack, "run_opaque", run_opaque)
    assert model(pictures(2)).requires_grad
    assert bool(asked) is (runtime == "auto" and not hooked)
    assert not asked or asked[0] > 20
    with torch.no_grad():
        model(pictures(2))
    assert asked[-1] == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("chosen", "recipe"),
    mostly_slow(
        [(name, recipe) for name in CHOSEN for recipe in CHOSEN[name]],
        # The other two are two more pairs of hosts and recipes that are here.
        [(name, recipes[-1]) for name, recipes in CHOSEN.items() if name != "transformers/DINOv3"],
    ),
)
def test_a_fixed_budget_can_be_exported_for_any_number_of_images(chosen, recipe):
    (member,) = [member for member in ZOO if str(member) == chosen]
    member.require()

    class Seeing(nn.Module):
        def __init__(self, model: Any):
            super().__init__()
            self.model = model

        def forward(self, images):
            return member.see(self.model, images)

    model, images = Seeing(adamerge.apply(member.build(), FIXED[recipe])).eval(), member.images()
    with torch.no_grad():
        free = {"images": {0: torch.export.Dim("batch", min=2, max=64)}}
        program = torch.export.export(model, (images,), dynamic_shapes=free, strict=False)
        for some in (images, images[:3]):
            torch.testing.assert_close(program.module()(some), model(some), atol=1e-5, rtol=1e-5)


def test_data_parallel_runs_a_merged_model(member):
    model, images = adamerge.apply(member.build(), tome(3)), member.images()
    wrapped = nn.DataParallel(image_entry(model))
    with torch.no_grad():
        wrapped(images)
    assert adamerge.trace(model).merged.tolist() == [9] * 4


@pytest.fixture
def replicate(monkeypatch) -> Callable[..., list[nn.Module]]:
    """What DataParallel makes for two devices, here of copies on the CPU."""
    parallel = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(parallel, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(
        parallel,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[tensor.clone() for tensor in tensors] for _ in devices],
    )
    return lambda model, **options: parallel.replicate(model, [0, 1], **options)


@pytest.mark.parametrize("recipe", [tome(3), ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_replica_runs_on_its_own_parameters(member, recipe, replicate):
    """The originals may be anything meanwhile."""
    model, images = member.build(), member.images()
    adamerge.apply(model, recipe)
    with torch.no_grad():
        expected = member.see(model, images)
        first, second = replicate(model, detach=True)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        for replica in (first, second):
            torch.testing.assert_close(member.see(replica, images), expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_replica_reach_the_model(member, replicate):
    model, images = member.build(), member.images()
    adamerge.apply(model, tome(3), "reference")
    member.see(model, images).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    adamerge.apply(model, tome(3))
    member.see(replicate(model)[1], images).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore")  # gloo on a machine with odd host names
def test_distributed_data_parallel_trains_a_merged_model(tmp_path):
    """One process is enough to see that the gradients of shared registries are reduced."""
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for name in ("timm/ViT", "transformers/ViT"):
            (member,) = [member for member in ZOO if str(member) == name]
            member.require()
            model, images = adamerge.apply(member.build(), tome(3)), member.images()
            wrapped: Any = DistributedDataParallel(model)
            out = wrapped(images)
            out = getattr(out, "logits", out)
            out.square().sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        destroy_process_group()
