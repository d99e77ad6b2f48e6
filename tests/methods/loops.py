"""The rival methods a second time: one image, loops over tokens, written from the papers and not from `adamerge`.

Every function gives the merge of one image at one layer.  Python floats are float64.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

Vector = list[float]


@dataclass
class Image:
    """One image after the attention of a block.

    `tokens` and `sizes` are those of the patch tokens.  `query`, `key` and `value` are `[token][head][channel]`, with
    the `prefix` tokens in front.  `bias` is added to the attention scores of each key.  `places` are the patches, of
    `side * side`, where the tokens are.
    """

    tokens: list[Vector]
    sizes: list[float]
    query: list[list[Vector]]
    key: list[list[Vector]]
    value: list[list[Vector]]
    bias: list[float]
    scale: float
    prefix: int
    layer: int
    depth: int
    places: list[int]
    side: int

    @property
    def number(self) -> int:
        return len(self.tokens)


@dataclass
class Group:
    """The old tokens that one new token stands for, and the new token.  `stays` is the one that was not merged away."""

    stays: int
    members: list[int]
    token: Vector


def norm(a: Vector) -> float:
    return math.sqrt(math.fsum(x * x for x in a))


def cosine(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / (norm(a) * norm(b))


def mean(vectors: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """The weighted mean; equal weights if all are 0."""
    weights = [1.0] * len(vectors) if weights is None or sum(weights) == 0 else weights
    total = math.fsum(weights)
    return [math.fsum(w * v[c] for w, v in zip(weights, vectors, strict=True)) / total for c in range(len(vectors[0]))]


def head_means(image: Image) -> list[Vector]:
    """The keys of the patch tokens, averaged over heads."""
    return [mean(heads) for heads in image.key[image.prefix :]]


def attention_row(image: Image, row: int) -> Vector:
    """How much token `row` attends to every token, averaged over heads."""
    rows = []
    for head in range(len(image.query[0])):
        scores = [
            image.scale * math.fsum(a * b for a, b in zip(image.query[row][head], key[head], strict=True)) + bias
            for key, bias in zip(image.key, image.bias, strict=True)
        ]
        weights = [math.exp(score - max(scores)) for score in scores]
        rows.append([weight / math.fsum(weights) for weight in weights])
    return mean(rows)


def class_attention(image: Image) -> Vector:
    """The attention of the class token, the first of all, to the patch tokens."""
    return attention_row(image, 0)[image.prefix :]


def tome_sides(image: Image) -> tuple[list[int], list[int]]:
    """Even tokens are sources and odd ones targets, counted from the first token of the sequence."""
    positions = range(image.number)
    return (
        [i for i in positions if (i + image.prefix) % 2 == 0],
        [i for i in positions if (i + image.prefix) % 2 == 1],
    )


def most_similar(
    features: Sequence[Vector],
    sources: Sequence[int],
    targets: Sequence[int],
    allowed: Callable[[int, int], bool] = lambda i, j: True,
) -> dict[int, tuple[float, int]]:
    """The similarity and the most similar target of each source that has one."""
    found = {}
    for i in sources:
        near = [(cosine(features[i], features[j]), -j) for j in targets if allowed(i, j)]
        if near:
            similarity, j = max(near)
            found[i] = (similarity, -j)
    return found


def strongest(links: dict[int, tuple[float, int]], r: int) -> dict[int, int]:
    """The `r` strongest links, as source -> target."""
    order = sorted(links, key=lambda i: (-links[i][0], i))
    return {i: links[i][1] for i in order[: max(r, 0)]}


def grouped(
    number: int, gone: dict[int, int], first: Collection[int], combine: Callable[[int, list[int]], Vector]
) -> list[Group]:
    """The groups after the merges `gone`; tokens of `first` come before the others, if anything merges at all."""
    kept = [i for i in range(number) if i not in gone]
    if gone:
        kept = [i for i in kept if i in first] + [i for i in kept if i not in first]
    groups = [(i, [i, *(j for j in gone if gone[j] == i)]) for i in kept]
    return [Group(i, members, combine(i, members)) for i, members in groups]


def averaged(image: Image, weights: Sequence[float]) -> Callable[[int, list[int]], Vector]:
    """Combines a group by the weighted mean; a token alone stays as it is."""

    def combine(stays: int, members: list[int]) -> Vector:
        if len(members) == 1:
            return image.tokens[stays]
        return mean([image.tokens[i] for i in members], [weights[i] for i in members])

    return combine


def tome(image: Image, r: int) -> list[Group]:
    """ToMe (Bolya et al.): the r most similar pairs of keys; averages by size; unmerged sources come first."""
    sources, targets = tome_sides(image)
    gone = strongest(most_similar(head_means(image), sources, targets), min(r, len(targets)))
    return grouped(image.number, gone, sources, averaged(image, image.sizes))


def dsm(image: Image, r: int, delay: int, windows: bool) -> list[Group]:
    """DSM (Heo et al.): ToMe after `delay` blocks; in the first half of the blocks within quarters of the image."""

    def quarter(i: int) -> tuple[bool, bool]:
        row, column = divmod(image.places[i], image.side)
        return row >= image.side / 2, column >= image.side / 2

    near = windows and image.layer < image.depth / 2
    sources, targets = tome_sides(image)
    links = most_similar(head_means(image), sources, targets, lambda i, j: not near or quarter(i) == quarter(j))
    gone = strongest(links, min(r, len(targets)) if image.layer >= delay else 0)
    return grouped(image.number, gone, sources, averaged(image, image.sizes))


def dymu(image: Image, threshold: float) -> list[Group]:
    """DyMU (Wang et al.): ToMe's pairs, and all of them that are more similar than the layer's threshold."""
    sources, targets = tome_sides(image)
    links = most_similar(head_means(image), sources, targets)
    above = sum(similarity > threshold for similarity, _ in links.values())
    gone = strongest(links, min(above, len(targets)))
    return grouped(image.number, gone, sources, averaged(image, image.sizes))


def tofu(image: Image, r: int) -> list[Group]:
    """ToFu (Kim et al.): ToMe's pairs; the first half of the blocks prunes, the others average and keep the norm."""
    sources, targets = tome_sides(image)
    gone = strongest(most_similar(head_means(image), sources, targets), min(r, len(targets)))
    average = averaged(image, image.sizes)

    def combine(stays: int, members: list[int]) -> Vector:
        if len(members) == 1 or image.layer < image.depth / 2:
            return image.tokens[stays]
        middle, longest = average(stays, members), max(norm(image.tokens[i]) for i in members)
        return [longest / norm(middle) * x for x in middle]

    return grouped(image.number, gone, sources, combine)


def pitome(image: Image, r: int, margin: float) -> list[Group]:
    """PiToMe (Tran et al.): energetic tokens merge; in the second half of the blocks all but the top 2r are safe."""
    keys, n = head_means(image), image.number
    at = margin * (1 - image.layer / image.depth)

    def elu(x: float) -> float:
        return x if x > 0 else math.exp(x) - 1

    energy = [math.fsum(elu(cosine(keys[i], keys[j]) - at) for j in range(n)) / n for i in range(n)]
    order = sorted(range(n), key=lambda i: -energy[i])
    if image.layer >= image.depth / 2:
        order = order[: 2 * r]
    gone = strongest(most_similar(keys, order[0::2], order[1::2]), r)
    return grouped(n, gone, (), averaged(image, image.sizes))


def evit(image: Image, keep: float) -> list[Group]:
    """EViT (Liang et al.): the most attended tokens stay; the others become one, weighted by their attention."""
    attended = class_attention(image)
    order = sorted(range(image.number), key=lambda i: -attended[i])
    rest = order[math.ceil(keep * image.number) :]
    return grouped(image.number, {i: rest[-1] for i in rest[:-1]}, (), averaged(image, attended))


def ats(image: Image, points: int, first: float) -> list[Group]:
    """ATS (Fayyaz et al.): tokens at even steps of the cumulative attention times value norm stay, others are dropped.

    A dropped token is counted with the next one that stays, or with the last.
    """
    n = image.number
    values = [[x for head in token for x in head] for token in image.value[image.prefix :]]
    score = [a * norm(v) for a, v in zip(class_attention(image), values, strict=True)]
    kept = set(range(n))
    if image.layer >= first * image.depth:
        reached = [math.fsum(score[: i + 1]) / math.fsum(score) for i in range(n)]
        kept = {next((i for i in range(n) if reached[i] >= (point + 0.5) / points), n - 1) for point in range(points)}
    gone = {i: min((j for j in kept if j > i), default=max(kept)) for i in range(n) if i not in kept}
    return grouped(n, gone, (), lambda stays, members: image.tokens[stays])


def vid_tldr(image: Image, r: int) -> list[Group]:
    """vid-TLDR (Choi et al.): sharp attention is salient; below the mean is background, which has no weight."""
    rows = [attention_row(image, image.prefix + i) for i in range(image.number)]
    sharp = [math.fsum(a * math.log(a) for a in row if a > 0) for row in rows]
    scaled = [(s - min(sharp)) / (max(sharp) - min(sharp)) for s in sharp]
    middle = math.fsum(scaled) / len(scaled)
    weight = [0.0 if s < middle else s * size for s, size in zip(scaled, image.sizes, strict=True)]
    sources, targets = tome_sides(image)
    gone = strongest(most_similar(image.tokens, sources, targets), min(r, len(targets)))
    return grouped(image.number, gone, sources, averaged(image, weight))


def protect(image: Image, threshold: float, strength: float, class_token: bool) -> list[Group]:
    """The preset (ours): distance times attention to a power; the mean gets the mean norm of its members.

    Without a class token: attention from all tokens, tokens are compared and not keys, averages by size.
    """
    if class_token:
        attended, features = class_attention(image), head_means(image)
    else:
        rows = [attention_row(image, i) for i in range(image.prefix + image.number)]
        attended = [math.fsum(row[image.prefix + i] for row in rows) for i in range(image.number)]
        features = image.tokens
    salience = [a * image.number / math.fsum(attended) for a in attended]
    sources, targets = tome_sides(image)
    links = most_similar(features, sources, targets)
    scored = {i: ((cos - 1) * salience[i] ** strength, j) for i, (cos, j) in links.items()}
    above = sum(value > threshold for value, _ in scored.values())
    weight = salience if class_token else image.sizes
    average = averaged(image, weight)

    def combine(stays: int, members: list[int]) -> Vector:
        if len(members) == 1:
            return image.tokens[stays]
        middle = average(stays, members)
        [length] = mean([[norm(image.tokens[i])] for i in members], [weight[i] for i in members])
        return [length / norm(middle) * x for x in middle]

    return grouped(image.number, strongest(scored, min(above, len(targets))), (), combine)
