"""Compares methods at equal cost: every cell (method, budget) is solved, measured, stored and compared with a rival."""

import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import adamerge
from adamerge.core.errors import BadImages, BadOption, BadOutput
from adamerge.core.files import check_can_write, write_atomically
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images, batches, labelled_batches, number_of_batches
from adamerge.data.thumbnails import Extremes
from adamerge.digest import digest_samples, digest_tensors, identify_model, sample
from adamerge.distributed import in_order, is_first, my_share, place
from adamerge.evaluation import judge, time_logits
from adamerge.experiments.comparison_rows import ComparisonRow, make_rows, to_csv, to_markdown
from adamerge.experiments.run_record import RunRecord
from adamerge.experiments.store import ResultStore, StoredResult
from adamerge.experiments.versions import versions
from adamerge.flops import CostCount, check_cost, meter
from adamerge.hosts.base import find_host
from adamerge.methods import METHODS
from adamerge.patching.apply import apply, stack_of, temporarily_patched, trace
from adamerge.patching.stack import install
from adamerge.search.solve import make_calibrated_recipe
from adamerge.search.solve_variant import check_variant, solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import PRESET, VARIANTS, Variant, find_variant

Data = Iterable[Any]
CUTS = (0.1, 0.2, 0.3, 0.4, 0.5)
# Batches on which the unmerged and the merged model are timed alternately; one more is a warm-up.
TIMED = 8
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """A variant at a target cost; without a target its options, or its recipe, define its strength."""

    label: str
    variant: Variant
    target: Target | None
    recipe: Recipe | None = None

    @property
    def budget(self) -> str:
        """The target in words."""
        return str(self.target) if self.target is not None else "native"

    @property
    def settings(self) -> dict[str, Any]:
        """The cell as JSON data; recipes with the class names of their parts."""
        return {**asdict(replace(self, recipe=None)), "recipe": to_json(self.recipe)}


def compare(
    model: nn.Module,
    calibration_images: Images,
    data: Data,
    methods: Sequence[str] | Mapping[str, Variant] = (*VARIANTS, PRESET),
    budgets: Sequence[float | Target] = CUTS,
    *,
    out: str | os.PathLike[str],
    native: Mapping[str, Variant] | None = None,
    recipes: Mapping[str, Recipe] | None = None,
    cost: CostCount = "true",
    rival: str = "tome",
    tolerance: float = 0.005,
    name: str = "",
    progress: bool = True,
) -> list[ComparisonRow]:
    """Measure the unmerged model (first row) and every method at every budget; the model is restored afterwards.

    Finished cells are stored in `out/cells`, so that an interrupted run resumes where it stopped.  A cell is left out
    with a warning if the method cannot reach the target or does not support the model.  The results are written to
    `out` as results.csv, results.md and pareto.png.  If they cannot be written, the error has the rows in `result`.

    Args:
        model: a supported classifier.
        calibration_images: images to solve targets on and to calibrate adaptive methods on.
        data: batches of (images, labels), or dicts with pixel_values and labels; iterated once for each cell, so a list
            or a DataLoader.
        methods: labels of `VARIANTS` or `PRESETS`, or variants by label.
        budgets: cuts, or Targets.
        out: the folder for results.
        native: further variants whose options set their strength, such as `{"tome r=8": Variant("tome", {"r": 8})}`.
        recipes: further recipes by label, such as those of `adamerge.tune`.
        cost: the count of multiply-accumulates that the budgets are given in, "true" or "paper".
        rival: the label that all others are compared with at each budget; added if it is not among the methods.
        tolerance: how far a cost may be from its target, as a share of it.
        name: the model's name in the rows.
        progress: show progress bars.
    """
    check_cost(cost)
    check_can_write(out, folder=True)
    cells = _cells(methods, budgets, native or {}, recipes or {}, rival)
    if isinstance(data, Iterator) or isinstance(calibration_images, Iterator):
        raise BadImages("images are read once for each cell; pass a list or a DataLoader, not an iterator")
    label, done = name or type(model).__name__, list[StoredResult]()
    about = {"model": label, "rival": rival}
    comparison = Comparison(model, calibration_images, data, cost, tolerance, progress, about)
    try:
        missing = _measure_all(comparison, cells, Path(out), done)
        rows = make_rows(done, rival, label)
        if is_first():
            _write(rows, missing, Path(out))
    except BadOutput as error:
        error.result = make_rows(done, rival, label) if done else []
        raise
    return rows


def _measure_all(comparison: "Comparison", cells: Sequence[Cell], folder: Path, done: list[StoredResult]) -> list[str]:
    """Load or measure every cell, and add it to `done`; returns why cells were left out."""
    store = ResultStore(folder / "cells")
    missing: list[str] = []
    (record := RunRecord(folder, "compare", _planned(comparison, cells, store))).write()
    for number, cell in enumerate(cells, 1):
        LOGGER.info("cell %d of %d: %s, %s", number, len(cells), cell.label, cell.budget)
        try:
            settings = {**comparison.identity, "cell": cell.settings}
            done.append(store.load_or_measure(settings, partial(measure, comparison, cell)))
        except BadOutput as error:
            done.append(error.result)
            raise
        except BadOption as error:
            missing.append(f"{cell.label}, {cell.budget}: {error}")
            warnings.warn(f"left out: {missing[-1]}", stacklevel=3)
            continue
        if is_first():
            write_atomically(folder / "cells.jsonl", "".join(json.dumps(result.facts) + "\n" for result in done))
    record.write(left_out=missing, finished=True)
    return missing


def _planned(comparison: "Comparison", cells: Sequence[Cell], store: ResultStore) -> dict[str, Any]:
    """What a report needs of a run that was stopped: the cells in order, and the file that each one will have."""
    known = comparison.identity
    named = ((cell, store.file_name({**known, "cell": cell.settings})) for cell in cells)
    listed = [{"method": cell.label, "budget": cell.budget, "file": file} for cell, file in named]
    return {**comparison.about, "settings": known, "cells": listed}


def _write(rows: Sequence[ComparisonRow], missing: Sequence[str], folder: Path) -> None:
    write_atomically(folder / "results.csv", to_csv(rows))
    write_atomically(folder / "results.md", to_markdown(rows, missing))
    _draw(rows, folder / "pareto.png")


def _draw(rows: Sequence[ComparisonRow], path: Path) -> None:
    """Write the plot; without matplotlib only warn, so that a long run does not end in an error."""
    try:
        from adamerge.experiments.comparison_plot import pareto
    except ImportError as error:
        warnings.warn(
            f"no {path.name}: {error}; install matplotlib and run again, finished cells are kept", stacklevel=3
        )
        return
    pareto(rows, path)


def _cells(
    methods: Sequence[str] | Mapping[str, Variant],
    budgets: Sequence[float | Target],
    native: Mapping[str, Variant],
    recipes: Mapping[str, Recipe],
    rival: str,
) -> list[Cell]:
    chosen = dict(methods) if isinstance(methods, Mapping) else {label: find_variant(label) for label in methods}
    if chosen and budgets and rival not in chosen:
        chosen[rival] = find_variant(rival)
    targets = [b if isinstance(b, Target) else Target(cut=b) for b in budgets]
    for variant in chosen.values():
        check_variant(variant)
    for variant in native.values():
        check_variant(variant, native=True)
    if not (chosen and targets) and not native and not recipes:
        raise BadOption("there is nothing to compare; give methods and budgets, native variants, or recipes")
    return [
        Cell("none", Variant("none"), None),
        *(Cell(label, variant, target) for target in targets for label, variant in chosen.items()),
        *(Cell(label, variant, None) for label, variant in native.items()),
        *(Cell(label, Variant("recipe"), None, recipe) for label, recipe in recipes.items()),
    ]


@dataclass(frozen=True)
class Comparison:
    """What all cells share: the model, its images and the settings; `about` is for the reader of a report."""

    model: nn.Module
    calibration: Images
    data: Data
    cost: CostCount
    tolerance: float
    progress: bool
    about: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the results of all cells depend on, as JSON data: weights, images, labels and settings."""
        mine = my_share(labelled_batches(self.data), self.data)
        samples = in_order([sample(images) + sample(labels) for images, labels in mine])
        if not samples:
            raise BadImages("there are no images to compare on; pass at least one batch of (images, labels)")
        return {
            **identify_model(self.model),
            "calibration": digest_tensors(batches(self.calibration)),
            "data": digest_samples(samples),
            "cost": self.cost,
            "tolerance": self.tolerance,
            "device": self.device,
            "version": adamerge.__version__,
        }

    @property
    def device(self) -> str:
        """The name of the model's device."""
        return versions(str(next(self.model.parameters()).device))["device"]

    @cached_property
    def unmerged(self) -> list[Tensor]:
        """The logits of the unmerged model for each batch; computed once for all cells."""
        host = find_host(self.model)
        with temporarily_patched(self.model), torch.inference_mode():
            install(host, host.container)
            return [time_logits(self.model, images)[0].cpu() for images, _ in self.batches("unmerged")]

    def batches(self, label: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the data on the model's device."""
        parameter = next(self.model.parameters())
        shown = tqdm(self.data, label, number_of_batches(self.data), leave=False, disable=not self.progress)
        for images, labels in my_share(labelled_batches(shown), self.data):
            yield images.to(parameter.device, parameter.dtype), labels.to(parameter.device)


def measure(comparison: Comparison, cell: Cell) -> StoredResult:
    """Find the recipe of a cell and run it over the data.

    For the speed-up, the unmerged model is timed alternately with it on a few batches.  Times from different minutes
    would not be comparable.
    """
    model, host, unmerged = comparison.model, find_host(comparison.model), comparison.unmerged
    recipe, facts = _solved(comparison, cell)
    columns: list[tuple[Tensor, ...]] = []
    extremes = Extremes()
    times: list[tuple[int, float, float]] = []
    with temporarily_patched(model), torch.inference_mode():
        prices = meter(model)
        apply(model, recipe)
        merging = stack_of(model)
        for index, (images, labels) in enumerate(comparison.batches(f"{cell.label}, {cell.budget}")):
            install(host, host.container)
            full_time = time_logits(model, images)[1] if index <= TIMED else 0.0
            install(host, merging)
            merged, merged_time = time_logits(model, images)
            if full_time:
                times.append((len(images), full_time if cell.variant.method == "none" else merged_time, full_time))
            judged = judge(unmerged[index].to(merged.device), merged, labels)
            counts = trace(model).counts
            columns.append(tuple(t.cpu() for t in (*judged, counts)))
            extremes.add(images, counts[:, -1])
    *judged, counts = (torch.cat(column) for column in zip(*in_order(columns), strict=True))
    cost, full = prices.cost(counts, recipe), prices.unmerged()
    # The first batch is a warm-up.
    timed, seconds, full_seconds = (sum(column) for column in zip(*in_order(times[1:] or times), strict=True))
    facts |= {"timed": timed, "seconds": seconds / place().world, "full_seconds": full_seconds / place().world}
    facts |= {"full_true": full.true.item(), "full_paper": full.paper.item()}
    kept = dict(zip(("top1", "top5", "full_top1", "agreement", "kl"), judged, strict=True))
    kept |= {"true": cost.true, "paper": cost.paper, "merged": prices.patches - counts[:, -1]}
    start = torch.full_like(counts[:, :1], prices.patches)
    kept |= {"r": -torch.diff(counts, dim=1, prepend=start), **extremes.tensors(model)}
    return StoredResult(facts | {"patches": prices.patches}, kept)


def _solved(comparison: Comparison, cell: Cell) -> tuple[Recipe, dict[str, Any]]:
    """The recipe of a cell, and the facts that are known before it runs."""
    variant, target_cut = cell.variant, None
    if cell.recipe is not None:
        recipe, knob, met = cell.recipe, None, True
    elif cell.target is None:
        method = METHODS[variant.method]
        recipe = make_calibrated_recipe(comparison.model, comparison.calibration, method, variant.options, variant.how)
        knob, met = variant.options.get(str(method.knob)), True
    else:
        options: dict[str, Any] = {"cost": comparison.cost, "tolerance": comparison.tolerance}
        found = solve_variant(comparison.model, comparison.calibration, variant, cell.target, **options)
        recipe, knob, met, target_cut = found.recipe, found.knob, found.met, found.target_cut
    extra = {} if variant.how is None else {"how": variant.how}
    dtype = str(next(comparison.model.parameters()).dtype).removeprefix("torch.")
    return recipe, {
        "method": cell.label,
        "options": json.dumps({**variant.options, **extra}),
        "budget": cell.budget,
        "cost": comparison.cost,
        "target_cut": target_cut,
        "knob": knob,
        "met": met,
        "device": comparison.device,
        "dtype": dtype,
        "versions": json.dumps({**versions(), "device": comparison.device}),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
