"""Every family of models can be shown, videos as strips of frames; many images take no more memory than one."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from hosts.zoo import TRANSFORMERS, ZOO
from PIL import Image

from adamerge.data.inputs import Input, find_inputs
from adamerge.embedded import load
from adamerge.experiments.showing import DrawnRecord, Shower, ShowOptions, draw, file_name, show_images
from adamerge.methods import tome


def photo(path: Path, seed: int = 0) -> Path:
    pixels = torch.randint(0, 255, (40, 60, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return path


@pytest.mark.parametrize("member", ZOO, ids=str)
def test_every_family_can_be_shown(member, tmp_path):
    member.require()
    path = photo(tmp_path / "a.png")
    shower = Shower(member.build(), {"tome": tome(2), "more": tome(3)})
    one, two = shower.views(Input("a", (str(path),)))
    assert one.patches == member.patches and one.counts[-1] < one.patches
    assert two.counts[-1] < one.counts[-1] and two.cut > one.cut > 0
    assert one.before and one.after
    rows, cols = one.grid
    assert rows * cols == one.patches and one.pixels.shape[1] % rows == 0 and one.pixels.shape[2] % cols == 0


def test_a_video_is_a_folder_of_frames_or_an_animation_and_a_strip_is_drawn(tmp_path):
    (member,) = [member for member in TRANSFORMERS if member.name == "VideoMAE"]
    member.require()
    frames = tmp_path / "film"
    frames.mkdir()
    pictures = [Image.open(photo(frames / f"{index}.png", seed=index)) for index in range(6)]
    pictures[0].save(tmp_path / "film.gif", save_all=True, append_images=pictures[1:])
    inputs = find_inputs([str(frames), str(tmp_path / "film.gif")], video=True)
    assert [one.name for one in inputs] == ["film", "film-2"]
    shower = Shower(member.build(), {"tome": tome(4), "tome 6": tome(6)})
    for one in inputs:
        views = shower.views(one)
        assert views[0].moments == 2 and views[0].grid == (8, 4)
        files = draw(views, tmp_path / "out", ShowOptions(html=True), "videomae")
        assert files[-1] == f"{one.name}.html" and f"{one.name}-tome-6.webp" in files
    first, second = (shower.views(one)[0].pixels for one in inputs)
    assert (first - second).abs().mean() < 0.1, "the same film; a GIF has fewer colours"
    with Image.open(tmp_path / "out" / "film-tome.png") as sheet:
        assert sheet.width > 1200


def test_names_of_methods_become_names_of_files():
    assert file_name("adamerge (cosine, exchanged)") == "adamerge-cosine-exchanged"
    assert file_name("../../etc") == "..-..-etc"


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns: ten numbers."""

    _fields_ = tuple((f"field{number}", ctypes.c_size_t) for number in range(10))


def bytes_in_use() -> int:
    """Bytes that were allocated and not freed.

    The size of the process says less: freed memory stays in it, more or less of it by chance.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("needs the allocator of glibc >= 2.33")
    library.mallinfo2.restype = Mallinfo
    found = library.mallinfo2()
    return found.field7 + found.field4  # uordblks and hblkhd: in its own areas, and mapped


@pytest.mark.slow
def test_a_hundred_images_take_no_more_memory_than_twenty(tmp_path, monkeypatch):
    for index in range(100):
        photo(tmp_path / f"{index:03d}.png", seed=index)
    used: list[int] = []
    add = DrawnRecord.add

    def noting(self, one, files):
        add(self, one, files)
        used.append(bytes_in_use())

    monkeypatch.setattr(DrawnRecord, "add", noting)
    inputs, out = find_inputs([str(tmp_path)]), tmp_path / "out"
    gc.collect()
    gc.disable()  # so that nothing depends on when it comes by
    try:
        report = show_images(load(), inputs, {"tome": tome(8)}, out, ShowOptions(html=True), name="embedded")
    finally:
        gc.enable()
    assert len(report.written) == 100
    # The smallest picture in a sheet has 67 kB; a page with its canvas has 7 MB.
    assert (used[99] - used[19]) / 80 < 50e3
