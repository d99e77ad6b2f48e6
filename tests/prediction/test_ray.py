"""`--engine ray`: the files of one process, also if a worker of Ray is killed."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prediction.examples import image_folder, part_bytes, rows, tiny_model

import adamerge
from adamerge.core.errors import BadOption, BadOutput, MissingPackage
from adamerge.prediction.sources import Part, Sample, Source, Unit, folder_source

TOME = adamerge.methods.tome(r=3)
QUIET: Any = {"workers": 0, "progress": False, "batch_tokens": 64}
# Ray warns of its own plans and leaves connections to the garbage collector.
quietly = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"), 23, bad=(4,))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as a worker of Ray has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def deadly(source: Source, index: int, marker: Path) -> Source:
    """The same images; the first process that has read some of part `index` is killed."""
    parts = [
        replace(part, units=partial(_deadly_units, part, marker)) if part.index == index else part
        for part in source.parts
    ]
    return replace(source, parts=parts)


def _deadly_units(part: Part, marker: Path, batch: int) -> Sequence[Unit]:
    *first, last = part.units(batch)
    assert first, "the worker has to die in the middle of its part"
    return [*first, replace(last, samples=partial(_die_once, last, marker))]


def _die_once(unit: Unit, marker: Path) -> Iterator[Sample]:
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    yield from unit.samples()


@pytest.fixture
def carried() -> Iterator[None]:
    """Ray's workers cannot import this file: what it defines travels with the images."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@quietly
@pytest.mark.slow
@pytest.mark.usefixtures("carried", "one_thread")
def test_two_workers_of_which_one_is_killed_write_the_files_of_one_process(images, tmp_path):
    model, source = tiny_model(), folder_source(images, shard_size=6)
    alone = adamerge.embed(model, source, tmp_path / "alone", TOME, **QUIET)
    marker = tmp_path / "killed"
    found = adamerge.embed(
        model, deadly(source, 2, marker), tmp_path / "ray", TOME, engine="ray", engine_workers=2, **QUIET
    )
    assert int(marker.read_text()) != os.getpid()
    assert part_bytes(tmp_path / "ray") == part_bytes(tmp_path / "alone")
    assert sorted(os.listdir(tmp_path / "ray")) == sorted(os.listdir(tmp_path / "alone"))
    assert (found.images, found.new_images, found.files, found.failed) == (22, 22, 4, ())
    assert found.unreadable == alone.unreadable and len(found.unreadable) == 1
    assert len({row["id"] for row in rows(tmp_path / "ray")}) == 22


@quietly
@pytest.mark.slow
@pytest.mark.usefixtures("carried")
def test_a_ray_that_runs_already_is_used_and_errors_of_workers_are_named(images, tmp_path):
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        model, call = tiny_model(), {"engine": "ray", "engine_workers": 2, "shard_size": 6, **QUIET}
        adamerge.apply(model, TOME)  # a merged model without a recipe stays merged in the workers
        found = adamerge.predict(model, images, tmp_path / "out", top=2, **call)
        assert ray.is_initialized() and found.images == 22
        assert {row["tokens"] for row in rows(tmp_path / "out")} == {16 - 2 * 3}
        again = adamerge.predict(model, images, tmp_path / "out", top=2, **call)
        assert (again.finished_before, again.new_images, again.images) == (4, 0, 22)
        source = folder_source(images, shard_size=6)
        raising = replace(source, parts=[replace(part, units=_full_disk) for part in source.parts])
        call.pop("shard_size")
        with pytest.raises(BadOutput, match="No space left"):
            adamerge.embed(model, raising, tmp_path / "full", **call)
    finally:
        ray.shutdown()


def _full_disk(batch: int) -> Sequence[Unit]:
    raise BadOutput("No space left")


def test_without_ray_the_error_names_the_package(images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage, match=r"--engine ray needs the package ray.*pip install 'adamerge\[ray\]'"):
        adamerge.embed(tiny_model(), images, tmp_path / "out", engine="ray", **QUIET)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"engine": "spark"}, "local or ray; got 'spark'"),
        ({"engine": "ray", "engine_workers": 0}, "at least 1; got 0"),
        ({"engine_workers": 2}, "give --engine ray too"),
    ],
)
def test_wrong_engines_are_refused_before_anything_is_written(images, tmp_path, wrong, said):
    with pytest.raises(BadOption, match=said):
        adamerge.embed(tiny_model(), images, tmp_path / "out", **wrong, **QUIET)
    assert not (tmp_path / "out").exists()
