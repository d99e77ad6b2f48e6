"""Draws what merging does to images: reads, runs and draws one image at a time, and continues where it was stopped."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from adamerge.core.errors import AdamergeError, BadImages, BadOption
from adamerge.core.files import check_can_write, write_atomically
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.data.class_names import describe_output
from adamerge.data.inputs import Input, InputReader
from adamerge.digest import digest_json
from adamerge.flops import Meter, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import applied, temporarily_patched, trace
from adamerge.patching.stack import install
from adamerge.plots.animation import animation
from adamerge.plots.image_view import ImageView, view_of
from adamerge.plots.layer_sheet import layer_sheet
from adamerge.plots.page import write_page
from adamerge.plots.strips import compare_methods
from adamerge.plots.svg_sheet import svg_sheet

RECORD = "show.json"
ANIMATIONS = ("webp", "gif", "none")


@dataclass(frozen=True)
class ShowOptions:
    """Which files to write besides the PNG: SVG, an animation (webp, gif or none), and a page of HTML."""

    svg: bool = True
    animation: str = "webp"
    html: bool = False

    def __post_init__(self) -> None:
        if self.animation not in ANIMATIONS:
            raise BadOption(f"the animation must be one of {', '.join(ANIMATIONS)}; got {self.animation!r}")


@dataclass
class ShowReport:
    """The files that were written, by image; how many images were there already; and what could not be read."""

    written: dict[str, list[str]] = field(default_factory=dict)
    skipped: int = 0
    unreadable: list[str] = field(default_factory=list)


class Shower:
    """A model with recipes by name, which looks at images one at a time."""

    def __init__(self, model: nn.Module, recipes: Mapping[str, Recipe]):
        self.model, self.recipes, self.host = model, recipes, find_host(model)
        self.entry = self.host.entry or model
        self.reader = InputReader(model)
        self.prices: Meter = meter(model)

    def views(self, one: Input) -> list[ImageView]:
        """How each recipe merges the patches of one image."""
        parameter = next(self.model.parameters())
        seen = self.reader.read(one)
        batch = seen[None].to(parameter.device, parameter.dtype)
        found: list[ImageView] = []
        with temporarily_patched(self.model), torch.inference_mode():
            install(self.host, self.host.container)
            unmerged = self.entry(batch)
            before = describe_output(self.model, unmerged, unmerged)
            for method, recipe in self.recipes.items():
                with applied(self.model, recipe):
                    output = self.entry(batch)
                    passed = trace(self.model)
                view = view_of(
                    passed, 0, name=one.name, method=method, frames=self.reader.pixels(seen), shape=self.host.image
                )
                cost = self.prices.cost(passed.counts, recipe).true.item()
                after = describe_output(self.model, output, unmerged)
                cut = 1 - cost / self.prices.unmerged().true.item()
                found.append(replace(view, before=before, after=after, cut=cut))
        return found


def show_images(
    model: nn.Module,
    inputs: Sequence[Input],
    recipes: Mapping[str, Recipe],
    out: str | os.PathLike[str],
    options: ShowOptions,
    *,
    name: str,
) -> ShowReport:
    """Draw what each recipe does to each image, into the folder `out`; `name` is that of the model.

    Images that were drawn before with the same settings are skipped, files that cannot be read are listed.
    """
    check_can_write(out, folder=True)
    shower, report = Shower(model, recipes), ShowReport()
    record = DrawnRecord(Path(out), _settings(shower, options, name))
    for one in (bar := tqdm(inputs, desc="drawing")):
        bar.set_postfix_str(one.name[-24:], refresh=False)
        try:
            if record.has(one):
                report.skipped += 1
                continue
            files = draw(shower.views(one), Path(out), options, name)
        except BadImages as error:
            report.unreadable.append(f"{one.source} ({error})")
            continue
        except OSError as error:
            if isinstance(error, AdamergeError):
                raise
            report.unreadable.append(f"{one.source} ({error})")
            continue
        report.written[one.name] = files
        record.add(one, files)
    return report


def draw(views: Sequence[ImageView], out: Path, options: ShowOptions, model: str) -> list[str]:
    """Write all files of one image; returns their names."""
    files: list[Path] = []
    for view in views:
        stem = f"{view.name}-{file_name(view.method)}"
        files.append(layer_sheet(view, out / f"{stem}.png"))
        if options.svg:
            files.append(svg_sheet(view, out / f"{stem}.svg"))
        if options.animation != "none":
            files.append(animation(view, out / f"{stem}.{options.animation}"))
    if len(views) > 1:
        files.append(compare_methods(views, out / f"{views[0].name}-methods.png"))
    if options.html:
        files.append(write_page(views, out / f"{views[0].name}.html", model=model))
    return [file.name for file in files]


def file_name(method: str) -> str:
    """The name of a method without what file names should not have."""
    kept = "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in method)
    return "-".join(part for part in kept.split("-") if part)


def _settings(shower: Shower, options: ShowOptions, name: str) -> str:
    """A digest of everything but the images that the pictures depend on."""
    recipes = {method: to_json(recipe) for method, recipe in shower.recipes.items()}
    return digest_json(json.loads(json.dumps([name, shower.host.fingerprint(), recipes, vars(options)], default=str)))


class DrawnRecord:
    """The record of a folder: which images were drawn with which settings; written after every image."""

    def __init__(self, out: Path, settings: str):
        self.out, self.settings = out, settings
        self.images: dict[str, Any] = {}
        try:
            known = json.loads((out / RECORD).read_text(encoding="utf-8"))
            if known["settings"] == settings:
                self.images = dict(known["images"])
        except (OSError, ValueError, TypeError, KeyError):
            pass  # no record, or none of ours: everything is drawn

    def has(self, one: Input) -> bool:
        """Whether all files of this image are there, and the image has not changed since."""
        known = self.images.get(one.name)
        if not isinstance(known, dict) or known.get("input") != one.stamp():
            return False
        return all((self.out / str(file)).is_file() for file in known.get("files", [""]))

    def add(self, one: Input, files: Sequence[str]) -> None:
        """Note that an image was drawn."""
        self.images[one.name] = {"input": one.stamp(), "files": list(files)}
        content = {"settings": self.settings, "images": self.images}
        write_atomically(self.out / RECORD, json.dumps(content, indent=1) + "\n")
