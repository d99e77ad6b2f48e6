"""Proposition 1, checked numerically: how much weighting by salience lowers the reconstruction error of a merge.

For the loss `s_i |x_i - x|^2 + s_j |x_j - x|^2` the gap between plain and weighted averaging is exactly
`(s_i - s_j)^2 / (4 (s_i + s_j)) |x_i - x_j|^2`, without a remainder.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.experiments.reproduce.claims import Claim, fact
from adamerge.experiments.reproduce.experiment import Experiment
from adamerge.experiments.reproduce.section import Column, Grid, Section

PAIRS, WIDTH = 20_000, 64
# Tolerance for float64 with cancellation.
EXACT = 1e-9

COLUMNS = (
    Column("loss", "loss"),
    Column("formula", "exact gap / |x_i - x_j|²"),
    Column("error", "largest relative error", "{:.1e}"),
    Column("ratio", "gap / the paper's term", "{:.4f}"),
    Column("least", "least gap", "{:.1e}"),
)


@dataclass(frozen=True)
class Pairs:
    """Token pairs with their saliences, in float64."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n d"]
    s: Float[Tensor, " n"]
    t: Float[Tensor, " n"]

    @property
    def apart(self) -> Float[Tensor, " n"]:
        """The squared distance of the tokens of each pair."""
        return (self.x - self.y).square().sum(1)

    def gap(self, wx: Float[Tensor, " n"], wy: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Loss of the plain mean minus loss of the salience-weighted mean, under loss weights `wx`, `wy`."""
        s, t = self.s[:, None], self.t[:, None]
        plain, weighted = (self.x + self.y) / 2, (s * self.x + t * self.y) / (s + t)

        def loss(merged: Tensor) -> Tensor:
            return wx * (self.x - merged).square().sum(1) + wy * (self.y - merged).square().sum(1)

        return loss(plain) - loss(weighted)

    @property
    def papers_term(self) -> Float[Tensor, " n"]:
        """The paper's leading term, `(s_i - s_j)^2 / (2 (s_i + s_j)^2) |x_i - x_j|^2`."""
        return (self.s - self.t).square() / (2 * (self.s + self.t).square()) * self.apart


def draw(closeness: float = 1.0, seed: int = 0) -> Pairs:
    """Random pairs; with a small `closeness` the two saliences of a pair are nearly equal."""
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, PAIRS, WIDTH, generator=random, dtype=torch.float64)
    s = 0.05 + 0.95 * torch.rand(PAIRS, generator=random, dtype=torch.float64)
    other = 0.05 + 0.95 * torch.rand(PAIRS, generator=random, dtype=torch.float64)
    return Pairs(x, y, s, s + closeness * (other - s))


def section(experiment: Experiment, out: Path) -> Section:
    """Check the proposition; the model is not used."""
    pairs, close = draw(), draw(closeness=1e-3)
    rows = tuple(_row(name, pairs, *of) for name, of in losses(pairs).items())
    grid = Grid("proposition", f"{PAIRS:,} random pairs of width {WIDTH}, float64", COLUMNS, rows)
    notes = (
        "The paper does not define its loss. For the salience-weighted loss the identity holds for every pair, so no "
        "noise model is needed. The paper's term is twice the exact gap of the normalised loss. For plain squared "
        "errors it is the exact gap with the wrong sign, because there the plain mean is optimal.",
    )
    claims = tuple(_claims(pairs, close))
    return Section("proposition", "Proposition 1: reconstruction error", (grid,), claims, notes)


def losses(pairs: Pairs) -> dict[str, tuple[str, Tensor, Tensor]]:
    """For each possible loss: the formula of the exact gap, the measured gap, the exact gap."""
    s, t, one = pairs.s, pairs.t, torch.ones_like(pairs.s)
    weighted = (s - t).square() / (4 * (s + t)) * pairs.apart
    return {
        "weighted by salience": ("(s_i-s_j)² / 4(s_i+s_j)", pairs.gap(s, t), weighted),
        "the same, normalised": ("(s_i-s_j)² / 4(s_i+s_j)²", pairs.gap(s / (s + t), t / (s + t)), weighted / (s + t)),
        "plain squared errors": ("-(s_i-s_j)² / 2(s_i+s_j)²", pairs.gap(one, one), -pairs.papers_term),
    }


def _row(name: str, pairs: Pairs, formula: str, gap: Tensor, exact: Tensor) -> dict[str, str | float]:
    # Relative to the squared distances: the gap is a small difference of two losses of that size.
    error = ((gap - exact).abs() / pairs.apart).max().item()
    ratio = (gap.sum() / pairs.papers_term.sum()).item()
    return {"loss": name, "formula": formula, "error": error, "ratio": ratio, "least": gap.min().item()}


def _claims(pairs: Pairs, close: Pairs) -> list[Claim]:
    weighted, normalised = (losses(pairs)[name] for name in ("weighted by salience", "the same, normalised"))
    exact = all(((gap - formula).abs() / pairs.apart).max() < EXACT for _, gap, formula in (weighted, normalised))
    equal = Pairs(pairs.x, pairs.y, pairs.s, pairs.s)
    none = equal.gap(equal.s, equal.s).abs().max().item()
    gap = weighted[1]
    running = gap.sort().values.cumsum(0)
    _, near, _ = losses(close)["the same, normalised"]
    # For nearly equal saliences a remainder of third order is negligible, so the ratio must be near 1.
    ratio = (near.sum() / close.papers_term.sum()).item()
    return [
        Claim(
            "The gap is non-negative, and zero only for equal saliences",
            ">= 0",
            f"least gap {gap.min().item():.1e} for unequal saliences, at most {none:.1e} for equal ones",
            fact(bool((gap > 0).all()) and none < EXACT),
        ),
        Claim(
            "The gap is (s_i-s_j)² / 2(s_i+s_j)² |x_i-x_j|² plus a remainder of third order",
            "gap / term -> 1 as s_i -> s_j",
            f"gap / term = {ratio:.4f}: the exact gap is half of it, (s_i-s_j)² / 4(s_i+s_j)² |x_i-x_j|², "
            f"{'with no remainder' if exact else 'up to a remainder'}",
            fact(abs(ratio - 1) < 0.01),
        ),
        Claim(
            "Summed over merged pairs, the gap is non-negative and grows with their number",
            "grows with r",
            f"sum over {len(gap):,} pairs {running[-1].item():.1f}, never falling",
            fact(bool((running.diff() >= 0).all()) and bool(running[0] >= 0)),
        ),
    ]
