"""The table of benchmarks/finetune.py, and whether the gap to ToMe widens after fine-tuning, as the paper says."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from reading import Row, read
from torch import Tensor

RESAMPLES = 10_000
RIVAL = "tome"
SHOWN = {"tome": "ToMe", "adamerge": "AdaMerge as published", "preset": "preset"}


def pack_answers(right: Tensor) -> str:
    """Which images are classified correctly, as hexadecimal digits; the last image is the lowest bit."""
    bits = "".join("1" if one else "0" for one in right.tolist())
    return f"{int(bits, 2):0{-(-len(bits) // 4)}x}"


def unpack_answers(text: str, images: int) -> Tensor:
    """The packed answers as a tensor of 0 and 1."""
    bits = f"{int(text, 16):0{images}b}"
    return torch.tensor([float(bit) for bit in bits], dtype=torch.float64)


@dataclass(frozen=True)
class Points:
    """A difference in points of top-1 with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, else 0."""
        return (self.low > 0) - (self.high < 0)


def answers(rows: Sequence[Row], method: str, cut: float, when: str = "after") -> Tensor:
    """(seeds, images): which test images a method classifies correctly, in the order of the seeds."""
    found = [row for row in rows if row["method"] == method and float(row["target_cut"]) == cut]
    found.sort(key=lambda row: int(row["seed"]))
    return torch.stack([unpack_answers(row[f"right_{when}"], int(row["test_images"])) for row in found])


def points(difference: Tensor) -> Points:
    """The mean of differences (seeds, images) in points; the interval is a bootstrap over seeds and over images."""
    seeds, images = difference.shape
    dice = torch.Generator().manual_seed(0)
    drawn_seeds, drawn_images = (_times(number, dice) for number in (seeds, images))
    means = ((drawn_seeds @ difference) * drawn_images).sum(1) / (seeds * images)
    low, high = (100 * means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Points(100 * difference.mean().item(), low, high)


def _times(number: int, dice: torch.Generator) -> Tensor:
    """(resamples, number): how often each of `number` things is drawn in each resample."""
    drawn = torch.randint(number, (RESAMPLES, number), generator=dice)
    zeros = torch.zeros(drawn.shape, dtype=torch.float64)
    return zeros.scatter_add_(1, drawn, torch.ones((), dtype=torch.float64).expand(drawn.shape))


def gap(rows: Sequence[Row], method: str, cut: float, when: str = "after") -> Points:
    """How much better a method is than ToMe."""
    return points(answers(rows, method, cut, when) - answers(rows, RIVAL, cut, when))


def widening(rows: Sequence[Row], method: str) -> Points:
    """The gap to ToMe after fine-tuning at the largest cut minus that at the smallest."""
    least, *_, most = cuts(rows)
    return points(
        (answers(rows, method, most) - answers(rows, RIVAL, most))
        - (answers(rows, method, least) - answers(rows, RIVAL, least))
    )


def cuts(rows: Sequence[Row]) -> list[float]:
    """The cuts of merged models, from small to large."""
    return sorted({float(row["target_cut"]) for row in rows if row["method"] != "none"})


def statement(rows: Sequence[Row], method: str) -> str:
    """In words: the gaps to ToMe after fine-tuning, and whether they grow with the cut."""
    found = [(cut, gap(rows, method, cut)) for cut in cuts(rows)]
    change = widening(rows, method)
    places = {1: "ahead of ToMe", -1: "behind ToMe", 0: "level with ToMe"}
    where = ", ".join(
        f"{words} at {' and '.join(f'{cut:.0%}' for cut, one in found if one.sign == sign)}"
        for sign, words in places.items()
        if any(one.sign == sign for _, one in found)
    )
    if len({one.sign for _, one in found}) == 1:
        where = f"{places[found[0][1].sign]} at every cut"
    how = {1: "the advantage grows with the cut", -1: "it falls further behind as the cut grows"}
    if found[-1][1].sign == 1 and change.sign == -1:
        how[-1] = "the advantage shrinks as the cut grows"
    elif found[-1][1].sign == -1 and change.sign == 1:
        how[1] = "it falls less behind as the cut grows"
    trend = how.get(change.sign, "a trend with the cut is not shown")
    listed = ", ".join(f"{one} at {cut:.0%}" for cut, one in found)
    return (
        f"{SHOWN[method]} − ToMe after fine-tuning, points: {listed}. It is {where}, and {trend}: {change} from "
        f"{found[0][0]:.0%} to {found[-1][0]:.0%}."
    )


def complete(rows: Sequence[Row]) -> list[Row]:
    """The rows of seeds for which every method and cut is there."""
    kinds = {(row["method"], row["target_cut"]) for row in rows}
    of_seed = {
        row["seed"]: {(one["method"], one["target_cut"]) for one in rows if one["seed"] == row["seed"]} for row in rows
    }
    return [row for row in rows if of_seed[row["seed"]] == kinds]


def finetune_table() -> str:
    """Top-1 before and after fine-tuning for every method and cut, and the statements."""
    rows = complete(read("finetune"))
    first = rows[0]
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"Embedded model, {first['images']} training images, {first['epochs']} epochs, learning rate "
        f"{float(first['learning_rate']):g}, batches of {first['batch_size']}, label smoothing "
        f"{float(first['label_smoothing']):g}, {len(seeds)} seeds, {first['test_images']} test images. "
        f"{first['device']}, {first['date']}.",
        "",
        "| method | cut: before, after | top-1 before | top-1 after, each seed | change [95 %] | to ToMe before [95 %] "
        "| to ToMe after [95 %] | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cut, method in [(0.0, "none"), *((cut, method) for cut in cuts(rows) for method in SHOWN)]:
        lines.append(_line(rows, method, cut))
    told = [f"* {statement(rows, method)}" for method in SHOWN if method != RIVAL]
    return "\n".join([*lines, "", *told])


def _line(rows: Sequence[Row], method: str, cut: float) -> str:
    here = [row for row in rows if row["method"] == method and float(row["target_cut"]) == cut]
    here.sort(key=lambda row: int(row["seed"]))
    after, before = (answers(rows, method, cut, when) for when in ("after", "before"))
    mean_cut = sum(float(row["cut_after"]) for row in here) / len(here)
    each = " ".join(f"{float(row['top1_after']):.2%}" for row in here)
    seconds = sum(float(row["seconds"]) for row in here) / len(here)
    gaps = ["–", "–"]
    if method not in (RIVAL, "none"):
        gaps = [str(gap(rows, method, cut, when)) for when in ("before", "after")]
    return (
        f"| {SHOWN.get(method, 'unmerged')} | {float(here[0]['cut_before']):.1%}, {mean_cut:.1%} | "
        f"{float(here[0]['top1_before']):.2%} | {each} | {points(after - before)} | {gaps[0]} | {gaps[1]} | "
        f"{seconds:.0f} |"
    )
