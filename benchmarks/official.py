"""Time the official code of ToMe and PiToMe against ours; the official code is imported from checkouts of it.

python benchmarks/official.py --tome ../ToMe --pitome ../PiToMe --batch 1,32,256 --device cuda --dtype bf16
"""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from adamerge.cli.bench import table
from adamerge.cli.lists import read_labels, read_sizes
from adamerge.cli.loading import load_model
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.experiments.benchmark import Contender, bench, drawn_images, folder_images, make_entries, twin
from adamerge.experiments.benchmark.contenders import pricing
from adamerge.flops import Meter, meter
from adamerge.methods import METHODS
from adamerge.patching.apply import apply
from adamerge.search.target import Target
from adamerge.search.variants import Variant

# What official PiToMe uses for ViT; ours gets the same.
MARGIN = 0.75


def official_tome(model: nn.Module, checkout: Path, r: int) -> Callable[[Tensor], Any]:
    """Official ToMe with its own proportional attention, on a copy of the model."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    from tome.patch import timm as patch  # pyright: ignore[reportMissingImports]

    net: Any = twin(model)
    patch(net, trace_source=False, prop_attn=True)
    net.r = r
    return net


def official_pitome(model: nn.Module, checkout: Path, ratio: float) -> Callable[[Tensor], Any]:
    """Official PiToMe for DeiT, on a copy of the model.

    Its own `forward` is written for an older timm; this is the same sequence of calls with today's names.
    """
    patch = _load_pitome(checkout)
    net: Any = twin(model)
    with contextlib.redirect_stdout(io.StringIO()):
        patch.apply_patch(net, trace_source=False)
    depth = len(net.blocks)
    bipartite = math.ceil(depth / 2)

    def run(images: Tensor) -> Tensor:
        net._info.update(ratio=[ratio] * depth, size=None, source=None)
        net._info["use_bsm_pitome"] = [True] * bipartite + [False] * (depth - bipartite)
        x = net._pos_embed(net.patch_embed(images))
        for block in net.blocks:
            x = block(x)
        return net.head(net.norm(x)[:, 0])

    return run


def _load_pitome(checkout: Path) -> ModuleType:
    """Only the files that are needed: the package as a whole imports libraries for language models."""
    root = checkout / "algo" / "pitome"
    for name, folder in (("official_pitome", root), ("official_pitome.patch", root / "patch")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    for name in ("merge", "patch.timm", "patch.deit"):
        path = root / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(f"official_pitome.{name}", path)
        if spec is None or spec.loader is None:
            raise SystemExit(f"there is no {path}; is {checkout} a checkout of PiToMe?")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules["official_pitome.patch.deit"]


@dataclass(frozen=True)
class OfficialCode:
    """Official code of a method of ours: `make` takes a model and gives what runs a copy of it with that code."""

    method: str
    label: str
    options: dict[str, Any]
    make: Callable[[nn.Module], Callable[[Tensor], Any]]


def contenders(model: nn.Module, code: OfficialCode, prices: Meter) -> list[Contender]:
    """Official code as it is, and compiled; both cost what our recipe for the same merges costs."""
    recipe = METHODS[code.method](**code.options)
    price = pricing(apply(twin(model), recipe), recipe, prices)
    facts = {"options": json.dumps(code.options), "target": "native"}
    return [
        Contender(code.label, "official", lambda images: code.make(model), price, facts=facts),
        Contender(
            code.label,
            "official compiled",
            lambda images: torch.compile(code.make(model), dynamic=False),
            price,
            facts=facts,
        ),
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    given = parse(words)
    torch.manual_seed(0)
    model = load_model(given.model, given.weights, False, given.device, given.dtype, random=True)
    sizes = read_sizes(given.batch)
    count = given.images or max(*sizes, 64)
    if given.data is None:
        images = drawn_images(model, count, seed=TEST_SEED)
    else:
        images, _ = folder_images(model, given.data, count)
    known = drawn_images(model, given.calibration_images, seed=CALIBRATION_SEED)
    chosen = official_codes(given)
    native = {code.label: Variant(code.method, code.options) for code in chosen}

    def others(net: nn.Module) -> list[Contender]:
        prices = meter(net)
        return [contender for code in chosen for contender in contenders(net, code, prices)]

    labels = read_labels(given.methods) if given.methods else []
    entries = make_entries(model, known, labels, [Target(cut=given.cut)], native=native, cost=given.cost)
    rows = bench(
        model,
        images,
        entries,
        batch_sizes=sizes,
        rounds=given.rounds,
        unmerged=read_labels(given.unmerged) if given.unmerged else None,
        merged=read_labels(given.ways) if given.ways else None,
        others=others,
        name=given.model,
        weights=given.weights.name if given.weights else "random",
        source="drawn" if given.data is None else Path(given.data).name,
        out=given.out,
    )
    shown = Console()
    shown.print(table(rows, shown.width))


def official_codes(given: argparse.Namespace) -> list[OfficialCode]:
    """The official code of each checkout that was given."""
    found: list[OfficialCode] = []
    if given.tome is not None:
        r = given.tome_r
        found.append(OfficialCode("tome", f"tome r={r}", {"r": r}, lambda net: official_tome(net, given.tome, r)))
    if given.pitome is not None:
        ratio = given.pitome_ratio
        options = {"ratio": ratio, "margin": MARGIN, "proportional_attention": False}
        found.append(
            OfficialCode(
                "pitome", f"pitome ratio={ratio}", options, lambda net: official_pitome(net, given.pitome, ratio)
            )
        )
    return found


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--weights", type=Path, help="a safetensors file; random weights without one")
    parser.add_argument("--tome", type=Path, help="a checkout of github.com/facebookresearch/ToMe")
    parser.add_argument("--tome-r", type=int, default=8)
    parser.add_argument("--pitome", type=Path, help="a checkout of github.com/hchautran/PiToMe")
    parser.add_argument("--pitome-ratio", type=float, default=0.95)
    parser.add_argument("--methods", default="adamerge", help="further methods of ours, at --cut")
    parser.add_argument("--cut", type=float, default=0.23)
    parser.add_argument("--cost", choices=["paper", "true"], default="paper")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="an ImageFolder; images are drawn without one")
    parser.add_argument("--images", type=int)
    parser.add_argument("--calibration-images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--unmerged", help="ways to run the unmerged model; all of the device by default")
    parser.add_argument("--ways", help="ways to run our methods; all of the device by default")
    parser.add_argument("--out", type=Path, default=Path("official.csv"))
    given = parser.parse_args(words)
    if given.tome is None and given.pitome is None:
        parser.error("give --tome PATH or --pitome PATH, to checkouts of the official code")
    return given


if __name__ == "__main__":
    main()
