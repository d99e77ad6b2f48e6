"""AdaMerge's merge step a second time: one image, loops over tokens, only the paper's equations.

Written from the paper, independently of `adamerge`; Python floats are float64.
"""

import math
from dataclasses import dataclass

Token = list[float]


@dataclass
class Step:
    """What one merge did to one image."""

    salience: list[float]
    partner: dict[int, int]
    redundancy: float
    r: int
    slot: list[int]
    count: int
    tokens: list[Token]


def dot(a: Token, b: Token) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def cosine(a: Token, b: Token) -> float:
    lengths = math.sqrt(dot(a, a)) * math.sqrt(dot(b, b))
    return dot(a, b) / lengths if lengths > 0 else 0.0


def salience(x: list[Token], affinity: str) -> list[float]:
    """Eq. (1)-(2): how much attention every token would get from all, scaled to [0, 1]."""
    n = len(x)
    received = [0.0] * n
    for i in range(n):
        if affinity == "cosine":
            row = [cosine(x[i], x[j]) for j in range(n)]
        else:
            over = math.sqrt(len(x[i])) if affinity == "scaled" else 1.0
            row = [dot(x[i], x[j]) / over for j in range(n)]
        highest = max(row)
        weights = [math.exp(a - highest) for a in row]
        for j in range(n):
            received[j] += weights[j] / math.fsum(weights)
    low, high = min(received), max(received)
    # Sums that differ by rounding alone are equal (D4); the smallest true differences here are far greater.
    flat = high - low <= 1e-12 * high
    return [1.0 if flat else (s - low) / (high - low) for s in received]


def sides(n: int, split: str) -> tuple[list[int], list[int]]:
    if split == "sequential":
        return list(range(n // 2)), list(range(n // 2, n))
    if n == 1:
        return [], [0]
    return list(range(0, n, 2)), list(range(1, n, 2))


def links(x: list[Token], s: list[float], split: str, direction: str) -> tuple[dict[int, int], dict[int, float]]:
    """Eq. (3): every source's partner and score."""
    sources, targets = sides(len(x), split)
    partner: dict[int, int] = {}
    score: dict[int, float] = {}
    for i in sources:
        best = max(targets, key=lambda j: (cosine(x[i], x[j]), -j))
        factor = {"published": s[i], "protecting": 1 - s[i], "off": 1.0}[direction]
        partner[i], score[i] = best, factor * cosine(x[i], x[best])
    return partner, score


def number(redundancy: float, r_max: float, mean: float, std: float, alpha: float, temperature: float) -> int:
    """Eq. (4): how many tokens this image merges."""
    if not math.isfinite(redundancy):
        return 0
    at = alpha * (redundancy - mean) / max(std, 1e-6) / temperature
    sigmoid = 1 / (1 + math.exp(-at)) if at > -700 else 0.0
    return math.floor(r_max * sigmoid)


def slots(n: int, merged: set[int], partner: dict[int, int]) -> tuple[list[int], int]:
    """Survivors in their old order; a merged token shares its partner's slot."""
    survivors = [i for i in range(n) if i not in merged]
    place = {i: k for k, i in enumerate(survivors)}
    return [place[partner[i]] if i in merged else place[i] for i in range(n)], len(survivors)


def average(x: list[Token], weight: list[float], slot: list[int], count: int) -> list[Token]:
    """Eq. (5) over whole groups."""
    out = []
    for k in range(count):
        group = [i for i, s in enumerate(slot) if s == k]
        total = math.fsum(weight[i] for i in group)
        if len(group) == 1:
            out.append(list(x[group[0]]))
            continue
        share = {i: weight[i] / total if total > 0 else 1 / len(group) for i in group}
        out.append([math.fsum(share[i] * x[i][c] for i in group) for c in range(len(x[0]))])
    return out


def merge(
    x: list[Token],
    size: list[float],
    *,
    affinity: str,
    split: str,
    direction: str,
    averaging: str,
    r: int | None = None,
    r_max: float = 0.0,
    mean: float = 0.0,
    std: float = 1.0,
    alpha: float = 1.0,
    temperature: float = 1.0,
) -> Step:
    """The whole step before one block."""
    s = salience(x, affinity)
    partner, score = links(x, s, split, direction)
    redundancy = math.fsum(score.values()) / len(score) if score else 0.0
    wanted = number(redundancy, r_max, mean, std, alpha, temperature) if r is None else r
    ranked = sorted(score, key=lambda i: (-score[i], i))
    merged = set(ranked[:wanted])
    slot, count = slots(len(x), merged, partner)
    weight = {
        "salience": s,
        "size": size,
        "salience_size": [a * b for a, b in zip(s, size, strict=True)],
    }[averaging]
    return Step(s, partner, redundancy, len(merged), slot, count, average(x, weight, slot, count))
