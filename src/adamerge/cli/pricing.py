"""The price list behind `adamerge flops`: costs without running a single image."""

from collections.abc import Iterator

import torch

from adamerge.cli.loading import EMBEDDED
from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence
from adamerge.core.match import Links
from adamerge.core.recipe import Recipe
from adamerge.flops import Cost, meter


def price(name: str, recipe: Recipe) -> Iterator[str]:
    """Lines with both costs, unmerged and under `recipe`, for an image of average redundancy."""
    prices = meter(_untrained(name))
    full = prices.unmerged()
    yield f"{name}: {prices.patches} patch tokens + {prices.prefix} prefix, {len(prices.blocks)} blocks"
    yield _line("unmerged", full, full)
    left, counts = prices.patches, []
    for layer in range(len(prices.blocks)):
        left -= _merged(recipe, layer, len(prices.blocks), left)
        counts.append(left)
    yield _line("merged", prices.cost(torch.tensor([counts]), recipe), full)
    yield f"tokens left after each layer's merge: {' '.join(map(str, counts))}"


def _merged(recipe: Recipe, layer: int, depth: int, left: int) -> int:
    """How many tokens an average image merges at a layer that `left` tokens reach."""
    sources = left // 2
    mean = recipe.stats.mean[layer] if recipe.stats is not None and layer < recipe.stats.depth else 0.0
    value = torch.full((1, max(sources, 1)), mean)
    links = Links(value, torch.zeros_like(value, dtype=torch.long), torch.ones_like(value, dtype=torch.bool), sources)
    token = torch.zeros(1, left, 1)
    return min(int(recipe.budget(links, Evidence(token, token[..., 0], layer, depth))), sources)


def _line(label: str, cost: Cost, full: Cost) -> str:
    paper, true = cost.paper.item() / 1e9, cost.true.item() / 1e9
    cuts = f"(-{1 - cost.paper.item() / full.paper.item():.1%} / -{1 - cost.true.item() / full.true.item():.1%})"
    return f"{label:>9}: {paper:.3f} GMACs in the paper's count, {true:.3f} true {cuts if cost is not full else ''}"


def _untrained(name: str):
    if name == EMBEDDED:
        from adamerge.embedded import build

        return build().eval()
    import timm

    if name.split(".")[0] not in timm.list_models():
        raise BadOption(f"timm has no model {name!r}; see timm.list_models('vit*')")
    return timm.create_model(name).eval()
