"""How two records of `same_results.py` differ, entry by entry."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

# Stands before the hash of a tensor that is too large to keep.
HASHED = "sha256:"


@dataclass(frozen=True)
class Difference:
    """An entry that is not the same: where, of which field, of which kind, and what is seen of it."""

    key: str
    kind: str
    text: str = ""

    @property
    def field(self) -> str:
        """The fourth part of the key."""
        return self.key.split(" | ")[3]

    def __str__(self) -> str:
        return f"{self.kind}: {self.key}" + (f": {self.text}" if self.text else "")


def compare(before: Path, after: Path, allowed: frozenset[str], most: int) -> int:
    """Print how two records differ; 1 if they do in a field that must not, else 0."""
    old, new = read(before), read(after)
    for name in sorted(set(old["made_with"]) | set(new["made_with"])):
        mine, theirs = (record["made_with"].get(name) for record in (old, new))
        if mine != theirs and name not in ("seconds", "adamerge"):
            print(f"note: {name} was {mine} before and is {theirs} after; that alone may change bits")
    found = list(differences(old["entries"], new["entries"]))
    bad = [difference for difference in found if difference.field not in allowed]
    tolerated = [difference for difference in found if difference.field in allowed]
    entries = len(set(old["entries"]) | set(new["entries"]))
    if not old["entries"] or not new["entries"]:
        print(f"nothing to compare: {len(old['entries'])} entries before, {len(new['entries'])} after")
        return 1
    listed("allowed to differ", tolerated, most)
    listed("differ", bad, most)
    if bad:
        print(f"{entries} entries, {len(bad)} differ" + (f", {len(tolerated)} more may" if tolerated else ""))
    elif tolerated:
        print(f"{entries} entries, all equal but for {len(tolerated)} that may differ")
    else:
        print(f"{entries} entries, all equal")
    return int(bool(bad))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a record, tensors and texts together, and what it was made with."""
    path = path.with_suffix(".safetensors")
    content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return {"made_with": content["made_with"], "entries": {**load_file(path), **content["texts"]}}


def differences(before: Mapping[str, Tensor | str], after: Mapping[str, Tensor | str]) -> Iterator[Difference]:
    """Every entry that is not the same in both."""
    for key in sorted(set(before) | set(after)):
        if key not in after:
            yield Difference(key, "entry missing after")
        elif key not in before:
            yield Difference(key, "entry missing before", shown(after[key]))
        else:
            found = unlike(before[key], after[key])
            if found is not None:
                yield Difference(key, *found)


def shown(value: Tensor | str) -> str:
    """The first line of a text, or the shape of a tensor."""
    return value.partition("\n")[0] if isinstance(value, str) else f"{value.dtype} {tuple(value.shape)}"


def unlike(before: Tensor | str, after: Tensor | str) -> tuple[str, str] | None:
    """The kind of a difference and what is seen of it, if there is one."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return unlike_tensors(before, after)
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        return "kind of entry differs", f"{shown(before)} before, {shown(after)} after"
    if before == after:
        return None
    if before.startswith(HASHED) and after.startswith(HASHED):
        return "bits differ", "only hashes were kept"
    return "text differs", first_lines(before, after)


def unlike_tensors(before: Tensor, after: Tensor) -> tuple[str, str] | None:
    """How two tensors differ, to the bit: a NaN is like itself, 0 is not like -0."""
    if before.dtype != after.dtype or before.shape != after.shape:
        return "shape or type differs", f"{shown(before)} before, {shown(after)} after"
    elements = (before.numel(), before.element_size())
    bits = [tensor.flatten().view(torch.uint8).view(elements) for tensor in (before, after)]
    where = (bits[0] != bits[1]).any(1).nonzero().flatten()
    if len(where) == 0:
        return None
    mine, theirs = before.flatten()[where], after.flatten()[where]
    place = torch.unravel_index(where[0], before.shape)
    text = f"{len(where)} of {before.numel()}, first at {[int(i) for i in place]}: {mine[0].item()}, {theirs[0].item()}"
    if not before.is_floating_point():
        return "integers differ", text
    return "bits of floats differ", f"{text}; at most by {(mine.double() - theirs.double()).abs().max():.3g}"


def first_lines(before: str, after: str) -> str:
    """The first line in which two texts differ."""
    pair = before.splitlines(), after.splitlines()
    for number, (mine, theirs) in enumerate(zip(*pair, strict=False), start=1):
        if mine != theirs:
            return f"line {number}: {mine.strip()!r}, {theirs.strip()!r}"
    return f"{len(pair[0])} lines before, {len(pair[1])} after, or another end of line"


def listed(title: str, found: list[Difference], most: int) -> None:
    """Print differences, and how many there are of each kind and field."""
    if not found:
        return
    print(f"{title}:")
    for difference in found[:most]:
        print(f"  {difference}")
    if len(found) > most:
        print(f"  ... and {len(found) - most} more")
    for (name, kind), number in sorted(Counter((d.field, d.kind) for d in found).items()):
        print(f"  in all, {name}: {kind}: {number}")
