"""`predict` and `embed` on a folder: every image in one row, stopped runs continue, other runs are refused."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from prediction.examples import image_folder, part_bytes, rows, tiny_model

import adamerge
from adamerge.core.errors import BadImages, BadOption, BadOutput, MissingPackage
from adamerge.data.folders import folder_loader
from adamerge.prediction import part_files
from adamerge.prediction.output_folder import OutputFolder
from adamerge.prediction.sources import drawn_source, folder_source

TOME = adamerge.methods.tome(r=3)
QUIET = {"workers": 0, "progress": False}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"), 23)


def test_predictions_are_those_of_the_merged_model(images, tmp_path):
    model = tiny_model()
    found = adamerge.predict(model, images, tmp_path / "out", TOME, top=3, shard_size=10, **QUIET)
    assert (found.images, found.files, found.new_images, found.complaint()) == (23, 3, 23, None)
    adamerge.apply(model, TOME)
    loader = folder_loader(model, images, workers=0, labelled=False)
    with torch.inference_mode():
        probabilities = torch.cat([model(batch.images) for batch in loader]).softmax(1)
    written = rows(tmp_path / "out")
    paths = [path for path, _ in loader.dataset.samples]  # pyright: ignore[reportAttributeAccessIssue]
    assert [row["path"] for row in written] == paths
    assert [row["id"] for row in written] == [Path(path).relative_to(images).as_posix() for path in paths]
    best = probabilities.topk(3)
    assert [row["classes"] for row in written] == best.indices.tolist()
    torch.testing.assert_close(torch.tensor([row["probabilities"] for row in written]), best.values)
    assert {row["tokens"] for row in written} == {16 - 2 * 3}


def test_features_are_what_enters_the_classifier(images, tmp_path):
    model = tiny_model()
    adamerge.embed(model, images, tmp_path / "out", **QUIET)
    written = rows(tmp_path / "out")
    with torch.inference_mode():
        logits = model.head(torch.tensor([row["features"] for row in written]))  # pyright: ignore
        wanted = torch.cat([model(batch.images) for batch in folder_loader(model, images, workers=0, labelled=False)])
    torch.testing.assert_close(logits, wanted)
    assert {row["tokens"] for row in written} == {16}


def test_a_model_that_merges_already_is_taken_as_it_is(images, tmp_path):
    model = adamerge.apply(tiny_model(), TOME)
    adamerge.embed(model, images, tmp_path / "applied", **QUIET)
    adamerge.embed(tiny_model(), images, tmp_path / "given", TOME, **QUIET)
    assert part_bytes(tmp_path / "applied") == part_bytes(tmp_path / "given")
    assert adamerge.trace(model) is not None


def test_a_run_that_lost_files_makes_only_these_again(images, tmp_path, monkeypatch):
    model, out = tiny_model(), tmp_path / "out"
    adamerge.embed(model, images, out, TOME, shard_size=6, **QUIET)
    whole = part_bytes(out)
    (out / "part-00001-of-00004.parquet").unlink()
    (out / "_SUCCESS").unlink()
    (out / ".part-00001-of-00004.parquet.1").write_bytes(b"half of a file")
    read = []
    monkeypatch.setattr("adamerge.prediction.reader.read_image", lambda path: read.append(path) or _read(path))
    found = adamerge.embed(model, images, out, TOME, shard_size=6, **QUIET)
    assert part_bytes(out) == whole
    assert len(read) == 6 and (found.images, found.new_images, found.finished_before) == (23, 6, 3)
    assert sorted(path.name for path in out.iterdir() if path.name.startswith((".", "_"))) == [
        *("_SUCCESS", "_lock", "_manifest.json")
    ]


def _read(path):
    from adamerge.data.image_files import read_image

    return read_image(path)


def test_the_number_of_processes_does_not_change_a_byte(images, tmp_path):
    model = tiny_model()
    for workers in (0, 2):
        adamerge.embed(model, images, tmp_path / str(workers), TOME, shard_size=10, workers=workers, progress=False)
    assert part_bytes(tmp_path / "0") == part_bytes(tmp_path / "2")


def test_a_batch_has_about_the_tokens_that_were_asked_for(images, tmp_path, monkeypatch):
    sizes: list[int] = []
    model = tiny_model()
    model.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    adamerge.predict(model, images, tmp_path / "plain", batch_tokens=17 * 6, **QUIET)
    assert sizes[-4:] == [6, 6, 6, 5]
    # 13 and 10 patch tokens after the merges, and the class token: 12.5 on average.
    adamerge.predict(model, images, tmp_path / "merged", TOME, batch_tokens=17 * 6, **QUIET)
    assert sizes[-3:] == [8, 8, 7]


def test_unreadable_images_have_a_table_of_their_own(tmp_path):
    folder, out = image_folder(tmp_path / "images", 9, bad=(2, 7)), tmp_path / "out"
    found = adamerge.predict(tiny_model(), folder, out, TOME, shard_size=5, **QUIET)
    assert found.images == 7 and "2 image(s) could not be read" in str(found.complaint())
    listed = pq.read_table(out / "_unreadable").to_pylist()
    assert [Path(row["path"]).name for row in listed] == ["002.png", "007.png"]
    assert all(row["reason"] for row in listed)
    assert len(rows(out)) == 7, "the tables of unreadable images are no part of the data"


def test_a_shard_without_a_readable_image_is_empty_and_has_the_same_columns(tmp_path):
    folder, out = image_folder(tmp_path / "images", 4, bad=(0, 2)), tmp_path / "out"
    adamerge.embed(tiny_model(), folder, out, shard_size=2, **QUIET)
    first, second = (pq.read_table(path) for path in sorted(out.glob("part-*")))
    assert len(first) == 0 and len(second) == 2 and first.schema.equals(second.schema)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"model": tiny_model(1)}, "model"),
        ({"recipe": adamerge.methods.tome(r=4)}, "recipe"),
        ({"model": tiny_model().double()}, "dtype"),
        ({"shard_size": 11}, "input"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_kept(images, tmp_path, change, named):
    given = {"model": tiny_model(), "data": images, "out": tmp_path / "out", "recipe": TOME, "shard_size": 10, **QUIET}
    adamerge.embed(**given)
    whole = part_bytes(tmp_path / "out")
    with pytest.raises(BadOutput, match=rf"results of another run: it differs in .*{named}"):
        adamerge.embed(**given | change)
    with pytest.raises(BadOutput, match="differs in columns, command"):
        adamerge.predict(**given)
    assert part_bytes(tmp_path / "out") == whole


@pytest.mark.parametrize("schema", [{"schema": 2}, {"schema": None}, {}], ids=str)
def test_a_manifest_of_another_schema_is_refused_by_name(tmp_path, schema):
    job, manifest = {"command": "embed", "model": "abc"}, tmp_path / "_manifest.json"
    manifest.write_text(json.dumps({"schema": 1, **job}))
    (tmp_path / "part-00000-of-00001.parquet").write_bytes(b"a result")
    OutputFolder(tmp_path, job, 1).prepare()
    manifest.write_text(json.dumps({**schema, **job}))
    with pytest.raises(BadOutput, match=r"results of another run: it differs in schema\. .* Give another --out"):
        OutputFolder(tmp_path, job, 1).prepare()
    assert json.loads(manifest.read_text()) == {**schema, **job}


def test_a_new_manifest_has_the_schema_and_the_job(tmp_path):
    OutputFolder(tmp_path, {"command": "embed"}, 1).prepare()
    assert json.loads((tmp_path / "_manifest.json").read_text()) == {"schema": 1, "command": "embed"}


def test_a_folder_with_other_files_or_other_images_is_refused(images, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all my work")
    with pytest.raises(BadOutput, match=r"holds other files \(thesis\.tex\)"):
        adamerge.embed(tiny_model(), images, tmp_path / "out", **QUIET)
    adamerge.embed(tiny_model(), images, tmp_path / "new", **QUIET)
    with pytest.raises(BadOutput, match="differs in input"):
        adamerge.embed(tiny_model(), folder_source(images, limit=7), tmp_path / "new", **QUIET)


def test_a_damaged_file_is_named(images, tmp_path):
    out = tmp_path / "out"
    adamerge.embed(tiny_model(), images, out, shard_size=10, **QUIET)
    (path,) = out.glob("part-00001-*")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadOutput, match=r"part-00001-of-00003\.parquet is damaged .* Delete this file"):
        adamerge.embed(tiny_model(), images, out, shard_size=10, **QUIET)


def test_a_full_disk_is_named_and_the_run_continues_when_there_is_room(images, tmp_path, monkeypatch):
    model, out = tiny_model(), tmp_path / "out"
    adamerge.embed(model, images, tmp_path / "undisturbed", TOME, shard_size=6, **QUIET)
    published: list[Path] = []
    real = part_files._publish

    def publish(temporary: Path, target: Path) -> None:
        if len(published) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        published.append(target)
        real(temporary, target)

    monkeypatch.setattr(part_files, "_publish", publish)
    with pytest.raises(BadOutput, match=r"cannot write .*part-00002.*: No space left on device\. The finished files"):
        adamerge.embed(model, images, out, TOME, shard_size=6, **QUIET)
    assert len(part_bytes(out)) == 2 and not list(out.glob(".*")) and not (out / "_SUCCESS").exists()
    monkeypatch.undo()
    adamerge.embed(model, images, out, TOME, shard_size=6, **QUIET)
    assert part_bytes(out) == part_bytes(tmp_path / "undisturbed")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_write_that_the_system_refuses_is_named(images, tmp_path, monkeypatch):
    monkeypatch.setattr(part_files, "_temporary", lambda target: Path("/dev/full"))
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    with pytest.raises(BadOutput, match="No space left on device"):
        adamerge.embed(tiny_model(), images, tmp_path / "out", **QUIET)


HOLD = """
import sys, time
from adamerge.prediction.output_folder import OutputFolder
with OutputFolder(sys.argv[1], {}, 1).locked():
    print("holding", flush=True)
    time.sleep(60)
"""


def test_two_runs_into_one_folder_are_refused_until_the_first_is_gone(images, tmp_path):
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "holding\n"
        with pytest.raises(BadOutput, match=rf"another run writes to .*process {other.pid} on "):
            adamerge.embed(tiny_model(), images, out, **QUIET)
        other.send_signal(signal.SIGKILL)
    assert adamerge.embed(tiny_model(), images, out, **QUIET).images == 23


def test_a_killed_process_leaves_whole_files_and_the_next_run_adds_the_rest(images, tmp_path):
    model, out = tiny_model(), tmp_path / "out"
    adamerge.embed(model, images, tmp_path / "undisturbed", TOME, shard_size=2, workers=0, progress=False)
    child = os.fork()
    if child == 0:
        original = part_files.PartFile.commit
        part_files.PartFile.commit = lambda self: (original(self), time.sleep(0.2))[0]  # pyright: ignore
        adamerge.embed(model, images, out, TOME, shard_size=2, **QUIET)
        os._exit(0)
    while not (out / "part-00003-of-00012.parquet").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    before = part_bytes(out)
    assert 4 <= len(before) < 12
    found = adamerge.embed(model, images, out, TOME, shard_size=2, **QUIET)
    assert found.finished_before == len(before)
    assert part_bytes(out) == part_bytes(tmp_path / "undisturbed")
    assert set(Counter(row["id"] for row in rows(out)).values()) == {1}


@pytest.mark.parametrize("wrong", [{"shard_size": 0}, {"batch_tokens": 0}, {"top": 0}])
def test_numbers_that_make_no_sense_are_refused(images, tmp_path, unchecked, wrong):
    with pytest.raises(BadOption, match="at least 1"):
        adamerge.predict(tiny_model(), images, tmp_path / "out", **{**QUIET, **wrong})


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(BadImages, match="holds no images"):
        adamerge.embed(tiny_model(), tmp_path, tmp_path / "out", **QUIET)


def test_without_pyarrow_the_error_says_what_to_install(images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackage, match=r"pip install 'adamerge\[predict\]'"):
        adamerge.embed(tiny_model(), images, tmp_path / "out", **QUIET)


def test_generated_images_are_a_source(tmp_path):
    found = adamerge.predict(
        tiny_model(), drawn_source(5, seed=0, size=32, shard_size=3), tmp_path / "out", TOME, **QUIET
    )
    assert found.files == 2 and [row["id"] for row in rows(tmp_path / "out")] == ["0", "1", "2", "3", "4"]
