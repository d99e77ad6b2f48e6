"""Learned schedules against the search of the tuner, on the same images and in the same time.

The learning changes the merge rates of all layers at once, until one more merge loses as much per saved cost at every
layer.  The loss of a merge is estimated by the squared gradient of the log-probability of a class that the unmerged
model draws, as in Fisher pruning: see benchmarks/marginal_prices.py.  The backbone is frozen, and no labels are used.

    python benchmarks/learned_schedules.py find --way learned --weights W --images CAL --found found.jsonl
    python benchmarks/learned_schedules.py find --way tuned --weights W --images CAL --found found.jsonl
    python benchmarks/learned_schedules.py write --weights W --images CAL --found found.jsonl
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from frontier_inputs import read_images
from marginal_prices import slopes_and_returns, soft_blocks
from reading import RESULTS, append
from torch import Tensor

from adamerge.cli.loading import load_model
from adamerge.core.budget import Threshold
from adamerge.core.parts import to_json
from adamerge.experiments.versions import versions
from adamerge.patching.apply import temporarily_patched
from adamerge.patching.probes import GivenTokens
from adamerge.patching.stack import install
from adamerge.search.evaluator import Evaluator
from adamerge.search.journal import Journal
from adamerge.search.local_search import SearchLimits, search_candidates
from adamerge.search.scaling import Candidate
from adamerge.search.schedule import MERGE_ALL, Rates, expected_macs, merged_per_layer, scale_rates
from adamerge.search.target import Target
from adamerge.search.tuner import hold_out

# Images in a batch; the same for sweeps and for gradients.
AT_ONCE = 32
# The learning: passes over the images, the exponent of a step, the largest logarithm of a ratio of prices, and how much
# of the mean gradients remains after a step.
EPOCHS, EXPONENT, LARGEST, MEMORY = 3, 0.15, 1.0, 0.8
# The rate with which idle layers begin, as a share of the mean; a layer that merges less than one token becomes idle.
FIRST_RATE, FEWEST = 0.1, 1.0


class Schedule:
    """The merge rates of a family while they are learned."""

    def __init__(self, evaluator: Evaluator, best: Candidate, target: Target):
        self.evaluator, self.family = evaluator, best.family
        self.goal = target.macs_below(evaluator.full)
        self.excess = best.macs / expected_macs(best.rates, evaluator.prices, best.family, evaluator.cost)
        self.last = best.rates[-1] >= MERGE_ALL
        finite = [rate for rate in best.rates if rate < MERGE_ALL]
        self.rates: Rates = tuple(max(rate, FIRST_RATE * sum(finite) / len(finite)) for rate in best.rates)
        self.slopes = torch.zeros(len(self.rates), dtype=torch.float64)
        self.returns = torch.zeros(len(self.rates), len(self.rates), dtype=torch.float64)
        self.weight = 0.0

    @property
    def merged(self) -> tuple[float, ...]:
        """How many tokens each layer merges, with the rates scaled to the cost."""
        self.rates = scale_rates(
            self.rates, self.goal / self.excess, self.evaluator.prices, self.family, self.evaluator.cost
        )
        return merged_per_layer(self.rates, self.evaluator.prices.patches)

    def update(self, slopes: Tensor, returns: Tensor) -> None:
        """Merge more where a merge loses little per saved cost, and less where it loses much."""
        self.weight = MEMORY * self.weight + 1 - MEMORY
        self.slopes = MEMORY * self.slopes + (1 - MEMORY) * slopes
        self.returns = MEMORY * self.returns + (1 - MEMORY) * returns
        own = (self.slopes / self.weight) ** 2
        # A link that does not merge now may merge later.  If it merges now, another one merges there.
        prices = torch.linalg.solve(torch.eye(len(own), dtype=own.dtype) - self.returns / self.weight, own)
        free = slice(0, len(own) - self.last)
        ratio = (prices / self.saved()).clamp_min(1e-30).log()[free]
        rates = torch.tensor(self.rates, dtype=torch.float64)
        ratio = ratio - (ratio * rates[free]).sum() / rates[free].sum()
        rates[free] *= (-EXPONENT * ratio.clamp(-LARGEST, LARGEST)).exp()
        self.rates = tuple(rates.tolist())

    def saved(self) -> Tensor:
        """What one more merge at each layer saves, if the layers after it merge as many as before."""
        prices = self.evaluator.prices
        counts = prices.patches - torch.tensor([self.merged], dtype=torch.float64).cumsum(1)
        fewer = torch.triu(torch.ones(counts.shape[1], counts.shape[1], dtype=torch.float64))
        if self.last:
            fewer[:, -1] = 0.5
        active = replace(self.family, budget=Threshold(1.0))
        before, after = (getattr(prices.cost(c, active), self.evaluator.cost) for c in (counts, counts - fewer))
        return before - after


def learn(evaluator: Evaluator, best: Candidate, target: Target, seed: int = 0) -> tuple[Rates, int]:
    """Learn the rates of the family of `best`, from its rates on; gives them and the number of steps."""
    schedule, dice = Schedule(evaluator, best, target), torch.Generator().manual_seed(seed)
    x, place, images = (
        torch.cat(parts).clone()
        for parts in ([s.x for s in evaluator.starts], [s.place for s in evaluator.starts], evaluator.images)
    )
    wanted = torch.cat([one[0] for one in evaluator.wanted]).clone()
    steps = 0
    with temporarily_patched(evaluator.model), torch.enable_grad(), frozen(evaluator.model):
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(x), generator=dice).split(AT_ONCE):
                if len(chosen) < min(AT_ONCE, len(x)):
                    continue
                sizes = torch.ones_like(place[chosen], dtype=x.dtype)
                start = replace(evaluator.starts[0], x=x[chosen], place=place[chosen], size=sizes)
                tokens, merges = soft_blocks(start, evaluator.host.views, best.family, schedule.merged)
                install(evaluator.host, GivenTokens(evaluator.host, tokens))
                given: Any = evaluator.entry(images[chosen])
                drawn = torch.multinomial(wanted[chosen].exp(), 1, generator=dice)
                outcome = given.double().log_softmax(1).gather(1, drawn).sum()
                schedule.update(*slopes_and_returns(outcome, merges, x.shape[1] - evaluator.host.prefix))
                steps += 1
    few = schedule.merged
    return tuple(0.0 if r < FEWEST else rate for rate, r in zip(schedule.rates, few, strict=True)), steps


class frozen:
    """No gradients of parameters inside."""

    def __init__(self, model: torch.nn.Module):
        self.parameters = [one for one in model.parameters() if one.requires_grad]

    def __enter__(self) -> None:
        for one in self.parameters:
            one.requires_grad_(False)

    def __exit__(self, *_: object) -> None:
        for one in self.parameters:
            one.requires_grad_(True)


def find(given: argparse.Namespace) -> None:
    """Find recipes at each cut, and write a line for each."""
    evaluator = _evaluator(given)
    for cut in map(float, given.cuts.split(",")):
        ways = learned(evaluator, Target(cut=cut), given) if given.way == "learned" else tuned(evaluator, cut, given)
        for line in ways:
            text = json.dumps({"model": given.model, "cut": cut, **line})
            print(text, flush=True)
            with given.found.open("a") as file:
                file.write(text + "\n")


def learned(evaluator: Evaluator, target: Target, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The preset's rates with the best family, the learned rates, and the search from there."""
    journal, begin, swept = Journal(), time.monotonic(), evaluator.sweeps
    first, _ = search_candidates(evaluator, target, SearchLimits(3), journal=journal)
    yield kept("preset, best family", first, begin, evaluator.sweeps - swept)
    rates, steps = learn(evaluator, first, target)
    starts = [(first.family, rates)]
    found, _ = search_candidates(evaluator, target, SearchLimits(1), journal=journal, starts=starts)
    yield kept("learned", found, begin, evaluator.sweeps - swept, steps)
    limits = SearchLimits(10_000, until=begin + given.seconds)
    both, _ = search_candidates(evaluator, target, limits, journal=journal, starts=starts)
    yield kept("learned, then tuned", both, begin, evaluator.sweeps - swept, steps)


def tuned(evaluator: Evaluator, cut: float, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The best recipe of the search in the time that learning took, and in the whole time."""
    lines = [json.loads(text) for text in given.found.read_text().splitlines()]
    (other,) = (one for one in lines if (one["model"], one["cut"], one["way"]) == (given.model, cut, "learned"))
    journal, begin, swept = Journal(), time.monotonic(), evaluator.sweeps
    for way, seconds in (("tuned, same time as learned", other["seconds"]), ("tuned", given.seconds)):
        limits = SearchLimits(10_000, until=begin + seconds)
        best, _ = search_candidates(evaluator, Target(cut=cut), limits, journal=journal)
        yield kept(way, best, begin, evaluator.sweeps - swept)


def kept(way: str, best: Candidate, begin: float, sweeps: int, steps: int = 0) -> dict[str, Any]:
    """What is written of a candidate."""
    seconds = round(time.monotonic() - begin, 1)
    spent = {"sweeps": sweeps, "steps": steps, "seconds": seconds}
    return {"way": way, "family": to_json(best.family), "rates": best.rates, "loss": best.loss, **spent}


def write(given: argparse.Namespace) -> None:
    """Write what was found as rows."""
    for text in given.found.read_text().splitlines():
        line = json.loads(text)
        row = {name: line[name] for name in ("model", "cut", "way", "sweeps", "steps", "seconds", "loss")}
        row |= {"family": json.dumps(line["family"]), "rates": json.dumps(line["rates"])}
        row |= {"images": given.number, "date": datetime.now(timezone.utc).strftime("%Y-%m-%d")}
        append(given.out, [row | {"versions": json.dumps(versions("cpu"))}])


def _evaluator(given: argparse.Namespace) -> Evaluator:
    model = load_model(given.model, given.weights / f"{given.model}.safetensors", False, "cpu", "fp32")
    images, _ = read_images(model, given.images, given.number, 0)
    return Evaluator(model, hold_out(list(images.split(AT_ONCE)))[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["find", "write"])
    parser.add_argument("--way", choices=["learned", "tuned"], default="learned")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", required=True, help="images to tune on: a folder or a .pt file")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=150, help="how long a search may take")
    parser.add_argument("--cuts", default="0.6,0.5")
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "learned-schedules.csv")
    torch.set_num_threads(1)
    given = parser.parse_args()
    find(given) if given.what == "find" else write(given)
