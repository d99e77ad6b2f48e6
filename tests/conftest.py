"""What every test may use: small examples that repeat exactly, and a way to see errors as users see them."""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

# Read when numpy and torch are imported, here and in processes that tests start.  Small products in Triton's
# interpreter take twice as long with two threads of BLAS, and five times as long on a busy machine.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import jaxtyping
import pytest
import torch
from hypothesis import settings

# Machines with a GPU often lack the checker of types; the kernels can be tested there all the same.
if find_spec("beartype") is not None:
    from typecheck import check_package

    check_package("adamerge")

# Without a device, Triton's interpreter runs the kernels; it must be chosen before anybody imports them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny tensors gain nothing from threads, and on a busy machine lose much: 99 s became 8 s (2 shared cores, torch 2.15).
torch.set_num_threads(1)

settings.register_profile("adamerge", deadline=None, max_examples=15, derandomize=True, database=None)
settings.load_profile("adamerge")


def pytest_collection_finish() -> None:
    """Imported modules live until the end: the collector of garbage need not look at their objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries with C++ objects complain at exit of what the collector could not free."""
    gc.unfreeze()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Run without the shape checker, as users do: it would refuse a wrong type before the library can."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
