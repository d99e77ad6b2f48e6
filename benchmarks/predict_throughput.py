"""How fast are `adamerge predict` and `embed` on a GPU with decoded shards, and what limits them?

Writes shards of generated images as decoded uint8 pixels, then for each recipe three speeds in images a second: the
model alone on a batch that stays on the device, the readers alone, and both together as in `adamerge.embed`.  For both
together it gives the share of the time in which the device computed (by CUDA events, from the first batches on) and the
share in which the run waited for images.  Where pyarrow is installed, a whole `adamerge.embed` with its parquet files
follows.  Weights are random.  Rows are added to a CSV file.  Takes about 5 minutes with the defaults.

    python benchmarks/predict_throughput.py [--model vit_base_patch16_224] [--workers 14] [--seconds 15]
"""

import argparse
import shutil
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from reading import RESULTS, append
from torch import nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.data.image_tensors import drawn_images
from adamerge.embedded import scenes
from adamerge.experiments.versions import versions
from adamerge.prediction.batch_size import images_in_batch
from adamerge.prediction.forward import Forward, default_batch_tokens
from adamerge.prediction.part_run import run_batches
from adamerge.prediction.reader import Chunk, make_loader
from adamerge.prediction.report import Clock
from adamerge.prediction.sources import Part, Sample, Source, Unit
from adamerge.prediction.tasks import Features

CALIBRATION = 64
WARM_UP = 12
# Above this share the device is the limit.
BUSY = 0.9


def main() -> None:
    """Measure every recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=14, help="processes that read shards")
    parser.add_argument("--shards", type=int, default=28, help="shards on the disk; read again as often as needed")
    parser.add_argument("--shard-images", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=15, help="about so long for each speed")
    parser.add_argument("--rows", type=Path, default=RESULTS / "predict-throughput.csv")
    given = parser.parse_args()
    device = torch.device(given.device)
    model = timm.create_model(given.model).eval().to(device, torch.bfloat16)
    home = Path(tempfile.mkdtemp())
    try:
        shards = write_shards(home, given.shards, given.shard_images, device)
        print(f"{len(shards)} shards of {given.shard_images} decoded images; pyarrow: {has('pyarrow')}", flush=True)
        for label, recipe in recipes(model):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = {"model": given.model, "recipe": label, "dtype": "bfloat16", "workers": given.workers}
                row |= measure(model, recipe, shards, given)
            names = versions(given.device)
            row |= {"device": names["device"], "torch": names["torch"]}
            row["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
            print(row, flush=True)
            append(given.rows, [row])
    finally:
        shutil.rmtree(home)


def has(package: str) -> bool:
    """Whether a package is installed."""
    return find_spec(package) is not None


def recipes(model: nn.Module) -> Iterator[tuple[str, Recipe | None]]:
    """The unmerged model, fixed counts, and counts that adapt to the image."""
    yield "unmerged", None
    yield "tome r=8", adamerge.methods.tome(r=8)
    yield "tome r=13", adamerge.methods.tome(r=13)
    adaptive = adamerge.methods.adamerge(r_max=26)
    images = drawn_images(model, CALIBRATION, seed=2)
    yield "adamerge r_max=26", adaptive.with_stats(adamerge.calibrate(model, images, adaptive, progress=False))


def write_shards(home: Path, number: int, images: int, device: torch.device) -> list[Path]:
    """Tar files of decoded images (224, 224, 3), one .npy file each."""
    shards = []
    for shard in range(number):
        drawn = scenes(shard * images, images, device=device).images.mul(255).round().to(torch.uint8)
        shards.append(home / f"shard-{shard:03d}.tar")
        with tarfile.open(shards[-1], "w") as archive:
            for index, image in enumerate(drawn.permute(0, 2, 3, 1).contiguous().cpu().numpy()):
                file = BytesIO()
                np.save(file, image)
                member = tarfile.TarInfo(f"{shard:03d}-{index:05d}.npy")
                member.size = file.tell()
                file.seek(0)
                archive.addfile(member, file)
    return shards


def decoded(shards: list[Path], times: int) -> Source:
    """The shards, each read so many times; by WebDataset where it is installed."""
    paths = [str(shard) for _ in range(times) for shard in shards]
    if has("webdataset"):
        from adamerge.prediction.tar_shards import tar_source

        return tar_source(paths)
    return Source("tar", [Part(i, path, i, partial(_units, i, path)) for i, path in enumerate(paths)])


def _units(part: int, path: str, batch: int) -> list[Unit]:
    return [Unit(part, True, partial(_samples, path))]


def _samples(path: str) -> Iterator[Sample]:
    with tarfile.open(path) as archive:
        while (member := archive.next()) is not None:
            file = archive.extractfile(member)
            assert file is not None
            yield Sample(member.name, path, np.load(BytesIO(file.read())))
            archive.members = []  # pyright: ignore[reportAttributeAccessIssue]


def measure(model: nn.Module, recipe: Recipe | None, shards: list[Path], given: Any) -> dict[str, Any]:
    """The speeds of a recipe."""
    device = next(model.parameters()).device
    batch = images_in_batch(model, recipe, default_batch_tokens(device))
    there = given.shards * given.shard_images
    with torch.inference_mode():
        if recipe is not None:
            adamerge.apply(model, recipe)
        try:
            forward = Forward(model, Features())
            alone = model_speed(forward, batch, given.seconds / 3)
            times = max(1, round(alone * given.seconds / there))
            units = [unit for part in decoded(shards, times).parts for unit in part.units(batch)]
            readers = reader_speed(forward, units, batch, given)
            together = run_speed(forward, units, batch, given)
        finally:
            adamerge.remove(model)
    row: dict[str, Any] = {
        "batch": batch,
        "model_images_per_second": round(alone),
        "reader_images_per_second": round(readers),
    }
    row |= together
    row["limit"] = "the GPU" if together["busy"] >= BUSY else "reading" if readers < alone else "copying and launching"
    row["embed_images_per_second"] = round(embed_speed(model, recipe, shards, times, given)) if has("pyarrow") else ""
    return row


def model_speed(forward: Forward, batch: int, seconds: float) -> float:
    """Images a second of a batch that stays on the device."""
    chunk = Chunk(0, ("",) * batch, ("",) * batch, torch.randint(0, 256, (batch, *forward.host.image)).byte())
    pixels = chunk.pixels.to(forward.device) if chunk.pixels is not None else None
    assert pixels is not None
    clock = Clock(forward.device)
    resident = Chunk(0, chunk.ids, chunk.paths, pixels)
    for _ in range(WARM_UP):
        forward.start(resident, clock).finish(clock)
    begin, images = time.perf_counter(), 0
    before = forward.start(resident, clock)
    while time.perf_counter() - begin < seconds:
        now = forward.start(resident, clock)
        before.finish(clock)
        before, images = now, images + batch
    before.finish(clock)
    return (images + batch) / (time.perf_counter() - begin)


def reader_speed(forward: Forward, units: list[Unit], batch: int, given: Any) -> float:
    """Images a second that the readers give when nobody computes."""
    images, begin, seen = 0, time.perf_counter(), 0
    for number, chunk in enumerate(make_loader(units, forward.transform, batch, given.workers, forward.device)):
        if number == given.workers:
            begin, images = time.perf_counter(), 0
        images, seen = images + len(chunk.ids), number
        if time.perf_counter() - begin > given.seconds and seen > given.workers:
            break
    return images / (time.perf_counter() - begin)


def run_speed(forward: Forward, units: list[Unit], batch: int, given: Any) -> dict[str, Any]:
    """Images a second of readers and model together, the device's share and the share of waiting for images."""
    clock = Clock(forward.device)
    loader = make_loader(units, forward.transform, batch, given.workers, forward.device)
    images, begin, computed, waited = 0, time.perf_counter(), 0.0, 0.0
    for number, (chunk, _) in enumerate(run_batches(forward, loader, clock)):
        if number == WARM_UP + given.workers:
            images, begin, computed, waited = 0, time.perf_counter(), clock.computed, clock.waited
            continue
        images += len(chunk.ids)
    seconds = time.perf_counter() - begin
    return {
        "images": images,
        "seconds": round(seconds, 1),
        "images_per_second": round(images / seconds),
        "busy": round((clock.computed - computed) / seconds, 3),
        "waiting": round((clock.waited - waited) / seconds, 3),
    }


def embed_speed(model: nn.Module, recipe: Recipe | None, shards: list[Path], times: int, given: Any) -> float:
    """Images a second of the whole command, from its start to its last file."""
    with tempfile.TemporaryDirectory() as out:
        source = decoded(shards, times)
        found = adamerge.embed(model, source, out, recipe, workers=given.workers, progress=False)
    print(found, flush=True)
    return found.new_images / found.seconds


if __name__ == "__main__":
    main()
