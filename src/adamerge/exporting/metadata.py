"""What an exported file says about itself: recipe, model, preprocessing, versions."""

import json
from importlib.metadata import version
from typing import Any

from torch import nn

from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.exporting.program import INPUT, Program
from adamerge.hosts.base import Host

SCHEMA = 1
# The name under which a file has its metadata, as JSON text.
KEY = "adamerge"


def describe(host: Host, recipe: Recipe, program: Program) -> dict[str, Any]:
    """The metadata of an exported model."""
    return {
        "schema": SCHEMA,
        "torch": version("torch"),
        "model": type(host.model).__name__,
        "fingerprint": host.fingerprint(),
        "recipe": to_json(recipe),
        "input": {"name": INPUT, "image": list(program.image)},
        "outputs": list(program.outputs),
        "preprocessing": preprocessing(host.model),
    }


def preprocessing(model: nn.Module) -> dict[str, Any] | None:
    """How images are made for a model of timm; None for other libraries, whose processors are files of their own."""
    if not hasattr(model, "pretrained_cfg"):
        return None
    from timm.data import resolve_model_data_config  # pyright: ignore[reportPrivateImportUsage]

    return json.loads(json.dumps(resolve_model_data_config(model)))
