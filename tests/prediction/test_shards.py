"""WebDataset shards and parquet files as input: the same results as from a folder, damaged shards are named."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from prediction.examples import image_folder, part_bytes, pixels, rows, tiny_model
from webdataset.writer import TarWriter

import adamerge
from adamerge.core.errors import BadImages, BadOption, BadOutput
from adamerge.data.folders import normalise
from adamerge.prediction.locate import find_source
from adamerge.prediction.parquet_shards import ColumnNames

TOME = adamerge.methods.tome(r=3)
QUIET = {"workers": 0, "progress": False}
# Three shards of 7, 8 and 8 images.
SHARDS = (range(0, 7), range(7, 15), range(15, 23))


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write_tars(home: Path, field: str = "png") -> Path:
    home.mkdir()
    images = pixels(23)
    for number, indices in enumerate(SHARDS):
        with TarWriter(str(home / f"shard-{number:03d}.tar")) as sink:
            for index in indices:
                content = images[index] if field == "npy" else png(images[index])
                sink.write({"__key__": f"{index:03d}", "json": {"label": 1}, field: content})
    return home


def write_parquet(home: Path, column: str = "image") -> Path:
    home.mkdir()
    images = pixels(23)
    for number, indices in enumerate(SHARDS):
        table = {"key": [f"{index:03d}" for index in indices]}
        table[column] = [{"bytes": png(images[index]), "path": None} for index in indices]  # pyright: ignore
        pq.write_table(pa.table(table), home / f"train-{number}.parquet")
    return home


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Id without its folder and ending -> features, from a folder of the same images."""
    home = tmp_path_factory.mktemp("wanted")
    adamerge.embed(tiny_model(), image_folder(home / "images", 23), home / "out", TOME, **QUIET)
    return {Path(row["id"]).stem: row["features"] for row in rows(home / "out")}


def test_tar_files_give_what_the_folder_gives(tmp_path, wanted):
    shards = write_tars(tmp_path / "shards")
    found = adamerge.embed(tiny_model(), shards, tmp_path / "out", TOME, workers=2, progress=False)
    assert (found.images, found.files) == (23, 3)
    assert {row["id"]: row["features"] for row in rows(tmp_path / "out")} == wanted
    assert [len(pq.read_table(path)) for path in sorted((tmp_path / "out").glob("part-*"))] == [7, 8, 8]
    assert rows(tmp_path / "out")[0]["path"] == f"{shards}/shard-000.tar/000.png"


def test_decoded_pixels_of_the_models_size_are_neither_resized_nor_cropped(tmp_path):
    model = adamerge.apply(tiny_model(), TOME)
    adamerge.embed(model, write_tars(tmp_path / "shards", "npy"), tmp_path / "out", **QUIET)
    written = torch.tensor([row["features"] for row in rows(tmp_path / "out")])
    with torch.inference_mode():
        images = normalise(model, torch.from_numpy(pixels(23)).permute(0, 3, 1, 2) / 255)
        torch.testing.assert_close(model.head(written), model(images))  # pyright: ignore[reportCallIssue]


def test_parquet_files_give_what_the_folder_gives(tmp_path, wanted):
    found = adamerge.embed(
        tiny_model(), write_parquet(tmp_path / "shards"), tmp_path / "out", TOME, workers=2, progress=False
    )
    assert (found.images, found.files) == (23, 3)
    assert {row["id"]: row["features"] for row in rows(tmp_path / "out")} == wanted


def test_our_own_output_of_one_process_and_of_several_is_the_same_to_the_byte(tmp_path):
    shards = write_tars(tmp_path / "shards")
    for workers in (0, 1, 2):
        adamerge.predict(tiny_model(), shards, tmp_path / str(workers), TOME, workers=workers, progress=False)
    assert part_bytes(tmp_path / "0") == part_bytes(tmp_path / "1") == part_bytes(tmp_path / "2")


@pytest.mark.parametrize("pattern", ["shard-*.tar", "shard-{000..002}.tar"])
def test_shards_are_named_by_patterns(tmp_path, pattern):
    shards = write_tars(tmp_path / "shards")
    labels = [Path(part.label).name for part in find_source(str(shards / pattern)).parts]
    assert labels == ["shard-000.tar", "shard-001.tar", "shard-002.tar"]


def cut(path: Path) -> None:
    """Cut a shard in the middle of an image."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def damage_header(path: Path) -> None:
    """Overwrite the header of a file in the middle; Python's tarfile takes it for the end."""
    with tarfile.open(path) as archive:
        offset = archive.getmembers()[6].offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 512] = b"x" * 512
    path.write_bytes(content)


def cut_between(path: Path) -> None:
    """Cut a shard exactly between two files."""
    with tarfile.open(path) as archive:
        offset = archive.getmembers()[6].offset
    path.write_bytes(path.read_bytes()[:offset])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, damage_header, cut_between, empty])
def test_a_damaged_shard_is_named_has_no_output_and_is_read_when_it_is_repaired(tmp_path, wanted, damage):
    shards, out = write_tars(tmp_path / "shards"), tmp_path / "out"
    victim = shards / "shard-001.tar"
    whole = victim.read_bytes()
    damage(victim)
    found = adamerge.embed(tiny_model(), shards, out, TOME, **QUIET)
    assert [name for name, _ in found.failed] == [str(victim)] and "shard-001.tar" in str(found.complaint())
    assert sorted(part_bytes(out)) == ["part-00000-of-00003.parquet", "part-00002-of-00003.parquet"]
    assert not (out / "_SUCCESS").exists() and not list(out.glob(".*"))
    victim.write_bytes(whole)
    again = adamerge.embed(tiny_model(), shards, out, TOME, **QUIET)
    assert again.complaint() is None and (again.new_images, again.finished_before) == (8, 2)
    assert {row["id"]: row["features"] for row in rows(out)} == wanted


def test_a_damaged_parquet_file_is_named(tmp_path):
    shards = write_parquet(tmp_path / "shards")
    cut(shards / "train-1.parquet")
    found = adamerge.embed(tiny_model(), shards, tmp_path / "out", TOME, **QUIET)
    assert [Path(name).name for name, _ in found.failed] == ["train-1.parquet"] and found.images == 15
    cut(shards / "train-0.parquet")
    with pytest.raises(BadImages, match=r"cannot read the parquet file .*train-0\.parquet"):
        adamerge.embed(tiny_model(), shards, tmp_path / "other", TOME, **QUIET)


def test_a_shard_that_changed_after_its_results_were_written_is_refused(tmp_path):
    shards = write_tars(tmp_path / "shards")
    adamerge.embed(tiny_model(), shards, tmp_path / "out", TOME, **QUIET)
    empty(shards / "shard-001.tar")
    with pytest.raises(BadOutput, match=r"part-00001.* was made from other images than .*shard-001\.tar has now"):
        adamerge.embed(tiny_model(), shards, tmp_path / "out", TOME, **QUIET)


def test_samples_without_an_image_and_damaged_images_are_listed(tmp_path):
    home, out = tmp_path / "shards", tmp_path / "out"
    home.mkdir()
    with TarWriter(str(home / "a.tar")) as sink:
        sink.write({"__key__": "text", "txt": "no image"})
        sink.write({"__key__": "good", "png": png(pixels(1)[0])})
        sink.write({"__key__": "half", "png": png(pixels(1)[0])[:80]})
        sink.write({"__key__": "floats", "npy": np.zeros((4, 4, 3))})
    found = adamerge.embed(tiny_model(), home, out, **QUIET)
    assert [row["id"] for row in rows(out)] == ["good"] and not found.failed
    listed = {row["id"]: row["reason"] for row in pq.read_table(out / "_unreadable").to_pylist()}
    assert sorted(listed) == ["floats", "half", "text"]
    assert "has no image: it has txt" in listed["text"] and "float64" in listed["floats"]


def test_columns_are_found_or_asked_for(tmp_path):
    shards = write_parquet(tmp_path / "shards", "photo")
    with pytest.raises(BadImages, match=r"has key, photo\. Give one of them as --image-column"):
        find_source(str(shards))
    with pytest.raises(BadImages, match=r"no column 'name'.*--id-column"):
        find_source(str(shards), columns=ColumnNames("photo", "name"))
    found = adamerge.embed(
        tiny_model(), find_source(str(shards), columns=ColumnNames("photo")), tmp_path / "out", TOME, **QUIET
    )
    assert found.images == 23


@pytest.mark.parametrize("name", ["nothing", "*.tar", "missing.parquet"])
def test_what_is_not_there_is_refused(tmp_path, name):
    with pytest.raises(BadImages, match=r"there is no .* expected a folder of images, tar files"):
        find_source(str(tmp_path / name))


def test_other_files_mixed_kinds_and_a_number_of_images_are_refused(tmp_path):
    shards = write_tars(tmp_path / "shards")
    (shards / "note.txt").write_text("")
    with pytest.raises(BadImages, match="ends in none of"):
        find_source(str(shards / "note.txt"))
    with pytest.raises(BadOption, match="give fewer shards"):
        find_source(str(shards), limit=3)
    (shards / "a.parquet").write_bytes(b"")
    with pytest.raises(BadImages, match="one kind"):
        find_source(str(shards))
