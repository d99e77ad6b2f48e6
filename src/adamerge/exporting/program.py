"""A merged model as one graph of torch.export, with the number of images free."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from adamerge.core.errors import CannotExport
from adamerge.core.recipe import Recipe
from adamerge.exporting.backend import ExportStack
from adamerge.hosts.base import Host
from adamerge.patching.stack import install

INPUT, OUTPUT, BATCH = "images", "output", "batch"
# More images than this in one call are refused by the exported program.
MOST_IMAGES = 4096


@dataclass(frozen=True)
class Program:
    """The graph of a merged model, its outputs by name, and the shape of one image."""

    exported: ExportedProgram
    outputs: tuple[str, ...]
    image: tuple[int, ...]


class NamedOutputs(nn.Module):
    """Calls a model on images and gives the tensors of its output that have these names."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        found = tensors_of(self.model(images))
        return tuple(found[name] for name in self.names)


def tensors_of(output: Any, name: str = OUTPUT) -> dict[str, Tensor]:
    """The tensors of a model's output by name: the fields of transformers' outputs, else `output`, `output_1`, …"""
    if isinstance(output, Tensor):
        return {name: output}
    if isinstance(output, Mapping):
        return {key: found for field, value in output.items() for key, found in tensors_of(value, str(field)).items()}
    if isinstance(output, (tuple, list)):
        parts = (tensors_of(value, f"{name}_{number}") for number, value in enumerate(output))
        return {key: found for part in parts for key, found in part.items()}
    return {}


def export_program(host: Host, recipe: Recipe, images: Tensor, outputs: tuple[str, ...]) -> Program:
    """Trace the model of `host` with merging; `images` are a few examples.  The blocks stay replaced afterwards."""
    stack = ExportStack(host, recipe, unfolded=_reads_patches(host, recipe, images[:2]))
    hooks = stack.find_hooks()
    if hooks is not None:
        raise CannotExport(
            f"{hooks.reason}; an exported model has no hooks. Remove them first: the value that "
            "`register_forward_hook` returned has a method `remove`."
        )
    install(host, stack)
    model = NamedOutputs(host.entry or host.model, outputs).eval()
    # An example of one image would fix the number of images.
    example = images[:2] if len(images) > 1 else images[:1].repeat(2, *(1 for _ in images.shape[1:]))
    free = ({0: Dim(BATCH, min=1, max=MOST_IMAGES)},)
    try:
        with torch.no_grad(), quiet_torch():
            exported = torch.export.export(model, (example,), dynamic_shapes=free, strict=False)
    except Exception as error:  # torch raises many types for what it cannot trace
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CannotExport(
            f"torch.export cannot trace this {type(host.model).__name__}: {type(error).__name__}: {first}. "
            "Does torch.export.export(model, (images,), strict=False) trace it after adamerge.remove(model)? If not, "
            "the model's own code is the reason."
        ) from error
    return Program(exported, outputs, tuple(images.shape[1:]))


def _reads_patches(host: Host, recipe: Recipe, images: Tensor) -> bool:
    """Whether the output depends on what the patches get after the last block, found by leaving it out."""
    found: list[dict[str, Tensor]] = []
    for unfolded in (True, False):
        install(host, ExportStack(host, recipe, unfolded))
        try:
            with torch.no_grad():
                found.append(tensors_of((host.entry or host.model)(images)))
        except (RuntimeError, ValueError, AssertionError):  # the host needs a token for every patch
            return True
    whole, short = (list(each.values()) for each in found)
    return any(a.shape != b.shape or not torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, short, strict=True))


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Without the warnings of torch's exporters about torch's own future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
