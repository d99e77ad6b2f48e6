"""How fast is the call that people write?  Merged models called plainly, beside the unmerged model called in every way.

A case is a model, a way to call it and a batch size.  All contenders of a case run in turn in one process.  Weights are
random: time does not depend on what they mean, and counts adapt to the images all the same.  Rows are added to a CSV
file.  Models whose library is not installed are left out, and named.

    python benchmarks/plain_call.py [--cases vit,autocast,…] [--compile] [--out benchmarks/results/plain-call.csv]
"""

import argparse
import datetime
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reading import append
from torch import Tensor, nn

import adamerge
from adamerge import Recipe
from adamerge.embedded import scenes
from adamerge.hosts.base import find_host
from adamerge.methods import METHODS, dymu, tome
from adamerge.methods import adamerge as published
from adamerge.search.solve import solve
from adamerge.search.variants import VARIANTS
from adamerge.timing import time_call

CALIBRATION = 32
WARM_UP = 4
SPAN_S = 0.1
MOST_CALLS = 100
CUT = 0.25
DEVICE = torch.device("cuda")

Way = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A model that `build` makes, called inside `way` with images of `size` at some batch sizes."""

    name: str
    build: Callable[[], nn.Module]
    batches: tuple[int, ...]
    size: int = 224
    dtype: torch.dtype = torch.bfloat16
    way: Way = torch.inference_mode
    methods: tuple[str, ...] = ("tome", "preset")
    captured: bool = True


def timm_model(name: str, **options: Any) -> nn.Module:
    """A timm model."""
    import timm

    return timm.create_model(name, **options)


def transformers_model(config: str, model: str, **options: Any) -> nn.Module:
    """A transformers model of a configuration."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


def open_clip_tower() -> nn.Module:
    """The vision tower of open_clip's ViT-B/16."""
    import open_clip

    model: Any = open_clip.create_model("ViT-B-16")
    return model.visual


def autocast() -> AbstractContextManager[Any]:
    """Inference under autocast to bfloat16."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode())
    stack.enter_context(torch.autocast("cuda", torch.bfloat16))
    return stack


VIT = partial(timm_model, "vit_base_patch16_224")
CLIP_L = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14)
SO400M = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, patch_size=14)
ALL = ("tome", "published", "dymu", "preset")
OTHERS = ("pitome", "dsm", "tofu", "evit", "ats", "vid_tldr", "random")
CASES = {
    "vit": Case("ViT-B/16 bf16", VIT, (256, 32, 8, 1), methods=ALL),
    "autocast": Case("ViT-B/16 float32, autocast", VIT, (256, 32, 8), dtype=torch.float32, way=autocast, methods=ALL),
    "gradients": Case("ViT-B/16 bf16, gradients on", VIT, (256,), way=nullcontext, methods=("tome",), captured=False),
    "methods": Case("ViT-B/16 bf16, other methods", VIT, (256,), methods=OTHERS, captured=False),
    "dinov3": Case("DINOv3 ViT-B/16 bf16", partial(timm_model, "vit_base_patch16_dinov3"), (128, 8), size=256),
    "hf-vit": Case(
        "transformers ViT-B bf16", partial(transformers_model, "ViTConfig", "ViTForImageClassification"), (128, 32, 8)
    ),
    "hf-dinov2": Case(
        "transformers DINOv2-B bf16",
        partial(transformers_model, "Dinov2Config", "Dinov2Model", image_size=224),
        (128, 32),
    ),
    "hf-clip": Case(
        "transformers CLIP-L/14 bf16",
        partial(transformers_model, "CLIPVisionConfig", "CLIPVisionModel", **CLIP_L),
        (64, 32),
    ),
    "hf-siglip": Case(
        "transformers SigLIP-so400m/14 bf16",
        partial(transformers_model, "SiglipVisionConfig", "SiglipVisionModel", image_size=384, **SO400M),
        (32,),
        size=384,
    ),
    "open_clip": Case("open_clip ViT-B/16 bf16", open_clip_tower, (128, 32)),
}


def recipe_for(method: str, model: nn.Module, images: Tensor, patches: int, depth: int) -> Recipe:
    """A recipe that cuts about a quarter of the cost; adaptive ones are calibrated on `images`."""
    if method == "preset":
        return adamerge.presets.best(model, images, CUT)
    if method in OTHERS:
        variant = VARIANTS[method]
        return solve(model, images, METHODS[method], CUT, tolerance=0.02, options=variant.options).recipe
    # Fixed counts are the same share of the patches as 8 of 196 at 12 layers.
    r = max(1, round(8 * patches / 196 * 12 / depth))
    if method == "tome":
        return tome(r)
    recipe = published(2.0 * r) if method == "published" else dymu(float(r))
    stats = adamerge.calibrate(model, images, recipe, how="sequential", progress=False)
    return recipe.with_stats(stats)


def contenders(case: Case, model: nn.Module, images: Tensor, compiled: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything that is timed at one batch size: a name and a call."""
    yield "unmerged plain", lambda: model(images)
    models = {"unmerged": model}
    if compiled:
        torch._dynamo.reset()
        models["unmerged compiled"] = torch.compile(deepcopy(model), dynamic=False)  # pyright: ignore
        yield "unmerged compiled plain", partial(models["unmerged compiled"], images)
    for method, recipe in RECIPES[case.name].items():
        models[method] = adamerge.apply(deepcopy(model), recipe)
        yield f"{method} plain", partial(models[method], images)
    for name, each in models.items() if case.captured else ():
        try:
            yield f"{name} captured", partial(adamerge.capture(each, images), images)
        except Exception as error:  # Some hosts cannot be captured; the row is left out, and the reason printed.
            print(f"{case.name}, {name} captured: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)


RECIPES: dict[str, dict[str, Recipe]] = {}
CUTS: dict[str, dict[str, float]] = {}


def make_recipes(case: Case, model: nn.Module, images: Tensor) -> None:
    """The recipes of a case, and the share of the true cost that each saves on `images`.

    They are made on a copy of the model in bfloat16: calibrating in float32 takes a minute longer.
    """
    model, images = deepcopy(model).to(torch.bfloat16), images.to(torch.bfloat16)
    depth = find_host(model).depth
    with torch.inference_mode():
        probe = adamerge.apply(deepcopy(model), tome(1))
        probe(images[:1])
        patches = adamerge.trace(probe).patches
    RECIPES[case.name] = {name: recipe_for(name, model, images, patches, depth) for name in case.methods}
    unmerged, CUTS[case.name] = adamerge.flops.meter(model).unmerged().true, {}
    for name, recipe in RECIPES[case.name].items():
        merged = adamerge.apply(deepcopy(model), recipe)
        with torch.inference_mode():
            merged(images)
        CUTS[case.name][name] = 1 - float(adamerge.flops.cost(merged).true.mean()) / float(unmerged)


def measure(case: Case, batch: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one case at one batch size."""
    torch.manual_seed(0)
    model: Any = case.build().to(DEVICE, case.dtype).eval()
    drawn = scenes(0, max(batch, CALIBRATION), seed=5, size=case.size, device=DEVICE).images
    images = ((drawn - 0.5) / 0.5).to(case.dtype)
    if case.name not in RECIPES:
        make_recipes(case, model, images[:CALIBRATION])
    images = images[:batch].contiguous()
    times: dict[str, list[float]] = {}
    with case.way(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = dict(contenders(case, model, images, arguments.compile))
        counts = {}
        for name, call in calls.items():
            warm = [time_call(call, DEVICE)[1] for _ in range(WARM_UP)]
            counts[name] = max(1, min(MOST_CALLS, round(SPAN_S / min(warm))))
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                _, seconds = time_call(lambda call=call, name=name: [call() for _ in range(counts[name])][-1], DEVICE)
                times.setdefault(name, []).append(1e3 * seconds / counts[name])
    medians = {name: statistics.median(column) for name, column in times.items()}
    best = min(ms for name, ms in medians.items() if name.startswith("unmerged"))
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": arguments.rounds}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = []
    for name, ms in medians.items():
        cut = CUTS[case.name].get(name.split()[0], 0.0)
        row = {"case": case.name, "batch": batch, "contender": name, "cut_true": round(cut, 4), "ms": round(ms, 4)}
        row |= {"over_plain": round(medians["unmerged plain"] / ms, 3), "over_best": round(best / ms, 3)}
        rows.append({**row, **about, "date": date})
        print(
            f"{case.name:36} {batch:4} {name:24} {ms:9.3f} ms  {row['over_plain']:.2f}  {row['over_best']:.2f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure the cases and add their rows to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--batches", default="", help="only these batch sizes")
    parser.add_argument("--compile", action="store_true", help="compile the unmerged model as well")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a CSV file that rows are added to")
    arguments = parser.parse_args()
    wanted = [int(batch) for batch in arguments.batches.split(",") if batch]
    for case in (CASES[name] for name in arguments.cases.split(",")):
        for batch in case.batches:
            if wanted and batch not in wanted:
                continue
            try:
                rows = measure(case, batch, arguments)
            except ImportError as error:
                print(f"{case.name}: left out, because of {error}", flush=True)
                break
            if arguments.out is not None:
                append(arguments.out, rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
