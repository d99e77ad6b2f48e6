"""Recipes beside weights: `adamerge.json`, in a folder or on the hub."""

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from adamerge.core.errors import BadOption
from adamerge.core.parts import from_json, to_json
from adamerge.core.recipe import Recipe
from adamerge.core.stats import write_atomically
from adamerge.models.surgery import applied

NAME = "adamerge.json"
SCHEMA = 1


def save_recipe(what: nn.Module | Recipe, folder: str | os.PathLike[str]) -> Path:
    """Write a recipe, or that of a merged model, with its statistics to `folder/adamerge.json`; return the path.

    Put it where the weights are: `model.save_pretrained(folder)` writes the same files merged or not.
    """
    recipe = what if isinstance(what, Recipe) else applied(what).recipe
    path = Path(folder) / NAME
    write_atomically(path, json.dumps({"schema": SCHEMA, "recipe": to_json(recipe)}, indent=1) + "\n")
    return path


def load_recipe(source: str | os.PathLike[str], revision: str | None = None) -> Recipe:
    """The recipe in a folder, in a file, or in a repository of the Hugging Face hub such as `owner/name`.

    `revision` is a branch, tag or commit of the repository.
    """
    path = Path(source)
    if path.is_dir():
        path = path / NAME
    elif not path.exists():
        path = _download(str(source), revision)
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadOption(f"cannot read the recipe {path}: {error}. adamerge.save_recipe writes it.") from error
    if isinstance(content, dict) and content.get("part") == "Recipe":
        return Recipe.load(path)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise BadOption(f"{path} must have schema {SCHEMA}, as adamerge.save_recipe writes it; it has {found!r}")
    recipe = from_json(content.get("recipe"))
    if not isinstance(recipe, Recipe):
        raise BadOption(f"{path} holds no recipe but {type(recipe).__name__}; adamerge.save_recipe writes one")
    return recipe


def _download(source: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, NAME, revision=revision))
    except Exception as error:  # no such repository, no such file, no network, no permission
        raise BadOption(
            f"{source!r} is neither a folder or file here nor a repository on the hub with {NAME}: {error}"
        ) from error
