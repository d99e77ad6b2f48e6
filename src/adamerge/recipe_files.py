"""Reads and writes `adamerge.json`, a recipe next to the weights, in a folder or on the Hugging Face hub."""

import json
import os
from pathlib import Path

from torch import nn

from adamerge.core.errors import BadOption
from adamerge.core.recipe import NAME, Recipe
from adamerge.core.weight_patch import file_name
from adamerge.patching.apply import stack_of


def save_recipe(what: nn.Module | Recipe, folder: str | os.PathLike[str]) -> Path:
    """Write a recipe, or that of a merged model, with its statistics to `folder/adamerge.json`; return the path.

    The patch of a repaired recipe is written to `folder/adamerge.safetensors`.  Put them where the weights are:
    `model.save_pretrained(folder)` writes the same files merged or not.
    """
    recipe = what if isinstance(what, Recipe) else stack_of(what).recipe
    path = Path(folder) / NAME
    recipe.save(path)
    return path


def load_recipe(source: str | os.PathLike[str], revision: str | None = None) -> Recipe:
    """The recipe in a folder, in a file, or in a repository of the Hugging Face hub such as `owner/name`.

    `revision` is a branch, tag or commit of the repository.
    """
    return Recipe.load(source if Path(source).exists() else _download(str(source), revision))


def _download(source: str, revision: str | None) -> Path:
    """The recipe's file, with that of its patch beside it, in the cache of the hub."""
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(source, NAME, revision=revision))
        patch = file_name(json.loads(path.read_text(encoding="utf-8")))
        if patch is not None:
            hf_hub_download(source, patch, revision=revision)
        return path
    except BadOption:
        raise
    except Exception as error:  # no such repository, no such file, no network, no permission
        raise BadOption(
            f"{source!r} is neither a folder or file here nor a repository on the hub with {NAME}: {error}"
        ) from error
