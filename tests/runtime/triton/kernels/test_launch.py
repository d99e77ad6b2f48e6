"""Kernels ask for no more of a processor's memory than it has."""

import pytest
import torch
from awkward import DEVICE, layout, noise

from adamerge.runtime.packed.layout import ragged_layout
from adamerge.runtime.triton.kernels import affinity, attention, launch, linear, match
from adamerge.runtime.triton.kernels.match import Split
from adamerge.runtime.triton.kernels.merge import merge
from adamerge.runtime.triton.kernels.select import PaddedLinks, select

KIB = 1024


class Launches:
    """Stands in for a kernel and keeps what it was launched with."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **options):
        self.options = options


@pytest.fixture(params=[63, 99, 163, 227], ids="{} KiB".format)
def room(request, monkeypatch):
    """Bytes of memory on devices from a T4 to an H200, none of which has a copy engine."""
    monkeypatch.setattr(launch, "shared_memory", lambda device: request.param * KIB)
    monkeypatch.setattr(launch, "_has_tma", lambda device: False)
    return request.param * KIB


def launched(monkeypatch, where, name):
    kernel = Launches()
    monkeypatch.setattr(where, name, kernel)
    return kernel


@pytest.mark.parametrize("processors", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["vit", "large"])
def test_tiles_asked_for_ahead_fit(name, dtype, processors, room, monkeypatch):
    where, split = layout(name), Split(True, 1)
    for module in (affinity, match, linear):
        monkeypatch.setattr(module, "processors", lambda device: processors)
    x = noise(where.total, 768, dtype=dtype)

    kernel = launched(monkeypatch, affinity, "_affinity")
    affinity.affinity(x, torch.ones(where.total), where, split, "dot")
    assert _held(kernel, x) <= room
    kernel = launched(monkeypatch, match, "_match")
    match.match(x, where, split, inverse=torch.ones(where.total))
    assert _held(kernel, x) <= room
    kernel = launched(monkeypatch, linear, "_linear")
    linear.linear(x, noise(256, 768, dtype=dtype), None)
    assert _held(kernel, x) <= room


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_keys_and_values_asked_for_ahead_fit(dtype, dim, room, monkeypatch):
    where = layout("vit")
    heads = noise(where.total, 2, dim, dtype=dtype)
    kernel = launched(monkeypatch, attention, "_attend")
    attention.attend(heads, heads, heads, where, 1.0)
    options = kernel.options
    assert 2 * options["KEYS"] * options["DIMS"] * heads.element_size() * options["num_stages"] <= room


def test_with_much_memory_as_many_stages_as_wanted():
    assert launch.num_stages_for(6, noise(1, 1, dtype=torch.float16), 16, 256, 64) == 6


def _held(kernel, x):
    options = kernel.options
    return (options["ROWS"] + options["COLUMNS"]) * options["STEP"] * x.element_size() * options["num_stages"]


@pytest.mark.parametrize("total", [1, 6, 7, 8])
def test_arrays_of_a_choice_lie_on_boundaries_of_16_bytes_for_any_number_of_rows(total):
    """Triton compiles a kernel once more for arrays that lie elsewhere."""
    where = ragged_layout([total], 0, DEVICE)
    zeros = torch.zeros(1, total, device=DEVICE)
    links = PaddedLinks(zeros, zeros.long(), zeros.bool(), zeros, zeros)
    history = torch.zeros(1, total, dtype=torch.int32, device=DEVICE)
    choice = select(links, 0, history, where, sources_first=False)
    _, _, size, logs, _ = merge(noise(total, 16), torch.ones(total, device=DEVICE), where, choice)
    arrays = (choice.slot, choice.gone, choice.goal, choice.origin, choice.weight, choice.salience, size, logs)
    assert all(len(array) == total and array.data_ptr() % 16 == 0 for array in arrays)
