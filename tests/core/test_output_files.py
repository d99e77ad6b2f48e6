"""A path for a result is refused before the work, and a failing write is an error that names the path."""

import errno
import os
from pathlib import Path

import pytest

from adamerge.core.errors import AdamergeError, BadOutput
from adamerge.core.files import check_can_write, write_atomically


def full_disk(descriptor: int) -> None:
    """What `os.fsync` does when the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_new_file_in_a_new_folder_can_be_written_and_nothing_is_made_before(tmp_path):
    path = tmp_path / "a" / "b" / "result.json"
    check_can_write(path)
    check_can_write(path.parent, folder=True)
    assert list(tmp_path.iterdir()) == []
    write_atomically(path, "{}")
    check_can_write(path)
    check_can_write(path.parent, folder=True)
    assert path.read_text() == "{}" and list(path.parent.iterdir()) == [path]


def test_paths_below_a_file_and_folders_in_the_place_of_files_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    below = file / "a" / "result.json"
    with pytest.raises(BadOutput) as caught:
        check_can_write(below)
    assert str(caught.value) == f"cannot write {below}: {file} is a file, not a folder. Give another path."
    with pytest.raises(BadOutput, match="is a file, not a folder"):
        check_can_write(file, folder=True)
    with pytest.raises(BadOutput) as caught:
        check_can_write(tmp_path)
    assert str(caught.value) == f"cannot write {tmp_path}: it is a folder. Give the name of a file."
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]


def test_a_folder_without_permission_is_refused_with_the_reason(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(BadOutput) as caught:
        check_can_write(tmp_path / "x.json")
    told = f"cannot write {tmp_path / 'x.json'}: Permission denied. Give another path, or make room there."
    assert str(caught.value) == told
    assert isinstance(caught.value, AdamergeError) and isinstance(caught.value, OSError)


@pytest.mark.parametrize("name", ["n" * 300, "nul\0"])
def test_names_that_no_file_can_have_are_refused(name, tmp_path):
    with pytest.raises(BadOutput, match=r"^cannot write "):
        check_can_write(tmp_path / name)
    with pytest.raises(BadOutput, match=r"^cannot write "):
        write_atomically(tmp_path / name, "x")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(BadOutput) as caught:
        write_atomically(path, "new")
    told = f"cannot write {path}: No space left on device. Give another path, or make room there."
    assert str(caught.value) == told and caught.value.result is None
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    """So that `--json /dev/stdout` prints, and `--json /dev/null` leaves /dev/null alone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_can_write(pipe)
        write_atomically(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert Path(pipe).is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_file_gets_the_permissions_that_the_umask_leaves_and_the_umask_stays(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "result.json", "{}")
    finally:
        after = os.umask(before)
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o640
    assert after == 0o027
