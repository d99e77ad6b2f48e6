"""What keeps a batch from the packed and triton backends."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adamerge.runtime.autocast import autocast_dtype

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class BatchFacts:
    """What the choice of a backend depends on, besides the recipe and the host.

    `autocast` is the dtype in which autocast computes, None without it.
    """

    device: str
    dtype: torch.dtype
    gradients: bool
    training: bool
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Obstacle:
    """Why a batch takes the reference backend.  `advice` says what to do; None where the reference is no surprise."""

    reason: str
    advice: str | None = None


def read_facts(x: Tensor, training: bool) -> BatchFacts:
    """What a batch of tokens and the current modes of torch say."""
    return BatchFacts(x.device.type, x.dtype, torch.is_grad_enabled(), training, autocast_dtype(x.device))


def find_obstacle(
    batch: BatchFacts, merges: bool, why_no_rotation: str | None, why_no_kernels: Callable[[], str | None]
) -> Obstacle | None:
    """What keeps a batch from the packed backend, or on CUDA from the kernels; None if nothing does.

    Args:
        batch: the tokens and the modes of torch.
        merges: whether the recipe merges anything.
        why_no_rotation: why kernels cannot turn the host's queries and keys; None if they can or need not.
        why_no_kernels: why no kernel runs here, None if they do; asked last.
    """
    if batch.training:
        return Obstacle("the model is in training mode")
    if not merges:
        return Obstacle("this recipe merges nothing, and only the reference is bit-exact then")
    if batch.device not in ("cpu", "cuda"):
        return Obstacle(f"tokens are packed on CPUs and CUDA devices only, and these are on {batch.device}")
    if why_no_rotation is not None:
        return Obstacle(why_no_rotation, "give the view a `rotation`, as docs/add-a-model.md shows")
    unknown = _unknown_dtype(batch) if batch.device == "cuda" else None
    if unknown is not None:
        return unknown
    # Compilers with gradients enabled come as far as this; they cannot follow the search for packages.
    if batch.gradients:
        return Obstacle("gradients are enabled", "call the model inside torch.inference_mode()")
    reason = why_no_kernels() if batch.device == "cuda" else None
    return None if reason is None else Obstacle(reason, "install Triton 3.6 or later")


def _unknown_dtype(batch: BatchFacts) -> Obstacle | None:
    """Why there are no kernels for the dtypes of a batch; None if there are."""
    if batch.dtype not in KERNEL_DTYPES:
        return Obstacle(
            f"there are no kernels for {batch.dtype}", "convert the model and the images to torch.bfloat16 or float32"
        )
    if batch.autocast is not None and not _known_autocast(batch.autocast, batch.dtype):
        return Obstacle(
            f"autocast computes in {batch.autocast} and the tokens are {batch.dtype}",
            "let autocast compute in torch.bfloat16 or float16, and leave the model and the images in float32",
        )
    return None


def _known_autocast(computes: torch.dtype, tokens: torch.dtype) -> bool:
    """Whether kernels compute so: tokens are in float32 or in the dtype of autocast."""
    return computes in KERNEL_DTYPES and tokens in (torch.float32, computes)
