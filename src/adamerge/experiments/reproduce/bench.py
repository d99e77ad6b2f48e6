"""The bench that every table is measured on: a model, its images, and what was measured on them already."""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from adamerge.calibration import How, calibrate
from adamerge.core.errors import BadImages, UnsupportedModel
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.data.batches import number_of_batches
from adamerge.data.folders import even_indices
from adamerge.experiments.reproduce.store import Outcome, Store, key_of
from adamerge.experiments.versions import versions
from adamerge.flops import Meter, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, stack_of, temporarily_patched, trace
from adamerge.patching.stack import Stack, install

# Images of a calibration set that go through the model at once.
BATCH = 64
# Values that go into the key of a tensor.
DIGESTED = 20_000


@dataclass
class Experiment:
    """A model with evaluation batches and calibration images; the unmerged model runs over them only once.

    `data` is gone through several times: a list, a DataLoader, anything that starts again.  `calibration` is one
    tensor of images.  `names` says in words what the model, the data and the calibration images are.
    """

    model: nn.Module
    data: Iterable[tuple[Tensor, Tensor]]
    calibration: Tensor
    names: dict[str, str]
    notes: tuple[str, ...] = ()
    runs: int = 1
    progress: bool = True
    store: Store | None = None
    _full: list[Tensor] = field(default_factory=list, repr=False)
    _unmerged: Outcome | None = field(default=None, repr=False)
    _outcomes: dict[str, Outcome] = field(default_factory=dict, repr=False)
    _stats: dict[str, LayerStats] = field(default_factory=dict, repr=False)

    @cached_property
    def depth(self) -> int:
        """How many blocks the model has."""
        return find_host(self.model).depth

    @cached_property
    def prices(self) -> Meter:
        """The model's prices."""
        return meter(self.model)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that shapes a figure: two benches with equal settings measure the same."""
        images, labels = next(iter(self.data), (torch.empty(0), torch.empty(0)))
        if not len(images):
            raise BadImages("there are no images to evaluate on; pass at least one batch of (images, labels)")
        parameter = next(self.model.parameters())
        return {
            **self.names,
            "weights": key_of(find_host(self.model).fingerprint()),
            "batches": number_of_batches(self.data),
            "first_batch": [_digest(images), _digest(labels)],
            "calibration_images": len(self.calibration),
            "calibration_pixels": _digest(self.calibration),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "versions": versions(str(parameter.device)),
        }

    @property
    def full_gmacs(self) -> float:
        """The unmerged model's cost in the paper's count."""
        return self.prices.unmerged().paper.item() / 1e9

    @property
    def unmerged(self) -> Outcome:
        """The unmerged model."""
        if self._unmerged is None:
            self._unmerged = self.store.outcome(key_of([self.settings, "unmerged"])) if self.store else None
        if self._unmerged is None:
            self._pass({}, "unmerged")
        assert self._unmerged is not None
        return self._unmerged

    def calibrated(self, recipe: Recipe, how: How = "iterative", passes: int = 2, share: float = 1.0) -> Recipe:
        """The recipe with statistics from an evenly spread `share` of the calibration images."""
        count = max(round(share * len(self.calibration)), 2)
        key = key_of([self.settings, to_json(recipe), how, passes, count])
        stats = self._stats.get(key) or (self.store.stats(key) if self.store else None)
        if stats is None:
            images = self.calibration[even_indices(len(self.calibration), count)]
            stats = calibrate(self.model, images.split(BATCH), recipe, how=how, passes=passes, progress=self.progress)
            if self.store:
                self.store.keep_stats(key, stats)
        self._stats[key] = stats
        return recipe.with_stats(stats)

    def measure(self, recipes: Mapping[str, Recipe], label: str = "", *, run: int = 0) -> dict[str, Outcome]:
        """The outcome of each recipe; those not measured yet share one pass over the images."""
        keys = {name: key_of([self.settings, to_json(recipe), run]) for name, recipe in recipes.items()}
        for key in keys.values():
            kept = self.store.outcome(key) if self.store and key not in self._outcomes else None
            if kept is not None:
                self._outcomes[key] = kept
        missing = {keys[name]: recipe for name, recipe in recipes.items() if keys[name] not in self._outcomes}
        if missing:
            self._pass(missing, label)
        return {name: self._outcomes[key] for name, key in keys.items()}

    def repeat(self, recipes: Mapping[str, Recipe], label: str) -> dict[str, list[Outcome]]:
        """The outcomes of each recipe in all runs."""
        runs = [self.measure(recipes, f"{label}, run {run + 1}", run=run) for run in range(self.runs)]
        return {name: [outcomes[name] for outcomes in runs] for name in recipes}

    def _pass(self, recipes: Mapping[str, Recipe], label: str) -> None:
        """Go once over the images with the unmerged model, unless its answers are known, and with every recipe."""
        host, known = find_host(self.model), len(self._full) > 0
        tallies = {key: _Tally() for key in recipes}
        full_tally = _Tally()
        full_answers: list[Tensor] = list(self._full)
        with temporarily_patched(self.model), torch.inference_mode():
            stacks = {key: _stack(self.model, recipe) for key, recipe in recipes.items()}
            for number, (images, labels) in enumerate(self._shown(label)):
                parameter = next(self.model.parameters())
                images, labels = images.to(parameter.device, parameter.dtype), labels.to(parameter.device)
                if not known:
                    install(host, host.container)
                    logits = full_tally.time(self.model, images)
                    full_answers.append(logits.float().log_softmax(1).cpu())
                    unchanged = torch.full((len(images), self.depth), self.prices.patches)
                    full_tally.add(logits, logits.float().log_softmax(1), labels, unchanged)
                full = full_answers[number].to(parameter.device)
                for key, stack in stacks.items():
                    install(host, stack)
                    tallies[key].add(tallies[key].time(self.model, images), full, labels, trace(self.model).counts)
        self._full[:] = full_answers
        if self._unmerged is None:
            self._unmerged = full_tally.outcome(self.prices, None)
            self._keep(key_of([self.settings, "unmerged"]), self._unmerged)
        for key, recipe in recipes.items():
            self._outcomes[key] = tallies[key].outcome(self.prices, recipe)
            self._keep(key, self._outcomes[key])

    def _keep(self, key: str, outcome: Outcome) -> None:
        if self.store:
            self.store.keep_outcome(key, outcome)

    def _shown(self, label: str) -> Iterable[tuple[Tensor, Tensor]]:
        return tqdm(self.data, desc=label, total=number_of_batches(self.data), disable=not self.progress)


class _Tally:
    """Collects one recipe's results batch by batch."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self.seconds: list[tuple[int, float]] = []

    def time(self, model: nn.Module, images: Tensor) -> Tensor:
        """The logits, with the time they took noted."""
        wait = torch.cuda.synchronize if images.is_cuda else (lambda: None)
        wait()
        begin = time.perf_counter()
        logits = model(images)
        logits = getattr(logits, "logits", logits)  # transformers gives them a name
        wait()
        self.seconds.append((len(images), time.perf_counter() - begin))
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UnsupportedModel(f"the tables need a classifier that gives (images, classes) logits; got {shape}")
        return logits

    def add(self, logits: Tensor, full: Tensor, labels: Tensor, counts: Tensor) -> None:
        """Judge one batch against the labels and the unmerged model's log-probabilities."""
        kl = (full.double().exp() * (full.double() - logits.double().log_softmax(1))).sum(1)
        self.rows.append(((logits.argmax(1) == labels).cpu(), kl.cpu(), counts.cpu()))

    def outcome(self, prices: Meter, recipe: Recipe | None) -> Outcome:
        """All batches together.  The first batch warms up and is not timed when there are more."""
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


def _digest(tensor: Tensor) -> str:
    """A few letters for a tensor, from its shape and values spread over all of it."""
    flat = tensor.detach().flatten()
    values: list[float] = flat[:: max(len(flat) // DIGESTED, 1)].cpu().double().tolist()
    return hashlib.sha256(repr((tuple(tensor.shape), values)).encode()).hexdigest()[:12]
