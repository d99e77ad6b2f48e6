"""Loads the weights of a model from a safetensors file."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from adamerge.core.errors import BadWeights


def load_weights(model: nn.Module, path: Path, *, resample: bool = False) -> None:
    """Load a safetensors file into the model; all keys and shapes have to fit.

    With `resample`, position embeddings of another image size are resampled.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadWeights(f"cannot read {path} as safetensors: {error}") from error
    if resample and "pos_embed" in tensors:
        tensors = {**tensors, "pos_embed": _resampled(model, tensors["pos_embed"])}
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    missing = sorted(set(own) - set(tensors))
    unknown = sorted(set(tensors) - set(own))
    shapes = [
        f"{k}: file {tuple(tensors[k].shape)}, model {own[k]}"
        for k in own
        if k in tensors and tensors[k].shape != own[k]
    ]
    if missing or unknown or shapes:
        raise BadWeights(
            f"{path} does not fit the model: {len(missing)} keys missing {missing[:3]}, {len(unknown)} unknown "
            f"{unknown[:3]}, {len(shapes)} of another shape {shapes[:3]}. "
            + _advice(tensors, shapes, len(missing) + len(unknown))
        )
    model.load_state_dict(tensors)


def _advice(tensors: dict[str, Tensor], shapes: list[str], other_keys: int) -> str:
    """What to do about a file that does not fit; if only the head has another size, it has other classes."""
    heads = {len(tensors[key]) for text in shapes if (key := text.partition(":")[0]).startswith("head")}
    if len(heads) == 1 and not other_keys:
        return f"Its head has {heads.pop()} classes: give that number with --num-classes."
    return "Is it for another model?"


def _resampled(model: Any, positions: Tensor) -> Tensor:
    """Position embeddings, resampled to the number of patches of a timm model."""
    from timm.layers.pos_embed import resample_abs_pos_embed

    wanted = getattr(model, "pos_embed", None)
    if wanted is None or positions.dim() != 3 or positions.shape == wanted.shape:
        return positions
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    return resample_abs_pos_embed(positions, list(model.patch_embed.grid_size), num_prefix_tokens=prefix)
