"""What a model says about an image, in words."""

from typing import Any

import torch
from torch import Tensor, nn

TOP = 3


def class_name(model: nn.Module, index: int) -> str:
    """The name of a class: of the model's own list, of ImageNet if the model has 1,000 classes, else its number."""
    given = getattr(model, "pretrained_cfg", None)
    given = given if isinstance(given, dict) else {}
    names: Any = given.get("label_names") or getattr(getattr(model, "config", None), "id2label", None)
    try:
        if names:
            return str(names[index])
        if getattr(model, "num_classes", 0) == 1000:
            from timm.data import ImageNetInfo  # pyright: ignore[reportPrivateImportUsage]

            return ImageNetInfo().index_to_description(index).split(",")[0]
    except (KeyError, IndexError):
        pass
    return f"class {index}"


def describe_output(model: nn.Module, output: Any, unmerged: Any) -> list[str]:
    """The strongest classes of one image with their probabilities; for features, how similar they are to unmerged ones.

    `output` and `unmerged` are what the model returned for a batch of one image.
    """
    found, full = _vector(output), _vector(unmerged)
    if _has_classes(model, output):
        share, index = found.softmax(0).topk(min(TOP, len(found)))
        return [f"{class_name(model, i)} {100 * p:.0f} %" for p, i in zip(share.tolist(), index.tolist(), strict=True)]
    same = torch.nn.functional.cosine_similarity(found, full, dim=0).item()
    return [f"features, cosine to unmerged {same:.3f}"]


def _has_classes(model: nn.Module, output: Any) -> bool:
    if not isinstance(output, Tensor):
        return getattr(output, "logits", None) is not None
    return output.dim() == 2 and getattr(model, "num_classes", output.shape[-1]) > 1


def _vector(output: Any) -> Tensor:
    """The logits or features of the first image as one vector."""
    for name in ("logits", "pooler_output", "image_embeds", "last_hidden_state"):
        if not isinstance(output, (Tensor, tuple, list)) and getattr(output, name, None) is not None:
            output = getattr(output, name)
    while not isinstance(output, Tensor):
        output = output[0]
    first = output[0].detach().float().cpu()
    return first if first.dim() == 1 else first.flatten(0, -2).mean(0) if first.dim() == 2 else first.flatten()
