"""The experiment that every table is measured with: a model, its evaluation images and its calibration images."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from adamerge.calibration import How, calibrate
from adamerge.core.errors import BadImages
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.data.batches import labelled_batches, number_of_batches
from adamerge.data.folders import even_indices
from adamerge.digest import digest_json, digest_tensors, identify_model
from adamerge.evaluation import kl_divergence, time_logits
from adamerge.experiments.reproduce.outcome import Outcome
from adamerge.experiments.store import ResultStore, StoredResult
from adamerge.experiments.versions import versions
from adamerge.flops import Meter, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, stack_of, temporarily_patched, trace
from adamerge.patching.stack import Stack, install

# Calibration images per forward pass.
BATCH = 64


@dataclass
class Experiment:
    """A model with evaluation batches and calibration images.

    Attributes:
        model: a supported classifier.
        data: batches of (images, labels); iterated several times, so a list or a DataLoader.
        calibration: the calibration images, one tensor (images, channels, height, width).
        names: what the model, the data and the calibration images are called in the report.
        notes: sentences for the report.
        runs: how often `repeat` measures a recipe.
        progress: show progress bars.
        store: where finished results are stored; without one they are only kept in memory.
    """

    model: nn.Module
    data: Iterable[tuple[Tensor, Tensor]]
    calibration: Tensor
    names: dict[str, str]
    notes: tuple[str, ...] = ()
    runs: int = 1
    progress: bool = True
    store: ResultStore | None = None
    _full: list[Tensor] = field(default_factory=list, repr=False)
    _results: dict[str, StoredResult] = field(default_factory=dict, repr=False)

    @cached_property
    def depth(self) -> int:
        """The number of blocks of the model."""
        return find_host(self.model).depth

    @cached_property
    def prices(self) -> Meter:
        """Computes the model's costs."""
        return meter(self.model)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that affects a result, as JSON data: experiments with equal settings measure the same."""
        images, labels = next(iter(self.data), (torch.empty(0), torch.empty(0)))
        if not len(images):
            raise BadImages("there are no images to evaluate on; pass at least one batch of (images, labels)")
        parameter = next(self.model.parameters())
        return {
            **self.names,
            **identify_model(self.model),
            "batches": number_of_batches(self.data),
            "first_batch": digest_tensors([images, labels]),
            "calibration_images": len(self.calibration),
            "calibration_pixels": digest_tensors(self.calibration.unbind()),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "versions": versions(str(parameter.device)),
        }

    @property
    def full_gmacs(self) -> float:
        """The unmerged model's cost in the paper's count, in 10^9 multiply-accumulates."""
        return self.prices.unmerged().paper.item() / 1e9

    @property
    def unmerged(self) -> Outcome:
        """The outcome of the unmerged model."""
        settings = self._unmerged_settings
        if self._find(settings) is None:
            self._run({}, "unmerged")
        return self._outcome(settings)

    def calibrated(self, recipe: Recipe, how: How = "iterative", passes: int = 2, share: float = 1.0) -> Recipe:
        """The recipe with statistics from an evenly spaced `share` of the calibration images."""
        count = max(round(share * len(self.calibration)), 2)
        settings = [self.settings, to_json(recipe), how, passes, count]
        found = self._find(settings)
        if found is not None:
            return Recipe.from_json(found.facts["recipe"])
        images = self.calibration[even_indices(len(self.calibration), count)]
        stats = calibrate(self.model, images.split(BATCH), recipe, how=how, passes=passes, progress=self.progress)
        calibrated = recipe.with_stats(stats)
        self._save(settings, StoredResult({"recipe": calibrated.to_json()}))
        return calibrated

    def measure(self, recipes: Mapping[str, Recipe], label: str = "", *, run: int = 0) -> dict[str, Outcome]:
        """The outcome of each recipe; all that are not measured yet share one pass over the images."""
        settings = {name: self._recipe_settings(recipe, run) for name, recipe in recipes.items()}
        missing = {name: recipe for name, recipe in recipes.items() if self._find(settings[name]) is None}
        if missing:
            self._run(missing, label, run)
        return {name: self._outcome(settings[name]) for name in recipes}

    def repeat(self, recipes: Mapping[str, Recipe], label: str) -> dict[str, list[Outcome]]:
        """The outcomes of each recipe, one for each of `runs` runs."""
        runs = [self.measure(recipes, f"{label}, run {run + 1}", run=run) for run in range(self.runs)]
        return {name: [outcomes[name] for outcomes in runs] for name in recipes}

    def _run(self, recipes: Mapping[str, Recipe], label: str, run: int = 0) -> None:
        """Iterate over the images once: run the unmerged model unless its answers are known, and every recipe."""
        host, known = find_host(self.model), len(self._full) > 0
        tallies = {name: _Tally() for name in recipes}
        full_tally = _Tally()
        full_answers: list[Tensor] = list(self._full)
        with temporarily_patched(self.model), torch.inference_mode():
            stacks = {name: _stack(self.model, recipe) for name, recipe in recipes.items()}
            for number, (images, labels) in enumerate(self._batches(label)):
                parameter = next(self.model.parameters())
                images, labels = images.to(parameter.device, parameter.dtype), labels.to(parameter.device)
                if not known:
                    install(host, host.container)
                    logits = full_tally.time(self.model, images)
                    full_answers.append(logits.float().log_softmax(1).cpu())
                    unchanged = torch.full((len(images), self.depth), self.prices.patches)
                    full_tally.add(logits, logits.float().log_softmax(1), labels, unchanged)
                full = full_answers[number].to(parameter.device)
                for name, stack in stacks.items():
                    install(host, stack)
                    tallies[name].add(tallies[name].time(self.model, images), full, labels, trace(self.model).counts)
        self._full[:] = full_answers
        if self._find(self._unmerged_settings) is None:
            self._save(self._unmerged_settings, full_tally.outcome(self.prices, None).to_stored())
        for name, recipe in recipes.items():
            outcome = tallies[name].outcome(self.prices, recipe)
            self._save(self._recipe_settings(recipe, run), outcome.to_stored())

    @property
    def _unmerged_settings(self) -> list[Any]:
        return [self.settings, "unmerged"]

    def _recipe_settings(self, recipe: Recipe, run: int) -> list[Any]:
        return [self.settings, to_json(recipe), run]

    def _find(self, settings: Any) -> StoredResult | None:
        """The result with these settings, from memory or from the store."""
        key = digest_json(settings)
        if key not in self._results and self.store is not None:
            stored = self.store.load(settings)
            if stored is not None:
                self._results[key] = stored
        return self._results.get(key)

    def _save(self, settings: Any, result: StoredResult) -> None:
        self._results[digest_json(settings)] = result
        if self.store is not None:
            self.store.save(settings, result)

    def _outcome(self, settings: Any) -> Outcome:
        found = self._find(settings)
        assert found is not None
        return Outcome.from_stored(found)

    def _batches(self, label: str) -> Iterable[tuple[Tensor, Tensor]]:
        shown = tqdm(self.data, desc=label, total=number_of_batches(self.data), disable=not self.progress)
        return labelled_batches(shown)


class _Tally:
    """Collects the results of one recipe batch by batch."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self.seconds: list[tuple[int, float]] = []

    def time(self, model: nn.Module, images: Tensor) -> Tensor:
        """The logits of a batch; their time is recorded."""
        logits, seconds = time_logits(model, images)
        self.seconds.append((len(images), seconds))
        return logits

    def add(self, logits: Tensor, full: Tensor, labels: Tensor, counts: Tensor) -> None:
        """Record one batch; `full` holds the unmerged model's log-probabilities."""
        kl = kl_divergence(full.double(), logits.double().log_softmax(1))
        self.rows.append(((logits.argmax(1) == labels).cpu(), kl.cpu(), counts.cpu()))

    def outcome(self, prices: Meter, recipe: Recipe | None) -> Outcome:
        """All batches together.  The first batch is a warm-up and not timed, unless it is the only one."""
        if not self.rows:
            raise BadImages("there are no images to evaluate on; pass at least one batch of (images, labels)")
        top1, kl, counts = (torch.cat(column) for column in zip(*self.rows, strict=True))
        cost = prices.cost(counts, recipe)
        start = torch.full_like(counts[:, :1], prices.patches)
        timed = self.seconds[1:] or self.seconds
        return Outcome(
            top1=top1,
            kl=kl,
            r=-torch.diff(counts, dim=1, prepend=start),
            paper=cost.paper,
            true=cost.true,
            seconds=sum(seconds for _, seconds in timed),
            timed=sum(images for images, _ in timed),
        )


def _stack(model: nn.Module, recipe: Recipe) -> Stack:
    apply(model, recipe)
    return stack_of(model)
