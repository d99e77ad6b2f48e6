"""Does the library still compute the same?  Writes down what it gives, bit for bit, and compares two such records.

A record is a file of tensors with a file of texts beside it.  It holds what every method does with the embedded model
and with the tiny models of the tests, on both backends: plans, salience, sizes, redundancy, outputs, costs, recipes,
statistics, warnings and refusals.  Bits depend on the machine and on the version of torch: write both records on one.

    python benchmarks/same_results.py write BEFORE.safetensors [--zoo tests/hosts/zoo.py]
    python benchmarks/same_results.py compare BEFORE.safetensors AFTER.safetensors [--allow redundancy]
"""

import argparse
import hashlib
import importlib.util
import json
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from same_results_differences import HASHED, compare
from same_results_variants import ADAMERGE, METHODS, OTHERS, PRESETS, TINY, Make, Subject
from torch import Tensor

import adamerge
import adamerge.embedded
from adamerge import LayerStats, Recipe

Runtime = Literal["reference", "packed"]

RUNTIMES: tuple[Runtime, ...] = ("reference", "packed")
# In place of a runtime, for what both have in common.
BOTH = "both"
FIELDS: dict[str, str] = {
    "images": "what the embedded scenes look like",
    "labels": "what the embedded scenes show",
    "prices": "prefix and patch tokens of a model, and its prices outside the blocks",
    "unmerged": "what a model costs without merging, in both counts",
    "plain": "the output of a model before anything was merged in it",
    "removed": "the same after everything was removed from it",
    "recipe": "a recipe as JSON, without the means and standard deviations of its statistics",
    "stats": "the file of the statistics, without means and standard deviations",
    "mean": "the means of the statistics",
    "std": "the standard deviations of the statistics",
    "journal": "the journal of a search",
    "slots": "which slot every token goes to, by layer",
    "history": "which token every patch is part of in the end",
    "counts": "tokens left after each layer",
    "width": "slots of each layer",
    "ragged": "whether the counts of a layer may differ",
    "salience": "the salience at each layer",
    "size": "the sizes after each layer",
    "redundancy": "the redundancy at each layer",
    "output": "all tensors that the model gives",
    "paper": "costs as the paper counts them",
    "true": "costs as they are",
    "warnings": "what users are told",
    "refusal": "why something was refused",
}
IMAGES, CALIBRATION, TUNING = 3, 8, 16
# The seeds of the embedded scenes to look at and to calibrate on.
LOOKED_AT, CALIBRATED_ON = 0, 2


@dataclass(frozen=True)
class Record:
    """Tensors and texts by `model | variant | runtime | field`, with the layer or number where there are several."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def put(self, case: str, name: str, value: Tensor | str, at: int | None = None) -> None:
        """Keep one entry."""
        assert name in FIELDS, name
        key = f"{case} | {name}" if at is None else f"{case} | {name} | {at}"
        assert key not in self.tensors and key not in self.texts, key
        if isinstance(value, str):
            self.texts[key] = value
        else:
            self.tensors[key] = value.detach().cpu().contiguous().clone()


def case_of(subject: Subject, variant: str, runtime: str = BOTH) -> str:
    """The first three parts of a key."""
    return f"{subject.name} | {variant} | {runtime}"


def observe(record: Record, subject: Subject, variant: str, make: Make) -> None:
    """Make a recipe for a model and run it on both runtimes."""
    case = case_of(subject, variant)
    recipe: Recipe | None = None
    with noted(record, case):
        recipe = make(subject)
        describe(record, case, recipe)
    if recipe is not None:
        for runtime in RUNTIMES:
            case = case_of(subject, variant, runtime)
            with noted(record, case):
                run(record, case, subject, recipe, runtime)
    adamerge.remove(subject.model)


@contextmanager
def noted(record: Record, case: str) -> Iterator[None]:
    """Keep what the library warns of, and an error with its text in place of a result."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:
            record.put(case, "refusal", f"{type(error).__name__}: {error}")
    package = Path(adamerge.__file__).parent
    told = [w for w in heard if package in Path(w.filename).parents or w.filename == __file__]
    if told:
        record.put(case, "warnings", "\n".join(f"{w.category.__name__}: {w.message}" for w in told))


def describe(record: Record, case: str, recipe: Recipe) -> None:
    """Keep a recipe and its statistics as JSON; means and standard deviations are entries of their own."""
    record.put(case, "recipe", without_moments(recipe.to_json()))
    if recipe.stats is not None:
        record.put(case, "stats", without_moments(saved(recipe.stats)))
        record.put(case, "mean", torch.tensor(recipe.stats.mean, dtype=torch.float64))
        record.put(case, "std", torch.tensor(recipe.stats.std, dtype=torch.float64))


def without_moments(text: str) -> str:
    """A JSON text with the lists of means and standard deviations taken out; all else is left as it is."""
    return re.sub(r'"(mean|std)": \[[^]]*]', r'"\1": "elsewhere"', text)


def saved(stats: LayerStats) -> str:
    """The text of the file that statistics are saved to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.json"
        stats.save(path)
        return path.read_text(encoding="utf-8")


def run(record: Record, case: str, subject: Subject, recipe: Recipe, runtime: Runtime) -> None:
    """Run a merged model and keep what it gave, what it did and what that cost."""
    adamerge.apply(subject.model, recipe, runtime)
    for number, tensor in enumerate(outputs(subject)):
        record.put(case, "output", tensor, number)
    seen = adamerge.trace(subject.model)
    record.put(case, "counts", seen.counts)
    record.put(case, "history", seen.slots())
    record.put(case, "redundancy", seen.redundancy)
    record.put(case, "width", torch.tensor([layer.plan.width for layer in seen.layers]))
    record.put(case, "ragged", torch.tensor([layer.plan.ragged for layer in seen.layers]))
    for number, layer in enumerate(seen.layers):
        record.put(case, "slots", layer.plan.slot, number)
        record.put(case, "salience", layer.salience, number)
        record.put(case, "size", layer.size, number)
    cost = adamerge.flops.cost(subject.model)
    record.put(case, "paper", cost.paper)
    record.put(case, "true", cost.true)


@torch.no_grad()
def outputs(subject: Subject) -> list[Tensor]:
    """The tensor that is looked at, and all others that the model gives beside it."""
    caught: list[Any] = []
    hook = subject.model.register_forward_hook(lambda module, given, out: caught.append(out))
    try:
        looked_at = subject.see(subject.model, subject.images)
    finally:
        hook.remove()
    return [looked_at, *(tensor for tensor in inside(caught) if tensor is not looked_at)]


def inside(value: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and dictionaries, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from inside(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from inside(item)


def write(path: Path, zoo: Path) -> None:
    """Record everything that the library computes here."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin, record = time.monotonic(), Record()
    watch_embedded(record)
    print(f"embedded: {time.monotonic() - begin:.0f} s", flush=True)
    for member in load_zoo(zoo).ZOO:
        watch_member(record, member)
    made_with = {"seconds": f"{time.monotonic() - begin:.0f}", **versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(sorted(record.tensors.items())), path)
    texts = {"made_with": made_with, "texts": dict(sorted(record.texts.items()))}
    path.with_suffix(".json").write_text(json.dumps(texts, indent=1) + "\n", encoding="utf-8")
    refusals = sum(" | refusal" in key for key in record.texts)
    entries = len(record.tensors) + len(record.texts)
    print(f"{entries} entries, {refusals} of them refusals, in {made_with['seconds']} s: {path}")


def watch_embedded(record: Record) -> None:
    """The embedded model with all variants, and what a search finds for it."""
    embedded = adamerge.embedded
    looked_at = embedded.scenes(0, IMAGES, seed=LOOKED_AT)
    others = embedded.scenes(0, TUNING, seed=CALIBRATED_ON)
    images, tuning = embedded.preprocess(looked_at.images), embedded.preprocess(others.images)
    subject = Subject("embedded", embedded.load(), images, tuning[:CALIBRATION])
    for number, scenes in enumerate((looked_at, others)):
        record.put(case_of(subject, "scenes"), "images", hashed(scenes.images), number)
        record.put(case_of(subject, "scenes"), "labels", scenes.labels, number)
    with untouched(record, subject):
        for variant, make in {**METHODS, **ADAMERGE, **OTHERS, **PRESETS}.items():
            observe(record, subject, variant, make)
        for variant, static in (("tuned", False), ("tuned, static", True)):
            observe(record, subject, variant, partial(search, record, variant, tuning, static))


def search(record: Record, variant: str, images: Tensor, static: bool, subject: Subject) -> Recipe:
    """A very short search; its journal is kept."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        options: dict[str, Any] = dict(static=static, seed=0, tries=6, progress=False, resume=journal)
        recipe = adamerge.tune(subject.model, images, 0.3, **options)
        record.put(case_of(subject, variant), "journal", journal.read_text(encoding="utf-8"))
    return recipe


def watch_member(record: Record, member: Any) -> None:
    """A tiny model of the tests with a few variants."""
    if importlib.util.find_spec(member.library) is None:
        print(f"{member}: left out, {member.library} is not installed", flush=True)
        return
    try:
        model = member.build()
    except Exception as error:
        record.put(f"{member} | build | {BOTH}", "refusal", f"{type(error).__name__}: {error}")
        print(f"{member}: left out, it cannot be built: {error}", flush=True)
        return
    subject = Subject(str(member), model, member.images(IMAGES), member.images(CALIBRATION, seed=8), member.see)
    with untouched(record, subject):
        for variant, make in TINY.items():
            observe(record, subject, variant, make)


@contextmanager
def untouched(record: Record, subject: Subject) -> Iterator[None]:
    """Keep a model's price and its output, before anything was merged and after everything was removed."""
    case = case_of(subject, "unmerged")
    meter = adamerge.flops.meter(subject.model)
    unmerged = meter.unmerged()
    numbers = [meter.prefix, meter.patches, meter.embedding, meter.head]
    record.put(case, "prices", torch.tensor(numbers, dtype=torch.float64))
    record.put(case, "unmerged", torch.cat([unmerged.paper, unmerged.true]))
    for number, tensor in enumerate(outputs(subject)):
        record.put(case, "plain", tensor, number)
    yield
    for number, tensor in enumerate(outputs(subject)):
        record.put(case, "removed", tensor, number)


def load_zoo(path: Path) -> ModuleType:
    """The list of tiny models, from its file; its folder and the one above may be imported from."""
    path = path.resolve()
    sys.path += [str(path.parent), str(path.parent.parent)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"expected a Python file with the list ZOO at {path}; give another with --zoo")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hashed(tensor: Tensor) -> str:
    """A hash of the bytes of a tensor, for one that is too large to keep."""
    return HASHED + hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def versions() -> dict[str, str]:
    """What the bits depend on."""
    found = {"adamerge": adamerge.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for library in ("torch", "torchvision", "timm", "transformers", "open_clip_torch"):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "none"
    return {**found, "cpu": torch.backends.cpu.get_cpu_capability()}


def main() -> None:
    """Write a record, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="write down what the library computes")
    writing.add_argument("out", type=Path, metavar="OUT.safetensors", help="texts go to OUT.json beside it")
    writing.add_argument("--zoo", type=Path, default=Path("tests/hosts/zoo.py"), help="the file of the tiny models")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    tolerate = f"a field whose differences are listed but tolerated, of {', '.join(FIELDS)}; may be given again"
    comparing.add_argument("--allow", action="append", default=[], choices=list(FIELDS), metavar="FIELD", help=tolerate)
    comparing.add_argument("--most", type=int, default=200, help="how many differences to list")
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.out.with_suffix(".safetensors"), arguments.zoo)
    else:
        sys.exit(compare(arguments.before, arguments.after, frozenset(arguments.allow), arguments.most))


if __name__ == "__main__":
    main()
