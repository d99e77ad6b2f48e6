"""The layers of a plain transformers block, in the order in which they run."""

from operator import attrgetter

from torch import Tensor, nn

from adamerge.hosts.block_params import PlainBlockLayers
from adamerge.hosts.transformers_towers import BlockPaths

# The children of the library's own MLPs, in the order in which they run.  Gated ones have more.
MLPS = (
    ("fc1", "activation_fn", "fc2"),
    ("fc1", "activation", "fc2"),
    ("up_proj", "act_fn", "down_proj"),
    ("dense", "intermediate_act_fn"),
)


def plain_layers(block: nn.Module, layout: BlockPaths) -> PlainBlockLayers | None:
    """The layers of a block in evaluation mode; None if it has other layers than a plain block."""
    attention = block.get_submodule(layout.attention)
    project = [block.get_submodule(path) for path in layout.project]
    mlp = [block.get_submodule(path) for path in layout.mlp]
    after_attention, steps = _without_idle(project), _without_idle([step for part in mlp for step in _steps(part)])
    if block.training or layout.biases or len(after_attention) not in (1, 2) or len(steps) not in (4, 5):
        return None
    gammas = [_gamma(rest) for rest in (after_attention[1:], steps[4:])]
    if [len(rest) for rest in (after_attention[1:], steps[4:])] != [int(gamma is not None) for gamma in gammas]:
        return None
    query, key, value = attrgetter(*layout.projections)(attention)
    return PlainBlockLayers(
        norm1=block.get_submodule(layout.norm),
        qkv=(query, key, value),
        project=after_attention[0],
        gamma1=gammas[0],
        norm2=steps[0],
        fc1=steps[1],
        act=steps[2],
        fc2=steps[3],
        gamma2=gammas[1],
        around=(attention, *_parents(block, layout.attention), *project, *mlp),
    )


def _steps(module: nn.Module) -> list[nn.Module]:
    """The layers of an MLP of the library, in order; any other module counts as one layer."""
    names = {name for name, _ in module.named_children()}
    found = [order for order in MLPS if set(order) == names and _of_library(module)]
    return [module.get_submodule(name) for name in found[0]] if found else [module]


def _without_idle(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules without those that do nothing in evaluation mode."""
    return [module for module in modules if not _is_idle(module)]


def _is_idle(module: nn.Module) -> bool:
    drops_paths = _of_library(module) and type(module).__name__.endswith("DropPath")
    return not module.training and (type(module) in (nn.Identity, nn.Dropout) or drops_paths)


def _gamma(modules: list[nn.Module]) -> Tensor | None:
    """The factors of a LayerScale; None if there is none."""
    scales = [module for module in modules if _of_library(module) and type(module).__name__.endswith("LayerScale")]
    return scales[0].get_parameter("lambda1") if scales else None


def _of_library(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def _parents(block: nn.Module, path: str) -> list[nn.Module]:
    """The modules between a block and one of its parts."""
    steps = path.split(".")
    return [block.get_submodule(".".join(steps[:depth])) for depth in range(1, len(steps))]
